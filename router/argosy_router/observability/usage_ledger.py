"""Usage ledger: tokens per API key, model and hour, for billing.

Owns: the sums since start (metrics) and their increments in append-only files.
Must not know: requests, prompts, secrets; keys appear by name.
Invariants: a request is entered once, when its answer has ended, however many attempts and replicas it took. The lines
of all files add up to what was entered, except for what a crash loses within `FLUSH_S`. While the disk cannot be
written, increments wait in memory and are merged per hour, key and model.

A file holds one hour of one router: `2026-11-21T10Z.ROUTER.jsonl`, with a number before the suffix once the previous
one has reached `MAX_FILE_BYTES`. Each line is an increment, as JSON:

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
from pathlib import Path

import msgspec

from argosy_router.metric_series import PREFIX, Labels, Reading
from argosy_router.metrics import USAGE_REQUESTS, USAGE_TOKENS, USAGE_WRITE_FAILURES
from argosy_router.observability.lines import AppendFile, flush_until_cancelled

log = logging.getLogger(__name__)

FLUSH_S = 2.0
MAX_FILE_BYTES = 64 * 1024 * 1024
_HOUR_S = 3600


class _Sums:
    """Usage of one model by one key."""

    __slots__ = (
        "cached_tokens",
        "completion_tokens",
        "estimated_requests",
        "prompt_tokens",
        "requests",
        "unmetered_requests",
    )

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
