"""PendingStep: a step that was launched, on its way from the device to the host.

The device goes on without the host: the next step may be launched before this one's tokens are known here, and reads
them where they are. So nothing waits between two steps but `get`, which is called a step later.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from argosy_engine.sample.logprobs import LogprobsTensors
from argosy_engine.sample.sampler import GrammarMask, SampledLogprobs
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
        logits: [R, vocab_size] of the rows that give a token, None if none does.
        rows: their R rows in the output.
        slots: int64 [R].
        positions: int64 [R], index in its sequence of the token that each gives.
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
    ) -> None:
        self._batch = batch
        self._unsettled = unsettled
        self._output = output
        self._logits = logits
        self._rows = rows or []
        self._slots = np.empty(0, np.int64) if slots is None else slots
        self._positions = np.empty(0, np.int64) if positions is None else positions
        self._freed: set[int] = set()
        self._tokens: torch.Tensor | None = None
        self._copied: _HostCopy | None = None
        self._logprobs: SampledLogprobs | None = None
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
        sampled = batch.sampler.sample(self._logits, self._slots, self._positions, mask)
        self._logits = None
        self._output.errors = {
            self._output.request_ids[self._rows[index]]: why for index, why in sampled.failed.items()
        }
        self._tokens, self._logprobs = sampled.token_ids, sampled.logprobs
        self._copied = _HostCopy(self._tokens, *(self._logprobs.tensors if self._logprobs else ()))
        batch.num_tokens[self._slots] += 1
        self._unsettled.steps.append(self)

    def fill(self, token_ids: torch.Tensor, slots: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        """See `UnsettledSteps`, as `free`."""
        assert self._tokens is not None
        row_of = np.full(self._batch.num_slots, -1, np.int64)
        row_of[self._slots] = np.arange(len(self._slots))
        row_of[list(self._freed)] = -1
        index = row_of[slots]
        late = np.flatnonzero(index >= 0)
        if len(late):
            device = token_ids.device
            source = torch.from_numpy(index[late]).to(device)
            token_ids[torch.from_numpy(ends[late]).to(device)] = self._tokens[source]

    def free(self, slot: int) -> None:
        self._freed.add(slot)

    def settle(self) -> None:
        """Waits for the tokens and writes them to the host's tables."""
        if self._is_settled or self._copied is None:
            return
        self._is_settled = True
        sampled, *logprobs = self._copied.wait()
        tokens = sampled.tolist()
        for row, token in zip(self._rows, tokens, strict=True):
            self._output.sampled_token_ids[row] = [token]
        slots, positions, values = self._slots, self._positions, np.array(tokens, np.int32)
        if self._freed:
            is_held = ~np.isin(slots, list(self._freed))
            slots, positions, values = slots[is_held], positions[is_held], values[is_held]
        self._batch.token_ids[slots, positions] = values
        self._unsettled.steps.remove(self)
        if self._logprobs is not None:
            on_host = self._logprobs._replace(tensors=LogprobsTensors(*logprobs))
            for index, entry in on_host.by_row().items():
                self._output.logprobs[self._output.request_ids[self._rows[index]]] = [entry]

    def get(self) -> ModelRunnerOutput:
        """Waits for the step's end."""
        self.settle()
        return self._output

    def _mask(self, grammar: GrammarBitmask) -> GrammarMask:
        """The mask by rows of the logits."""
        row_of = {self._output.request_ids[row]: index for index, row in enumerate(self._rows)}
        rows = np.array([row_of[request_id] for request_id in grammar.request_ids], np.int64)
        bitmask = np.frombuffer(grammar.bitmask, np.int32).reshape(len(rows), -1)
        return GrammarMask(rows, bitmask.copy())


class _HostCopy:
    """Tensors on their way to the host. Waiting for them waits for nothing that was launched behind them."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._tensors = tensors
        if tensors[0].device.type == "cuda":
            self._tensors = tuple(
                torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
                for tensor in tensors
            )
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> tuple[torch.Tensor, ...]:
        if self._event is not None:
            self._event.synchronize()
        return self._tensors
