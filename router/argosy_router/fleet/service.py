"""One service: its replicas, its prefix index, and the choice among them.

Owns: which replicas are candidates, and the call of the policy.
Must not know: HTTP, discovery, telemetry frames.
Invariant: a request is refused only when no replica could take it; ejection and suspicion give way before that.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from math import exp, inf
from typing import Final

from argosy_protocol.chunks import chain_seed
from argosy_protocol.errors import TooManyRequests, Unavailable
from argosy_protocol.fleet import FleetService
from argosy_protocol.openai import GenerationRequest
from argosy_protocol.prompt_view import Segment, SegmentKind
from argosy_router.fleet.health import may_eject, panics
from argosy_router.fleet.load import LoadAccount
from argosy_router.fleet.replica import Replica
from argosy_router.native.hashing import chunk_hashes, chunk_tokens
from argosy_router.policy import POLICIES, Decision, RouteRequest
from argosy_router.policy.base import Candidate
from argosy_router.policy.rates import assumed
from argosy_router.prefixes.index import PrefixIndex

PRIOR_BYTES_PER_TOKEN: Final = 4.0
"""English prose with a large vocabulary; learnt from the first answers' usage."""
_LEARNING_RATE: Final = 0.05
SEATS_PER_SEQ: Final = 1.5
"""A replica counts as full with this many sequences for each that its batch holds: half a batch waits inside the
engine, so that it never runs dry; what waits here instead can still be ordered, and sent where room comes first."""
NO_LIMIT: Final = 1 << 30
"""Room of a service whose replicas do not tell the size of their batch."""
RECENT_S: Final = 60.0
"""Work sent to a replica counts for its share of new prefixes by half after 40 s."""
_RESCALE: Final = 30.0
"""Weights grow to e**30 of what they were before sums are brought down again: far from a float's limits."""
_KEY_CHUNKS: Final = 4
"""The rendezvous key is the chain up to this chunk: role, then the first 768 bytes of the first text. Fewer would send
every prompt with the same role to one replica; more would part prompts that share a system prompt."""


class Prompt:
    """What routing knows about a request's prompt."""

    __slots__ = (
        "chunk_tokens",
        "has_media",
        "hashes",
        "key",
        "name",
        "segment_bytes",
        "session",
        "text_bytes",
        "token_ids",
    )

    def __init__(
        self,
        hashes: Sequence[int],
        key: int,
        text_bytes: int,
        token_ids: int,
        session: int = 0,
        segment_bytes: Sequence[int] = (),
        chunk_tokens: Sequence[int] = (),
        name: str = "",
        *,
        has_media: bool = False,
    ) -> None:
        self.hashes = hashes
        self.key = key
        """Names the prompt's beginning; zero if it has none."""
        self.text_bytes = text_bytes
        self.token_ids = token_ids
        self.session = session
        """Names the session the client declared; zero for none."""
        self.segment_bytes = segment_bytes
        """Sizes of the segments `hashes` were made of; what was in them is kept in the request's body alone."""
        self.chunk_tokens = chunk_tokens
        """Prompt tokens up to each chunk, where they are known rather than estimated from `segment_bytes`."""
        self.name = name
        """Adapter or alias that not all replicas may have: one that has it must answer. Empty for the model itself."""
        self.has_media = has_media
        """Whether parts of it are no text: their tokens are not in proportion to any bytes."""


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


class Candidates:
    """Replicas a request may be sent to, in the order of their names, as policies want them."""

    __slots__ = ("loads", "positions", "replicas", "slot_changes")

    def __init__(self, replicas: list[Replica], slot_changes: int) -> None:
        self.replicas = replicas
        self.loads: list[Candidate] = [replica.load for replica in replicas]
        self.positions = {
            slot: position for position, replica in enumerate(replicas) for slot in replica.residency.slots
        }
        """slot -> position"""
        self.slot_changes = slot_changes
        """Of the index, when `positions` was made."""


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
        self.partial_aliases: frozenset[str] = frozenset()
        """Those of the aliases that some replica does not have."""
        self.bytes_per_token = PRIOR_BYTES_PER_TOKEN
        self.sequence = 0
        self._recent_since = 0.0
        """When work sent weighed one; later work weighs more, so that older work fades."""
        self._candidates: dict[str, Candidates] = {}
        """By name: the empty one, and those of adapters and aliases that not all replicas have."""
        self._candidates_until = 0.0
        """When the first of those that are left out may be a candidate again."""
        self._unsalted_seed = chain_seed(spec.engine_name)
        self._takes_model_names: bool | None = None
        """None: to be asked anew."""

    def prompt(
        self,
        request: GenerationRequest,
        prompts: Sequence[Sequence[Segment]],
        session: int = 0,
        adapter: str = "",
        alias: str = "",
    ) -> Prompt:
        """Hashes and size of a request's prompts. A batch is routed by its longest prompt.

        Args:
            adapter: that must answer; its cache is its own.
            alias: that a replica must have to answer.
        """
        seed = self._unsalted_seed
        if adapter or request.cache_salt:
            seed = chain_seed(self.spec.engine_name, adapter, cache_salt=request.cache_salt or "")
        text = ids = 0
        has_media = False
        hashes: Sequence[int] = ()
        longest: Sequence[Segment] = ()
        for segments in prompts:
            chain = chunk_hashes(segments, seed)
            if len(chain) > len(hashes):
                hashes, longest = chain, segments
            for kind, data in segments:
                if kind == SegmentKind.TOKENS:
                    ids += len(data) >> 2
                elif kind == SegmentKind.DIGEST:
                    has_media = True
                else:
                    text += len(data)
        key = hashes[min(_KEY_CHUNKS, len(hashes)) - 1] if hashes else 0
        return Prompt(
            hashes,
            key,
            text,
            ids,
            session,
            [len(data) for _, data in longest],
            name=adapter or alias,
            has_media=has_media,
        )

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
            candidates = self._healthy(now, tried, prompt.name)
        else:
            candidates = self.candidates(now, tried, prompt.name, sequences)
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
        tokens = self.estimate_tokens(prompt)
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

    def candidates(
        self, now: float, tried: Collection[Replica] = (), name: str = "", sequences: int = 1
    ) -> Candidates:
        """Replicas a request may be sent to now, best health class only, and below the in-flight limit; of these those
        with room for all of its sequences, if there are any.

        Raises:
            Unavailable: no replica is routable.
            TooManyRequests: all of them are at the service's in-flight limit.
        """
        candidates = self._healthy(now, tried, name)
        limit = self.spec.limits.max_inflight_per_replica
        if not limit:
            return candidates
        most = limit - min(sequences, limit)  # that a replica may have already
        if any(replica.load.inflight_sequences > most for replica in candidates.replicas):
            below = [replica for replica in candidates.replicas if replica.load.inflight_sequences <= most]
            below = below or [r for r in candidates.replicas if r.load.inflight_sequences < limit]
            if not below:
                raise TooManyRequests(
                    f"model {self.spec.model!r} is at its limit of requests", retry_after_s=1.0
                )
            candidates = self._with_slots(below)
        return candidates

    def room(self, now: float, name: str = "") -> int:
        """How many more sequences the replicas that can answer as `name` take together before they are full; not above
        zero when they are.

        Raises:
            Unavailable: no such replica is routable.
        """
        limit = self.spec.limits.max_inflight_per_replica
        candidates = self._healthy(now, (), name)
        room = 0
        for replica in candidates.replicas:
            load = replica.load
            if limit:
                room += max(0, limit - load.inflight_sequences)
            elif replica.hello is None:
                return NO_LIMIT
            else:
                seats = int(SEATS_PER_SEQ * load.max_num_seqs)
                # One with a call larger than itself takes from its peers what would wait in an engine, no more: their
                # batches can still be filled.
                room += max(seats - load.requests, load.max_num_seqs - seats)
        return room

    def takes(self, now: float, name: str, sequences: int) -> bool:
        """Whether a request with so many sequences may be sent now: there is room for all of them. One that is larger
        than a replica needs no more than an idle one has.

        Raises:
            Unavailable: no replica that can answer as `name` is routable.
        """
        limit = self.spec.limits.max_inflight_per_replica
        if limit:
            most = limit - min(sequences, limit)
            replicas = self._healthy(now, (), name).replicas
            return any(replica.load.inflight_sequences <= most for replica in replicas)
        room = self.room(now, name)
        if room >= sequences or room <= 0:
            return room > 0
        seats = [int(SEATS_PER_SEQ * r.load.max_num_seqs) for r in self._healthy(now, (), name).replicas]
        return room >= max(seats)

    def _healthy(self, now: float, tried: Collection[Replica] = (), name: str = "") -> Candidates:
        if tried:
            return self._with_slots(self._admitted(now, tried, name))
        if now >= self._candidates_until:
            self._candidates.clear()
        candidates = self._candidates.get(name)
        if candidates is None or candidates.slot_changes != self.index.slot_changes:
            candidates = self._with_slots(self._admitted(now, (), name))
            if not self._candidates:
                changes = [replica.health.next_change(now) for replica in self.replicas.values()]
                self._candidates_until = min(changes, default=inf)
            self._candidates[name] = candidates
        return candidates

    def invalidate(self) -> None:
        """Some replica came, went, or changed its state: who is a candidate must be asked anew."""
        self._candidates.clear()
        self._takes_model_names = None

    def rename(self, spec: FleetService) -> None:
        """Another version of its entry in the document, perhaps with other names, but the same engines."""
        self.spec = spec
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

    def _admitted(self, now: float, tried: Collection[Replica], name: str) -> list[Replica]:
        usable = [
            replica
            for replica in self.replicas.values()
            if replica.is_routable and replica not in tried and replica.serves(name)
        ]
        if not usable:
            model = self.spec.model
            asked = name if name in self.partial_aliases else f"{model}:{name}" if name else model
            raise Unavailable(f"no replica of model {asked!r} is ready", retry_after_s=1.0)
        admitted = usable
        if not self.is_in_panic:
            admitted = [replica for replica in usable if replica.health.admits(now)]
        healthy = [replica for replica in admitted if not replica.health.is_suspect]
        fresh = [replica for replica in healthy if not replica.health.is_in_cooldown(now)]
        return sorted(fresh or healthy or admitted or usable, key=lambda replica: replica.name)

    def _with_slots(self, replicas: list[Replica]) -> Candidates:
        return Candidates(replicas, self.index.slot_changes)

    def can_answer(self, now: float) -> bool:
        """Whether some replica is routable and not ejected."""
        return any(replica.is_routable and replica.health.admits(now) for replica in self.replicas.values())

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
        residency, tokens = replica.residency, lambda: self.estimate_chunks(prompt)
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

    @property
    def is_in_panic(self) -> bool:
        """Whether ejections are ignored."""
        return panics([replica.health for replica in self.replicas.values() if replica.is_routable])

    def assume_rates(self) -> None:
        """Replicas that have not measured themselves are taken for the median of those that have."""
        loads = [replica.load for replica in self.replicas.values()]
        rates = assumed(load.measured for load in loads)
        for load in loads:
            load.assume(rates)

    # prompt lengths

    def estimate_tokens(self, prompt: Prompt) -> int:
        return prompt.token_ids + int(prompt.text_bytes / self.bytes_per_token) + 1

    def estimate_chunks(self, prompt: Prompt) -> Sequence[int]:
        """Prompt tokens up to each chunk."""
        if prompt.chunk_tokens:
            return prompt.chunk_tokens
        per_token = 4.0 if prompt.token_ids else self.bytes_per_token
        return chunk_tokens(prompt.segment_bytes, per_token)

    def learn(self, prompt: Prompt, prompt_tokens: int) -> None:
        """An answer told the prompt's true length in tokens."""
        is_text = not prompt.token_ids and not prompt.has_media
        if prompt.text_bytes >= 256 and is_text and prompt_tokens > 0:
            ratio = min(16.0, max(0.25, prompt.text_bytes / prompt_tokens))
            self.bytes_per_token += _LEARNING_RATE * (ratio - self.bytes_per_token)
