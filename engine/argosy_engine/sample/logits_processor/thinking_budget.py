"""ThinkingBudget: ends a think block after `thinking_token_budget` tokens, as vLLM does.

What is forced is a function of the request's tokens, so that it is the same after a preemption, for drafts, and in an
engine that continues another one's stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from argosy_engine.params.sampling_params import SamplingParams, ThinkingMarks
from argosy_engine.sample.logits_processor.interface import BatchUpdate, LogitsProcessor, Rows

_LOOKAHEAD_TOKENS = 64
"""More than a step samples of one request, drafts included."""


class _Request(NamedTuple):
    budget: int
    marks: ThinkingMarks
    num_prompt_tokens: int

    @property
    def first_forced(self) -> int:
        """Index of the first token that can be forced."""
        marks = self.marks
        in_prompt = len(marks.start_ids) if marks.num_open_tokens < 0 else -marks.num_open_tokens
        return self.num_prompt_tokens + max(in_prompt + self.budget, 0)


class ThinkingBudget(LogitsProcessor):
    """Allows only the next token of a think block's end, once the block has as many tokens as the request's budget.

    It comes after all other processors, and takes precedence over what they mask out.

    Args:
        token_ids: int32 [num_slots, max_len], every request's tokens so far; the owner keeps it up to date.
    """

    def __init__(self, token_ids: NDArray[np.int32]) -> None:
        self._token_ids = token_ids
        self._requests: dict[int, _Request] = {}
        self._num_tokens: dict[int, int] = {}
        """By slot, tokens that the request has for certain."""

    @classmethod
    def is_used_by(cls, params: SamplingParams) -> bool:
        return params.thinking_token_budget is not None and params.thinking_marks is not None

    def __bool__(self) -> bool:
        return bool(self._requests)

    @property
    def reads_tokens(self) -> bool:  # type: ignore[override]  # tokens matter only where a budget may be used up
        return any(
            self._num_tokens[slot] + _LOOKAHEAD_TOKENS >= request.first_forced
            for slot, request in self._requests.items()
        )

    def update_state(self, update: BatchUpdate) -> None:
        for slot in update.removed:
            self._requests.pop(slot, None)
            self._num_tokens.pop(slot, None)
        for slot, params, token_ids, num_prompt_tokens in update.added:
            budget, marks = params.thinking_token_budget, params.thinking_marks
            if budget is not None and marks is not None:
                self._requests[slot] = _Request(budget, marks, num_prompt_tokens)
                self._num_tokens[slot] = len(token_ids)

    def apply(self, logits: torch.Tensor, rows: Rows) -> None:
        forced: list[tuple[int, int]] = []
        for slot, request in self._requests.items():
            row, position = int(rows.of_slot[slot]), int(rows.position_of_slot[slot])
            if row < 0:
                continue
            self._num_tokens[slot] = position
            if position >= request.first_forced:
                token = self._forced(request, self._token_ids[slot, :position])
                if token is not None:
                    forced.append((row, token))
        if forced:
            index = torch.tensor(forced, device=logits.device)
            logits[index[:, 0]] = float("-inf")
            logits[index[:, 0], index[:, 1]] = 0.0

    def _forced(self, request: _Request, token_ids: NDArray[np.int32]) -> int | None:
        """Return the token that has to follow, if there is one."""
        marks, num_prompt = request.marks, request.num_prompt_tokens
        output = token_ids[num_prompt:]
        ends = _occurrences(output, marks.end_ids)
        if not len(ends) and marks.num_open_tokens >= 0:
            begun = -marks.num_open_tokens
        else:
            after = int(ends[-1]) + len(marks.end_ids) if len(ends) else 0
            starts = _occurrences(output[after:], marks.start_ids)
            if not len(starts):
                return None
            begun = after + int(starts[0]) + len(marks.start_ids)
        if len(output) - begun < request.budget:
            return None
        return marks.end_ids[_num_written(output[max(begun, 0) :], marks.end_ids)]


def _occurrences(token_ids: NDArray[np.int32], mark: Sequence[int]) -> NDArray[np.intp]:
    """Return the indices at which a mark begins."""
    num_starts = max(len(token_ids) - len(mark) + 1, 0)
    matches = np.ones(num_starts, np.bool_)
    for offset, token_id in enumerate(mark):
        matches &= token_ids[offset : offset + num_starts] == token_id
    return np.flatnonzero(matches)


def _num_written(token_ids: NDArray[np.int32], mark: Sequence[int]) -> int:
    """Return how many of a mark's first tokens the tokens end with."""
    last = token_ids[len(token_ids) - min(len(mark) - 1, len(token_ids)) :].tolist()
    return next((n for n in range(len(last), 0, -1) if last[-n:] == list(mark[:n])), 0)
