"""Request tables: what the kernels read of single requests' parameters, on the device, with one entry per slot.

A table is written when a request that needs it is added, by one asynchronous copy each, and never in between: steps
only say which rows use it. Until the first such request it has a single entry, so that the kernels' arguments have the
same types at all times; then it takes its full size at once, and keeps its address. The largest steps that measure
the device's memory use every table.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from argosy_engine.params.sampling_params import (
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)
from argosy_engine.sample.logits_processor.interface import Added, Ints
from argosy_engine.sample.upload import upload, upload_into
from argosy_engine.triton_kernels.penalty_counts import clear_entries, count_tokens
from argosy_engine.triton_kernels.process_logits import RowEdits, RowMasks, RowPenalties

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
        """int32 [E, vocab_size]; see `penalty_counts`."""
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
