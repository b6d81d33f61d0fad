"""An HTTP server on this machine that answers as a function of the test says, and keeps what it was asked."""

from __future__ import annotations

import socketserver
import ssl
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self

PIECE_BYTES = 64 << 10


@dataclass(frozen=True)
class Asked:
    """A request. Names of headers are in lower case."""

    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    client: int = 0
    """Port of the connection's other end."""
    body: bytes = b""


@dataclass(frozen=True)
class Reply:
    """An answer."""

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    cut_at: int | None = None
    """Close the connection after so many bytes of the body, whatever its length is said to be."""
    is_chunked: bool = False
    """Do not say how long the body is."""


class ScriptedHttp:
    """The server, as a context manager.

    Args:
        answer: called for each request, in the thread of its connection.
        tls: files of a certificate and its key.
        host: address to listen on.
    """

    def __init__(
        self,
        answer: Callable[[Asked], Reply],
        tls: tuple[Path, Path] | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        self.asked: list[Asked] = []
        self._answer = answer
        self._failures: list[BaseException] = []
        self._server = _Server(self, host)
        if tls is not None:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(*tls)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self._scheme = "https" if tls else "http"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.002,), daemon=True)
        self._thread.start()

    @property
    def authority(self) -> str:
        host, port = self._server.server_address[:2]
        return f"{host}:{port}"

    @property
    def url(self) -> str:
        return f"{self._scheme}://{self.authority}"

    def paths(self) -> list[str]:
        return [asked.path for asked in self.asked]

    def reply(self, asked: Asked) -> Reply:
        self.asked.append(asked)
        try:
            return self._answer(asked)
        except BaseException as error:
            self._failures.append(error)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        if error is None:
            assert not self._failures, self._failures


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, script: ScriptedHttp, host: str) -> None:
        super().__init__((host, 0), _Handler)
        self.script = script

    def server_bind(self) -> None:
        """Bind without HTTPServer's search for a name, which asks a name server about addresses other than loopback."""
        socketserver.TCPServer.server_bind(self)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients may hang up whenever they like; other failures are kept by `reply`."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 30
    server: _Server

    def do_GET(self) -> None:
        self._respond()

    def do_HEAD(self) -> None:
        self._respond()

    def do_POST(self) -> None:
        self._respond(self.rfile.read(int(self.headers.get("content-length", "0"))))

    do_PUT = do_POST

    def log_message(self, *arguments: Any) -> None: ...

    def _respond(self, body: bytes = b"") -> None:
        path, _, query = self.path.partition("?")
        headers = {name.lower(): value for name, value in self.headers.items()}
        reply = self.server.script.reply(
            Asked(self.command, path, query, headers, self.client_address[1], body)
        )
        self.send_response(reply.status)
        names = {name.lower() for name in reply.headers}
        for name, value in reply.headers.items():
            self.send_header(name, value)
        if reply.is_chunked:
            self.send_header("Transfer-Encoding", "chunked")
        elif "content-length" not in names:
            self.send_header("Content-Length", str(len(reply.body)))
        self.end_headers()
        body = b"" if self.command == "HEAD" else reply.body[: reply.cut_at]
        for start in range(0, len(body), PIECE_BYTES):
            piece = body[start : start + PIECE_BYTES]
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece) if reply.is_chunked else piece)
        if reply.is_chunked:
            self.wfile.write(b"0\r\n\r\n")
        self.close_connection = self.close_connection or reply.cut_at is not None


def file_reply(asked: Asked, content: bytes, headers: Mapping[str, str]) -> Reply:
    """Answer for a file, as RFC 9110 has it: with `Range`, `If-Range` and `If-Match`.

    Args:
        headers: of every answer, such as ETag and Last-Modified.
    """
    validators = {headers[name] for name in ("ETag", "Last-Modified") if name in headers}
    wanted = asked.headers.get("if-match")
    if wanted is not None and wanted not in validators:
        return Reply(412, headers=headers)
    held = asked.headers.get("if-range")
    spans = asked.headers.get("range", "").removeprefix("bytes=")
    if not spans or (held is not None and held not in validators):
        return Reply(200, content, headers)
    first, _, last = spans.partition("-")
    start, stop = int(first), min(int(last) + 1, len(content))
    if start >= len(content):
        return Reply(416, headers={**headers, "Content-Range": f"bytes */{len(content)}"})
    span = {"Content-Range": f"bytes {start}-{stop - 1}/{len(content)}"}
    return Reply(206, content[start:stop], {**headers, **span})
