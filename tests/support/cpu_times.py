"""Compares the CPU times of two calls, on a machine that also runs other programs."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable


def least_ratio(
    few: Callable[[], object], many: Callable[[], object], limit: float, *, least_s: float = 0.0
) -> float:
    """Return how many times as long as `few` `many` takes, by the shortest run of each.

    Cold caches and other programs lengthen runs, so it measures again until the ratio is under the limit, at most 20
    times. Garbage is not collected meanwhile: that takes as long as there are objects of other tests.

    Args:
        least_s: that `few` counts as taking, because shorter times are not measured well.
    """
    few_s = many_s = ratio = float("inf")
    gc.disable()
    try:
        for _ in range(20):
            few_s, many_s = min(few_s, _cpu_s(few)), min(many_s, _cpu_s(many))
            ratio = many_s / max(few_s, least_s)
            if ratio < limit:
                break
    finally:
        gc.enable()
    return ratio


def _cpu_s(call: Callable[[], object]) -> float:
    started = time.thread_time()
    call()
    return time.thread_time() - started
