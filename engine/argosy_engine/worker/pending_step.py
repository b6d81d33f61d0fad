"""PendingStep: a launched step whose tokens are not on the host yet.

The device does not wait for the host: the next step may be launched before the host knows this step's tokens, and reads
them on the device. Only `get` and `wait` wait, and they are called one step later. `wait` may be called by another
thread than the one that launches steps, because it does not touch the host's tables: those are written by `land`.
"""

from __future__ import annotations

import threading

import numpy as np
import torch
from numpy.typing import NDArray

from argosy_engine.messages.model_runner_output import ModelRunnerOutput
from argosy_engine.messages.scheduler_output import GrammarBitmask
from argosy_engine.sample.sampler import GrammarMask
from argosy_engine.worker.async_output import AsyncTokens, PendingTokens
from argosy_engine.worker.input_batch import InputBatch
from argosy_engine.worker.rejection_sampler import RejectionSampled


class PendingSteps:
    """Steps whose sampled tokens are not in the host's tables yet, oldest first; at most one."""

    def __init__(self) -> None:
        self.steps: list[PendingStep] = []

    def fill(self, token_ids: torch.Tensor, slots: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        """Copy their sampled tokens into the inputs of the next step, on the device.

        Args:
            token_ids: int64 [T], the tokens of the next step; changed in place.
            slots: int64 [N], the slots of its requests.
            ends: int64 [N], index of each request's last token in `token_ids`.
        """
        for step in self.steps:
            step.fill(token_ids, slots, ends)

    def free(self, slot: int) -> None:
        """Note that the slot no longer belongs to the request that these steps computed."""
        for step in self.steps:
            step.free(slot)

    def land(self) -> None:
        """Write the tokens that another thread has waited for to the host's tables."""
        for step in list(self.steps):
            if step.has_tokens:
                step.land()

    def wait_for_tokens(self) -> None:
        """Wait for the tokens of all these steps, and write them to the host's tables."""
        for step in list(self.steps):
            step.land()


class PendingStep:
    """Launched step whose tokens arrive later.

    Args:
        output: what is known so far; `get` completes it.
        logits: [R + number of drafts, vocab_size] of the R requests that sample a token: for each, one row after its
            known tokens and one after each of its drafts. None if no request samples.
        rows: indices of these R requests in the output.
        slots: int64 [R].
        positions: int64 [R], position in its sequence of the first token that each request samples.
        drafts: draft tokens of each of the R requests; empty if no request has any.
    """

    def __init__(
        self,
        batch: InputBatch,
        pending_steps: PendingSteps,
        output: ModelRunnerOutput,
        logits: torch.Tensor | None = None,
        rows: list[int] | None = None,
        slots: NDArray[np.int64] | None = None,
        positions: NDArray[np.int64] | None = None,
        drafts: list[list[int]] | None = None,
    ) -> None:
        self._batch = batch
        self._pending_steps = pending_steps
        self._output = output
        self._logits = logits
        self._rows = rows or []
        self._slots = np.empty(0, np.int64) if slots is None else slots
        self._positions = np.empty(0, np.int64) if positions is None else positions
        self._drafts = drafts or []
        self._freed: set[int] = set()
        self._sampled: PendingTokens | None = None
        self._tokens: list[list[int]] | None = None
        """New tokens of each of the R requests, once they are on the host."""
        self._lock = threading.Lock()
        """Held by the thread that waits for the tokens."""
        self._has_landed = False

    @torch.inference_mode()
    def sample(self, grammar: GrammarBitmask | None) -> None:
        """Sample the tokens and start copying them to the host. Call it once, before the next step is launched."""
        if self._logits is None:
            return
        batch = self._batch
        if batch.sampler.reads_tokens:
            self._pending_steps.wait_for_tokens()
        mask = self._mask(grammar) if grammar is not None else None
        logits, self._logits = self._logits, None
        if self._drafts:
            self._sampled = RejectionSampled(
                batch.sampler, logits, self._slots, self._positions, self._drafts, mask
            )
        else:
            self._sampled = AsyncTokens(batch.sampler.sample(logits, self._slots, self._positions, mask))
        self._output.errors = {
            self._output.request_ids[self._rows[index]]: why for index, why in self._sampled.failed.items()
        }
        batch.num_tokens[self._slots] += 1
        self._pending_steps.steps.append(self)

    def fill(self, token_ids: torch.Tensor, slots: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        """Copy sampled tokens into the next step's inputs; see `PendingSteps.fill`.

        First tokens suffice, because a request with drafts is not scheduled again before this step's tokens are known.
        """
        assert self._sampled is not None
        row_of = np.full(self._batch.num_slots, -1, np.int64)
        row_of[self._slots] = np.arange(len(self._slots))
        row_of[list(self._freed)] = -1
        index = row_of[slots]
        late = np.flatnonzero(index >= 0)
        if len(late):
            device = token_ids.device
            source = torch.from_numpy(index[late]).to(device)
            token_ids[torch.from_numpy(ends[late]).to(device)] = self._sampled.first[source]

    def free(self, slot: int) -> None:
        self._freed.add(slot)

    @property
    def has_tokens(self) -> bool:
        """Whether the tokens are on the host."""
        return self._tokens is not None

    def wait(self) -> ModelRunnerOutput:
        """Wait for the end of the step and return its output. Any thread may call it, after `sample`."""
        with self._lock:
            if self._tokens is None and self._sampled is not None:
                tokens, logprobs = self._sampled.wait()
                for row, token_ids in zip(self._rows, tokens, strict=True):
                    self._output.sampled_token_ids[row] = token_ids
                for index, entries in logprobs.items():
                    self._output.logprobs[self._output.request_ids[self._rows[index]]] = entries
                self._tokens = tokens
        return self._output

    def land(self) -> None:
        """Wait for the tokens and write them to the host's tables, in the thread that launches steps."""
        self.wait()
        tokens = self._tokens
        if tokens is None or self._has_landed:
            return
        self._has_landed = True
        self._write([token_ids[0] for token_ids in tokens])
        for index, drafts in enumerate(self._drafts):
            slot = int(self._slots[index])
            if drafts and slot not in self._freed:
                self._write_accepted(slot, int(self._positions[index]), tokens[index])
        self._pending_steps.steps.remove(self)

    def _write(self, first_tokens: list[int]) -> None:
        slots, positions, values = self._slots, self._positions, np.array(first_tokens, np.int32)
        if self._freed:
            is_held = ~np.isin(slots, list(self._freed))
            slots, positions, values = slots[is_held], positions[is_held], values[is_held]
        self._batch.token_ids[slots, positions] = values

    def _write_accepted(self, slot: int, position: int, token_ids: list[int]) -> None:
        """Write a request's accepted drafts and the token after them. That last token is not computed yet: what was
        computed at its position was a draft."""
        end = position + len(token_ids)
        self._batch.token_ids[slot, position:end] = token_ids
        self._batch.num_tokens[slot] = end
        self._batch.num_computed[slot] = end - 1

    def get(self) -> ModelRunnerOutput:
        """Wait for the end of the step, write its tokens to the host's tables and return its output."""
        self.land()
        return self._output

    def _mask(self, grammar: GrammarBitmask) -> GrammarMask:
        """Map the bitmask's rows to rows of the logits."""
        counts = [1 + len(drafts) for drafts in self._drafts] or [1] * len(self._rows)
        ends = np.cumsum(counts)
        index_of = {self._output.request_ids[row]: index for index, row in enumerate(self._rows)}
        indices = [index_of[request_id] for request_id in grammar.request_ids]
        rows = np.concatenate([np.arange(ends[index] - counts[index], ends[index]) for index in indices])
        bitmask = np.frombuffer(grammar.bitmask, np.int32).reshape(len(rows), -1)
        return GrammarMask(rows, bitmask.copy())
