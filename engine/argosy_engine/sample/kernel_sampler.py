"""KernelSampler: samples with our Triton kernels, in at most eight launches, and never waits for the device.

| step | launches | when |
|---|---|---|
| `process_logits` | 1 | a grammar, or a request with allowed tokens, bias, min_tokens, bad words or penalties |
| `sample_tokens` | 2; 4 with limits | always; limits are top-k, top-p, min-p |
| `cut_logits` | 1 | log probabilities of processed logits |
| `top_logprobs` | 2 | log probabilities |

Which kernels run depends on a few facts about the whole step that the host knows; values are read on the device. The
parameters of a step's rows travel with the step (`stage`): 48 bytes a row, gathered by numpy out of arrays by slot.
So requests come and go without a copy of their own, unless they need a table (`request_tables`), and the parameters lie
at addresses that the runner chooses. A grammar's masks come last, in one copy.

Torch operations run in three cases: custom processors and bad words of several tokens, which change the processed
logits between the kernels (bad words also need the host to know the previous tokens), and more alternatives than
MAX_TOP_LOGPROBS. Drafts are verified depth by depth, with one call of `sample` each, as by any sampler.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from argosy_engine.params.sampling_params import SamplingParams
from argosy_engine.sample.logits_processor.builtin import BadWords
from argosy_engine.sample.logits_processor.interface import Ints, Rows
from argosy_engine.sample.logits_processor.thinking_budget import ThinkingBudget
from argosy_engine.sample.logprobs import LogprobsTensors, gather_logprobs, score
from argosy_engine.sample.request_tables import AllowedTable, EditTable, PenaltyTable
from argosy_engine.sample.sampler import GrammarMask, SampledLogprobs, Sampler, SamplerOptions, SamplerOutput
from argosy_engine.sample.upload import upload
from argosy_engine.triton_kernels.cut_logits import cut_logits
from argosy_engine.triton_kernels.process_logits import RowMasks, process_logits
from argosy_engine.triton_kernels.sampling import Cuts, DeviceSamplingBatch, sample_tokens
from argosy_engine.triton_kernels.top_logprobs import MAX_TOP_LOGPROBS, top_logprobs

_TEMPERATURE, _TOP_P, _MIN_P, _TOP_K, _ALLOWED, _EDITS, _PENALTIES, _SCORED = range(8)
"""Words of a row, each an array over all rows; the last, the rows whose tokens are scored, is made in `stage`."""
_NUM_WORDS = 12
"""Position and seed take two words each."""
_MAX_TOP_K = (1 << 31) - 1
ALTERNATIVES = (0, 1, 5, 20, MAX_TOP_LOGPROBS)
"""Numbers of alternatives that kernels are compiled for; a request gets the first of what the next one finds."""


class KernelSampler(Sampler):
    """The sampler of GPUs, and of Triton's interpreter on a CPU.

    Args:
        options: with the vocabulary's size.
    """

    def __init__(
        self,
        token_ids: NDArray[np.int32],
        eos_token_ids: tuple[int, ...],
        device: torch.device,
        options: SamplerOptions,
    ) -> None:
        super().__init__(token_ids, eos_token_ids, device, options)
        num_slots = self._num_slots
        self._device = device
        self._words = np.zeros((_SCORED, num_slots), np.int32)
        self._floats = self._words.view(np.float32)
        self._seeds = np.zeros(num_slots, np.int64)
        self._has_limits = np.zeros(num_slots, np.bool_)
        self._allowed = AllowedTable(num_slots, options.vocab_size, device)
        self._edits = EditTable(num_slots, eos_token_ids, device)
        self._penalties = PenaltyTable(num_slots, options.vocab_size, device)
        self._tables = (
            (_ALLOWED, self._allowed),
            (_EDITS, self._edits),
            (_PENALTIES, self._penalties),
        )
        self._processors = (BadWords(token_ids, shortest=2), *self._isolated, ThinkingBudget(token_ids))

    def add(self, slot: int, params: SamplingParams, token_ids: list[int], num_prompt_tokens: int) -> None:
        is_random = not params.is_greedy
        self._floats[_TEMPERATURE, slot] = params.temperature if is_random else 0.0
        self._floats[_TOP_P, slot] = params.top_p
        self._floats[_MIN_P, slot] = params.min_p
        self._words[_TOP_K, slot] = min(max(params.top_k, 0), _MAX_TOP_K)
        self._seeds[slot] = params.seed or 0
        self._has_limits[slot] = is_random and (params.top_p < 1.0 or params.top_k > 0 or params.min_p > 0.0)
        for word, table in self._tables:
            self._words[word, slot] = slot if table.is_used_by(params) else -1
        super().add(slot, params, token_ids, num_prompt_tokens)

    def stage(self, slots: Ints, positions: Ints) -> NDArray[np.int32]:
        """Return int32 [12 * W], where W is the number of rows rounded up to a multiple of 4."""
        num_rows = len(slots)
        width = _width(num_rows)
        staged = np.empty(_NUM_WORDS * width, np.int32)
        longs = staged[: 4 * width].view(np.int64).reshape(2, width)
        longs[0, :num_rows] = positions
        longs[1, :num_rows] = self._seeds[slots]
        words = staged[4 * width :].reshape(_SCORED + 1, width)
        words[:_SCORED, :num_rows] = self._words[:, slots]
        scored = self._scored(slots, positions)
        words[_SCORED, : len(scored)] = scored
        words[_SCORED, len(scored) :] = -1
        return staged

    def sample(
        self,
        logits: torch.Tensor,
        slots: Ints,
        positions: Ints,
        grammar: GrammarMask | None = None,
        staged: torch.Tensor | None = None,
    ) -> SamplerOutput:
        self._flush()
        if staged is None:
            staged = upload(self.stage(slots, positions), self._device)
        rows = _split(staged, len(slots))
        scored = self._scored(slots, positions)
        wants_processed = len(scored) > 0 and self._logprobs_mode.startswith("processed")
        has_limits = wants_processed or bool(self._has_limits[slots].any())
        processed = self._process(logits, slots, positions, grammar, rows)
        cuts = None
        if has_limits:
            cuts = Cuts(
                torch.empty(len(slots), device=self._device),
                torch.empty(len(slots), dtype=torch.int32, device=self._device),
            )
        tokens = sample_tokens(
            processed,
            rows.batch,
            has_limits=has_limits,
            token_counts=self._penalties.token_counts,
            count_entries=rows.penalties,
            cuts=cuts,
        )
        failed = self._failed(slots)
        if not len(scored):
            return SamplerOutput(tokens, None, failed)
        if wants_processed:
            assert cuts is not None
            logits = cut_logits(processed, rows.batch, cuts)
        wanted = self._num_logprobs[slots[scored]]
        indices = rows.scored[: len(scored)]
        tensors = self._with_chosen_tokens(
            self._score(logits, tokens, int(wanted.max()), indices),
            slots[scored],
            lambda chosen: score(logits[indices[chosen].long()], self._logprobs_mode),
        )
        return SamplerOutput(tokens, SampledLogprobs(scored.tolist(), wanted.tolist(), tensors), failed)

    def _process(
        self,
        logits: torch.Tensor,
        slots: Ints,
        positions: Ints,
        grammar: GrammarMask | None,
        rows: _DeviceRows,
    ) -> torch.Tensor:
        """Return the logits to draw from: the model's own if nothing changes them."""
        changes = [processor for processor in self._processors if processor]
        has_entries = (self._words[_ALLOWED : _PENALTIES + 1, slots] >= 0).any()
        if not (changes or has_entries or grammar is not None):
            return logits
        processed = process_logits(
            logits,
            rows.batch.positions,
            grammar=None if grammar is None else self._masks(grammar, *logits.shape),
            allowed=self._allowed.rows(rows.allowed),
            edits=self._edits.rows(rows.edits),
            penalties=self._penalties.rows(rows.penalties),
        )
        for processor in changes:
            processor.apply(processed, Rows(slots, positions, self._num_slots))
        return processed

    def _masks(self, grammar: GrammarMask, num_rows: int, vocab_size: int) -> RowMasks:
        """Copy a grammar's masks to the device: each row's entry, then the masks, in one copy."""
        num_words, width, count = -(-vocab_size // 32), _width(num_rows), len(grammar.rows)
        host = np.empty(width + count * num_words, np.int32)
        host[:width] = -1
        host[grammar.rows] = np.arange(count)
        host[width:].reshape(count, num_words)[:] = grammar.bitmask[:, :num_words]
        copied = upload(host, self._device)
        return RowMasks(copied[:num_rows], copied[width:].view(count, num_words))

    def _scored(self, slots: Ints, positions: Ints) -> Ints:
        """Return the rows whose requests want log probabilities."""
        return np.flatnonzero((self._num_logprobs[slots] >= 0) & (positions >= 0))

    def _score(
        self, logits: torch.Tensor, tokens: torch.Tensor, count: int, rows: torch.Tensor
    ) -> LogprobsTensors:
        if count > MAX_TOP_LOGPROBS:
            index = rows.long()
            return gather_logprobs(score(logits[index], self._logprobs_mode), tokens[index], count)
        count = next(most for most in ALTERNATIVES if most >= count)
        is_normalized = self._logprobs_mode.endswith("logprobs")
        return LogprobsTensors(*top_logprobs(logits, tokens, count, rows=rows, is_normalized=is_normalized))

    @torch.inference_mode()
    def _flush(self) -> None:
        added = self._update.added
        for _, table in self._tables if added else ():
            table.add([each for each in added if table.is_used_by(each.params)])
        super()._flush()


class _DeviceRows(NamedTuple):
    """What was staged, on the device: arrays over the rows."""

    batch: DeviceSamplingBatch
    allowed: torch.Tensor
    edits: torch.Tensor
    penalties: torch.Tensor
    scored: torch.Tensor
    """int32 [R]: the rows to score, then -1."""


def _split(staged: torch.Tensor, num_rows: int) -> _DeviceRows:
    width = _width(num_rows)
    longs = staged[: 4 * width].view(torch.int64)
    words = staged[4 * width :].view(_SCORED + 1, width)[:, :num_rows].unbind(0)
    temperature, top_p, min_p = (words[word].view(torch.float32) for word in (_TEMPERATURE, _TOP_P, _MIN_P))
    batch = DeviceSamplingBatch(
        temperature=temperature,
        top_k=words[_TOP_K],
        top_p=top_p,
        min_p=min_p,
        seeds=longs[width : width + num_rows],
        positions=longs[:num_rows],
    )
    return _DeviceRows(batch, words[_ALLOWED], words[_EDITS], words[_PENALTIES], words[_SCORED])


def _width(num_rows: int) -> int:
    """Round up, so that every array starts at a multiple of 16 bytes and kernels have one variant."""
    return -(-num_rows // 4) * 4
