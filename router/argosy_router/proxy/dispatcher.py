"""The dispatcher: chooses the replica of each attempt, and how long to wait for it.

Owns: where a request goes first, where it goes from a stalled core, where its hedge goes, and the timeouts that follow
from a choice.
Must not know: attempts, health reports, the bytes of requests and answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from argosy_protocol.errors import ApiError
from argosy_router.fleet.fleet import Fleet
from argosy_router.fleet.replica import Replica
from argosy_router.fleet.service import Choice
from argosy_router.flow_control.controller import FlowController
from argosy_router.http.deadlines import Deadline
from argosy_router.metrics.registry import Metrics
from argosy_router.proxy.request.call import Call
from argosy_router.proxy.resilience.hedging import Hedging

TTFT_FACTOR = 4.0
"""The first-byte timeout is at least this multiple of the predicted time to first token, unless the request timeout is
shorter. The alert ArgosyFirstTokenMispredicted has the same factor."""


class Dispatcher:
    """Chooses for all requests of one router. Times are a monotonic clock's, passed in."""

    def __init__(
        self,
        fleet: Fleet,
        metrics: Metrics,
        flow_control: FlowController,
        hedging: Hedging,
        *,
        first_byte_timeout_s: float,
        request_timeout_s: float,
    ) -> None:
        self.hedging = hedging
        self._fleet = fleet
        self._metrics = metrics
        self._flow_control = flow_control
        self._first_byte_timeout_s = first_byte_timeout_s
        self._request_timeout_s = request_timeout_s

    def choose(
        self,
        call: Call,
        tried: Sequence[Replica],
        now: float,
        fingerprint: str = "",
        *,
        is_admitted: bool = False,
    ) -> Choice:
        """Choose a replica for the next attempt.

        Args:
            tried: replicas to exclude.
            fingerprint: of the model that must continue a stream; empty for any model.
            is_admitted: the request was in flight and has lost its replica; the in-flight limit does not apply to it.

        Raises:
            ApiError: no replica can take the request.
        """
        started = time.monotonic()
        if fingerprint:
            others = [r for r in call.service.replicas.values() if r.fingerprint != fingerprint]
            tried = [*tried, *others]
        choice = call.service.choose(
            call.prompt,
            now,
            self._fleet.rng,
            tried,
            self._fleet.policy,
            is_admitted=is_admitted or bool(fingerprint),
            sequences=call.estimate.sequences,
        )
        self._metrics.decision.observe((), time.monotonic() - started)
        return choice

    def choose_instead_of_stalled(
        self, call: Call, tried: Sequence[Replica], now: float, fingerprint: str
    ) -> Choice | None:
        """Choose the replica to which a request moves from a stalled one; None if no healthy replica can take it, in
        which case it stays."""
        try:
            choice = self.choose(call, tried, now, fingerprint, is_admitted=True)
        except ApiError:
            return None
        replica = choice.replica
        return choice if replica.health.is_healthy and not replica.is_stalled else None

    def choose_hedge(self, call: Call, tried: Sequence[Replica], now: float) -> Choice | None:
        """Choose a hedge's target for an overdue answer; None if no healthy replica has capacity, or if the service's
        share of hedges is used up."""
        if not self._flow_control.has_capacity(call.service, now, call.prompt.name, call.estimate.sequences):
            return None
        try:
            choice = self.choose(call, tried, now)
        except ApiError:
            return None
        health = choice.replica.health
        is_fit = health.is_healthy and not health.is_in_cooldown(now)
        return choice if is_fit and self.hedging.spend(call.service) else None

    def watch_first_token(
        self, call: Call, choice: Choice, on_overdue: Callable[[], None]
    ) -> Deadline | None:
        """Have `on_overdue` called when a stream's first token is overdue, unless the deadline ends before; None if
        the service's requests are not hedged."""
        return self.hedging.watch(call.service, choice.predicted_ttft_s, on_overdue)

    def first_byte_timeout_s(self, call: Call, choice: Choice) -> float:
        """How long to wait for the first byte of the chosen replica's response."""
        whole = call.service.spec.limits.request_timeout_s or self._request_timeout_s
        if not call.is_stream:
            return whole
        return min(whole, max(self._first_byte_timeout_s, TTFT_FACTOR * choice.predicted_ttft_s))
