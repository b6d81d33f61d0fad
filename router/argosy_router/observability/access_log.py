"""Access log: one line per request on standard error, as `key=value` or as JSON.

Owns: the fields, and when lines are passed on to be written. Must not know: requests, how lines are written.
Invariants: a line contains no prompt, no secret key, and no client text that could break it; lines are dropped rather
than requests delayed.
"""

from __future__ import annotations

import asyncio
import time
from functools import lru_cache

import msgspec

from argosy_protocol.errors import NO_REASON, ErrorReason
from argosy_router.config import AccessFormat
from argosy_router.observability.lines import LineWriter

FLUSH_S = 0.2


class AccessEntry:
    """Fields of a line. A field that does not apply is zero or empty, or None where zero would have a meaning."""

    __slots__ = (
        "attempts",
        "cached_tokens",
        "completion_tokens",
        "duration_ms",
        "error",
        "key",
        "migrations",
        "model",
        "predicted_tokens",
        "prompt_tokens",
        "queue_ms",
        "replica",
        "request",
        "route",
        "status",
        "time",
        "ttft_ms",
    )

    def __init__(
        self,
        time: float,
        request: str,
        status: int,
        key: str = "",
        model: str = "",
        *,
        error: ErrorReason = NO_REASON,
    ) -> None:
        self.time = time
        """Unix time at which the request ended; in text `2026-11-21T10:00:00.123Z`."""
        self.request = request
        self.status = status
        self.key = key
        """Name of the client's API key."""
        self.model = model
        self.replica = ""
        """Replica of the last attempt."""
        self.route = ""
        self.attempts = 0
        self.migrations = 0
        """Attempts that continued a stream whose replica had died."""
        self.predicted_tokens: int | None = None
        """Prompt tokens expected to be cached."""
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.completion_tokens: int | None = None
        self.queue_ms: float | None = None
        """Milliseconds spent queued, which `ttft_ms` includes; None if the request did not wait."""
        self.ttft_ms: float | None = None
        """Milliseconds to the first byte of the response."""
        self.duration_ms: float | None = None
        self.error = error
        """Why the request was refused or failed."""


class AccessLog:
    """Collects entries and writes them a few times a second: one system call instead of one per request."""

    def __init__(
        self, writer: LineWriter, *, is_enabled: bool = True, line_format: AccessFormat = "text"
    ) -> None:
        self._writer = writer
        self.is_enabled = is_enabled
        self._render = _as_json if line_format == "json" else _as_text
        self._entries: list[AccessEntry] = []
        self._timer: asyncio.TimerHandle | None = None
        self.dropped = 0
        """Lines that were dropped because standard error was not read in time."""

    def write(self, entry: AccessEntry) -> None:
        """Add one entry."""
        self._entries.append(entry)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_S, self.flush)

    def flush(self) -> None:
        """Pass the collected lines to the writer, which drops them if too much waits there."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._entries:
            lines = [self._render(entry) for entry in self._entries]
            self._entries.clear()
            if not self._writer.write(b"\n".join(lines) + b"\n"):
                self.dropped += len(lines)


_encode = msgspec.json.Encoder().encode


def _as_json(entry: AccessEntry) -> bytes:
    """Render as JSON, without the fields that do not apply."""
    e = entry
    fields = {
        "time": e.time,
        "request": e.request,
        "status": e.status,
        "key": e.key or None,
        "model": e.model or None,
        "replica": e.replica or None,
        "route": e.route or None,
        "attempts": e.attempts or None,
        "migrations": e.migrations or None,
        "predicted_tokens": e.predicted_tokens,
        "prompt_tokens": e.prompt_tokens,
        "cached_tokens": e.cached_tokens,
        "completion_tokens": e.completion_tokens,
        "queue_ms": _rounded(e.queue_ms),
        "ttft_ms": _rounded(e.ttft_ms),
        "duration_ms": _rounded(e.duration_ms),
        "error_type": e.error.type or None,
        "error_code": e.error.code or None,
        "error_param": e.error.param or None,
    }
    return _encode({name: value for name, value in fields.items() if value is not None})


def _as_text(entry: AccessEntry) -> bytes:
    """Render as `key=value`, all fields in a fixed order, `-` where one does not apply."""
    e = entry
    line = (
        f"time={_moment(e.time)} request={e.request} status={e.status} "
        f"key={_word(e.key)} model={_word(e.model)} replica={_word(e.replica)} route={e.route or '-'} "
        f"attempts={e.attempts} migrations={e.migrations} predicted_tokens={_count(e.predicted_tokens)} "
        f"prompt_tokens={_count(e.prompt_tokens)} cached_tokens={_count(e.cached_tokens)} "
        f"completion_tokens={_count(e.completion_tokens)} queue_ms={_tenths(e.queue_ms)} ttft_ms={_tenths(e.ttft_ms)} "
        f"duration_ms={_tenths(e.duration_ms)} error_type={e.error.type or '-'} error_code={e.error.code or '-'} "
        f"error_param={e.error.param or '-'}"
    )
    return line.encode("ascii", "backslashreplace")


@lru_cache(maxsize=1024)
def _word(name: str) -> str:
    """Render a configured name, quoted if it could be taken for more than one field or line."""
    plain = name.isprintable() and not any(character in name for character in ' ="')
    return (name or "-") if plain else _encode(name).decode()


def _rounded(ms: float | None) -> float | None:
    return None if ms is None else round(ms, 3)


def _count(value: int | None) -> str:
    return "-" if value is None else str(value)


def _tenths(value: float | None) -> str:
    """Render with one decimal place; once compiled, this is much faster than string formatting."""
    if value is None:
        return "-"
    tenths = int(value * 10.0 + 0.5)
    return f"{tenths // 10}.{tenths % 10}"


def _moment(time_s: float) -> str:
    second = int(time_s)
    return f"{_second(second)}.{str(int((time_s - second) * 1000.0)).zfill(3)}Z"


@lru_cache(maxsize=2)
def _second(moment: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(moment))
