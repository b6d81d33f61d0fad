"""PendingStep: a step that was launched, on its way from the device to the host.

The device goes on without the host: the next step may be launched before this one's tokens are known here, and reads
them where they are. So nothing waits between two steps but `get`, which is called a step later.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from argosy_engine.sample.sampler import GrammarMask
from argosy_engine.worker.drawn_tokens import DrawnTokens, OnTheWay, Verified
from argosy_engine.worker.input_batch import InputBatch
from argosy_engine.worker.step import GrammarBitmask, ModelRunnerOutput


class UnsettledSteps:
    """Steps whose tokens the host's tables lack, oldest first; none or one."""

    def __init__(self) -> None:
        self.steps: list[PendingStep] = []

    def fill(self, token_ids: torch.Tensor, slots: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        """Puts their tokens where the next step needs them, on the device.

        Args:
            token_ids: int64 [T] of the step to come, changed in place.
            slots: [N] of its requests.
            ends: [N] index of the last token of each in `token_ids`.
        """
        for step in self.steps:
            step.fill(token_ids, slots, ends)

    def free(self, slot: int) -> None:
        """The slot is no longer that of the request that they computed."""
        for step in self.steps:
            step.free(slot)

    def settle(self) -> None:
        """Waits for all tokens that are under way."""
        for step in list(self.steps):
            step.settle()


class PendingStep:
    """
    Args:
        output: what is known already; `get` completes it.
        logits: [R + number of drafts, vocab_size] of the rows that give a token, None if none does: of each one behind
            its known tokens, and one behind each of its drafts.
        rows: their R rows in the output.
        slots: int64 [R].
        positions: int64 [R], index in its sequence of the first token that each gives.
        drafts: of each of the R rows; empty if no row has some.
    """

    def __init__(
        self,
        batch: InputBatch,
        unsettled: UnsettledSteps,
        output: ModelRunnerOutput,
        logits: torch.Tensor | None = None,
        rows: list[int] | None = None,
        slots: NDArray[np.int64] | None = None,
        positions: NDArray[np.int64] | None = None,
        drafts: list[list[int]] | None = None,
    ) -> None:
        self._batch = batch
        self._unsettled = unsettled
        self._output = output
        self._logits = logits
        self._rows = rows or []
        self._slots = np.empty(0, np.int64) if slots is None else slots
        self._positions = np.empty(0, np.int64) if positions is None else positions
        self._drafts = drafts or []
        self._freed: set[int] = set()
        self._drawn: DrawnTokens | None = None
        self._is_settled = False

    @torch.inference_mode()
    def sample(self, grammar: GrammarBitmask | None) -> None:
        """Draws the tokens and starts their way to the host. Once, and before the next step is launched."""
        if self._logits is None:
            return
        batch = self._batch
        if batch.sampler.reads_tokens:
            self._unsettled.settle()
        mask = self._mask(grammar) if grammar is not None else None
        logits, self._logits = self._logits, None
        if self._drafts:
            self._drawn = Verified(batch.sampler, logits, self._slots, self._positions, self._drafts, mask)
        else:
            self._drawn = OnTheWay(batch.sampler.sample(logits, self._slots, self._positions, mask))
        self._output.errors = {
            self._output.request_ids[self._rows[index]]: why for index, why in self._drawn.failed.items()
        }
        batch.num_tokens[self._slots] += 1
        self._unsettled.steps.append(self)

    def fill(self, token_ids: torch.Tensor, slots: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        """See `UnsettledSteps`, as `free`. Requests with drafts are in no step until theirs is settled."""
        assert self._drawn is not None
        row_of = np.full(self._batch.num_slots, -1, np.int64)
        row_of[self._slots] = np.arange(len(self._slots))
        row_of[list(self._freed)] = -1
        index = row_of[slots]
        late = np.flatnonzero(index >= 0)
        if len(late):
            device = token_ids.device
            source = torch.from_numpy(index[late]).to(device)
            token_ids[torch.from_numpy(ends[late]).to(device)] = self._drawn.first[source]

    def free(self, slot: int) -> None:
        self._freed.add(slot)

    def settle(self) -> None:
        """Waits for the tokens and writes them to the host's tables."""
        if self._is_settled or self._drawn is None:
            return
        self._is_settled = True
        tokens, logprobs = self._drawn.wait()
        for row, token_ids in zip(self._rows, tokens, strict=True):
            self._output.sampled_token_ids[row] = token_ids
        for index, entries in logprobs.items():
            self._output.logprobs[self._output.request_ids[self._rows[index]]] = entries
        self._write([token_ids[0] for token_ids in tokens])
        for index, drafts in enumerate(self._drafts):
            slot = int(self._slots[index])
            if drafts and slot not in self._freed:
                self._write_verified(slot, int(self._positions[index]), tokens[index])
        self._unsettled.steps.remove(self)

    def _write(self, first_tokens: list[int]) -> None:
        slots, positions, values = self._slots, self._positions, np.array(first_tokens, np.int32)
        if self._freed:
            is_held = ~np.isin(slots, list(self._freed))
            slots, positions, values = slots[is_held], positions[is_held], values[is_held]
        self._batch.token_ids[slots, positions] = values

    def _write_verified(self, slot: int, position: int, token_ids: list[int]) -> None:
        """What was computed behind the last token was a draft's, and counts for nothing."""
        end = position + len(token_ids)
        self._batch.token_ids[slot, position:end] = token_ids
        self._batch.num_tokens[slot] = end
        self._batch.num_computed[slot] = end - 1

    def get(self) -> ModelRunnerOutput:
        """Waits for the step's end."""
        self.settle()
        return self._output

    def _mask(self, grammar: GrammarBitmask) -> GrammarMask:
        """The mask by rows of the logits."""
        counts = [1 + len(drafts) for drafts in self._drafts] or [1] * len(self._rows)
        ends = np.cumsum(counts)
        index_of = {self._output.request_ids[row]: index for index, row in enumerate(self._rows)}
        indices = [index_of[request_id] for request_id in grammar.request_ids]
        rows = np.concatenate([np.arange(ends[index] - counts[index], ends[index]) for index in indices])
        bitmask = np.frombuffer(grammar.bitmask, np.int32).reshape(len(rows), -1)
        return GrammarMask(rows, bitmask.copy())
