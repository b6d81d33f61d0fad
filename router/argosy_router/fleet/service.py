"""One service: its replicas, its prefix index, and the choice among them.

Owns: the call of the policy, and what a dispatch teaches about the replica it went to.
Must not know: HTTP, discovery, telemetry frames.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from math import exp
from typing import Final

from argosy_protocol.fleet import FleetService
from argosy_router.fleet.candidates import CandidatePool, Candidates
from argosy_router.fleet.health import may_eject
from argosy_router.fleet.load import LoadAccount
from argosy_router.fleet.prompt import Prompt, PromptHasher
from argosy_router.fleet.prompt_lengths import PromptLengths
from argosy_router.fleet.replica import Replica
from argosy_router.policy import POLICIES, Decision, RouteRequest
from argosy_router.policy.rates import assumed
from argosy_router.prefixes.index import PrefixIndex

RECENT_S: Final = 60.0
"""Work sent to a replica counts for its share of new prefixes by half after 40 s."""
_RESCALE: Final = 30.0
"""Weights grow to e**30 of what they were before sums are brought down again: far from a float's limits."""


class Choice:
    """A replica, and why."""

    __slots__ = ("decision", "predicted_ttft_s", "replica", "tokens_ahead", "uncached_tokens")

    def __init__(
        self,
        replica: Replica,
        decision: Decision,
        uncached_tokens: int,
        tokens_ahead: int,
        predicted_ttft_s: float,
    ) -> None:
        self.replica = replica
        self.decision = decision
        self.uncached_tokens = uncached_tokens
        self.tokens_ahead = tokens_ahead
        """Prompt tokens the replica computes until this request's first token, its own included."""
        self.predicted_ttft_s = predicted_ttft_s


class Service:
    """A named set of replicas that serve one model."""

    def __init__(self, spec: FleetService, key: str, index_capacity: int) -> None:
        self.spec = spec
        self.model = spec.model
        self.name = spec.key
        """`namespace/name`"""
        self.key = key
        """Bearer key of its engines; empty for none."""
        self.index = PrefixIndex(index_capacity)
        self.replicas: dict[str, Replica] = {}
        self.hasher = PromptHasher(spec.engine_name)
        self.lengths = PromptLengths()
        self.candidates = CandidatePool(spec, self.replicas, self.index)
        self.sequence = 0
        self._recent_since = 0.0
        """When work sent weighed one; later work weighs more, so that older work fades."""
        self._takes_model_names: bool | None = None
        """None: to be asked anew."""

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
        """Picks a replica that was not tried before. Changes nothing but the turn counter, and in a trial not even it.

        Args:
            sequences: that the request generates side by side.
            is_admitted: the request is under way and lost its replica; the in-flight limit does not stop it.

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
        return Choice(replica, decision, uncached, ahead, ttft)

    def route_request(self, prompt: Prompt, candidates: Candidates) -> tuple[RouteRequest, int]:
        """What the policy is asked, and the number of chunks of the longest predicted hit."""
        runs, length = self.index.match(prompt.hashes)
        positions = candidates.positions
        # Of several slots of one replica the longest run counts: it comes last.
        hits = {positions[slot]: tokens for slot, tokens in runs.items() if slot in positions} if runs else {}
        tokens = self.lengths.tokens(prompt)
        return RouteRequest(tokens, hits, prompt.key, self.sequence, prompt.session), length

    def is_announced(self, replica: Replica, hashes: Sequence[int], length: int) -> bool:
        """Whether the replica itself said that it holds the prefix."""
        residency = replica.residency
        if not replica.is_synced:
            return False
        if not residency.has_guesses:
            return True
        while length and not self.index.holds(residency.slot, hashes[length - 1]):
            length -= 1
        return length > 0 and not residency.is_guess(hashes[length - 1])

    def invalidate(self) -> None:
        """Some replica came, went, or changed its state: who is a candidate must be asked anew."""
        self.candidates.invalidate()
        self._takes_model_names = None

    def rename(self, spec: FleetService) -> None:
        """Another version of its entry in the document, perhaps with other names, but the same engines."""
        self.spec = self.candidates.spec = spec
        self.model = spec.model

    @property
    def takes_model_names(self) -> bool:
        """Whether all of its replicas can be told what the client calls the model."""
        takes = self._takes_model_names
        if takes is None:
            replicas = self.replicas.values()
            takes = self._takes_model_names = bool(replicas) and all(r.takes_model_names for r in replicas)
        return takes

    @property
    def announced_name(self) -> str:
        """A name of the model known to a replica of ours that can not be told; empty for none."""
        for replica in self.replicas.values():
            if replica.is_ours and not replica.takes_model_names:
                return replica.announced_name
        return ""

    @property
    def schedules_by_priority(self) -> bool:
        """Whether its engines say that they do; those that do not refuse requests with a priority."""
        hellos = [replica.hello for replica in self.replicas.values()]
        return bool(hellos) and all(hello is not None and hello.schedules_by_priority for hello in hellos)

    # what happened

    def dispatched(self, choice: Choice, prompt: Prompt, now: float) -> None:
        """Records that the request goes to the chosen replica: followers of its prefix should too."""
        replica = choice.replica
        if replica.health.dispatched(now):
            self.invalidate()
        self._count_work(replica.load, choice.uncached_tokens, now)
        residency, tokens = replica.residency, lambda: self.lengths.chunk_ends(prompt)
        if replica.is_synced:
            residency.guess(prompt.hashes, tokens, now, expected_s=choice.predicted_ttft_s)
        else:
            residency.remember(prompt.hashes, tokens, now)

    def _count_work(self, load: LoadAccount, tokens: int, now: float) -> None:
        age = (now - self._recent_since) / RECENT_S
        if age > _RESCALE:
            fading = exp(-age)
            for replica in self.replicas.values():
                replica.load.recent_work *= fading
            self._recent_since, age = now, 0.0
        load.recent_work += exp(age) * tokens / load.prefill_tokens_per_s

    def may_eject(self) -> bool:
        """Whether one more replica may be ejected."""
        return may_eject([replica.health for replica in self.replicas.values() if replica.is_routable])

    def assume_rates(self) -> None:
        """Replicas that have not measured themselves are taken for the median of those that have."""
        loads = [replica.load for replica in self.replicas.values()]
        rates = assumed(load.measured for load in loads)
        for load in loads:
            load.assume(rates)
