"""One line per request on standard error, as `key=value` or as JSON.

Owns: the fields and when lines are handed over. Must not know: requests, how lines are written.
Invariants: no prompt, no key, no client text that could break a line; lines are dropped, not requests delayed.
"""

from __future__ import annotations

import asyncio
import time
from functools import lru_cache
from typing import Literal

import msgspec
from msgspec import Struct

from argosy_router.records.line_writer import LineWriter
from argosy_router.series import Reading

FLUSH_S = 0.2

AccessFormat = Literal["text", "json"]


class AccessEntry(Struct, omit_defaults=True):
    """What a line says; in JSON fields that do not apply are left out."""

    time: float
    """Unix time of the end; in text `2026-11-21T10:00:00.123Z`."""
    request: str
    status: int
    key: str = ""
    """Name of the client's API key."""
    model: str = ""
    replica: str = ""
    """Of the last attempt."""
    route: str = ""
    attempts: int = 0
    migrations: int = 0
    """Attempts that went on with a stream whose replica had died."""
    predicted_tokens: int | None = None
    """Prompt tokens expected to be cached."""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    queue_ms: float | None = None
    """Of the next, time in the queue; absent where the request did not wait."""
    ttft_ms: float | None = None
    """To the first byte of the answer."""
    duration_ms: float | None = None


class AccessLog:
    """Collects entries and has them written a few times a second: one system call instead of one per request."""

    def __init__(
        self, writer: LineWriter, *, is_enabled: bool = True, line_format: AccessFormat = "text"
    ) -> None:
        self._writer = writer
        self.is_enabled = is_enabled
        self._render = _as_json if line_format == "json" else _as_text
        self._entries: list[AccessEntry] = []
        self._timer: asyncio.TimerHandle | None = None
        self.dropped = 0

    def series(self) -> Reading:
        """What it counts."""
        return Reading(
            "counter",
            "access_log_dropped_lines",
            "Access lines that nobody read in time.",
            (),
            lambda: [((), self.dropped)],
        )

    def write(self, entry: AccessEntry) -> None:
        """Takes in one entry."""
        self._entries.append(entry)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_S, self.flush)

    def flush(self) -> None:
        """Hands over what was taken in."""
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
    return _encode(entry)


def _as_text(entry: AccessEntry) -> bytes:
    """All fields in one order, `-` where one does not apply."""
    e = entry
    line = (
        f"time={_second(int(e.time))}.{int(e.time * 1000) % 1000:03d}Z request={e.request} status={e.status} "
        f"key={_word(e.key)} model={_word(e.model)} replica={_word(e.replica)} route={e.route or '-'} "
        f"attempts={e.attempts} migrations={e.migrations} predicted_tokens={_count(e.predicted_tokens)} "
        f"prompt_tokens={_count(e.prompt_tokens)} cached_tokens={_count(e.cached_tokens)} "
        f"completion_tokens={_count(e.completion_tokens)} queue_ms={_time(e.queue_ms)} ttft_ms={_time(e.ttft_ms)} "
        f"duration_ms={_time(e.duration_ms)}"
    )
    return line.encode("ascii", "backslashreplace")


@lru_cache(maxsize=1024)
def _word(name: str) -> str:
    """A configured name, quoted where it could be taken for more than one field or line."""
    plain = name.isprintable() and not any(character in name for character in ' ="')
    return (name or "-") if plain else _encode(name).decode()


def _count(value: int | None) -> str:
    return "-" if value is None else str(value)


def _time(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


@lru_cache(maxsize=2)
def _second(moment: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(moment))
