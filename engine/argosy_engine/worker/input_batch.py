"""InputBatch: the worker's state of the requests it runs, and what a step makes of it: numpy arrays, then tensors.

The state is in fixed slots of preallocated arrays. A step only touches the rows of requests that changed, and its
inputs are built by numpy indexing, without a Python loop over tokens (`StepArrays`, the same for every device). Where
device and host work at the same time, `device_inputs` makes the tensors instead of `HostInputs`. Design: vLLM V1's
`gpu_input_batch` without row swapping: rows are slots, and a step gathers its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from argosy_engine.attention.backend import AttentionMetadata, ModelInputs
from argosy_engine.messages import BlockIds, NewRequest, SchedulerOutput
from argosy_engine.sample.sampler import SamplerOptions, make_sampler


class InputBatch:
    """Token ids, block tables and counts of the running requests, one row per slot.

    Args:
        max_num_seqs: number of slots.
        max_model_len: most tokens of a request.
        max_blocks: most blocks of a request in one group.
        num_groups: number of KV cache groups, each with a block table.
        eos_token_ids: passed to the sampler, which uses the same slots.
        tracks_blocks: whether to note changes of the block tables for `take_changed_blocks`.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        max_blocks: int,
        num_groups: int,
        eos_token_ids: tuple[int, ...],
        device: torch.device,
        sampling: SamplerOptions,
        *,
        tracks_blocks: bool = False,
    ) -> None:
        self.num_slots = max_num_seqs
        self.token_ids = np.zeros((max_num_seqs, max_model_len + 1), dtype=np.int32)
        self.block_tables = np.zeros((num_groups, max_num_seqs, max_blocks), dtype=np.int32)
        self.num_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_blocks = np.zeros((num_groups, max_num_seqs), dtype=np.int64)
        self.num_computed = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_prompt = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_prompt_logprobs = np.full(max_num_seqs, -1, dtype=np.int64)
        """Number of alternatives per prompt token; -1 if the request did not ask, or got them before a preemption."""
        self.second_texts = np.full(max_num_seqs, max_model_len + 1, dtype=np.int64)
        """Index of the first token that is of type 1: of a pair's second text."""
        self.num_pairs = 0
        """Number of requests with such tokens."""
        self.sampler = make_sampler(self.token_ids, eos_token_ids, device, sampling)
        self.slot_of: dict[str, int] = {}
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._changed_blocks: list[tuple[int, int, int, int]] | None = [] if tracks_blocks else None

    def add(self, request: NewRequest) -> None:
        slot = self._free_slots.pop()
        self.slot_of[request.request_id] = slot
        count = len(request.token_ids)
        self.token_ids[slot, :count] = request.token_ids
        self.num_tokens[slot] = count
        self.num_computed[slot] = request.num_computed_tokens
        self.num_blocks[:, slot] = 0
        self.append_blocks(slot, request.block_ids)
        pooling = request.pooling_params
        if pooling is not None and pooling.second_text is not None:
            self.second_texts[slot] = pooling.second_text
            self.num_pairs += 1
        params, num_prompt = request.sampling_params, count - request.num_output_tokens
        self.num_prompt[slot] = num_prompt
        asked = params.prompt_logprobs
        self.num_prompt_logprobs[slot] = -1 if asked is None or request.num_output_tokens else asked
        self.sampler.add(slot, params, request.token_ids, num_prompt)

    def append_blocks(self, slot: int, block_ids: BlockIds) -> None:
        for group, added in enumerate(block_ids):
            start = self.num_blocks[group, slot]
            self.block_tables[group, slot, start : start + len(added)] = added
            self.num_blocks[group, slot] = start + len(added)
            if self._changed_blocks is not None and added:
                self._changed_blocks.append((group, slot, int(start), len(added)))

    def take_changed_blocks(self) -> list[tuple[int, int, int, int]]:
        """Return the ranges (group, slot, first, count) of the block tables that changed since the last call."""
        changed, self._changed_blocks = self._changed_blocks, []
        assert changed is not None, "made without tracks_blocks"
        return changed

    def token_types(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray | None:
        """Return the type of each token, int64 [T]; None: all are 0."""
        if not self.num_pairs:
            return None
        types: np.ndarray = (positions >= self.second_texts[slots]).astype(np.int64)
        return types

    def set_token(self, slot: int, token_id: int) -> None:
        """Write the token after the computed ones, which another pipeline stage has sampled."""
        position = self.num_computed[slot]
        self.token_ids[slot, position] = token_id
        self.num_tokens[slot] = max(self.num_tokens[slot], position + 1)

    def add_drafts(self, slot: int, token_ids: list[int]) -> None:
        """Write draft tokens after the known tokens, for the step that computes and verifies them."""
        start = self.num_tokens[slot]
        self.token_ids[slot, start : start + len(token_ids)] = token_ids

    def remove(self, request_id: str) -> int | None:
        """Free a request's slot and return it. Returns None for an unknown id: the request was never scheduled."""
        slot = self.slot_of.pop(request_id, None)
        if slot is not None:
            self._free_slots.append(slot)
            if self.second_texts[slot] < self.token_ids.shape[1]:
                self.second_texts[slot] = self.token_ids.shape[1]
                self.num_pairs -= 1
            self.sampler.remove(slot)
        return slot


Ints = NDArray[np.int64]


@dataclass(slots=True, kw_only=True)
class StepArrays:
    """A batch flattened to T tokens of R requests, decodes (one new token) first, because attention backends handle
    them together.
    """

    request_ids: list[str]
    """[R]"""
    num_decodes: int
    slots: Ints
    """[R]"""
    query_lens: Ints
    """[R]: tokens to compute."""
    computed: Ints
    """[R]: tokens computed by earlier steps."""
    seq_lens: Ints
    """[R]: computed + query_lens."""
    ends: Ints
    """[R]: index after each request's last token in the flattened batch."""
    token_slots: Ints
    """[T]: slot of each token's request."""
    positions: Ints
    """[T]: each token's position in its sequence."""
    late: Ints
    """[L]: indices in [0, T) of tokens that a step in flight has sampled, so that the host does not know them."""
    late_slots: Ints
    """[L]: slots of their requests."""
    sampled: SampledRows
    """The requests that sample a token."""
    rotary_rows: Ints | None = None
    """[T]: rows of the rotary tables, where they are not `positions`."""
    key_ends: NDArray[np.int32] | None = None
    """[T]: `AttentionMetadata.key_ends`."""

    @property
    def model_positions(self) -> Ints:
        """[T]: `AttentionMetadata.positions`."""
        return self.positions if self.rotary_rows is None else self.rotary_rows

    @property
    def num_tokens(self) -> int:
        return len(self.positions)


@dataclass(slots=True, kw_only=True)
class SampledRows:
    """The S requests that reach the end of their known tokens and sample the next one."""

    rows: list[int]
    """[S]: their indices among the R requests."""
    slots: Ints
    """[S]"""
    positions: Ints
    """[S]: position in its sequence of the first token that each samples."""
    tokens: Ints
    """Indices in [0, T) whose logits are needed: for each request, one for its last known token and one for each of
    its drafts."""
    drafts: list[list[int]]
    """[S]: draft tokens; empty if no request of the step has any."""


def flatten_step(batch: InputBatch, step: SchedulerOutput, in_flight: NDArray[np.bool_] | None) -> StepArrays:
    """Flatten a step that computes at least one token.

    Args:
        in_flight: bool [num_slots], slots whose last known token is not on the host yet; None: there are none.
    """
    # sorted() is stable, so that the rest keeps the scheduler's order.
    scheduled = sorted(step.num_scheduled_tokens.items(), key=lambda item: item[1] > 1)
    count = len(scheduled)
    request_ids = [request_id for request_id, _ in scheduled]
    slots = np.fromiter((batch.slot_of[request_id] for request_id in request_ids), np.int64, count)
    query_lens = np.fromiter((tokens for _, tokens in scheduled), np.int64, count)
    computed = batch.num_computed[slots]
    seq_lens, ends = computed + query_lens, np.cumsum(query_lens)
    num_decodes = int((query_lens == 1).sum())
    token_slots, positions = slots, computed
    if num_decodes < count:
        token_slots = np.repeat(slots, query_lens)
        positions = np.arange(len(token_slots)) + np.repeat(seq_lens - ends, query_lens)
    late = late_slots = _NONE
    if in_flight is not None:
        is_late = in_flight[slots]
        late, late_slots = ends[is_late] - 1, slots[is_late]
    return StepArrays(
        request_ids=request_ids,
        num_decodes=num_decodes,
        slots=slots,
        query_lens=query_lens,
        computed=computed,
        seq_lens=seq_lens,
        ends=ends,
        token_slots=token_slots,
        positions=positions,
        late=late,
        late_slots=late_slots,
        sampled=_sampled_rows(batch, step, request_ids, slots, seq_lens, ends),
    )


_NONE = np.empty(0, np.int64)
NO_ROWS = SampledRows(rows=[], slots=_NONE, positions=_NONE, tokens=_NONE, drafts=[])


def _sampled_rows(
    batch: InputBatch, step: SchedulerOutput, request_ids: list[str], slots: Ints, seq_lens: Ints, ends: Ints
) -> SampledRows:
    is_sampled = seq_lens >= batch.num_tokens[slots]
    rows = np.flatnonzero(is_sampled).tolist()
    tokens, positions = ends[is_sampled] - 1, seq_lens[is_sampled]
    drafts: list[list[int]] = []
    if step.scheduled_spec_token_ids and rows:
        drafts = [step.scheduled_spec_token_ids.get(request_ids[row], []) for row in rows]
        counts = np.array([len(each) for each in drafts])
        positions = positions - counts
        tokens = np.concatenate(
            [np.arange(last - count, last + 1) for last, count in zip(tokens, counts, strict=True)]
        )
    return SampledRows(rows=rows, slots=slots[is_sampled], positions=positions, tokens=tokens, drafts=drafts)


def empty_step() -> StepArrays:
    """Return a step without requests, which padding makes a step of any size."""
    return StepArrays(
        request_ids=[],
        num_decodes=0,
        slots=_NONE,
        query_lens=_NONE,
        computed=_NONE,
        seq_lens=_NONE,
        ends=_NONE,
        token_slots=_NONE,
        positions=_NONE,
        late=_NONE,
        late_slots=_NONE,
        sampled=NO_ROWS,
    )


class StepTensors(NamedTuple):
    """What forward pass and sampling of a step read."""

    inputs: ModelInputs
    sampled_tokens: torch.Tensor | None
    """int64, `SampledRows.tokens`. None: the logits of all tokens are needed (but not of padding), or of none."""
    staged_rows: torch.Tensor | None = None
    """int32, what the sampler staged for the rows that sample (`Sampler.stage`); None: it copies that itself."""


class StepInputs(Protocol):
    """Makes the tensors of steps, one step after another, and keeps the tokens that a step hands to the next one."""

    def tensors(self, step: StepArrays) -> StepTensors:
        """Return the tensors of a step. They are valid until the next call."""
        ...

    def keep(self, slots: Ints, token_ids: torch.Tensor) -> None:
        """Keep the tokens that the last step has sampled, as the input of steps launched before the host knows them.

        Args:
            slots: [S], the last step's `SampledRows.slots`.
            token_ids: int64 [S], on the device.
        """
        ...


class HostInputs:
    """Inputs on a CPU: tensors share the memory of numpy arrays."""

    def __init__(self, batch: InputBatch, block_size: int) -> None:
        self._batch = batch
        self._block_size = block_size
        self._last_tokens = np.zeros(batch.num_slots, np.int64)

    def tensors(self, step: StepArrays) -> StepTensors:
        batch, block_size = self._batch, self._block_size
        token_ids = batch.token_ids[step.token_slots, step.positions].astype(np.int64)
        if len(step.late):
            token_ids[step.late] = self._last_tokens[step.late_slots]
        block_of, offsets = np.divmod(step.positions, block_size)
        max_blocks = int(-(-step.seq_lens.max() // block_size))
        starts = np.zeros(len(step.slots) + 1, np.int32)
        starts[1:] = step.ends
        lens = step.seq_lens.astype(np.int32)
        query_start_loc, seq_lens = torch.from_numpy(starts), torch.from_numpy(lens)
        positions = torch.from_numpy(step.model_positions)
        key_ends = None if step.key_ends is None else torch.from_numpy(step.key_ends)
        metas = [
            AttentionMetadata(
                num_decodes=step.num_decodes,
                query_start_loc=query_start_loc,
                seq_lens=seq_lens,
                positions=positions,
                slot_mapping=torch.from_numpy(
                    tables[step.token_slots, block_of].astype(np.int64) * block_size + offsets
                ),
                block_table=torch.from_numpy(tables[step.slots, :max_blocks]),
                query_start_loc_cpu=starts,
                seq_lens_cpu=lens,
                key_ends=key_ends,
            )
            for tables in batch.block_tables
        ]
        wanted = step.sampled.tokens
        has_subset = 0 < len(wanted) < step.num_tokens
        types = batch.token_types(step.token_slots, step.positions)
        return StepTensors(
            ModelInputs(
                token_ids=torch.from_numpy(token_ids),
                positions=positions,
                meta=with_groups(metas),
                token_types=None if types is None else torch.from_numpy(types),
            ),
            torch.from_numpy(wanted) if has_subset else None,
        )

    def keep(self, slots: Ints, token_ids: torch.Tensor) -> None:
        self._last_tokens[slots] = token_ids.numpy()


def with_groups(metas: Sequence[AttentionMetadata]) -> AttentionMetadata:
    """Return the metadata of a step from that of its KV cache groups."""
    return metas[0] if len(metas) == 1 else replace(metas[0], groups=tuple(metas))
