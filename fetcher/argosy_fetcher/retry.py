"""Retries: reads a source across cuts, waits between attempts, and gives up when nothing comes any more.

Owns the delays, the count of failures in a row, the length of an outage, and that a range is the bytes asked for, in
order, no more and no less. Must not know disks. A fetch goes on as long as any of its files makes progress, so a bad
line costs time only; a source from which nothing comes for minutes is given up. A response that trickles counts as cut,
and what it brought does not count as progress.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, TypeVar

from argosy_fetcher.errors import HashMismatch, TransientError, UnknownHost, UnsupportedModel
from argosy_fetcher.source import Chunk, RemoteFile, Source, matches

_Result = TypeVar("_Result")


class Cancelled(Exception):
    """Another thread of the same fetch has failed, or the fetch was interrupted."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    max_outage: float = 300.0
    """Seconds without progress after which a fetch gives up: longer than restarts of routers and servers take."""
    min_failures: int = 3
    """Failures in a row before it gives up, so that one long wait at the server's wish is followed by attempts."""
    max_unknown_host: int = 5
    """Failures in a row after which it gives up if no server has that name, and nothing has come from the source."""
    first_delay: float = 0.5
    """Doubled by each failure in a row."""
    max_delay: float = 30.0
    max_retry_after: float = 300.0
    """Cap on a server's Retry-After: the hub's rate limits count requests over five minutes."""
    wait: Callable[[threading.Event, float], object] = threading.Event.wait
    """Waits until the event is set, for the given time at most."""
    clock: Callable[[], float] = time.monotonic
    """Seconds from any start."""

    def delay(self, failures: int, retry_after_s: float | None) -> float:
        """Return the seconds until the next attempt, after `failures` failures in a row.

        The delay is random, so that many clients of a server that comes back do not arrive at once. A server's wish
        lengthens it and never shortens it.
        """
        longest = min(self.max_delay, self.first_delay * 2.0 ** min(failures - 1, 30))
        delay = longest * random.uniform(0.5, 1.0)  # noqa: S311 - jitter
        if retry_after_s is not None and math.isfinite(retry_after_s):
            return max(delay, min(retry_after_s, self.max_retry_after))
        return delay


class Outage:
    """The time since which nothing has come from a source. Shared by the threads of a fetch."""

    def __init__(self) -> None:
        self.since: float | None = None
        """When the first attempt failed; None while there is progress."""
        self.num_noted = 0
        """The most failures in a row that a note was written about. Threads that fail alike need one note together."""
        self.has_progressed = False
        """Whether anything has ever come from the source."""

    def end(self) -> None:
        self.since = None
        self.num_noted = 0


class Attempts:
    """Failures in a row of one thing. Used by one thread.

    Args:
        what: names the thing in messages.
        note: is told each delay but the first, because single cuts are ordinary.
        cancelled: ends waiting.
        outage: that of the source, if several things are read of it at once.
    """

    def __init__(
        self,
        what: str,
        policy: RetryPolicy,
        note: Callable[[str], None],
        cancelled: threading.Event | None = None,
        outage: Outage | None = None,
    ) -> None:
        self._what = what
        self._policy = policy
        self._note = note
        self._cancelled = cancelled or threading.Event()
        self._outage = outage or Outage()
        self._failures = 0

    @property
    def clock(self) -> Callable[[], float]:
        return self._policy.clock

    def progressed(self) -> None:
        """Reset the count: something has arrived."""
        self._failures = 0
        self._outage.has_progressed = True
        if self._outage.since is not None:
            self._outage.end()

    def check_cancelled(self) -> None:
        """
        Raises:
            Cancelled: the event was set.
        """
        if self._cancelled.is_set():
            raise Cancelled

    def failed(self, error: TransientError) -> None:
        """Wait until the next attempt is due.

        Raises:
            TransientError: nothing has come from the source for too long.
            Cancelled: the event was set meanwhile.
        """
        self.check_cancelled()
        self._failures += 1
        now = self._policy.clock()
        since = self._outage.since
        if since is None:
            since = self._outage.since = now
        is_too_long = self._failures >= self._policy.min_failures and now - since >= self._policy.max_outage
        if is_too_long or self._is_hopeless(error):
            kept = "; what has arrived is kept, so another run continues from there"
            raise TransientError(
                f"{self._what}: gave up after {self._failures} failures in a row and {now - since:.0f} s without "
                f"progress: {error}{kept if self._outage.has_progressed else ''}",
                error.retry_after_s,
            ) from error
        self._wait(error)
        self.check_cancelled()

    def _is_hopeless(self, error: TransientError) -> bool:
        return (
            isinstance(error, UnknownHost)
            and not self._outage.has_progressed
            and self._failures >= self._policy.max_unknown_host
        )

    def _wait(self, error: TransientError) -> None:
        delay = self._policy.delay(self._failures, error.retry_after_s)
        is_ordinary = self._failures == 1 and not error.retry_after_s
        if not is_ordinary and self._failures > self._outage.num_noted:
            self._outage.num_noted = self._failures
            wish = ""
            if error.retry_after_s and error.retry_after_s > self._policy.max_retry_after:
                wish = (
                    f"; the server asks for {error.retry_after_s:.0f} s, which is more than is waited at once"
                )
            self._note(
                f"waiting for {self._what} (attempt {self._failures + 1} in {delay:.1f} s): {error}{wish}"
            )
        self._policy.wait(self._cancelled, delay)


def retrying(attempts: Attempts, call: Callable[[], _Result]) -> _Result:
    """Call until there is a result.

    Raises:
        TransientError: there was none for too long.
    """
    while True:
        try:
            return call()
        except TransientError as error:
            attempts.failed(error)
        except (ConnectionError, TimeoutError) as error:
            attempts.failed(TransientError(str(error) or type(error).__name__))


MIN_BYTES_PER_S: Final = 1024
"""A hundredth of the slowest lines on which anybody fetches models."""
WINDOW_S: Final = 60.0


class MinimumRate:
    """The rate of one response, which tells a slow source from one that only keeps a connection open: timeouts of
    sockets end at every byte. Only time that is spent waiting for the source counts, which begins with the object.

    The time until the first bytes is not held against a response: a server that cannot begin in the middle of a file
    sends first what nobody asked for.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._num_bytes = 0
        self._delay_s = 0.0
        self._waited_s = 0.0
        """Since the first bytes, or since the last window."""
        self._has_begun = False
        self._since = clock()

    def add(self, num_bytes: int) -> bool:
        """Count what has arrived. Returns whether it came fast enough to be progress, the first wait included."""
        waited_s = self._clock() - self._since
        if self._has_begun:
            self._waited_s += waited_s
        else:
            self._has_begun, self._delay_s = True, waited_s
        self._num_bytes += num_bytes
        return self._num_bytes >= MIN_BYTES_PER_S * (self._delay_s + self._waited_s)

    def resume(self) -> None:
        """Wait again: what has arrived was used up.

        Raises:
            TransientError: a window is over, and too little came in it.
        """
        if self._waited_s >= WINDOW_S:
            if self._num_bytes < MIN_BYTES_PER_S * self._waited_s:
                raise TransientError(
                    f"the source sends too slowly ({self._num_bytes} bytes in {self._waited_s:.0f} s)"
                )
            self._num_bytes, self._delay_s, self._waited_s = 0, 0.0, 0.0
        self._since = self._clock()


def read_range(
    source: Source, file: RemoteFile, start: int, stop: int, attempts: Attempts
) -> Iterator[memoryview]:
    """Yield the bytes [start, stop) of a file, and continue after cuts from what has arrived.

    Raises:
        FetchError: from the source.
        TransientError: there was no progress for too long.
        Cancelled: `attempts` was cancelled.
    """
    position = start
    while position < stop:
        failure = TransientError("the connection ended early")
        try:
            rate = MinimumRate(attempts.clock)
            for view in _chunks(source.read(file, position, stop), stop - position):
                attempts.check_cancelled()
                position += view.nbytes
                if rate.add(view.nbytes):
                    attempts.progressed()
                yield view
                rate.resume()
        except TransientError as error:
            failure = error
        except (ConnectionError, TimeoutError) as error:
            failure = TransientError(str(error) or type(error).__name__)
        if position < stop:
            attempts.failed(failure)


def _chunks(chunks: Iterator[Chunk], expected_bytes: int) -> Iterator[memoryview]:
    """Yield a source's chunks without empty ones and without what exceeds the expected bytes, then close the source's
    iterator. It is run to its end, after which a connection can be used again."""
    try:
        for chunk in chunks:
            if not expected_bytes:
                return
            view = memoryview(chunk).cast("B")[:expected_bytes]
            if view.nbytes:
                expected_bytes -= view.nbytes
                yield view
    finally:
        if close := getattr(chunks, "close", None):
            with suppress(TransientError):
                close()


def read_whole(source: Source, file: RemoteFile, max_bytes: int, attempts: Attempts) -> bytes:
    """Return a small file's content, checked against its digest.

    Raises:
        UnsupportedModel: it is larger than `max_bytes`.
        HashMismatch: the content was wrong twice.
        FetchError, TransientError: as `read_range`.
    """
    if file.size > max_bytes:
        raise UnsupportedModel(
            f"{source.name}: {file.path} has {file.size} bytes; more than {max_bytes} are not read"
        )
    for _ in range(2):
        data = b"".join(bytes(view) for view in read_range(source, file, 0, file.size, attempts))
        if matches(data, file.digest):
            return data
    raise HashMismatch(mismatch_message(source.name, file))


def mismatch_message(model: str, file: RemoteFile) -> str:
    assert file.digest is not None
    return (
        f"{model}: the content of {file.path} does not have the {file.digest.algorithm} that the source announces "
        f"({file.digest.hex}), twice in a row; a proxy or a mirror may serve damaged content: fetch from another one"
    )
