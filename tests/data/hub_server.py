"""A hub on the loopback: enough of the Hugging Face hub's API for `datasets` to read from it.

Files lie under ROOT/datasets/OWNER/NAME/ and ROOT/models/OWNER/NAME/. Clients find it by the environment that
`Hub.environment` gives, set before `datasets` or `huggingface_hub` is imported (so: in a subprocess).
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

API = re.compile(r"/api/(datasets|models)/([^/]+/[^/]+)(?:/(revision|tree|paths-info)/([^/]+)/?(.*))?$")
FILE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)$")


class Hub:
    """Context manager; `requests` collects (method, path) of what was asked for."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.commit = hashlib.sha1(str(root).encode()).hexdigest()
        self.requests: list[tuple[str, str]] = []

    def __enter__(self) -> Hub:
        hub = self

        class BoundHandler(Handler):
            pass

        BoundHandler.hub = hub
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), BoundHandler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def environment(self, home: Path) -> dict[str, str]:
        """Variables that point a fresh process at this hub, with its caches under `home`."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HOME": str(home),
            "NO_PROXY": "127.0.0.1",
        }


class Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(b"")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        self._answer(self.rfile.read(int(self.headers.get("Content-Length", 0))))

    def log_message(self, *args: object) -> None:
        pass

    def _answer(self, body: bytes) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path))
        if match := API.match(path):
            kind, repo, what, revision, below = match.groups()
            folder = self.hub.root / kind / repo
            if not folder.is_dir():
                self._error("RepoNotFound")
            elif revision not in (None, "main", self.hub.commit):
                self._error("RevisionNotFound")
            elif what == "tree":
                recursive = parse_qs(urlsplit(self.path).query).get("recursive", ["false"])[0].lower() == "true"
                self._tree(folder, below, recursive)
            elif what == "paths-info":
                self._json([_entry(folder, folder / p) for p in _paths(body) if (folder / p).exists()])
            else:
                names = [{"rfilename": str(p.relative_to(folder))} for p in sorted(folder.rglob("*.*"))]
                self._json({"id": repo, "sha": self.hub.commit, "private": False, "siblings": names, "tags": []})
        elif match := FILE.match(path):
            kind, repo, revision, name = match.groups()
            self._file(self.hub.root / ("datasets" if kind else "models") / repo, name)
        else:
            self._error("EntryNotFound")

    def _tree(self, folder: Path, below: str, recursive: bool) -> None:
        start = folder / below
        if not start.is_dir():
            return self._error("EntryNotFound")
        found = sorted(start.rglob("*") if recursive else start.iterdir())
        self._json([_entry(folder, path) for path in found])

    def _file(self, folder: Path, name: str) -> None:
        path = folder / name
        if not folder.is_dir():
            return self._error("RepoNotFound")
        if not path.is_file():
            return self._error("EntryNotFound")
        data = path.read_bytes()
        headers = {
            "ETag": f'"{hashlib.sha1(data).hexdigest()}"',
            "X-Repo-Commit": self.hub.commit,
            "Accept-Ranges": "bytes",
        }
        wanted = re.match(r"bytes=(\d+)-(\d*)$", self.headers.get("Range", ""))
        if not wanted:
            return self._send(200, data, headers)
        first, last = int(wanted[1]), min(int(wanted[2] or len(data) - 1), len(data) - 1)
        headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
        self._send(206, data[first : last + 1], headers)

    def _json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _error(self, code: str) -> None:
        self._send(404, b'{"error": "not found"}', {"X-Error-Code": code, "Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _entry(folder: Path, path: Path) -> dict[str, object]:
    name = path.relative_to(folder).as_posix()
    oid = hashlib.sha1(name.encode()).hexdigest()
    if path.is_dir():
        return {"type": "directory", "path": name, "oid": oid, "size": 0}
    return {"type": "file", "path": name, "oid": oid, "size": path.stat().st_size}


def _paths(body: bytes) -> list[str]:
    try:
        value = json.loads(body)["paths"]
    except ValueError:
        value = parse_qs(body.decode())["paths"]
    return [value] if isinstance(value, str) else value
