"""Target and Attack: what an attack is given, and how it is declared.

Owns the bounds of an attack (time, requests, requests in flight) and the counts of its answers. Must not know the
canary or the limits of the run.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from .fleet import ATTACKER_KEY, Fleet
from .verdict import STALL_S
from .wire import Broken, ask

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
REQUEST_TIMEOUT_S = 30.0
OVERLOADED = frozenset({429, 503})
"""Always permitted: the fleet signals overload."""


@dataclass
class Target:
    """The fleet as one attack sees it, until the attack's deadline."""

    fleet: Fleet
    until: float
    """Deadline on `time.monotonic`'s clock."""
    outcomes: Counter[str] = field(default_factory=Counter)
    unexpected: Counter[str] = field(default_factory=Counter)

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self.until

    @property
    def seconds_left(self) -> float:
        return max(0.0, self.until - time.monotonic())

    def saw(self, status: int, body: bytes = b"", *, allowed: frozenset[int] | None = None) -> None:
        """Count an answer. Server errors other than overload are unexpected; with `allowed`, so is any other status."""
        self.outcomes[str(status)] += 1
        is_fine = status < 500 if allowed is None else status in allowed
        if not (is_fine or status in OVERLOADED):
            self.unexpected[f"{status} {body[:160].decode(errors='replace')}"] += 1

    async def ask(
        self,
        path: str,
        body: object = None,
        *,
        key: str = ATTACKER_KEY,
        headers: Mapping[str, str] | None = None,
        port: int = 0,
        allowed: frozenset[int] | None = None,
    ) -> None:
        """Send one request and count its answer.

        A request without a complete answer in time counts as such, which is not a finding: the fleet may disconnect
        attackers, and an attack ends at its deadline.
        """
        try:
            response = await ask(
                port or self.fleet.port,
                path,
                body,
                key=key,
                headers=headers,
                timeout_s=min(REQUEST_TIMEOUT_S, self.seconds_left + 1.0),
            )
        except (OSError, Broken, TimeoutError) as error:
            self.outcomes[type(error).__name__] += 1
        else:
            self.saw(response.status, response.body, allowed=allowed)

    async def volley(
        self, once: Callable[[int], Awaitable[None]], *, in_flight: int = 8, most: int = 200
    ) -> None:
        """Call `once` with 0, 1, 2, ..., `in_flight` calls at a time, until the deadline or for `most` calls.

        Calls that are still running a second after the deadline are cancelled.
        """
        numbers = itertools.count()

        async def worker() -> None:
            while not self.is_over and (number := next(numbers)) < most:
                await once(number)

        workers = [asyncio.create_task(worker()) for _ in range(in_flight)]
        _, late = await asyncio.wait(workers, timeout=self.seconds_left + 1.0)
        for task in late:
            task.cancel()
        self.outcomes["cut off at the end"] += len(late)
        for outcome in await asyncio.gather(*workers, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome


@dataclass(frozen=True)
class Attack:
    """One attack: what it does, and how far it may affect other clients."""

    name: str
    run: Callable[[Target], Awaitable[None]]
    stall_s: float = STALL_S
    """Longest wait allowed for other clients during the attack."""
    kills: bool = False
    """Whether it makes replicas fail, so that ejecting them is correct."""
    needs_bucket: bool | None = None
    """Whether the storage must be a bucket; False: a directory; None: either."""
    is_slow: bool = False
    """Whether it needs a longer phase than usual."""
