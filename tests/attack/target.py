"""What an attack is given, and how it is declared.

Owns: the bounds of an attack (time, requests, requests in flight) and the tally of its answers.
Must not know: the canary, limits of the run.
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
"""Never wrong: the fleet says that it has enough."""


@dataclass
class Target:
    """The fleet, for one attack and as long as that may take."""

    fleet: Fleet
    until: float
    """On `time.monotonic`'s clock."""
    outcomes: Counter[str] = field(default_factory=Counter)
    unexpected: Counter[str] = field(default_factory=Counter)

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self.until

    @property
    def seconds_left(self) -> float:
        return max(0.0, self.until - time.monotonic())

    def saw(self, status: int, body: bytes = b"", *, allowed: frozenset[int] | None = None) -> None:
        """Notes an answer. A server error is unexpected unless it says overload; with `allowed` all else is, too."""
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
        """One request, noted. Without a whole answer in time it is noted as such, which is no fault by itself: the
        fleet may cut attackers off, and an attack ends when its time is over."""
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
        """Calls `once` with rising numbers, `in_flight` at a time, until the time is over or `most` were made; what is
        still under way a second later is cancelled."""
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
    """One attack: what it does, and what clients may feel of it."""

    name: str
    run: Callable[[Target], Awaitable[None]]
    stall_s: float = STALL_S
    """Longest wait that is allowed for other clients meanwhile."""
    kills: bool = False
    """Whether replicas go away by it: their ejection is then right."""
    is_slow: bool = False
    """Whether it needs more than the usual time of a phase."""
