"""What is written of each request: its line of the access log on standard error, and its usage in the ledger.

Owns: the fields of a line, as `key=value` or as JSON; the sums of tokens since start (metrics) and their increments in
append-only files, for billing. Must not know: requests, how lines are written.
Invariants: a line contains no prompt, no secret key, and no client text that could break it; lines are dropped rather
than requests delayed. A request is entered once in the ledger, when its answer has ended, however many attempts and
replicas it took. The lines of all files add up to what was entered, except for what a crash loses within `FLUSH_S`.
While the disk cannot be written, increments wait in memory and are merged per hour, key and model.

A file of the ledger holds one hour of one router: `2026-11-21T10Z.ROUTER.jsonl`, with a number before the suffix once
the previous one has reached `MAX_FILE_BYTES`. Each line is an increment, as JSON:

    id                  unique among all lines of all routers, so that a file loaded twice is noticed
    router
    hour                beginning of the hour in which the requests ended, as `2026-11-21T10:00:00Z`
    key                 name of the API key; empty if keys have no names
    model
    requests            answers with usage
    estimated_requests  streams without usage, for example because the client left: prompt tokens are estimated, sent
                        tokens counted
    unmetered_requests  other answers without usage, whose tokens are not known
    prompt_tokens       the cached tokens included
    cached_tokens
    completion_tokens
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path

import msgspec

from argosy_protocol.errors import NO_REASON, ErrorReason
from argosy_router.config import AccessFormat
from argosy_router.metric_series import PREFIX, Labels, Reading
from argosy_router.metrics import USAGE_REQUESTS, USAGE_TOKENS, USAGE_WRITE_FAILURES
from argosy_router.observability.lines import AppendFile, LineWriter, flush_until_cancelled

LINES_FLUSH_S = 0.2


class AccessEntry:
    """Fields of a line. A field that does not apply is zero or empty, or None where zero would have a meaning."""

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
            self._timer = asyncio.get_running_loop().call_later(LINES_FLUSH_S, self.flush)

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


log = logging.getLogger(__name__)

FLUSH_S = 2.0
MAX_FILE_BYTES = 64 * 1024 * 1024
_HOUR_S = 3600


class _Sums:
    """Usage of one model by one key."""

    def __init__(self) -> None:
        self.requests = 0
        self.estimated_requests = 0
        self.unmetered_requests = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.completion_tokens = 0

    def add(self, other: _Sums) -> None:
        self.requests += other.requests
        self.estimated_requests += other.estimated_requests
        self.unmetered_requests += other.unmetered_requests
        self.prompt_tokens += other.prompt_tokens
        self.cached_tokens += other.cached_tokens
        self.completion_tokens += other.completion_tokens


_Account = tuple[str, str]
"""(key, model)"""


class UsageLedger:
    """The usage of one router. `directory` is None if no files are written."""

    def __init__(
        self, directory: Path | None = None, router: str = "", *, clock: Callable[[], float] = time.time
    ) -> None:
        self._files = _HourlyFiles(directory, router) if directory is not None else None
        self._router = router
        self._clock = clock
        self._totals: dict[_Account, _Sums] = {}
        self._models: dict[str, list[str]] = {}
        """key -> models it has used"""
        self._unwritten: dict[int, dict[_Account, _Sums]] = {}
        """hours since the epoch -> increments of that hour not yet written"""
        self._ids = _ids()
        self.write_failures = 0

    def enter(
        self, key: str, model: str, prompt_tokens: int, cached_tokens: int, completion_tokens: int
    ) -> None:
        """Enter a request whose answer reported its usage."""
        for sums in self._sums(key, model):
            sums.requests += 1
            sums.prompt_tokens += prompt_tokens
            sums.cached_tokens += cached_tokens
            sums.completion_tokens += completion_tokens

    def enter_estimate(self, key: str, model: str, prompt_tokens: int, completion_tokens: int) -> None:
        """Enter a stream that ended without usage; its prompt tokens are estimated, the completion tokens counted."""
        for sums in self._sums(key, model):
            sums.estimated_requests += 1
            sums.prompt_tokens += prompt_tokens
            sums.completion_tokens += completion_tokens

    def enter_unmetered(self, key: str, model: str) -> None:
        """Enter a request that ended without usage, whose tokens are not known."""
        for sums in self._sums(key, model):
            sums.unmetered_requests += 1

    def _sums(self, key: str, model: str) -> list[_Sums]:
        """The sums that a request of `key` for `model` is added to."""
        account = (key, model)
        if account not in self._totals:
            self._models.setdefault(key, []).append(model)
        entered = [_of(account, self._totals)]
        if self._files is not None:
            entered.append(_of(account, self._unwritten.setdefault(int(self._clock()) // _HOUR_S, {})))
        return entered

    # metrics

    def series(self) -> list[Reading]:
        """Return the metrics of the ledger."""
        return [
            USAGE_REQUESTS.reading(lambda: self._request_rows(list(self._totals))),
            USAGE_TOKENS.reading(lambda: self._token_rows(list(self._totals))),
            USAGE_WRITE_FAILURES.value(lambda: self.write_failures),
        ]

    def render(self, key: str) -> bytes:
        """Render the usage of one key as a Prometheus text exposition."""
        accounts = [(key, model) for model in self._models.get(key, ())]
        readings = (
            USAGE_REQUESTS.reading(lambda: self._request_rows(accounts)),
            USAGE_TOKENS.reading(lambda: self._token_rows(accounts)),
        )
        return "".join([part for reading in readings for part in reading.parts(PREFIX)]).encode()

    def _request_rows(self, accounts: Iterable[_Account]) -> Iterator[tuple[Labels, float]]:
        for account in accounts:
            sums = self._totals[account]
            yield (*account, "yes"), sums.requests
            yield (*account, "estimated"), sums.estimated_requests
            yield (*account, "no"), sums.unmetered_requests

    def _token_rows(self, accounts: Iterable[_Account]) -> Iterator[tuple[Labels, float]]:
        for account in accounts:
            sums = self._totals[account]
            yield (*account, "prompt"), sums.prompt_tokens
            yield (*account, "cached"), sums.cached_tokens
            yield (*account, "completion"), sums.completion_tokens

    # files

    async def run(self) -> None:
        """Write increments periodically until cancelled, then once more."""
        try:
            await flush_until_cancelled(self.flush, FLUSH_S)
        finally:
            if self._files is not None:
                self._files.close()

    async def flush(self) -> None:
        """Append the increments not yet written. Those that cannot be written wait for the next flush."""
        if self._files is None:
            return
        pending, self._unwritten = self._unwritten, {}
        for hour, table in sorted(pending.items()):
            lines = [self._line(hour, account, sums) for account, sums in table.items()]
            try:
                await asyncio.to_thread(self._files.append, hour, b"".join(lines))
            except OSError as error:
                self.write_failures += 1
                log.error("usage cannot be written, it is kept in memory: %s", error)
                self._keep(hour, table)

    def _keep(self, hour: int, table: dict[_Account, _Sums]) -> None:
        kept = self._unwritten.setdefault(hour, {})
        for account, sums in table.items():
            if account in kept:
                kept[account].add(sums)
            else:
                kept[account] = sums

    def _line(self, hour: int, account: _Account, sums: _Sums) -> bytes:
        line = {
            "id": next(self._ids),
            "router": self._router,
            "hour": time.strftime("%Y-%m-%dT%H:00:00Z", time.gmtime(hour * _HOUR_S)),
            "key": account[0],
            "model": account[1],
            "requests": sums.requests,
            "estimated_requests": sums.estimated_requests,
            "unmetered_requests": sums.unmetered_requests,
            "prompt_tokens": sums.prompt_tokens,
            "cached_tokens": sums.cached_tokens,
            "completion_tokens": sums.completion_tokens,
        }
        return msgspec.json.encode(line) + b"\n"


def _of(account: _Account, table: dict[_Account, _Sums]) -> _Sums:
    sums = table.get(account)
    if sums is None:
        sums = table[account] = _Sums()
    return sums


def _ids() -> Iterator[str]:
    process = secrets.token_hex(8)
    number = 0
    while True:
        number += 1
        yield f"{process}-{number}"


class _HourlyFiles:
    """The usage files of one router in a directory, one open at a time."""

    def __init__(self, directory: Path, router: str) -> None:
        self._directory = directory
        self._router = router
        self._hour = -1
        self._file: AppendFile | None = None

    def append(self, hour: int, lines: bytes) -> None:
        """Append lines to the file of `hour`.

        Raises:
            OSError: nothing was added.
        """
        if self._file is None or hour != self._hour or self._file.size >= MAX_FILE_BYTES:
            self.close()
            self._hour = hour
            self._file = self._open(time.strftime("%Y-%m-%dT%HZ", time.gmtime(hour * _HOUR_S)))
        self._file.append(lines)

    def _open(self, hour: str) -> AppendFile:
        """Open the hour's first file below `MAX_FILE_BYTES` that no other process is writing."""
        part = 0
        while True:
            number = f".{part}" if part else ""
            part += 1
            try:
                file = AppendFile(self._directory / f"{hour}.{self._router}{number}.jsonl")
            except BlockingIOError:
                continue
            if file.size < MAX_FILE_BYTES:
                return file
            file.close()

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()
