"""A reverse proxy that cuts its connections when so many bytes of a model's weights have passed, and notes what passed.

It stands before any server on this machine: a hub, a bucket, a registry or a folder. Where a server redirects to
another one, the proxy stands before that one too. Weights are told from other answers by their sizes.
"""

from __future__ import annotations

import http.client
import threading
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

PIECE_BYTES = 1000
_HOP_BY_HOP = ("connection", "transfer-encoding", "date", "server")


@dataclass
class Passage:
    """An answer with a range of a weights file."""

    size: int
    """Bytes that were asked for."""
    sent: int = 0
    is_cut: bool = False


class CuttingProxy:
    """The proxy, as a context manager.

    Args:
        upstream: URL of the server, without a path.
        sizes: of the weights files.
        cut_after: bytes of weights after which every connection that carries weights is cut, once.
    """

    def __init__(self, upstream: str, sizes: Collection[int], cut_after: int) -> None:
        self.passages: list[Passage] = []
        self._sizes = frozenset(sizes)
        self._left = cut_after
        self._has_cut = False
        self._under_way: set[int] = set()
        self._lock = threading.Lock()
        self._fronts: dict[str, _Front] = {}
        self.host = self._front(urlsplit(upstream).netloc)

    @property
    def url(self) -> str:
        return f"http://{self.host}"

    @property
    def cuts(self) -> list[Passage]:
        return [each for each in self.passages if each.is_cut]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for front in self._fronts.values():
            front.shutdown()
            front.thread.join()
            front.server_close()

    def rewritten(self, location: str) -> str:
        """The address of a redirect, through this proxy."""
        url = urlsplit(location)
        return url._replace(netloc=self._front(url.netloc)).geturl() if url.netloc else location

    def begin(self, status: int, headers: http.client.HTTPMessage, size: int) -> Passage | None:
        """Note an answer; None if it has no weights. Single bytes are not counted: they show what a server can do."""
        total = headers.get("Content-Range", f"/{size}").rpartition("/")[2]
        if status not in (200, 206) or int(total) not in self._sizes or size <= 1:
            return None
        with self._lock:
            passage = Passage(size)
            self.passages.append(passage)
            if not self._has_cut:
                self._under_way.add(id(passage))
            return passage

    def allowed(self, passage: Passage, wanted: int) -> int:
        """How many of `wanted` bytes may pass; fewer if the connection is to be cut behind them."""
        with self._lock:
            if self._has_cut:
                passage.is_cut = id(passage) in self._under_way
                count = 0 if passage.is_cut else wanted
            elif wanted > self._left:
                count, self._has_cut, passage.is_cut = self._left, True, True
            else:
                count = wanted
            self._left -= count
            passage.sent += count
            return count

    def _front(self, netloc: str) -> str:
        with self._lock:
            front = self._fronts.get(netloc)
            if front is None:
                front = self._fronts[netloc] = _Front(self, netloc)
            return f"127.0.0.1:{front.server_address[1]}"


class _Front(ThreadingHTTPServer):
    """One address of the proxy, for one server behind it."""

    daemon_threads = True

    def __init__(self, proxy: CuttingProxy, upstream: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.proxy = proxy
        self.upstream = upstream
        self.thread = threading.Thread(target=self.serve_forever, args=(0.002,), daemon=True)
        self.thread.start()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 30
    server: _Front

    def handle(self) -> None:
        with suppress(ConnectionError):  # clients leave when they have what they want
            super().handle()

    def do_GET(self) -> None:
        upstream = http.client.HTTPConnection(self.server.upstream, timeout=30)
        try:
            headers = {name: value for name, value in self.headers.items() if name.lower() != "host"}
            upstream.request(self.command, self.path, headers={**headers, "Connection": "close"})
            response = upstream.getresponse()
            self._pass(response, response.read())
        finally:
            upstream.close()

    do_HEAD = do_GET

    def log_message(self, *arguments: object) -> None: ...

    def _pass(self, response: http.client.HTTPResponse, body: bytes) -> None:
        proxy = self.server.proxy
        self.send_response(response.status)
        for name, value in response.headers.items():
            if name.lower() not in (*_HOP_BY_HOP, "content-length"):
                self.send_header(name, proxy.rewritten(value) if name.lower() == "location" else value)
        is_head = self.command == "HEAD"
        length = response.headers.get("Content-Length") if is_head else str(len(body))
        self.send_header("Content-Length", length or "0")
        self.end_headers()
        passage = None if is_head else proxy.begin(response.status, response.headers, len(body))
        for start in range(0, len(body), PIECE_BYTES):
            piece = body[start : start + PIECE_BYTES]
            count = len(piece) if passage is None else proxy.allowed(passage, len(piece))
            self.wfile.write(piece[:count])
            if passage is not None and passage.is_cut:
                self.close_connection = True
                return
