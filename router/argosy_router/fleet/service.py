"""One service: its replicas, its prefix index, the choice of a replica, and its recent times to first token.

Owns: calling the policy, and recording what a dispatch implies for the chosen replica's load and cache.
Must not know: HTTP, discovery, telemetry frames.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Collection, Sequence
from math import exp
from typing import Final

from argosy_protocol.fleet import FleetService
from argosy_protocol.reports import TTFT_BOUNDS_S, TTFT_WINDOW_S
from argosy_router.fleet.candidates import CandidatePool, Candidates, RevisionSides
from argosy_router.fleet.health import may_eject
from argosy_router.fleet.replica import Replica, ReplicaLoad, ServiceKeys, hit_value
from argosy_router.policy import POLICIES, Decision, RouteRequest, assumed
from argosy_router.prefixes import PrefixIndex, Prompt, PromptHasher, PromptLengthModel, Side

SLICES: Final = 6
"""The window moves in steps of a sixth, so that a burst leaves it within ten seconds of its age."""
_SLICE_S: Final = TTFT_WINDOW_S / SLICES


class Demand:
    """Times to first token of one service in the last minute, as the operator's autoscaler needs them: counts by
    bucket, in slices of a few seconds. Memory is bounded by the number of slices, whatever the number of requests."""

    def __init__(self) -> None:
        self._slices: dict[int, list[int]] = {}
        """number of the slice -> answers per bucket"""
        self.held_until = 0.0
        """When requests were last held for want of a replica; earlier ones are not counted."""

    def observe_ttft(self, seconds: float, started: float, now: float) -> None:
        """Count an answer that began `seconds` after its request, which arrived at `started`."""
        if started < self.held_until:
            return
        number = int(now / _SLICE_S)
        counts = self._slices.get(number)
        if counts is None:
            self._forget(number)
            counts = self._slices[number] = [0] * (len(TTFT_BOUNDS_S) + 1)
        counts[bisect_left(TTFT_BOUNDS_S, seconds)] += 1

    def ttft_counts(self, now: float) -> tuple[int, ...]:
        """Answers of the window per bucket; empty if there were none."""
        self._forget(int(now / _SLICE_S))
        if not self._slices:
            return ()
        return tuple(sum(column) for column in zip(*self._slices.values(), strict=True))

    def _forget(self, number: int) -> None:
        """Drop the slices that have left the window when `number` is the current one."""
        for past in [past for past in self._slices if past <= number - SLICES]:
            del self._slices[past]


RECENT_S: Final = 60.0
"""Time constant with which the weight of past work decays (half after some 40 s) in a replica's share of new
prefixes."""
_RESCALE: Final = 30.0
"""Weights grow up to e**30 before the sums are scaled down again, far below a float's limit."""


class Choice:
    """The chosen replica, and the figures behind the choice."""

    def __init__(
        self,
        replica: Replica,
        decision: Decision,
        uncached_tokens: int,
        tokens_ahead: int,
        predicted_ttft_s: float,
        hit_value: float = 0.0,
    ) -> None:
        self.replica = replica
        self.decision = decision
        self.uncached_tokens = uncached_tokens
        self.tokens_ahead = tokens_ahead
        """Prompt tokens that the replica computes before this request's first token, including its own."""
        self.predicted_ttft_s = predicted_ttft_s
        self.hit_value = hit_value
        """`hit_value` of the expected hit."""

    @property
    def measured_ttft_s(self) -> float | None:
        """The predicted time to the first token; None if the replica's speed is assumed."""
        return self.predicted_ttft_s if self.replica.load.measured.prefill_tokens_per_s > 0.0 else None


class Service:
    """A named set of replicas that serve one model."""

    def __init__(self, spec: FleetService, keys: ServiceKeys, index_capacity: int) -> None:
        self.spec = spec
        self.model = spec.model
        self.name = spec.qualified_name
        """`namespace/name`"""
        self.keys = keys
        """Keys that its engines may ask of the router."""
        self.index = PrefixIndex(index_capacity)
        self.replicas: dict[str, Replica] = {}
        self.hasher = PromptHasher(spec.engine_name)
        self.lengths = PromptLengthModel()
        self.candidates = CandidatePool(spec, self.replicas, self.index)
        self.demand = Demand()
        self.sides: RevisionSides | None = None
        """Set while the fleet document divides the service's replicas by revision."""
        self.sequence = 0
        self._recent_since = 0.0
        """Time at which work has weight one. Later work weighs exponentially more, so that older work decays."""
        self._takes_model_names: bool | None = None
        """Cached `takes_model_names`; None if it must be computed anew."""
        self._has_foreign_replicas: bool | None = None
        """Likewise."""
        self._canary_share: float | None = None
        """Likewise, of `canary_share`."""
        self._max_model_len: tuple[int | None] | None = None
        """Likewise, of `max_model_len`."""
        self.listed_len: int | None = None
        """`max_model_len` as lists of models had it last (`Fleet.model_lengths`)."""

    # the choice

    def choose(
        self,
        prompt: Prompt,
        now: float,
        rng: random.Random,
        tried: Collection[Replica] = (),
        policy: str = "",
        *,
        is_trial: bool = False,
        is_admitted: bool = False,
        sequences: int = 1,
    ) -> Choice:
        """Choose a replica that was not tried before. Changes only the sequence counter, and in a trial nothing.

        Args:
            sequences: number of sequences that the request generates in parallel.
            is_admitted: the request was admitted before and lost its replica; the in-flight limit does not apply to it.

        Raises:
            Unavailable: no replica is routable.
            TooManyRequests: all of them are at the service's in-flight limit.
        """
        if is_admitted:
            candidates = self.candidates.healthy(now, tried, prompt.name)
        else:
            candidates = self.candidates.below_limit(now, tried, prompt.name, sequences)
        request, length = self.route_request(prompt, candidates)
        if not tried and not is_trial:
            self.sequence += 1
        decision = POLICIES[policy or self.spec.policy].choose(request, candidates.loads, rng)
        replica = candidates.replicas[decision.position]
        if decision.reason == "cached" and not self.is_announced(replica, prompt.hashes, length):
            decision.reason = "predicted"
        if replica.health.is_in_cooldown(now):
            decision.reason = "busy"
        load = replica.load
        uncached = max(1, request.prompt_tokens - decision.predicted_tokens)
        ahead = load.queued_tokens + uncached
        ttft = ahead / load.prefill_tokens_per_s + load.decode_step_s
        value = hit_value(request.hits, decision.position) if request.hits else 0.0
        return Choice(replica, decision, uncached, ahead, ttft, value)

    def route_request(self, prompt: Prompt, candidates: Candidates) -> tuple[RouteRequest, int]:
        """Build the policy's input; return it with the number of chunks of the longest predicted hit."""
        runs, length = self.index.match(prompt.hashes)
        positions = candidates.positions
        # A replica may have several slots: its longest prefix comes last and so wins.
        hits = {positions[slot]: tokens for slot, tokens in runs.items() if slot in positions} if runs else {}
        tokens = self.lengths.tokens(prompt)
        return RouteRequest(tokens, hits, prompt.affinity_hash, self.sequence, prompt.session), length

    def is_announced(self, replica: Replica, hashes: Sequence[int], length: int) -> bool:
        """Whether the replica has announced the predicted prefix, rather than only having been sent it."""
        prefixes = replica.prefixes
        if not replica.is_synced:
            return False
        if not prefixes.has_unconfirmed:
            return True
        while length and not self.index.holds(prefixes.slot, hashes[length - 1]):
            length -= 1
        return length > 0 and not prefixes.is_unconfirmed(hashes[length - 1])

    def invalidate(self) -> None:
        """Drop cached candidates: a replica came, went, or changed its state."""
        self.candidates.invalidate()
        self._takes_model_names = self._has_foreign_replicas = self._canary_share = None
        self._max_model_len = None

    def rename(self, spec: FleetService) -> None:
        """Take over a new version of the service's entry in the fleet document, perhaps with other names, for the same
        engines."""
        self.spec = self.candidates.spec = spec
        self.model = spec.model
        if spec.split is None:
            self.sides = None
        elif self.sides is None or self.sides.split != spec.split:
            self.sides = RevisionSides(spec.split)
        self._canary_share = None

    def side(self, drawn_by: bytes) -> Side:
        """Draw the side that answers a request; empty while the service is not divided."""
        return "" if self.sides is None else self.sides.draw(drawn_by, self.canary_share)

    @property
    def canary_share(self) -> float:
        """The canary's share of the requests, with the replicas that can take some now; 0 without a canary. One that is
        ejected counts only if all of its side are: it has to be probed."""
        share = self._canary_share
        if share is None:
            share, sides = 0.0, self.sides
            if sides is not None:
                routable = [replica for replica in self.replicas.values() if replica.is_routable]
                of_canary = [each for each in routable if sides.side_of(each.revision) == "canary"]
                of_stable = [each for each in routable if sides.side_of(each.revision) == "stable"]
                share = sides.share(_num_admitted(of_stable), _num_admitted(of_canary))
            self._canary_share = share
        return share

    @property
    def takes_model_names(self) -> bool:
        """Whether all replicas accept the model name that the client used, in a header."""
        takes = self._takes_model_names
        if takes is None:
            replicas = self.replicas.values()
            takes = self._takes_model_names = bool(replicas) and all(r.takes_model_names for r in replicas)
        return takes

    @property
    def max_model_len(self) -> int | None:
        """The shortest of the lengths that its replicas have told; None if none has."""
        known = self._max_model_len
        if known is None:
            lengths = [replica.hello.max_model_len for replica in self.replicas.values() if replica.hello]
            known = self._max_model_len = (min(lengths) if lengths else None,)
        return known[0]

    @property
    def has_foreign_replicas(self) -> bool:
        """Whether a replica is an engine of another make, or not known yet."""
        has = self._has_foreign_replicas
        if has is None:
            replicas = self.replicas.values()
            has = self._has_foreign_replicas = any(not replica.is_argosy_engine for replica in replicas)
        return has

    @property
    def announced_name(self) -> str:
        """The model name known to one of our replicas that does not accept the client's; empty for none."""
        for replica in self.replicas.values():
            if replica.is_argosy_engine and not replica.takes_model_names:
                return replica.announced_name
        return ""

    @property
    def schedules_by_priority(self) -> bool:
        """Whether all engines announce priority scheduling; others refuse requests with a priority."""
        hellos = [replica.hello for replica in self.replicas.values()]
        return bool(hellos) and all(hello is not None and hello.schedules_by_priority for hello in hellos)

    # dispatches

    def dispatched(self, choice: Choice, prompt: Prompt, now: float) -> None:
        """Record that the request goes to the chosen replica, so that requests sharing its prefix follow it."""
        replica = choice.replica
        if replica.health.dispatched(now):
            self.invalidate()
        self._add_recent_work(replica.load, choice.uncached_tokens, now)
        if choice.hit_value:
            replica.cache_value.add(choice.hit_value, now)
        prefixes, tokens = replica.prefixes, lambda: self.lengths.chunk_ends(prompt)
        if replica.is_synced:
            prefixes.insert_speculatively(prompt.hashes, tokens, now, expected_s=choice.predicted_ttft_s)
        else:
            prefixes.remember(prompt.hashes, tokens, now)

    def _add_recent_work(self, load: ReplicaLoad, tokens: int, now: float) -> None:
        age = (now - self._recent_since) / RECENT_S
        if age > _RESCALE:
            fading = exp(-age)
            for replica in self.replicas.values():
                replica.load.recent_work *= fading
            self._recent_since, age = now, 0.0
        load.recent_work += exp(age) * tokens / (load.prefill_tokens_per_s * load.data_parallel_size)

    def may_eject(self) -> bool:
        """Whether one more replica may be ejected."""
        return may_eject([replica.health for replica in self.replicas.values() if replica.is_routable])

    def assume_rates(self) -> None:
        """Give replicas without measurements the median rates of those that have them."""
        loads = [replica.load for replica in self.replicas.values()]
        rates = assumed(load.measured for load in loads)
        for load in loads:
            load.assume(rates)


def _num_admitted(side: list[Replica]) -> int:
    return sum(replica.is_available for replica in side) or min(1, len(side))
