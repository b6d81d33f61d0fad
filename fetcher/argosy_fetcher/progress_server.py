"""Progress server: answers `GET /progress` while a fetch runs, for the operator of a cluster.

The meter owns phase, rate and remaining time; a report keeps the bounds of `ModelProgress`. The server owns the port,
its thread and their bounds. Neither knows what is fetched. Invariants: whatever clients send, or do not send, costs one
thread, `MAX_CONNECTIONS` sockets and a few KiB each; a full house loses its oldest connection, so that idle ones cannot
keep the operator out; a fault here never ends a fetch.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

import msgspec

from argosy_fetcher.progress import ForwardedProgress, Progress, printable, size_text
from argosy_protocol.program.listen import listen
from argosy_protocol.reports import MAX_REPORT_BYTES, PROGRESS_PATH, ModelProgress, Phase, duration_text

RATE_WINDOW_S: Final = 15.0
"""The rate is the mean of this time: long enough not to jump, short enough to show soon that nothing arrives."""
_SAMPLE_INTERVAL_S: Final = 1.0
_MAX_SOURCE: Final = 1024
_MAX_REVISION: Final = 256
_MAX_NOTE: Final = 512


class ProgressMeter(ForwardedProgress):
    """A `Progress` that keeps account, and passes everything on.

    Args:
        source: the model as the user wrote it.
        shown: is told everything as well.
        clock: seconds from any start.
    """

    def __init__(self, source: str, shown: Progress, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(shown)
        self._clock = clock
        self._lock = threading.Lock()
        self._source = source
        self._revision = self._note = ""
        self._phase: Phase = "resolving"
        self._total = self._done = self._present = 0
        self._started = clock()
        self._samples: deque[tuple[float, int]] = deque()
        """Times, and the bytes done by then: one that is older than the window, and those of the window."""

    def report(self) -> ModelProgress:
        with self._lock:
            rate = self._rate(self._clock()) if self._phase == "fetching" else 0.0
            left = max(0, self._total - self._done)
            return ModelProgress(
                source=printable(self._source)[:_MAX_SOURCE],
                revision=printable(self._revision)[:_MAX_REVISION],
                phase=self._phase,
                fetched_bytes=max(0, self._done),
                total_bytes=max(0, self._total),
                bytes_per_second=rate,
                eta_seconds=left / rate if rate > 0.0 else None,
                note=printable(self._note)[:_MAX_NOTE],
            )

    def outcome(self) -> str:
        """Describe a fetch that has ended: `28.0 GiB fetched in 70 s`, or `already stored`."""
        with self._lock:
            fetched, seconds = self._done - self._present, self._clock() - self._started
        return (
            f"{size_text(fetched)} fetched in {duration_text(seconds)}" if fetched > 0 else "already stored"
        )

    def enter(self, phase: Phase) -> None:
        with self._lock:
            self._phase, self._note = phase, ""
        super().enter(phase)

    def resolved(self, source: str, revision: str) -> None:
        with self._lock:
            self._revision = revision
        super().resolved(source, revision)

    def begin(self, total_bytes: int, present_bytes: int) -> None:
        with self._lock:
            self._phase, self._note = "fetching", ""
            self._total, self._done, self._present = total_bytes, present_bytes, present_bytes
            self._samples.clear()
            self._samples.append((self._clock(), present_bytes))
        super().begin(total_bytes, present_bytes)

    def advance(self, num_bytes: int) -> None:
        with self._lock:
            self._done += num_bytes
            self._sample(self._clock())
        super().advance(num_bytes)

    def note(self, text: str) -> None:
        with self._lock:
            self._note = text
        super().note(text)

    def end(self) -> None:
        with self._lock:
            self._phase, self._note = "done", ""
        super().end()

    def _sample(self, now: float) -> None:
        if not self._samples or now - self._samples[-1][0] < _SAMPLE_INTERVAL_S:
            return
        self._samples.append((now, self._done))
        while len(self._samples) > 1 and self._samples[1][0] <= now - RATE_WINDOW_S:
            self._samples.popleft()

    def _rate(self, now: float) -> float:
        self._sample(now)
        since, done_then = self._samples[0]
        return max(0.0, (self._done - done_then) / (now - since)) if now > since else 0.0


MAX_CONNECTIONS: Final = 32
REQUEST_TIMEOUT_S: Final = 5.0
_MAX_HEAD_BYTES: Final = 4096
_ANY_HOST: Final = "0.0.0.0"  # noqa: S104 - a pod's network namespace is its own, and a progress is no secret


class ProgressServer:
    """A context manager; the port answers from its beginning to its end.

    Args:
        port: 0 for any that is free.
        report: called in the server's thread, for each request.

    Raises (from entering):
        CannotListen: the port is taken, or not permitted.
    """

    def __init__(self, port: int, report: Callable[[], ModelProgress], *, host: str = _ANY_HOST) -> None:
        self.port = port
        self._host = host
        self._report = report
        self._open: dict[asyncio.StreamWriter, None] = {}
        """In the order in which they came."""
        self._is_closing = False

    def __enter__(self) -> Self:
        (self._socket,) = listen(self._host, self.port, MAX_CONNECTIONS, port_flag="--progress-port")
        self.port = self._socket.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="progress", daemon=True)
        self._thread.start()
        serving = asyncio.start_server(
            self._serve, sock=self._socket, limit=_MAX_HEAD_BYTES, backlog=MAX_CONNECTIONS
        )
        self._server = asyncio.run_coroutine_threadsafe(serving, self._loop).result()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _close(self) -> None:
        self._is_closing = True
        self._loop.remove_reader(
            self._socket.fileno()
        )  # connections that are just accepted fail if close() is first
        for writer in self._open:
            writer.transport.abort()
        while ending := asyncio.all_tasks() - {asyncio.current_task()}:  # some may just have been accepted
            await asyncio.gather(*ending, return_exceptions=True)
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_closing:
            writer.transport.abort()
            return
        if len(self._open) >= MAX_CONNECTIONS:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.transport.abort()
        self._open[writer] = None
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._answer(head.partition(b"\r\n")[0]))
                await writer.drain()
        except (OSError, EOFError, TimeoutError, asyncio.LimitOverrunError):
            writer.transport.abort()
        finally:
            self._open.pop(writer, None)
            writer.close()

    def _answer(self, request_line: bytes) -> bytes:
        method, _, rest = request_line.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        if path != PROGRESS_PATH.encode():
            return _response("404 Not Found", b"")
        if method != b"GET":
            return _response("405 Method Not Allowed", b"", "Allow: GET\r\n")
        report = self._report()
        body = msgspec.json.encode(report)
        if len(body) > MAX_REPORT_BYTES:
            body = msgspec.json.encode(msgspec.structs.replace(report, note="", source=""))
        return _response("200 OK", body, "Content-Type: application/json\r\n")


def _response(status: str, body: bytes, headers: str = "") -> bytes:
    head = f"HTTP/1.1 {status}\r\n{headers}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + body
