"""A request's prompt as routing sees it, without its content (chunk hashes, sizes, an estimate of its tokens); and the
prefix index of one service: chunk hash -> replicas that hold the chunk, and prompt tokens up to it.

Owns: which prompt of a batch counts, the seed that separates services, adapters and cache salts, the ratio of bytes to
tokens, learnt from the usage that answers report; the slots that stand for replicas' caches, the cap on the number of
entries, speculative inserts, the division of memory among the indexes of a router's services.
Must not know: replicas' addresses, telemetry frames, HTTP, policies, clocks.
Invariants: entries never exceed `capacity`, and the entry announced or requested longest ago is evicted first. A slot
is reused only when no entry mentions it, the lowest first; the highest slots are given up while they are free, so that
entries with room for all slots shrink again with the fleet. A wrong entry costs speed, never correctness.

A chunk hash covers everything before it, so no tree is needed: `match` walks the hashes of a prompt and drops a replica
at its first missing chunk. Entries are sharded, and the bits of a replica that left are scrubbed shard by shard, so
that no operation blocks the event loop for long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from typing import Final, Literal, NamedTuple, Protocol

from argosy_protocol.chunk_hash import Segment, SegmentKind, chain_seed
from argosy_router.native.build import ChunkTable, chunk_hashes, chunk_tokens

SHARDS = 256
DEFAULT_CAPACITY = 1_000_000
"""In chunks. The router then sizes its indexes by the memory it has (`shares`)."""
SPECULATIVE_SHARE = 4
"""At most 1/4 as many speculative inserts as the capacity,"""
MAX_SPECULATIVE = 1 << 19
"""and no more than prompts of 33 million tokens that their replicas have not computed yet."""
_SPECULATIVE_BYTES = 110
"""Bytes of a chunk in a list and in a set, with the set at its emptiest."""


class PrefixIndex:
    """The index of one service."""

    def __init__(self, capacity: int = DEFAULT_CAPACITY) -> None:
        self._table = ChunkTable(SHARDS)
        self._free: list[int] = []
        """Heap of free slots: the lowest is taken first, so that the highest can be given up."""
        self._slots = 0
        self._wide = 0
        """Number of shards whose entries still have room for slots that were given up."""
        self._retired: dict[int, int] = {}
        """slot -> shards still to scrub"""
        self._scrubbed: list[int] = []
        """Slots being scrubbed from the current shard, fixed when it was begun; empty between shards."""
        self.slot_changes = 0
        """Incremented whenever a slot is acquired or retired."""
        self.num_speculative = 0
        """Chunks inserted speculatively, which replicas are expected to announce; counted by `ReplicaPrefixes`."""
        self.resize(capacity)

    def resize(self, capacity: int) -> None:
        """Change the capacity; surplus entries are evicted as new ones are inserted, or by `trim`."""
        self.capacity = max(SHARDS, capacity)
        self._table.resize(self.capacity // SHARDS)
        self._note_capacity()

    def _note_capacity(self) -> None:
        self.max_speculative = min(self.capacity // SPECULATIVE_SHARE, MAX_SPECULATIVE)

    def fit(self, limit: int) -> None:
        """Change the capacity to the largest with which the index never takes more than `limit` bytes. Call it again
        now and then: with more holders of many chunks there is room for fewer chunks."""
        shard_limit, beside = self._within(limit)
        self.capacity = SHARDS * self._table.shard_capacity(shard_limit, beside)
        self._table.resize(self.capacity // SHARDS, shard_limit)
        self._note_capacity()

    def capacity_within(self, limit: int) -> int:
        """The largest capacity whose entries and speculative inserts never take more than `limit` bytes with the
        current number of slots, and the current number of chunks that many slots hold."""
        return SHARDS * self._table.shard_capacity(*self._within(limit))

    def _within(self, limit: int) -> tuple[int, int]:
        """Return what each shard may take of `limit` bytes, and for each entry beside that."""
        each = _SPECULATIVE_BYTES // SPECULATIVE_SHARE
        if SHARDS * self._table.shard_capacity(limit // SHARDS, each) < SPECULATIVE_SHARE * MAX_SPECULATIVE:
            return limit // SHARDS, each
        return (limit - MAX_SPECULATIVE * _SPECULATIVE_BYTES) // SHARDS, 0

    @property
    def bytes(self) -> int:
        """Memory used now."""
        return self._table.bytes + self.num_speculative * _SPECULATIVE_BYTES

    @property
    def is_overfull(self) -> bool:
        """Whether some shard exceeds the capacity and can be trimmed."""
        return self._table.is_overfull

    def trim(self, number: int) -> None:
        """Shrink shard `number` to a capacity that was reduced."""
        self._table.trim(number)

    def __len__(self) -> int:
        return len(self._table)

    # slots

    def acquire_slot(self) -> int:
        """Take a slot that no entry mentions."""
        if self._free:
            slot = heappop(self._free)
        else:
            slot = self._slots
            self._slots += 1
        self._table.set_live(slot, True)
        self.slot_changes += 1
        return slot

    def retire_slot(self, slot: int) -> None:
        """Invalidate everything in a slot. This is immediate; `scrub` erases its bits later."""
        self._table.set_live(slot, False)
        self.slot_changes += 1
        self._retired[slot] = SHARDS

    def scrub(self) -> bool:
        """Do one step of cleaning: erase retired slots from (part of) a shard, or narrow a shard. Call until False."""
        if not self._retired:
            if self._wide:
                self._wide -= 1
                self._table.narrow_shard(self._wide)
            return self._wide > 0
        number = max(self._retired.values()) - 1
        slots = self._scrubbed or [slot for slot, left in self._retired.items() if left > number]
        if self._table.scrub(number, slots):
            for slot in slots:
                self._left_shard(slot, number)
            slots = []
        self._scrubbed = slots
        return bool(self._retired) or self._wide > 0

    def _left_shard(self, slot: int, number: int) -> None:
        if number:
            self._retired[slot] = number
        else:
            del self._retired[slot]
            heappush(self._free, slot)
            self._give_up_slots()

    def _give_up_slots(self) -> None:
        """Give up the highest slots while they are free, since entries of many holders (here all, in C the bitmaps)
        have room for all slots."""
        free, before = set(self._free), self._slots
        while self._slots and self._slots - 1 in free:
            self._slots -= 1
        if self._slots < before:
            self._free = sorted(slot for slot in free if slot < self._slots)
            if self._table.narrow(self._slots):
                self._wide = SHARDS

    # entries

    def add(self, slot: int, hashes: Iterable[int], tokens: Iterable[int]) -> None:
        """Note that `slot` holds these chunks; `tokens[i]` are the prompt tokens up to and including chunk i."""
        self._table.add(slot, hashes, tokens)

    def insert_speculatively(
        self, slot: int, hashes: Sequence[int], tokens: Callable[[], Sequence[int]]
    ) -> list[int]:
        """Insert the chunks of a prompt that is sent to `slot` speculatively, and mark them as just used.

        `tokens` is called for estimates only if some chunk is new. Returns the chunks that the slot did not have.
        """
        return self._table.insert_speculatively(slot, hashes, tokens)

    def remove(self, slot: int, hashes: Iterable[int]) -> None:
        """Note that `slot` no longer holds these chunks."""
        self._table.remove(slot, hashes)

    def holds(self, slot: int, chunk: int) -> bool:
        return self._table.holds(slot, chunk)

    def match(self, hashes: Sequence[int]) -> tuple[dict[int, int], int]:
        """Find the longest held prefix per slot.

        Returns `{slot: prompt tokens of its prefix}`, shortest first (slots without a prefix are absent), and the
        number of chunks of the longest.
        """
        return self._table.match(hashes)


FULL = 0.85
"""An index filled to this degree counts as full: it could use more memory than it has."""
SPARE = 2.0
"""An index that is not full gets this many times what it uses, so that it can grow until the next division."""


class Index(Protocol):
    capacity: int

    @property
    def bytes(self) -> int: ...
    def __len__(self) -> int: ...


def shares(total: int, indexes: Sequence[Index]) -> list[int]:
    """Divide memory among the indexes of a router's services: the smallest demands are granted first, and the rest is
    divided evenly (max-min fair). Full indexes get at least an equal share, and what others do not need.

    Returns:
        Bytes for each; together never more than `total`.
    """
    wishes = [
        total if len(index) >= FULL * index.capacity else min(total, int(SPARE * index.bytes))
        for index in indexes
    ]
    granted = [0] * len(wishes)
    for done, position in enumerate(sorted(range(len(wishes)), key=wishes.__getitem__)):
        granted[position] = min(wishes[position], total // (len(wishes) - done))
        total -= granted[position]
    return [share + total // len(wishes) for share in granted]


SPECULATIVE_TTL_S = 10.0
"""Minimum lifetime of a speculative insert: twice a bad time to first token, because a prompt's chunks are announced
once they are computed. With a longer one, requests would follow a prefix to a replica that never got it; with a shorter
one, a burst of requests with one prefix would scatter."""
TTFT_FACTOR = 2.0
"""For a prompt behind a long queue, the lifetime as a multiple of the expected time to first token."""
MAX_SPECULATIVE_TTL_S = 300.0
"""Maximum lifetime: a request that waits longer has been aborted by its client or its replica."""
HISTORY_S = 300.0
"""A conversation's next turn comes within minutes, and a busy cache is replaced in about that time."""


_GOLDEN = 0.6180339887498949
"""Multiples of it are spread evenly over the fractions, however many there are."""


class ReplicaPrefixes:
    """The prefixes that one replica holds or is expected to hold: its slots, speculative inserts awaiting confirmation,
    and the history of prompts it was sent.

    Invariants: for a replica with telemetry, a speculative insert is confirmed or erased after `MAX_SPECULATIVE_TTL_S`
    at the latest, and those of all replicas together stay within the index's `max_speculative`. For a replica without
    telemetry, the prompts it was sent count as cached for one to two periods of `HISTORY_S` after their last use.

    The history has one slot per period, so that forgetting a period only retires its slot, whatever it holds. Replicas
    begin their periods at different times, because what follows a change of slots costs more than the change.
    """

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self.slot = index.acquire_slot()
        self._phase_s = self.slot * _GOLDEN % 1.0 * HISTORY_S
        """How much earlier than those of the first replica its periods begin."""
        self._unconfirmed: set[int] = set()
        self._speculative_inserts: list[tuple[float, list[int]]] = []
        """Heap of (expiry, chunks)."""
        self._history: dict[int, int] = {}
        """period -> slot"""

    @property
    def slots(self) -> tuple[int, ...]:
        """All slots of this replica: the announced one, then its history."""
        return (self.slot, *self._history.values())

    def stored(self, hashes: Sequence[int], tokens: Sequence[int]) -> None:
        self._index.add(self.slot, hashes, tokens)
        if self._unconfirmed:
            self._unconfirmed.difference_update(hashes)

    def removed(self, hashes: Sequence[int]) -> None:
        self._index.remove(self.slot, hashes)
        if self._unconfirmed:
            self._unconfirmed.difference_update(hashes)

    def clear(self) -> None:
        """Forget everything. Taking a fresh slot makes this immediate; the index scrubs the old ones later."""
        self.close()
        self.slot = self._index.acquire_slot()

    def close(self) -> None:
        """Retire all slots: the replica has left."""
        for slot in self.slots:
            self._index.retire_slot(slot)
        self._history.clear()
        self._unconfirmed.clear()
        self._index.num_speculative -= sum(len(hashes) for _, hashes in self._speculative_inserts)
        self._speculative_inserts.clear()

    def insert_speculatively(
        self,
        hashes: Sequence[int],
        tokens: Callable[[], Sequence[int]],
        now: float,
        *,
        expected_s: float = 0.0,
    ) -> None:
        """Insert a prompt speculatively: the replica was sent it and will announce its chunks in about `expected_s`."""
        added = self._index.insert_speculatively(self.slot, hashes, tokens)
        if added:
            self._unconfirmed.update(added)
            heappush(self._speculative_inserts, (now + _lifetime_s(expected_s), added))
            index = self._index
            index.num_speculative += len(added)
            while index.num_speculative > index.max_speculative and self._speculative_inserts:
                self._erase_first_insert()

    def remember(self, hashes: Sequence[int], tokens: Callable[[], Sequence[int]], now: float) -> None:
        """Record a prompt in the history: the replica was sent it and has no telemetry to announce it."""
        period = self._period(now)
        slot = self._history.get(period)
        if slot is None:
            slot = self._history[period] = self._index.acquire_slot()
        self._index.insert_speculatively(slot, hashes, tokens)

    def expire(self, now: float) -> None:
        """Erase speculative inserts that were not confirmed in time, and past periods of the history."""
        inserts = self._speculative_inserts
        while inserts and inserts[0][0] <= now:
            self._erase_first_insert()
        period = self._period(now)
        for past in [past for past in self._history if past < period - 1]:
            self._index.retire_slot(self._history.pop(past))

    def _period(self, now: float) -> int:
        return int((now + self._phase_s) / HISTORY_S)

    def _erase_first_insert(self) -> None:
        """Erase the unconfirmed chunks of the speculative insert that expires first."""
        _, hashes = heappop(self._speculative_inserts)
        self._index.num_speculative -= len(hashes)
        late = self._unconfirmed.intersection(hashes)
        if late:
            self._unconfirmed -= late
            self._index.remove(self.slot, late)

    @property
    def num_unconfirmed(self) -> int:
        """Number of chunks that were inserted speculatively and are not confirmed."""
        return len(self._unconfirmed)

    @property
    def has_unconfirmed(self) -> bool:
        """Whether some chunk was inserted speculatively and is not confirmed."""
        return bool(self._unconfirmed)

    def is_unconfirmed(self, chunk: int) -> bool:
        """Whether `chunk` was inserted speculatively and is not confirmed."""
        return chunk in self._unconfirmed


def _lifetime_s(expected_s: float) -> float:
    """Return how long an insert waits for its confirmation, which is expected in `expected_s`."""
    return min(MAX_SPECULATIVE_TTL_S, max(SPECULATIVE_TTL_S, TTFT_FACTOR * expected_s))


_AFFINITY_CHUNKS: Final = 4
"""The affinity hash is the hash chain up to this chunk: the role, then the first 768 bytes of the first text. Fewer
would send every prompt with the same role to one replica; more would separate prompts that share a system prompt."""


Side = Literal["", "stable", "canary"]
"""Of a service that is divided by revision during a canary rollout; empty for any."""


class ServedName(NamedTuple):
    """What a replica must serve to answer a request; without arguments the model itself, at any replica."""

    name: str = ""
    """An adapter or alias, if not all replicas serve it."""
    side: Side = ""
    endpoints: frozenset[str] | None = None
    """The only ones (HOST:PORT) that a gateway allows; None for all."""

    @property
    def num_bytes(self) -> int:
        """What it takes in memory, about."""
        return len(self.name) + sum(map(len, self.endpoints or ()))


MODEL_ITSELF: Final = ServedName()


class Prompt:
    """A request's prompt as routing sees it, without its content."""

    def __init__(
        self,
        hashes: Sequence[int],
        affinity_hash: int,
        text_bytes: int,
        token_ids: int,
        session: int = 0,
        segment_bytes: Sequence[int] = (),
        chunk_tokens: Sequence[int] = (),
        name: ServedName = MODEL_ITSELF,
        *,
        has_media: bool = False,
        is_cut: bool = False,
    ) -> None:
        self.hashes = hashes
        self.affinity_hash = affinity_hash
        """Hash of the prompt's beginning, by which rendezvous hashing ranks replicas; zero if it has no chunk."""
        self.text_bytes = text_bytes
        self.token_ids = token_ids
        self.session = session
        """Hash of the session that the client declared; zero for none."""
        self.segment_bytes = segment_bytes
        """Sizes of the segments that `hashes` were made of. Their content stays in the request's body only."""
        self.chunk_tokens = chunk_tokens
        """Prompt tokens up to the end of each chunk, if known; else they are estimated from `segment_bytes`."""
        self.name = name
        self.has_media = has_media
        """Whether it has parts that are no text, such as images, whose tokens do not follow from their bytes."""
        self.is_cut = is_cut
        """Whether the engine may cut tokens off, so that fewer are computed."""


class MeasuredPrompts(NamedTuple):
    """The prompts of one request, hashed and measured. A batch is routed by its longest prompt."""

    hashes: Sequence[int]
    """Of the longest prompt."""
    segment_bytes: Sequence[int]
    """Of the longest prompt."""
    text_bytes: int
    token_ids: int
    has_media: bool


def measure(prompts: Sequence[Sequence[Segment]], seed: int) -> MeasuredPrompts:
    """Hash and measure a request's prompts."""
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
    return MeasuredPrompts(hashes, [len(data) for _, data in longest], text, ids, has_media)


class PromptHasher:
    """Hashes the prompts of one service."""

    def __init__(self, engine_name: str) -> None:
        """`engine_name` is the model name with which the service's engines seed their hashes."""
        self._engine_name = engine_name
        self._unsalted_seed = chain_seed(engine_name)

    def seed(self, adapter: str = "", cache_salt: str = "") -> int:
        """Return the seed of the chains of one adapter and salt."""
        if adapter or cache_salt:
            return chain_seed(self._engine_name, adapter, cache_salt=cache_salt)
        return self._unsalted_seed


def prompt_from(
    measured: MeasuredPrompts, session: int = 0, name: ServedName = MODEL_ITSELF, *, is_cut: bool = False
) -> Prompt:
    """Return what routing needs to know of a request's prompts, with `Prompt`'s arguments."""
    hashes = measured.hashes
    return Prompt(
        hashes,
        hashes[min(_AFFINITY_CHUNKS, len(hashes)) - 1] if hashes else 0,
        measured.text_bytes,
        measured.token_ids,
        session,
        measured.segment_bytes,
        name=name,
        has_media=measured.has_media,
        is_cut=is_cut,
    )


PRIOR_BYTES_PER_TOKEN: Final = 4.0
"""English prose with a large vocabulary; corrected by the first answers' usage."""
_LEARNING_RATE: Final = 0.05
_MIN_TEXT_BYTES: Final = 256
"""In shorter prompts the chat template's tokens distort the ratio."""


class PromptLengthModel:
    """Estimates the lengths of one service's prompts."""

    def __init__(self) -> None:
        self.bytes_per_token = PRIOR_BYTES_PER_TOKEN

    def tokens(self, prompt: Prompt) -> int:
        """Estimate the tokens of the whole prompt."""
        return tokens_of(prompt, self.bytes_per_token)

    def chunk_ends(self, prompt: Prompt) -> Sequence[int]:
        """Estimate the prompt tokens up to the end of each chunk."""
        if prompt.chunk_tokens:
            return prompt.chunk_tokens
        per_token = 4.0 if prompt.token_ids else self.bytes_per_token
        return chunk_tokens(prompt.segment_bytes, per_token)

    def learn(self, prompt: Prompt, prompt_tokens: int) -> None:
        """Adapt the ratio to a prompt's true length. Prompts with token ids or media, and those that may be cut, are
        ignored, because their tokens do not follow from bytes."""
        self.bytes_per_token = learnt(self.bytes_per_token, prompt, prompt_tokens)


def tokens_of(prompt: Prompt, bytes_per_token: float) -> int:
    """Estimate the tokens of the whole prompt by this ratio."""
    return prompt.token_ids + int(prompt.text_bytes / bytes_per_token) + 1


def learnt(bytes_per_token: float, prompt: Prompt, prompt_tokens: int) -> float:
    """Return the ratio adapted to a prompt's true length, as `PromptLengthModel.learn` says."""
    is_text = not (prompt.token_ids or prompt.has_media or prompt.is_cut)
    if prompt.text_bytes < _MIN_TEXT_BYTES or not is_text or prompt_tokens <= 0:
        return bytes_per_token
    ratio = min(16.0, max(0.25, prompt.text_bytes / prompt_tokens))
    return bytes_per_token + _LEARNING_RATE * (ratio - bytes_per_token)
