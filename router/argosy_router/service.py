"""One service: its replicas, its prefix index, and the choice among them.

Owns: which replicas are candidates, and the call of the policy.
Must not know: HTTP, discovery, telemetry frames.
Invariant: a request is refused only when no replica could take it; ejection and suspicion give way before that.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from typing import NamedTuple

from argosy_engine.protocol.chunks import chain_seed, chunk_hashes
from argosy_engine.protocol.errors import TooManyRequests, Unavailable
from argosy_engine.protocol.fleet import FleetService
from argosy_engine.protocol.openai import GenerationRequest
from argosy_engine.protocol.prompt_view import Segment, SegmentKind
from argosy_router.health import may_eject
from argosy_router.index import PrefixIndex
from argosy_router.policy import POLICIES, Decision, RouteRequest
from argosy_router.replica import Replica

PRIOR_BYTES_PER_TOKEN = 4.0
"""English prose with a large vocabulary; learnt from the first answers' usage."""
_LEARNING_RATE = 0.05
_KEY_CHUNKS = 4
"""The rendezvous key is the chain up to this chunk: role, then the first 768 bytes of the first text. Fewer would send
every prompt with the same role to one replica; more would part prompts that share a system prompt."""


class Prompt(NamedTuple):
    """What routing knows about a request's prompt."""

    hashes: list[int]
    text_bytes: int
    token_ids: int


class Choice(NamedTuple):
    """A replica, and why."""

    replica: Replica
    decision: Decision
    uncached_tokens: int


class Service:
    """A named set of replicas that serve one model."""

    def __init__(self, spec: FleetService, key: str, index_capacity: int) -> None:
        self.spec = spec
        self.key = key
        """Bearer key of its engines; empty for none."""
        self.index = PrefixIndex(index_capacity)
        self.replicas: dict[str, Replica] = {}
        self.bytes_per_token = PRIOR_BYTES_PER_TOKEN
        self.sequence = 0

    def prompt(self, request: GenerationRequest, prompts: Sequence[Sequence[Segment]]) -> Prompt:
        """Hashes and size of a request's prompts. A batch is routed by its longest prompt."""
        seed = chain_seed(self.spec.model, cache_salt=request.cache_salt or "")
        text = ids = 0
        hashes: list[int] = []
        for segments in prompts:
            chain = chunk_hashes(segments, seed)
            if len(chain) > len(hashes):
                hashes = chain
            for kind, data in segments:
                if kind == SegmentKind.TOKENS:
                    ids += len(data) >> 2
                else:
                    text += len(data)
        return Prompt(hashes, text, ids)

    def choose(
        self,
        prompt: Prompt,
        now: float,
        rng: random.Random,
        tried: Collection[Replica] = (),
        policy: str = "",
    ) -> Choice:
        """Picks a replica that was not tried before. Changes nothing but the turn counter.

        Raises:
            Unavailable: no replica is routable.
            TooManyRequests: all of them are at the service's in-flight limit.
        """
        candidates = self.candidates(now, tried)
        limit = self.spec.limits.max_inflight_per_replica
        if limit:
            candidates = [replica for replica in candidates if replica.load.inflight < limit]
            if not candidates:
                raise TooManyRequests(
                    f"model {self.spec.model!r} is at its limit of requests", retry_after_s=1.0
                )
        if not tried:
            self.sequence += 1
        tokens = self.estimate_tokens(prompt)
        runs, length = self.index.match(prompt.hashes)
        key = prompt.hashes[min(_KEY_CHUNKS, len(prompt.hashes)) - 1] if prompt.hashes else 0
        request = RouteRequest(tokens, runs, key, self.sequence)
        decision = POLICIES[policy or self.spec.policy](request, candidates, rng)
        replica = candidates[decision.position]
        if decision.reason == "cached" and not self._is_announced(replica, prompt.hashes, length):
            decision = decision._replace(reason="predicted")
        return Choice(replica, decision, max(1, tokens - decision.predicted_tokens))

    def _is_announced(self, replica: Replica, hashes: list[int], length: int) -> bool:
        """Whether the replica itself said that it holds the prefix."""
        residency = replica.residency
        while length and not self.index.holds(residency.slot, hashes[length - 1]):
            length -= 1
        return replica.is_synced and length > 0 and not residency.is_guess(hashes[length - 1])

    def candidates(self, now: float, tried: Collection[Replica] = ()) -> list[Replica]:
        """Replicas a request may be sent to now, best health class only.

        Raises:
            Unavailable: there is none.
        """
        routable = [
            replica for replica in self.replicas.values() if replica.is_routable and replica not in tried
        ]
        if not routable:
            raise Unavailable(f"no replica of model {self.spec.model!r} is ready", retry_after_s=1.0)
        admitted = [replica for replica in routable if replica.health.admits(now)]
        healthy = [replica for replica in admitted if not replica.health.is_suspect]
        return healthy or admitted or routable

    def dispatched(self, choice: Choice, prompt: Prompt, now: float) -> None:
        """Records that the request goes to the chosen replica: followers of its prefix should too."""
        replica = choice.replica
        replica.health.dispatched(now)
        hashes = prompt.hashes
        tokens_per_chunk = self.estimate_tokens(prompt) / max(1, len(hashes))
        replica.residency.guess(hashes, tokens_per_chunk, now, expires=replica.is_synced)

    def may_eject(self) -> bool:
        return may_eject([replica.health for replica in self.replicas.values()])

    def estimate_tokens(self, prompt: Prompt) -> int:
        return prompt.token_ids + int(prompt.text_bytes / self.bytes_per_token) + 1

    def learn(self, prompt: Prompt, prompt_tokens: int) -> None:
        """An answer told the prompt's true length in tokens."""
        if prompt.text_bytes >= 256 and not prompt.token_ids and prompt_tokens > 0:
            ratio = min(16.0, max(0.25, prompt.text_bytes / prompt_tokens))
            self.bytes_per_token += _LEARNING_RATE * (ratio - self.bytes_per_token)
