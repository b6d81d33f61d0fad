"""Finds grammars whose steps take too long, by taking some steps where it does not matter.

The time of a step depends on the grammar and on where the output stands in it, so a probe proves nothing; it refuses
what is slow from the start, as most of those grammars are. The rest meet `BoundedThread`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar

MAX_STEP_S = 0.1
"""CPU time of filling a mask or accepting a token. Usual grammars take microseconds, unusual ones milliseconds."""
MAX_PROBE_S = 1.0
NUM_STEPS = 16
"""Of each walk."""


class TooSlow(ValueError):
    """A step of the grammar takes too long."""


def check_steps(
    grammar: CompiledGrammar,
    token_lengths: NDArray[np.int64],
    cpu_time: Callable[[], float] = time.thread_time,
) -> None:
    """Walks through the grammar, twice by the shortest tokens that it allows and once by random ones.

    Args:
        token_lengths: bytes of each token of the vocabulary; 0 for those that are no text.

    Raises:
        TooSlow: a step took more than `MAX_STEP_S`.
    """
    from xgrammar import GrammarMatcher

    bitmask = np.zeros((1, -(-len(token_lengths) // 32)), np.int32)
    ends = cpu_time() + MAX_PROBE_S
    choice = random.Random(0)  # noqa: S311 (the same walk for the same grammar)
    for is_short in (True, True, False):
        matcher = GrammarMatcher(grammar)
        for _ in range(NUM_STEPS):
            started = cpu_time()
            matcher.fill_next_token_bitmask(bitmask, 0)
            filled = cpu_time()
            _check(filled - started)
            token_id = _choose(bitmask, token_lengths, choice, is_short)
            if token_id is None or filled > ends:
                break
            started = cpu_time()
            matcher.accept_token(token_id)
            _check(cpu_time() - started)


def _check(seconds: float) -> None:
    if seconds > MAX_STEP_S:
        raise TooSlow(
            f"a single step takes {seconds:.2f} s, more than {MAX_STEP_S:g} s: "
            "make the grammar less ambiguous, with fewer parts that can match the same text"
        )


def _choose(
    bitmask: NDArray[np.int32], lengths: NDArray[np.int64], choice: random.Random, is_short: bool
) -> int | None:
    """A token that the mask allows and that is text."""
    allowed = np.flatnonzero(np.unpackbits(bitmask[0].view(np.uint8), bitorder="little")[: len(lengths)])
    allowed = allowed[lengths[allowed] > 0]
    if not len(allowed):
        return None
    if is_short:
        allowed = allowed[lengths[allowed] == lengths[allowed].min()]
    return int(allowed[choice.randrange(len(allowed))])
