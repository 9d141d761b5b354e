"""A stand-in for the W&B server on this machine, and a reader of the files that W&B writes."""

import gzip
import json
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


def answer(operation: str, variables: dict[str, Any]) -> dict[str, Any]:
    """The answer that a client needs to start a run."""
    project = {"id": "p", "name": variables.get("project"), "entity": {"id": "e", "name": "me"}}
    bucket = {"id": "x", "name": variables.get("name"), "displayName": "", "config": "{}", "project": project}
    return {
        "Viewer": {"viewer": {"id": "u", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}},
        "RunResumeStatus": {"model": {"id": "p", "name": "p", "entity": project["entity"], "bucket": None}},
        "UpsertBucket": {"upsertBucket": {"bucket": bucket | {"historyLineCount": 0}, "inserted": True}},
        "CreateRunFiles": {"createRunFiles": {"runID": "x", "uploadHeaders": [], "files": []}},
    }.get(operation, {})


class Server(ThreadingHTTPServer):
    """Keeps the history that it is sent.

    Args:
        kind: "works"; "401" refuses every key; "stalls" starts runs but never answers when it is sent their history.
    """

    daemon_threads = True

    def __init__(self, kind: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.kind, self.rows, self.asked, self.closing = kind, list[dict[str, Any]](), list[Any](), threading.Event()


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        answered: dict[str, Any] = {}
        if self.path.endswith("graphql"):
            asked = json.loads(body)
            self.server.asked.append(asked)
            answered = {"data": answer(asked.get("operationName"), asked.get("variables") or {})}
        elif self.path.endswith("file_stream"):
            if self.server.kind == "stalls":
                self.server.closing.wait()
            history = (json.loads(body).get("files") or {}).get("wandb-history.jsonl", {})
            self.server.rows += [json.loads(text) for text in history.get("content", ())]
        content = json.dumps(answered).encode()
        self.send_response(401 if self.server.kind == "401" else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_PUT = do_POST

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def served(kind: str) -> Iterator[Server]:
    """A server of this kind, until the end of the block."""
    with Server(kind) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server
        finally:
            server.closing.set()
            server.shutdown()


@contextmanager
def port_that(listens: bool) -> Iterator[int]:
    """A port where connections are refused, or taken and never answered."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        if listens:
            s.listen(64)
        yield s.getsockname()[1]


def read_records(path: Path) -> Iterator[Any]:
    """The records of a .wandb file, parsed with W&B's own protocol.

    Its container is that of LevelDB's logs: blocks of 32 KiB, pieces with a header of checksum (4 bytes), length (2)
    and type (1 full, 2 first, 3 middle, 4 last); W&B puts 7 bytes of its own in front.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    data, block = path.read_bytes(), 32 * 1024
    assert data[:4] == b":W&B"
    at, whole = 7, b""
    while at + 7 <= len(data):
        if block - at % block < 7:  # too small for a header
            at += block - at % block
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        assert kind in (1, 2, 3, 4)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield Record.FromString(whole)
            whole = b""


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows that were logged to a .wandb file, in order."""
    rows = []
    for record in read_records(path):
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows
