"""A hub on the loopback: enough of the Hugging Face hub's API for `datasets` to read from it, and to push a folder.

Files lie under ROOT/datasets/OWNER/NAME/ and ROOT/models/OWNER/NAME/. Clients find it by the variables of
`Hub.environment`, which must be set before `datasets` or `huggingface_hub` is imported, so in a subprocess.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

API = re.compile(
    r"/api/(datasets|models)/([^/]+/[^/]+)(?:/(revision|tree|paths-info|preupload|commit)/([^/]+)/?(.*))?$"
)
LARGE = re.compile(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch$")
FILE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)$")


@dataclass(frozen=True)
class Fault:
    """A fault of one answer."""

    status: int | None = None  # answered instead of the file
    headers: dict[str, str] = field(default_factory=dict)
    cut: int | None = None  # bytes of the body after which the connection ends
    delay: float = 0.0  # seconds before the answer


class Hub:
    """A server that runs as long as its context.

    `requests` collects (method, path) of all requests and `served` (path, bytes) of data. `disturb`, a function of the
    path of a data file and the number of requests for data so far, returns the fault of the answer; `next_requests`
    sets it.

    Who writes needs `token`, and the repositories whose owner is in `writable` alone are written. `private` holds what
    was said of each repository that was made, and `uploads` large files by their SHA-256. Names with `broken` fail.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.token, self.writable = "hf_" + "w" * 30, {"me"}
        self.private: dict[str, bool] = {}
        self.uploads: dict[str, bytes] = {}
        self.commit = hashlib.sha1(str(root).encode()).hexdigest()
        self.requests: list[tuple[str, str]] = []
        self.served: list[tuple[str, int]] = []
        self.disturb: Callable[[str, int], Fault | None] = lambda path, number: None
        self._lock = threading.Lock()
        self._count = 0

    def next_requests(self, count: int, fault: Fault, below: str = "") -> None:
        """Let the next `count` requests for data whose path contains `below` meet the fault."""
        left = iter(range(count))
        self.disturb = lambda path, number: fault if below in path and next(left, None) is not None else None

    def fault(self, path: str) -> Fault | None:
        with self._lock:
            self._count += 1
            return self.disturb(path, self._count)

    def __enter__(self) -> Hub:
        hub = self

        class BoundHandler(Handler):
            pass

        BoundHandler.hub = hub
        self._server = Server(("127.0.0.1", 0), BoundHandler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def environment(self, home: Path) -> dict[str, str]:
        """Return variables that point a fresh process at this hub, with its caches under `home`."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HOME": str(home),
            "NO_PROXY": "127.0.0.1",
        }


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256  # all streams connect at once


class Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or the body waits 40 ms for the headers to be acknowledged
    _cut: int | None = None

    def do_GET(self) -> None:
        self._answer(b"")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        self._answer(self._read_body())

    def do_PUT(self) -> None:
        body = self._read_body()
        self.hub.requests.append((self.command, self.path))
        assert self.path == f"/lfs/{hashlib.sha256(body).hexdigest()}"
        self.hub.uploads[self.path.rpartition("/")[2]] = body
        self._json({})

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def log_message(self, *args: object) -> None:
        pass

    def _answer(self, body: bytes) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path))
        if path == "/api/validate-yaml":
            return self._json({"errors": [], "warnings": []})
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if match := LARGE.match(path):
            return self._write(match[1], lambda: self._name_places(json.loads(body)))
        if match := API.match(path):
            kind, repo, what, revision, below = match.groups()
            if what == "preupload":
                return self._write(repo, lambda: self._choose_modes(json.loads(body)))
            if what == "commit":
                return self._write(repo, lambda: self._commit(repo, body))
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
            fault = self.hub.fault(path) if kind and self.command == "GET" else None
            if fault is not None:
                time.sleep(fault.delay)
            if fault is not None and fault.status is not None:
                return self._send(fault.status, b"{}", fault.headers)
            self._cut = fault.cut if fault is not None else None
            self._file(self.hub.root / ("datasets" if kind else "models") / repo, name)
        else:
            self._error("EntryNotFound")

    def _write(self, repo: str, act: Callable[[], dict[str, object]]) -> None:
        if self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            return self._send(401, b'{"error": "Invalid username or password."}', {})
        if "broken" in repo:
            return self._send(500, b'{"error": "Internal error"}', {})
        if repo.partition("/")[0] not in self.hub.writable:
            return self._send(403, b'{"error": "You do not have the rights."}', {})
        self._json(act())

    def _create(self, wanted: dict[str, object]) -> None:
        repo = f"{wanted['organization']}/{wanted['name']}"
        url = {"url": f"{self.hub.url}/{repo}"}
        if repo in self.hub.private:
            return self._send(409, json.dumps(url).encode(), {"Content-Type": "application/json"})

        def make() -> dict[str, object]:
            (self.hub.root / "models" / repo).mkdir(parents=True)
            self.hub.private[repo] = bool(wanted.get("private")) or wanted.get("visibility") == "private"
            return dict(url)

        self._write(repo, make)

    def _choose_modes(self, wanted: dict[str, list[dict[str, str]]]) -> dict[str, object]:
        names = [file["path"] for file in wanted["files"]]
        modes = ["lfs" if name.endswith(".safetensors") else "regular" for name in names]
        return {
            "files": [
                {"path": name, "uploadMode": mode, "shouldIgnore": False}
                for name, mode in zip(names, modes, strict=True)
            ]
        }

    def _name_places(self, wanted: dict[str, list[dict[str, object]]]) -> dict[str, object]:
        return {
            "objects": [
                file | {"actions": {"upload": {"href": f"{self.hub.url}/lfs/{file['oid']}"}}}
                for file in wanted["objects"]
            ]
        }

    def _commit(self, repo: str, body: bytes) -> dict[str, object]:
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] in ("file", "lfsFile"):
                is_large = line["key"] == "lfsFile"
                content = self.hub.uploads[value["oid"]] if is_large else base64.b64decode(value["content"])
                (self.hub.root / "models" / repo / value["path"]).write_bytes(content)
        return {"commitUrl": f"{self.hub.url}/{repo}/commit/{self.hub.commit}", "commitOid": self.hub.commit}

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
            return self._data(200, data, headers)
        first, last = int(wanted[1]), min(int(wanted[2] or len(data) - 1), len(data) - 1)
        headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
        self._data(206, data[first : last + 1], headers)

    def _data(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        if self.command == "GET":
            self.hub.served.append((urlsplit(self.path).path, len(body)))
        if self._cut is None:
            return self._send(status, body, headers)
        self._send(status, body, headers, self._cut)
        self.close_connection = True

    def _json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _error(self, code: str) -> None:
        self._send(404, b'{"error": "not found"}', {"X-Error-Code": code, "Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: dict[str, str], cut: int | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:cut])


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
