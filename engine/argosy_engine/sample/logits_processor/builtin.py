"""The sampler's built-in logits processors (see `interface`).

Each keeps flat arrays over all live requests that use it, rebuilt when one comes or leaves. While no live request uses
a processor, it is falsy and `apply` is not called.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from argosy_engine.params.sampling_params import SamplingParams
from argosy_engine.sample.logits_processor.interface import BatchUpdate, Ints, LogitsProcessor, Rows

_UNLIKELY = -1e30
"""Never sampled unless every other token is masked out with minus infinity."""


class _SlotTokens:
    """(slot, token, value) triples of all live requests as parallel arrays, rebuilt when one comes or leaves."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[Ints, NDArray[np.float32]]] = {}
        self._arrays: tuple[Ints, Ints, NDArray[np.float32]] | None = None

    def __bool__(self) -> bool:
        return bool(self._entries)

    def remove(self, slots: Iterable[int]) -> None:
        for slot in slots:
            if self._entries.pop(slot, None) is not None:
                self._arrays = None

    def add(self, slot: int, tokens: Iterable[int], values: Iterable[float] | float) -> None:
        ids = np.fromiter(tokens, np.int64)
        self._entries[slot] = ids, np.broadcast_to(np.asarray(values, np.float32), ids.shape)
        self._arrays = None

    @property
    def arrays(self) -> tuple[Ints, Ints, NDArray[np.float32]]:
        """Slots, tokens and values of all triples. Requires at least one entry."""
        if self._arrays is None:
            tokens, values = zip(*self._entries.values(), strict=True)
            slots = np.repeat(np.fromiter(self._entries, np.int64), [len(ids) for ids in tokens])
            self._arrays = slots, np.concatenate(tokens), np.concatenate(values)
        return self._arrays


class AllowedTokenIds(LogitsProcessor):
    """Masks out all tokens except a request's `allowed_token_ids`."""

    def __init__(self) -> None:
        self._tokens = _SlotTokens()

    @classmethod
    def is_used_by(cls, params: SamplingParams) -> bool:
        return params.allowed_token_ids is not None

    def __bool__(self) -> bool:
        return bool(self._tokens)

    def update_state(self, update: BatchUpdate) -> None:
        self._tokens.remove(update.removed)
        for slot, params, _, _ in update.added:
            if self.is_used_by(params):
                self._tokens.add(slot, sorted(set(params.allowed_token_ids or ())), 0.0)

    def apply(self, logits: torch.Tensor, rows: Rows) -> None:
        slots, tokens, _ = self._tokens.arrays
        index = rows.of_slot[slots]
        present = index >= 0
        if present.any():
            row, token = _pairs(index[present], tokens[present], logits.device)
            kept = logits[row, token]
            logits[row] = float("-inf")
            logits[row, token] = kept


class MinTokens(LogitsProcessor):
    """Suppresses EOS and stop ids until a request has `min_tokens` output tokens.

    They stay possible where nothing else is, as after a grammar's last token.
    """

    def __init__(self, eos_token_ids: Iterable[int]) -> None:
        self._eos_token_ids = tuple(eos_token_ids)
        self._tokens = _SlotTokens()
        """The values are the first positions at which the token is allowed."""

    @classmethod
    def is_used_by(cls, params: SamplingParams) -> bool:
        return params.min_tokens > 0

    def __bool__(self) -> bool:
        return bool(self._tokens)

    def update_state(self, update: BatchUpdate) -> None:
        self._tokens.remove(update.removed)
        for slot, params, _, num_prompt in update.added:
            ids = {*self._eos_token_ids, *params.stop_token_ids}
            if self.is_used_by(params) and ids:
                self._tokens.add(slot, ids, float(num_prompt + params.min_tokens))

    def apply(self, logits: torch.Tensor, rows: Rows) -> None:
        slots, tokens, first_free = self._tokens.arrays
        index = rows.of_slot[slots]
        blocked = (index >= 0) & (rows.position_of_slot[slots] < first_free)
        if blocked.any():
            row, token = _pairs(index[blocked], tokens[blocked], logits.device)
            logits[row, token] = logits[row, token].clamp(max=_UNLIKELY)


class LogitBias(LogitsProcessor):
    """Adds each token's `logit_bias` to its logit."""

    def __init__(self) -> None:
        self._tokens = _SlotTokens()

    @classmethod
    def is_used_by(cls, params: SamplingParams) -> bool:
        return bool(params.logit_bias)

    def __bool__(self) -> bool:
        return bool(self._tokens)

    def update_state(self, update: BatchUpdate) -> None:
        self._tokens.remove(update.removed)
        for slot, params, _, _ in update.added:
            if params.logit_bias:
                self._tokens.add(slot, params.logit_bias, list(params.logit_bias.values()))

    def apply(self, logits: torch.Tensor, rows: Rows) -> None:
        slots, tokens, biases = self._tokens.arrays
        index = rows.of_slot[slots]
        present = index >= 0
        if present.any():
            row, token = _pairs(index[present], tokens[present], logits.device)
            logits[row, token] += torch.from_numpy(biases[present]).to(logits.device)


class BadWords(LogitsProcessor):
    """Masks out the last token of a bad word where the output ends with the word's preceding tokens.

    Args:
        token_ids: int32 [num_slots, max_len], every request's tokens so far; the owner keeps it up to date.
        shortest: length of the shortest words to look at; the owner bans shorter ones by other means.
    """

    reads_tokens = True

    def __init__(self, token_ids: NDArray[np.int32], shortest: int = 1) -> None:
        self._token_ids = token_ids
        self._shortest = shortest
        self._words: dict[int, list[tuple[int, ...]]] = {}
        self._first_output: dict[int, int] = {}
        self._join()

    @classmethod
    def is_used_by(cls, params: SamplingParams) -> bool:
        return bool(params.bad_words_token_ids)

    def __bool__(self) -> bool:
        return bool(self._words)

    def update_state(self, update: BatchUpdate) -> None:
        gone = [self._words.pop(slot, None) is not None for slot in update.removed]
        has_come = False
        for slot, params, _, num_prompt in update.added:
            words = [word for word in params.bad_words_token_ids if len(word) >= self._shortest]
            if words:
                self._words[slot] = words
                self._first_output[slot] = num_prompt
                has_come = True
        if any(gone) or has_come:
            self._join()

    def _join(self) -> None:
        """Rebuild the flat arrays over all words. Prefixes are right-aligned and padded with -1, a wildcard."""
        words = [(slot, word) for slot, words in self._words.items() for word in words]
        width = max((len(word) - 1 for _, word in words), default=0)
        self._slots = np.array([slot for slot, _ in words], np.int64)
        self._last = np.array([word[-1] for _, word in words], np.int64)
        self._lengths = np.array([len(word) - 1 for _, word in words], np.int64)
        self._starts = np.array([self._first_output[slot] for slot, _ in words], np.int64)
        self._prefixes = np.full((len(words), width), -1, np.int64)
        for index, (_, word) in enumerate(words):
            self._prefixes[index, width - len(word) + 1 :] = word[:-1]

    def apply(self, logits: torch.Tensor, rows: Rows) -> None:
        index = rows.of_slot[self._slots]
        positions = rows.position_of_slot[self._slots]
        # Only output tokens count: the model may complete a bad word that begins in the prompt.
        candidates = np.flatnonzero((index >= 0) & (positions - self._lengths >= self._starts))
        if not len(candidates):
            return
        width = self._prefixes.shape[1]
        columns = positions[candidates, None] - width + np.arange(width)
        recent = self._token_ids[self._slots[candidates, None], np.maximum(columns, 0)]
        prefixes = self._prefixes[candidates]
        matches = candidates[((prefixes < 0) | (recent == prefixes)).all(axis=1)]
        if len(matches):
            row, token = _pairs(index[matches], self._last[matches], logits.device)
            logits[row, token] = float("-inf")


def _pairs(rows: Ints, tokens: Ints, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(rows).to(device), torch.from_numpy(tokens).to(device)
