"""The gate every generation request passes: it is sent at once, or waits for its turn, or is refused.

Owns: one lane per service, and when lanes are looked at.
Must not know: the bytes of requests and answers, how a replica is chosen.
Invariants: what a request reserved of its key's limits is closed once, when the request ends; lanes are ticked as long
as somebody waits, so nobody waits longer than allowed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from argosy_protocol.errors import ApiError, TooManyRequests, Unavailable
from argosy_protocol.openai import MAX_TOKENS
from argosy_router.admission.accounts import RateLimited
from argosy_router.admission.lane import Bounds, Lane
from argosy_router.fleet.fleet import Fleet
from argosy_router.fleet.service import Service
from argosy_router.http.deadlines import Deadline, TimerWheel
from argosy_router.http.roles import Client
from argosy_router.metrics.series import Counter, Histogram, Labels, Reading, Series
from argosy_router.proxy.books import CLIENT_GONE
from argosy_router.proxy.waiting import Waiting

if TYPE_CHECKING:
    from argosy_router.proxy.exchange import Exchange

TICK_S = 0.1
"""How soon a new replica, or room that other routers left, is noticed."""
WAIT_SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Bounds of each service's queue, where the service has none of its own."""

    max_queued_requests: int = 4096
    max_queued_bytes: int = 256 * 1024 * 1024
    """Of request bodies."""
    queue_timeout_s: float = 60.0
    """As long as OpenAI's SDKs wait before they try again."""
    hold_timeout_s: float = 0.0
    """Zero: while a service has no replica its requests are refused at once."""
    keep_alive_s: float = 10.0
    """Time between the comments that a stream without an event gets (`begun_stream.KeepAlive`). In the queue a refusal
    before the first still has its own status."""
    keep_alive_after_s: float = 15.0
    """When they begin for a request that was sent, and that no replica has accepted."""


class Gate:
    """Shared by all requests of one router."""

    def __init__(self, fleet: Fleet, wheel: TimerWheel, limits: AdmissionLimits) -> None:
        self._fleet = fleet
        self._limits = limits
        self._lanes: dict[Service, Lane] = {}
        self._deadline = Deadline(wheel, self._tick)
        self._is_tick_near = False
        self.now = time.monotonic
        self._waits = Histogram(
            "queue_seconds", "Time in the queue, however it ended.", ("model", "outcome"), WAIT_SECONDS
        )
        self._limited = Counter("rate_limited", "Requests refused by the limits of their key.", ("key",))

    def series(self) -> tuple[Series, ...]:
        """What it counts."""
        queued = Reading("gauge", "queued_requests", "Requests in the queue.", ("model",), self._queued)
        admitted = Reading(
            "gauge",
            "admitted_requests",
            "Requests past the queue and without an end.",
            ("model",),
            self._admitted,
        )
        return queued, admitted, self._waits, self._limited

    def _queued(self) -> Iterator[tuple[Labels, float]]:
        for service in list(self._fleet.services.values()):
            lane = self._lanes.get(service)
            yield (service.spec.model,), lane.waiting if lane is not None else 0

    def _admitted(self) -> Iterator[tuple[Labels, float]]:
        for service in list(self._fleet.services.values()):
            lane = self._lanes.get(service)
            yield (service.spec.model,), lane.active if lane is not None else 0

    def enter(self, exchange: Exchange, client: Client) -> None:
        """Sends a request, or has it wait, or answers why not."""
        account, service, now = exchange.call.account, exchange.call.service, exchange.started
        if account.is_limited:
            try:
                exchange.reservation = account.reserve(exchange.call.estimate.total, now)
            except RateLimited as limited:
                self._limited.add((account.name,))
                exchange.refuse(limited)
                return
        lane = self._lanes.get(service) or self._add_lane(service, now)
        sequences = exchange.call.estimate.sequences
        if lane.enter(now, exchange.call.prompt.name, sequences):
            try:
                exchange.start()
            except (Unavailable, TooManyRequests):  # the last look at the room is a moment old
                lane.retract(now, sequences)
            else:
                return
        waiting = Waiting(self, lane, exchange, client)
        client.attach(waiting)
        try:
            lane.wait(waiting, now)
        except ApiError as error:
            waiting.refuse(error)
            return
        if not self._deadline.is_set:
            self._deadline.set(TICK_S)

    def has_room(self, service: Service, now: float, name: str = "", sequences: int = 1) -> bool:
        """Whether a service with requests under way takes one more for `name`, with so many sequences, at once, and
        nobody waits for it."""
        try:
            return not self._lanes[service].waiting and service.takes(now, name, sequences)
        except Unavailable:
            return False

    def ended(self, exchange: Exchange, now: float) -> None:
        """A request is over, sent or not."""
        reservation = exchange.reservation
        if reservation is not None:
            if exchange.attempts:
                reservation.settle(_tokens_used(exchange, now))
            else:
                reservation.cancel()
        if exchange.attempts:
            lane = self._lanes[exchange.call.service]
            lane.ended(now, exchange.call.estimate.sequences)
            if lane.waiting and not self._is_tick_near:
                # In a turn of its own: whoever ended may be in the middle of something.
                self._is_tick_near = True
                asyncio.get_running_loop().call_soon(self._tick)

    def left(self, waiting: Waiting, outcome: str) -> None:
        """A request waits no longer."""
        model = waiting.exchange.call.service.spec.model
        waiting.exchange.waited_s = waited_s = self.now() - waiting.since
        self._waits.observe((model, outcome), waited_s)

    def _add_lane(self, service: Service, now: float) -> Lane:
        for gone in set(self._lanes).difference(self._fleet.services.values()):
            if not self._lanes[gone].active and not self._lanes[gone].waiting:
                del self._lanes[gone]
        lane = self._lanes[service] = Lane(
            service.spec.model, service.room, lambda: self._bounds(service), now, service.takes
        )
        return lane

    def _bounds(self, service: Service) -> Bounds:
        own, limits = service.spec.limits, self._limits
        return Bounds(
            own.max_queued_requests or limits.max_queued_requests,
            limits.max_queued_bytes,
            own.queue_timeout_s or limits.queue_timeout_s,
            own.hold_timeout_s or limits.hold_timeout_s,
        )

    def _tick(self) -> None:
        self._is_tick_near = False
        now = self.now()
        busy = [lane for lane in self._lanes.values() if lane.waiting]
        if busy and not self._deadline.is_set:
            self._deadline.set(TICK_S)
        for lane in busy:
            lane.tick(now)


def _tokens_used(exchange: Exchange, now: float) -> int:
    """What a request that was sent counts for: its usage, an estimate of what was computed for an answer without one,
    nothing for an error."""
    record, choice, estimate = exchange.record, exchange.choice, exchange.call.estimate
    if record is not None and record.completion_tokens is not None:
        return estimate.used(record.prompt_tokens, record.completion_tokens)
    if choice is None or exchange.status not in (200, CLIENT_GONE):
        return 0
    replica = choice.replica
    max_tokens = replica.hello.max_model_len if replica.hello is not None else MAX_TOKENS
    generating_s = now - exchange.sent_at - choice.predicted_ttft_s
    return estimate.generated_in(generating_s, replica.load.decode_step_s, max_tokens)
