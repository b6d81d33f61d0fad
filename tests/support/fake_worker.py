"""A fake worker without a model, for tests of the scheduler and the KV cache.

It applies the scheduler's diffs as the real worker does and has its own KV cache: each slot stores the whole prefix
that it was computed from, and every read compares it with the prefix that the reader expects. This detects blocks that
are shared wrongly, reused too early, or registered in the prefix cache before they are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from argosy_engine.attention.kv_cache_spec import (
    ChunkedAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    RecurrentStateSpec,
    SlidingWindowSpec,
)
from argosy_engine.messages import BlockIds, ModelRunnerOutput, MultimodalFeature, SchedulerOutput

VOCAB = 7


@lru_cache(maxsize=1 << 16)
def next_token(prefix: tuple[int, ...]) -> int:
    """The fake model: compute the next token from all tokens before it. Its EOS token is 0."""
    state = 17
    for token in prefix:
        state = (state * 31 + token + 1) % 65521
    return state % VOCAB


def continuation(prompt: Sequence[int], count: int) -> list[int]:
    """Return the tokens that the fake model generates after a prompt."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tuple(tokens)))
    return tokens[len(prompt) :]


def seen(tokens: Sequence[int], features: Sequence[MultimodalFeature]) -> list[int]:
    """Return a prompt with other tokens in place of each item's placeholders."""
    found = list(tokens)
    for feature in features:
        for index in range(feature.offset, feature.offset + feature.length):
            found[index] = 100 + sum(feature.identifier.encode())
    return found


@dataclass
class Row:
    tokens: list[int]
    blocks: BlockIds
    num_computed: int
    features: Sequence[MultimodalFeature] = ()


class FakeWorker:
    """Executes scheduler outputs on Python lists and dicts.

    Args:
        num_drafts: draft tokens proposed after each step; those at every third position are wrong.
        samples: whether it is the last stage of a pipeline; others learn tokens from the scheduler.
    """

    def __init__(
        self,
        block_size: int,
        num_drafts: int = 0,
        specs: Sequence[KVCacheSpec] = (FullAttentionSpec(0),),
        *,
        samples: bool = True,
    ) -> None:
        self.samples = samples
        self.specs = specs
        self.block_size = block_size
        self.num_drafts = num_drafts
        self.rows: dict[str, Row] = {}
        self.cache: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {}
        """Maps (block, offset) to the KV cache group and the prefix it was computed from."""
        self.states: dict[int, tuple[int, ...]] = {}
        """Maps blocks of states to the prefix that they stand for."""
        self.encoded: set[str] = set()
        """Identifiers of the items whose encoder output it holds."""

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        for request_id in step.finished_request_ids:
            self.rows.pop(request_id, None)
        for request_id, block_ids in step.new_block_ids.items():
            for held, added in zip(self.rows[request_id].blocks, block_ids, strict=True):
                held += added
        for new in step.new_requests:
            assert new.request_id not in self.rows, "scheduled anew without being released"
            assert not any(feature.inputs for feature in new.mm_features)
            self.rows[new.request_id] = Row(
                seen(new.token_ids, new.mm_features),
                [list(ids) for ids in new.block_ids],
                new.num_computed_tokens,
                new.mm_features,
            )
        self.encoded -= set(step.freed_encoder_outputs)
        for item in step.encoder_inputs:
            assert item.identifier not in self.encoded, "encoded again"
            assert item.inputs
            self.encoded.add(item.identifier)
        for request_id, token in step.new_token_ids.items():
            self._learn(self.rows[request_id], token)
        self._continue_states(step)
        for request_id, count in step.num_scheduled_tokens.items():
            self._write(request_id, count, step.scheduled_spec_token_ids.get(request_id, []))
        output = ModelRunnerOutput(list(step.num_scheduled_tokens), [])
        for request_id, count in step.num_scheduled_tokens.items():
            drafts = step.scheduled_spec_token_ids.get(request_id, [])
            output.sampled_token_ids.append(self._read_and_sample(request_id, count, drafts, output))
        return output

    def _learn(self, row: Row, token: int) -> None:
        if not self.samples and row.num_computed == len(row.tokens):
            row.tokens.append(token)
        assert row.tokens[row.num_computed] == token

    def _continue_states(self, step: SchedulerOutput) -> None:
        """Compute the states of a step's requests in no order: none may read what another writes."""
        written: dict[int, tuple[int, ...]] = {}
        read = set()
        for request_id, count in step.num_scheduled_tokens.items():
            row = self.rows[request_id]
            end = row.num_computed + count
            for blocks, spec in zip(row.blocks, self.specs, strict=True):
                if not isinstance(spec, RecurrentStateSpec):
                    continue
                assert len(blocks) == -(-end // self.block_size)
                target = blocks[(end - 1) // self.block_size]
                if row.num_computed:
                    source = blocks[(row.num_computed - 1) // self.block_size]
                    assert source != 0
                    state = self.states[source]
                    assert state == tuple(row.tokens[: row.num_computed]), f"{request_id} has state {state}"
                    if source != target:
                        read.add(source)
                assert target != 0
                assert target not in written, "two requests write one state"
                written[target] = tuple(row.tokens[:end])
        assert not read & written.keys(), "a state is read and written in one step"
        self.states |= written

    def _slot(self, row: Row, group: int, position: int) -> tuple[int, int]:
        block_id = row.blocks[group][position // self.block_size]
        assert block_id != 0, "the null block is nobody's"
        return block_id, position % self.block_size

    def _write(self, request_id: str, count: int, drafts: list[int]) -> None:
        row = self.rows[request_id]
        known = row.tokens + drafts
        assert row.num_computed + count <= len(known)
        for feature in row.features:
            if (
                row.num_computed < feature.offset + feature.length
                and feature.offset < row.num_computed + count
            ):
                assert feature.identifier in self.encoded, f"{request_id} reads what was not encoded"
        for group, spec in enumerate(self.specs):
            if isinstance(spec, RecurrentStateSpec):
                continue
            for position in range(row.num_computed, row.num_computed + count):
                self.cache[self._slot(row, group, position)] = (group, tuple(known[: position + 1]))

    def _read(self, row: Row, end: int, known: list[int]) -> None:
        """Check what the tokens from `num_computed` to `end` read of the tokens before them, per group."""
        for group, spec in enumerate(self.specs):
            first = 0
            if isinstance(spec, SlidingWindowSpec):
                first = max(row.num_computed - spec.window + 1, 0)
            elif isinstance(spec, ChunkedAttentionSpec):
                first = row.num_computed - row.num_computed % spec.chunk_size
            elif isinstance(spec, RecurrentStateSpec):
                continue
            for position in range(first, end):
                read = self.cache[self._slot(row, group, position)]
                assert read == (group, tuple(known[: position + 1])), f"read {read} at {position}"

    def _read_and_sample(
        self, request_id: str, count: int, drafts: list[int], output: ModelRunnerOutput
    ) -> list[int]:
        row = self.rows[request_id]
        end = row.num_computed + count
        known = row.tokens + drafts
        self._read(row, end, known)
        if end < len(row.tokens) or not self.samples:
            row.num_computed = end
            return []
        sampled = []
        for guess in [*drafts, None]:
            token = next_token(tuple(row.tokens))
            row.tokens.append(token)
            sampled.append(token)
            if token != guess:
                break
        row.num_computed = len(row.tokens) - 1
        if self.num_drafts:
            output.draft_token_ids[request_id] = self._draft(row)
        return sampled

    def _draft(self, row: Row) -> list[int]:
        tokens = list(row.tokens)
        for _ in range(self.num_drafts):
            token = next_token(tuple(tokens))
            tokens.append(token if len(tokens) % 3 else (token + 1) % VOCAB)
        return tokens[len(row.tokens) :]
