"""RepetitionDetector: whether a growing sequence ends in one pattern several times in a row.

A sequence ends in `count` times a pattern of `size` tokens when its last `size * (count - 1)` tokens each equal the
token `size` places before. So for every size the length of the run of such tokens is kept, and a token more costs four
operations on short arrays, whatever the bounds: some microseconds. (vLLM: `check_sequence_repetition`, which compares
anew for every token.)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from argosy_engine.sample.params import RepetitionDetectionParams

_NO_TOKEN = -1


class RepetitionDetector:
    """
    Args:
        params: with a `max_pattern_size` of at least 1.
        token_ids: the sequence so far.
    """

    def __init__(self, params: RepetitionDetectionParams, token_ids: Sequence[int] = ()) -> None:
        self._min_size = max(params.min_pattern_size, 1)
        self._max_size = params.max_pattern_size
        sizes = np.arange(self._min_size, self._max_size + 1)
        self._needed = sizes * (params.min_count - 1)
        self._runs = np.zeros_like(sizes)
        """For each size, how many of the last tokens equal the one `size` places before."""
        self._recent = np.full(4 * self._max_size, _NO_TOKEN, np.int64)
        """The last tokens, newest first, from `_newest` on: so they fill it from its end to its start."""
        self._newest = len(self._recent) - self._max_size
        self._begin(np.array(token_ids[-self._max_size * params.min_count :], np.int64))

    @property
    def is_met(self) -> bool:
        """Whether the sequence ends in such a repetition."""
        return bool((self._runs >= self._needed).any())

    def append(self, token_id: int) -> None:
        if not self._newest:
            self._newest = len(self._recent) - self._max_size
            self._recent[self._newest :] = self._recent[: self._max_size]
        first = self._newest + self._min_size - 1
        self._runs += 1
        self._runs *= self._recent[first : self._newest + self._max_size] == token_id
        self._newest -= 1
        self._recent[self._newest] = token_id

    def _begin(self, tokens: NDArray[np.int64]) -> None:
        """What appending these tokens one by one would have led to."""
        newest_first = tokens[::-1]
        shown = newest_first[: self._max_size]
        self._recent[self._newest : self._newest + len(shown)] = shown
        for index, size in enumerate(range(self._min_size, min(self._max_size + 1, len(tokens)))):
            is_same = newest_first[:-size] == newest_first[size:]
            self._runs[index] = len(is_same) if is_same.all() else is_same.argmin()
