"""Step probe: detects grammars whose steps take too long, by running some steps in the compiling process.

The duration of a step depends on the grammar and on the position in it, so a probe proves nothing. It rejects grammars
that are slow from the start, as most slow ones are; `BoundedThread` handles the rest.
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
"""Limit on the CPU time of filling a bitmask or accepting a token. Usual grammars take microseconds, unusual ones
milliseconds."""
MAX_PROBE_S = 1.0
"""CPU time after which the probe takes no more steps."""
NUM_STEPS = 16
"""Maximum number of steps per walk."""


class TooSlow(ValueError):
    """Raised if a step of a grammar takes too long."""


def check_steps(
    grammar: CompiledGrammar,
    token_lengths: NDArray[np.int64],
    cpu_time: Callable[[], float] = time.thread_time,
) -> None:
    """Walk through the grammar, twice with the shortest tokens that it allows and once with random ones.

    Args:
        token_lengths: int64 [vocab_size], bytes of each token; 0 for tokens that are not text.
        cpu_time: returns the thread's CPU time in seconds.

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
    """Choose a text token that the bitmask allows, or None if there is none."""
    allowed = np.flatnonzero(np.unpackbits(bitmask[0].view(np.uint8), bitorder="little")[: len(lengths)])
    allowed = allowed[lengths[allowed] > 0]
    if not len(allowed):
        return None
    if is_short:
        allowed = allowed[lengths[allowed] == lengths[allowed].min()]
    return int(allowed[choice.randrange(len(allowed))])
