"""StepArrays: a scheduled step as numpy arrays, computed on the host from the input batch, the same for every device.

`StepInputs` implementations turn them into tensors. Requests with one new token come first in the flattened batch,
because attention backends handle them together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from argosy_engine.messages.scheduler_output import SchedulerOutput
    from argosy_engine.worker.input_batch import InputBatch

Ints = NDArray[np.int64]


@dataclass(slots=True, kw_only=True)
class StepArrays:
    """A batch flattened to T tokens of R requests, decodes (one new token) first."""

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
