"""RepetitionDetector: detects that a growing sequence ends in several repetitions of one pattern.

A sequence ends in `count` repetitions of a pattern of `size` tokens if each of its last `size * (count - 1)` tokens
equals the token `size` positions before. The detector keeps, for every size, the length of the run of such tokens, so
that appending a token costs a few operations on short arrays (some microseconds), however long the sequence is. (vLLM's
`check_sequence_repetition` compares the whole patterns again for every token.)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from argosy_engine.params.sampling_params import RepetitionDetectionParams

_NO_TOKEN = -1


class RepetitionDetector:
    """Detector for one growing sequence.

    Args:
        params: bounds of the pattern; `max_pattern_size` is at least 1.
        token_ids: the sequence so far.
    """

    def __init__(self, params: RepetitionDetectionParams, token_ids: Sequence[int] = ()) -> None:
        self._min_size = max(params.min_pattern_size, 1)
        self._max_size = params.max_pattern_size
        sizes = np.arange(self._min_size, self._max_size + 1)
        self._needed = sizes * (params.min_count - 1)
        self._runs = np.zeros_like(sizes)
        """For each pattern size, how many of the last tokens in a row equal the token `size` positions before."""
        self._recent = np.full(4 * self._max_size, _NO_TOKEN, np.int64)
        """The last tokens, newest first, starting at `_newest`; the buffer fills from its end to its start."""
        self._newest = len(self._recent) - self._max_size
        self._begin(np.array(token_ids[-self._max_size * params.min_count :], np.int64))

    @property
    def is_met(self) -> bool:
        """Whether the sequence ends in a repetition within the bounds of the parameters."""
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
        """Set the state that appending these tokens one by one would have led to."""
        newest_first = tokens[::-1]
        shown = newest_first[: self._max_size]
        self._recent[self._newest : self._newest + len(shown)] = shown
        for index, size in enumerate(range(self._min_size, min(self._max_size + 1, len(tokens)))):
            is_same = newest_first[:-size] == newest_first[size:]
            self._runs[index] = len(is_same) if is_same.all() else is_same.argmin()
