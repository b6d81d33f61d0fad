"""KernelSampler: samples with our Triton kernels, in at most eight launches, and never waits for the device.

| step | launches | when |
|---|---|---|
| `process_logits` | 1 | a grammar, or a request with allowed tokens, bias, min_tokens, bad words or penalties |
| `sample_tokens` | 2; 4 with limits | always; limits are top-k, top-p, min-p |
| `cut_logits` | 1 | log probabilities of processed logits |
| `top_logprobs` | 2 | log probabilities |

Which kernels run depends on a few facts about the whole step that the host knows; values are read on the device. The
parameters of a step's rows travel with the step (`stage`): 48 bytes a row, gathered by numpy out of arrays by slot.
So requests come and go without a copy of their own, unless they need a table, and the parameters lie
at addresses that the runner chooses. A grammar's masks come last, in one copy.

Torch operations run in three cases: custom processors and bad words of several tokens, which change the processed
logits between the kernels (bad words also need the host to know the previous tokens), and more alternatives than
MAX_TOP_LOGPROBS. Drafts are verified depth by depth, with one call of `sample` each, as by any sampler.

A table has what the kernels read of single requests' parameters, on the device, with one entry per slot. It is written
when a request that needs it is added, by one asynchronous copy each, and never in between: steps only say which rows
use it. Until the first such request it has a single entry, so that the kernels' arguments have the same types at all
times; then it takes its full size at once, and keeps its address. The largest steps that measure the device's memory
use every table.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from argosy_engine.params import MAX_BAD_WORDS, MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, SamplingParams
from argosy_engine.sample.builtin_processors import BadWords, ThinkingBudget
from argosy_engine.sample.logits_processor import Added, Ints, Rows
from argosy_engine.sample.sampler import (
    GrammarMask,
    LogprobsTensors,
    SampledLogprobs,
    Sampler,
    SamplerOptions,
    SamplerOutput,
    gather_logprobs,
    score,
)
from argosy_engine.triton_kernels.process_logits import (
    RowEdits,
    RowMasks,
    RowPenalties,
    clear_entries,
    count_tokens,
    process_logits,
)
from argosy_engine.triton_kernels.sampling import Cuts, DeviceSamplingBatch, sample_tokens
from argosy_engine.triton_kernels.top_logprobs import MAX_TOP_LOGPROBS, cut_logits, top_logprobs

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


_COUNT_BATCH = 16
"""Numbers of tokens to count are rounded up to a multiple of this, so that one variant of the kernel serves all."""


class AllowedTable:
    """Bitmasks of allowed_token_ids: bytes per slot are an eighth of the vocabulary's size."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._num_slots, self._words = num_slots, -(-vocab_size // 32)
        self._bitmask = torch.zeros(1, self._words, dtype=torch.int32, device=device)

    @staticmethod
    def is_used_by(params: SamplingParams) -> bool:
        return params.allowed_token_ids is not None

    def add(self, added: Sequence[Added]) -> None:
        """Write the entries of requests that use the table."""
        for slot, params, _, _ in added:
            self._bitmask = _full_size(self._bitmask, self._num_slots)
            bits = np.zeros(32 * self._words, np.bool_)
            bits[list(params.allowed_token_ids or ())] = True
            upload_into(self._bitmask[slot], np.packbits(bits, bitorder="little").view(np.int32))

    def rows(self, entries: torch.Tensor) -> RowMasks:
        """Return the kernel's argument for rows with these entries, int32 [R]."""
        return RowMasks(entries, self._bitmask)


class EditTable:
    """Edits of single tokens: logit_bias, min_tokens, and bad words of one token, which are banned at all times."""

    def __init__(self, num_slots: int, eos_token_ids: tuple[int, ...], device: torch.device) -> None:
        self._num_slots, self._eos_token_ids = num_slots, eos_token_ids
        most = MAX_LOGIT_BIAS + MAX_STOP_TOKEN_IDS + MAX_BAD_WORDS + len(eos_token_ids)
        self._width = width = -(-most // 16) * 16
        # An entry: first positions (int64), token ids, biases, the number of tokens.
        self._table = torch.zeros(1, 4 * width + 4, dtype=torch.int32, device=device)

    @staticmethod
    def is_used_by(params: SamplingParams) -> bool:
        return bool(params.logit_bias) or params.min_tokens > 0 or _has_short_words(params)

    def add(self, added: Sequence[Added]) -> None:
        """Write the entries of requests that use the table."""
        for slot, params, _, num_prompt in added:
            self._table = _full_size(self._table, self._num_slots)
            upload_into(self._table[slot], self._entry(params, num_prompt))

    def _entry(self, params: SamplingParams, num_prompt: int) -> NDArray[np.int32]:
        biases = dict(params.logit_bias or {})
        biases |= dict.fromkeys(_short_words(params), float("-inf"))
        first_positions: dict[int, int] = {}
        if params.min_tokens:
            ends = {*self._eos_token_ids, *params.stop_token_ids}
            first_positions = dict.fromkeys(ends, num_prompt + params.min_tokens)
        tokens = sorted({*biases, *first_positions})
        count, width = len(tokens), self._width
        entry = np.zeros(4 * width + 4, np.int32)
        entry.view(np.int64)[:count] = [first_positions.get(token, 0) for token in tokens]
        entry[2 * width : 2 * width + count] = tokens
        entry[3 * width : 3 * width + count].view(np.float32)[:] = [
            biases.get(token, 0.0) for token in tokens
        ]
        entry[4 * width] = count
        return entry

    def rows(self, entries: torch.Tensor) -> RowEdits:
        """Return the kernel's argument for rows with these entries, int32 [R]."""
        table, width = self._table, self._width
        return RowEdits(
            entries,
            lengths=table[:, 4 * width],
            token_ids=table[:, 2 * width : 3 * width],
            biases=table.view(torch.float32)[:, 3 * width : 4 * width],
            first_positions=table.view(torch.int64)[:, :width],
        )


class PenaltyTable:
    """Penalties, and counts of prompt and output tokens: four bytes per token of the vocabulary and slot."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._num_slots, self._device = num_slots, device
        self.token_counts = torch.zeros(1, vocab_size, dtype=torch.int32, device=device)
        """int32 [E, vocab_size]; see `triton_kernels.process_logits`."""
        self._values = torch.zeros(num_slots, 3, device=device)
        self._host_values = np.zeros((num_slots, 3), np.float32)

    @staticmethod
    def is_used_by(params: SamplingParams) -> bool:
        return params.has_penalties

    def add(self, added: Sequence[Added]) -> None:
        """Write the entries of requests that use the table, with their tokens so far."""
        if not added:
            return
        self.token_counts = _full_size(self.token_counts, self._num_slots)
        for slot, params, _, _ in added:
            self._host_values[slot] = (
                params.repetition_penalty,
                params.frequency_penalty,
                params.presence_penalty,
            )
        upload_into(self._values, self._host_values)
        slots = np.array([each.slot for each in added], np.int32)
        lengths = np.array([len(each.token_ids) for each in added])
        total = -(-int(lengths.sum()) // _COUNT_BATCH) * _COUNT_BATCH
        # Entries, tokens and whether each is output, then the entries to clear.
        host = np.full(2 * total + total // 4 + len(slots), -1, np.int32)
        host[: lengths.sum()] = np.repeat(slots, lengths)
        host[total : total + lengths.sum()] = _joined(each.token_ids for each in added)
        host[2 * total : 2 * total + total // 4].view(np.bool_)[: lengths.sum()] = _joined(
            np.arange(len(each.token_ids)) >= each.num_prompt_tokens for each in added
        )
        host[2 * total + total // 4 :] = slots
        entries, tokens, is_output, cleared = upload(host, self._device).split(
            [total, total, total // 4, len(slots)]
        )
        clear_entries(self.token_counts, cleared)
        if total:
            count_tokens(self.token_counts, entries, tokens, is_output.view(torch.bool))

    def rows(self, entries: torch.Tensor) -> RowPenalties:
        """Return the kernel's argument for rows with these entries, int32 [R]."""
        return RowPenalties(entries, self.token_counts, self._values)


def _full_size(table: torch.Tensor, num_slots: int) -> torch.Tensor:
    """Return the table with an entry per slot."""
    return table if len(table) == num_slots else table.new_zeros(num_slots, table.shape[1])


def _short_words(params: SamplingParams) -> Ints:
    return np.array([word[0] for word in params.bad_words_token_ids if len(word) == 1], np.int64)


def _has_short_words(params: SamplingParams) -> bool:
    return any(len(word) == 1 for word in params.bad_words_token_ids)


def _joined(parts: Iterable[object]) -> np.ndarray:
    return np.concatenate([np.asarray(part) for part in parts])


def upload(array: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    """Return a copy of the array on the device; on a CPU, the array's own memory.

    The copy is asynchronous, out of pinned memory that torch caches and hands out again only once the copy is done.
    """
    host = torch.from_numpy(array)
    return _pinned(host).to(device, non_blocking=True) if device.type == "cuda" else host


def upload_into(target: torch.Tensor, array: np.ndarray[Any, Any]) -> None:
    """Copy the array into a tensor of the same shape and dtype on any device, asynchronously."""
    host = torch.from_numpy(array)
    target.copy_(_pinned(host) if target.device.type == "cuda" else host, non_blocking=True)


def _pinned(host: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(host, pin_memory=True).copy_(host)
