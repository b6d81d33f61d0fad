"""PendingStep: a launched step whose tokens are not on the host yet.

The device does not wait for the host: the next step may be launched before the host knows this step's tokens, and reads
them on the device. Only `get` and `wait` wait, and they are called one step later. `wait` may be called by another
thread than the one that launches steps, because it does not touch the host's tables: those are written by `land`.
"""

from __future__ import annotations

import threading
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from argosy_engine.messages import GrammarBitmask, ModelRunnerOutput
from argosy_engine.sample.sampler import GrammarMask, LogprobsTensors, Sampler, SamplerOutput
from argosy_engine.sample.token_logprobs import TokenLogprobs
from argosy_engine.worker.device_runtime import HostCopies, HostCopy
from argosy_engine.worker.input_batch import NO_ROWS, InputBatch, SampledRows, StepInputs


class SampledTokens(NamedTuple):
    """Tokens of a step, on the host."""

    token_ids: list[list[int]]
    """New tokens of each row."""
    logprobs: dict[int, list[TokenLogprobs]]
    """Row -> one entry per new token, for requests that asked for them."""


class PendingTokens(Protocol):
    """Tokens that a step has sampled: one per row, or several after rejection sampling."""

    first: torch.Tensor
    """int64 [R], on the device: the first new token of each row."""
    failed: dict[int, str]
    """Row -> reason why its request cannot continue."""

    def wait(self) -> SampledTokens: ...


class AsyncTokens:
    """One token per row, copied to the host asynchronously.

    Args:
        copies: starts the copy; None: the tensors are on the host, because a CPU has computed them.
    """

    def __init__(self, sampled: SamplerOutput, copies: HostCopies | None) -> None:
        self.first = sampled.token_ids
        self.failed = sampled.failed
        self._logprobs = sampled.logprobs
        tensors = (sampled.token_ids, *(sampled.logprobs.tensors if sampled.logprobs else ()))
        self._copy = HostCopy(tensors) if copies is None else copies.start(tensors)

    def wait(self) -> SampledTokens:
        token_ids, *tensors = self._copy.wait()
        logprobs = {}
        if self._logprobs is not None:
            by_row = self._logprobs._replace(tensors=LogprobsTensors(*tensors)).by_row()
            logprobs = {row: [entry] for row, entry in by_row.items()}
        tokens = SampledTokens([[token] for token in token_ids.tolist()], logprobs)
        self._copy.release()
        return tokens


class RejectionSampled:
    """Tokens after draft verification: at most one more per row than it has drafts.

    Noise is a function of seed and position, so the token sampled after known tokens is the one that a step without
    drafts would sample; a draft is accepted if it equals that token. Drafts therefore change only the number of steps,
    whatever the sampling parameters.

    Sampling proceeds by depth, with the rows whose drafts have all been accepted so far, because logits processors look
    at the previous tokens. Each depth waits for the device.

    Args:
        logits: [R + number of drafts, vocab_size]; for each row, one after its known tokens and one after each draft.
        slots: int64 [R].
        positions: int64 [R], position in its sequence of the first token that each row samples.
        drafts: draft tokens of each row; may be empty.
        grammar: bitmask by rows of the logits.
    """

    def __init__(
        self,
        sampler: Sampler,
        logits: torch.Tensor,
        slots: NDArray[np.int64],
        positions: NDArray[np.int64],
        drafts: list[list[int]],
        grammar: GrammarMask | None,
    ) -> None:
        counts = np.array([1 + len(each) for each in drafts])
        starts = np.cumsum(counts) - counts
        self.failed: dict[int, str] = {}
        self._host = SampledTokens([[] for _ in drafts], {})
        rows = np.arange(len(drafts))
        depth = 0
        while len(rows):
            index = starts[rows] + depth
            sampled = sampler.sample(
                logits[torch.from_numpy(index).to(logits.device)],
                slots[rows],
                positions[rows] + depth,
                _mask_of(grammar, index),
            )
            if not depth:
                self.first = sampled.token_ids
            self.failed |= {int(rows[row]): why for row, why in sampled.failed.items()}
            for row, token in zip(rows.tolist(), sampled.token_ids.tolist(), strict=True):
                self._host.token_ids[row].append(token)
            if sampled.logprobs is not None:
                for row, entry in sampled.logprobs.by_row().items():
                    self._host.logprobs.setdefault(int(rows[row]), []).append(entry)
            rows = np.array(
                [row for row in rows.tolist() if self._is_right(row, drafts[row], depth)], np.int64
            )
            depth += 1

    def wait(self) -> SampledTokens:
        return self._host

    def _is_right(self, row: int, drafts: list[int], depth: int) -> bool:
        return (
            depth < len(drafts) and drafts[depth] == self._host.token_ids[row][-1] and row not in self.failed
        )


def _mask_of(grammar: GrammarMask | None, index: NDArray[np.int64]) -> GrammarMask | None:
    """Return the part of the mask for the logits that `index` selects, with rows renumbered accordingly."""
    if grammar is None:
        return None
    _, places, chosen = np.intersect1d(index, grammar.rows, assume_unique=True, return_indices=True)
    return GrammarMask(places, grammar.bitmask[chosen]) if len(places) else None


class PendingSteps:
    """Steps whose sampled tokens are not in the host's tables yet, oldest first.

    Args:
        batch: the host's tables.
        inputs: keeps the sampled tokens on the device for the steps that are launched meanwhile.
        copies: copies results to the host; None: a CPU computes them there.
        can_lose_steps: see `ModelRunner`.
    """

    def __init__(
        self, batch: InputBatch, inputs: StepInputs, copies: HostCopies | None, *, can_lose_steps: bool
    ) -> None:
        self.batch = batch
        self.inputs = inputs
        self.copies = copies
        self.steps: list[PendingStep] = []
        self._can_lose_steps = can_lose_steps

    def lost(self, error: torch.OutOfMemoryError) -> ModelRunnerOutput:
        """Return the output of a step that could not be computed, called in the handler of its error.

        Raises:
            torch.OutOfMemoryError: the error, if no step may be lost.
        """
        if not self._can_lose_steps:
            raise error
        return ModelRunnerOutput([], [], lost=str(error).partition("\n")[0][:300])

    def slots(self) -> NDArray[np.bool_] | None:
        """Return the slots whose requests' last token is not in the host's tables, bool [num_slots].

        None: there are no such steps.
        """
        if not self.steps:
            return None
        in_flight = np.zeros(self.batch.num_slots, bool)
        for step in self.steps:
            in_flight[step.held_slots()] = True
        return in_flight

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
        logits: one row for each of `sampled.tokens`. None if no request samples.
        sampled: the requests that sample a token.
        staged_rows: `StepTensors.staged_rows`, valid until the next step is launched.
    """

    def __init__(
        self,
        pending_steps: PendingSteps,
        output: ModelRunnerOutput,
        logits: torch.Tensor | None = None,
        sampled: SampledRows = NO_ROWS,
        staged_rows: torch.Tensor | None = None,
    ) -> None:
        self._pending_steps = pending_steps
        self._batch = pending_steps.batch
        self._output = output
        self._logits = logits
        self._rows, self._slots = sampled.rows, sampled.slots
        self._positions, self._drafts = sampled.positions, sampled.drafts
        self._staged_rows = staged_rows
        self._freed: set[int] = set()
        self._sampled: PendingTokens | None = None
        self._tokens: list[list[int]] | None = None
        """New tokens of each of the R requests, once they are on the host."""
        self._lock = threading.Lock()
        """Held by the thread that waits for the tokens."""
        self._has_landed = False

    @torch.inference_mode()
    def sample(self, grammar: GrammarBitmask | None) -> None:
        """Sample the tokens and start copying them to the host. Call it once, before the next step is launched.

        Raises:
            torch.OutOfMemoryError: there is no memory for it, and the other workers wait for this one.
        """
        if self._logits is None:
            return
        try:
            self._sample(self._logits, grammar)
        except torch.OutOfMemoryError as error:
            self._output = self._pending_steps.lost(error)

    def _sample(self, logits: torch.Tensor, grammar: GrammarBitmask | None) -> None:
        batch = self._batch
        if batch.sampler.reads_tokens:
            self._pending_steps.wait_for_tokens()
        mask = self._mask(grammar) if grammar is not None else None
        self._logits = None
        if self._drafts:
            self._sampled = RejectionSampled(
                batch.sampler, logits, self._slots, self._positions, self._drafts, mask
            )
        else:
            sampled = batch.sampler.sample(logits, self._slots, self._positions, mask, self._staged_rows)
            self._sampled = AsyncTokens(sampled, self._pending_steps.copies)
        # First tokens suffice: a request with drafts is not scheduled again before this step's tokens are known.
        self._pending_steps.inputs.keep(self._slots, self._sampled.first)
        self._output.errors = {
            self._output.request_ids[self._rows[index]]: why for index, why in self._sampled.failed.items()
        }
        batch.num_tokens[self._slots] += 1
        self._pending_steps.steps.append(self)

    def held_slots(self) -> NDArray[np.int64]:
        """Return the slots that still belong to the requests which sampled a token in this step."""
        if not self._freed:
            return self._slots
        return self._slots[~np.isin(self._slots, list(self._freed))]

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
