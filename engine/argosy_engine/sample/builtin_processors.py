"""The sampler's built-in logits processors, and the isolation of custom ones (see `logits_processor`).

Each keeps flat arrays over all live requests that use it, rebuilt when one comes or leaves. While no live request uses
a processor, it is falsy and `apply` is not called.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from argosy_engine.errors import ConfigError
from argosy_engine.params import SamplingParams, ThinkingMarks
from argosy_engine.sample.logits_processor import (
    Added,
    BatchUpdate,
    Ints,
    LogitsProcessor,
    ProcessorConfig,
    Rows,
)

logger = logging.getLogger("argosy.worker")

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


_INITIAL_WIDTH = 256


class Penalties(LogitsProcessor):
    """Repetition, frequency and presence penalties. The tables grow with the number of requests that use penalties.

    A penalty affects only tokens that occur in the request. Each request with penalties has a list of its distinct
    tokens with their counts in the output, and a step gathers, changes and scatters only those logits, so the work
    grows with the sequence length and not with the vocabulary. All operations run on the logits' device, and nothing is
    read back.

    Args:
        num_slots: maximum number of live requests.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._device = device
        self._entry_of_slot = np.full(num_slots, -1, np.int64)
        self._free: list[int] = []
        self._num_live = 0
        self._bound = np.zeros(0, np.int64)
        """Upper bound of the distinct tokens per entry; the exact number is on the device only."""
        self._ids = torch.zeros(0, _INITIAL_WIDTH, dtype=torch.int64, device=device)
        self._counts = torch.zeros(0, _INITIAL_WIDTH, dtype=torch.float32, device=device)
        self._num_distinct = torch.zeros(0, dtype=torch.int64, device=device)
        self._penalties = torch.zeros(0, 3, dtype=torch.float32, device=device)
        """Per entry: repetition, frequency, presence."""

    @classmethod
    def is_used_by(cls, params: SamplingParams) -> bool:
        return params.has_penalties

    def __bool__(self) -> bool:
        return self._num_live > 0

    def update_state(self, update: BatchUpdate) -> None:
        for slot in update.removed:
            entry = int(self._entry_of_slot[slot])
            if entry >= 0:
                self._entry_of_slot[slot] = -1
                self._free.append(entry)
                self._num_live -= 1
        for added in update.added:
            if self.is_used_by(added.params):
                self._add(added)

    def _add(self, added: Added) -> None:
        slot, params, token_ids, num_prompt = added
        ids, inverse = np.unique(np.asarray(token_ids, np.int64), return_inverse=True)
        counts = np.bincount(inverse.reshape(-1)[num_prompt:], minlength=len(ids))
        if not self._free:
            self._grow_entries()
        self._grow_width(len(ids) + 1)
        entry = self._free.pop()
        self._entry_of_slot[slot] = entry
        self._num_live += 1
        self._bound[entry] = len(ids)
        self._ids[entry, : len(ids)] = torch.from_numpy(ids).to(self._device)
        self._counts[entry, : len(ids)] = torch.from_numpy(counts.astype(np.float32)).to(self._device)
        self._num_distinct[entry] = len(ids)
        self._penalties[entry] = torch.tensor(
            [params.repetition_penalty, params.frequency_penalty, params.presence_penalty],
            device=self._device,
        )

    def apply(self, logits: torch.Tensor, rows: Rows) -> None:
        row_index, entry_index = self._present(rows)
        if not len(row_index):
            return
        row, entry = (torch.from_numpy(index).to(self._device) for index in (row_index, entry_index))
        width = max(int(self._bound[entry_index].max()), 1)
        column = torch.arange(width, device=self._device).expand(len(row_index), width)
        # Pad with the first distinct token: writing the same value twice changes nothing.
        column = torch.where(column < self._num_distinct[entry].unsqueeze(1), column, 0)
        ids = self._ids[entry].gather(1, column)
        counts = self._counts[entry].gather(1, column)
        repetition, frequency, presence = self._penalties[entry].unsqueeze(2).unbind(1)
        values = logits[row.unsqueeze(1), ids]
        values = torch.where(values > 0, values / repetition, values * repetition)
        values = values - frequency * counts - presence * (counts > 0)
        logits[row.unsqueeze(1), ids] = values

    def observe(self, rows: Rows, tokens: torch.Tensor) -> None:
        """Count the tokens [R] sampled for the rows."""
        row_index, entry_index = self._present(rows)
        if not len(row_index):
            return
        width = int(self._bound[entry_index].max())
        self._grow_width(width + 1)
        entry = torch.from_numpy(entry_index).to(self._device)
        token = tokens[torch.from_numpy(row_index).to(self._device)]
        is_known = torch.arange(width, device=self._device) < self._num_distinct[entry].unsqueeze(1)
        is_same = (self._ids[entry, :width] == token.unsqueeze(1)) & is_known
        was_seen = is_same.any(1)
        column = torch.where(was_seen, is_same.int().argmax(1), self._num_distinct[entry])
        self._counts[entry, column] = torch.where(was_seen, self._counts[entry, column] + 1.0, 1.0)
        self._ids[entry, column] = token
        self._num_distinct[entry] += (~was_seen).long()
        self._bound[entry_index] += 1

    def _present(self, rows: Rows) -> tuple[Ints, Ints]:
        """Return the rows that have penalties, and their entries."""
        entries = self._entry_of_slot[rows.slots]
        index = np.flatnonzero(entries >= 0)
        return index, entries[index]

    def _grow_entries(self) -> None:
        old, new = len(self._bound), max(2 * len(self._bound), 8)
        self._free.extend(range(new - 1, old - 1, -1))
        self._bound = np.concatenate([self._bound, np.zeros(new - old, np.int64)])
        for name in ("_ids", "_counts", "_num_distinct", "_penalties"):
            tensor = getattr(self, name)
            setattr(self, name, torch.cat([tensor, tensor.new_zeros(new - old, *tensor.shape[1:])]))

    def _grow_width(self, width: int) -> None:
        old = self._ids.shape[1]
        if width > old:
            extra = max(old, width - old)
            self._ids = torch.nn.functional.pad(self._ids, (0, extra))
            self._counts = torch.nn.functional.pad(self._counts, (0, extra))


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
    """Allows only the next token of a think block's end, once the block has as many tokens as the request's budget, as
    vLLM does. What is forced is a function of the request's tokens, so that it is the same after a preemption, for
    drafts, and in an engine that continues another one's stream.

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


class IsolatedProcessor:
    """Wrapper that the sampler calls in place of a custom processor: its exceptions fail only the requests that use it.

    The processor works on a copy of the rows that use it. If `apply` raises, it is retried with each row alone, and the
    requests whose rows raise again fail. If `update_state` raises for a request, that request fails. Endless loops,
    device faults and crashes of native code are not contained.

    Raises (from the constructor):
        ConfigError: the processor's own constructor failed.
    """

    def __init__(self, kind: type[LogitsProcessor], config: ProcessorConfig) -> None:
        self._name = kind.__qualname__
        self._kind = kind
        try:
            self._processor = kind(config)  # type: ignore[call-arg]
        except Exception as error:
            logger.exception("constructing logits processor %s failed", self._name)
            raise ConfigError(
                f"--logits-processors: {self._name}(config) raised {type(error).__name__}: {error}"
            ) from error
        self.reads_tokens = kind.reads_tokens
        self._users: set[int] = set()
        self.failures: dict[int, str] = {}
        """Maps the slot of each failed request to the reason."""

    def __bool__(self) -> bool:
        return bool(self._users)

    def update_state(self, update: BatchUpdate) -> None:
        for slot in update.removed:
            self.failures.pop(slot, None)
            if slot in self._users:
                self._users.remove(slot)
                self._tell(BatchUpdate(removed=[slot]))
        for added in update.added:
            if self._is_used_by(added):
                # One by one, so that an exception can be attributed to one request.
                if self._tell(BatchUpdate(added=[added])):
                    self._users.add(added.slot)
                else:
                    self._fail(added.slot)

    def apply(self, logits: torch.Tensor, rows: Rows) -> None:
        index = np.flatnonzero(
            [slot in self._users and slot not in self.failures for slot in rows.slots.tolist()]
        )
        if not len(index) or self._try(logits, rows, index):
            return
        for row in index:
            if not self._try(logits, rows, np.array([row])):
                self._fail(int(rows.slots[row]))

    def _try(self, logits: torch.Tensor, rows: Rows, index: Ints) -> bool:
        """Apply the processor to some of the rows. If it raises, return False and leave the logits unchanged."""
        chosen = torch.from_numpy(index).to(logits.device)
        changed = logits[chosen]
        try:
            self._processor.apply(changed, rows.take(index))
        except Exception:
            logger.exception("logits processor %s failed in apply", self._name)
            return False
        logits[chosen] = changed
        return True

    def _is_used_by(self, added: Added) -> bool:
        """Whether a request uses the processor. If `is_used_by` raises, fail the request and return False."""
        try:
            return bool(self._kind.is_used_by(added.params))
        except Exception:
            logger.exception("logits processor %s failed in is_used_by", self._name)
            self._fail(added.slot)
            return False

    def _tell(self, update: BatchUpdate) -> bool:
        try:
            self._processor.update_state(update)
        except Exception:
            logger.exception("logits processor %s failed in update_state", self._name)
            return False
        return True

    def _fail(self, slot: int) -> None:
        self.failures[slot] = f"logits processor {self._name} failed on this request"
