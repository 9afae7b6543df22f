"""A server with the part of the Hugging Face Hub's interface that downloads of models use."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass(slots=True)
class Hub:
    """A hub with one repository."""

    name: str
    files: Mapping[str, bytes]
    gated: bool = False
    breaks_at: int | None = None
    """Number of bytes of a file after which the connection breaks, once."""
    requests: list[str] = field(default_factory=list)
    """Method, path and range of each request."""
    url: str = ""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path} {self.headers.get('Range', '')}".strip())
        if self.hub.name not in path:
            self._send(401, b"", {"X-Error-Code": "RepoNotFound"})
        elif self.hub.gated:
            self._send(403, b"", {"X-Error-Code": "GatedRepo"})
        elif match := re.fullmatch(rf"/{self.hub.name}/resolve/[^/]+/(.+)", path):
            self._send_file(self.hub.files[match[1]])
        elif re.search(r"/revision/(?!main$|v1$)", path):
            self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        elif "/tree/" in path:
            self._send_json([{"type": "file", **entry} for entry in self._entries("path")])
        else:
            self._send_json({"id": self.hub.name, "sha": COMMIT, "siblings": self._entries("rfilename")})

    def _entries(self, key: str) -> list[dict[str, object]]:
        digests = {name: hashlib.sha1(content).hexdigest() for name, content in self.hub.files.items()}
        return [
            {key: name, "size": len(content), "oid": digests[name], "blobId": digests[name]}
            for name, content in self.hub.files.items()
        ]

    def _send_json(self, content: object) -> None:
        self._send(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _send_file(self, content: bytes) -> None:
        start = int(match[1]) if (match := re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))) else 0
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha1(content).hexdigest()}"'}
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self._send(206 if start else 200, content[start:], headers)

    def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | dict(headers)).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.hub.breaks_at is not None and len(body) > self.hub.breaks_at:
            body, self.hub.breaks_at, self.close_connection = body[: self.hub.breaks_at], None, True
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextmanager
def running_hub(hub: Hub) -> Iterator[Hub]:
    """Serve `hub` on a free port of the loopback interface, and set its URL."""
    with ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub})) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        hub.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
