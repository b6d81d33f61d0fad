"""Cache pruning: `argosy models prune --tree`, which keeps a node's cache within its limits.

Owns the rounds and what they print. Must not know what is removed, or how (`argosy_fetcher.store_tree`).
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Final

from argosy.arguments import age_seconds
from argosy.errors import OK, CommandError, UsageError
from argosy.sigterm import ends_at_sigterm
from argosy_fetcher.progress_display import duration_text, size_text
from argosy_fetcher.store_tree import PruneLimits, TreePruned, prune_tree

MIN_AGE_ENV: Final = "ARGOSY_CACHE_MIN_AGE"
_DEFAULT_MIN_AGE: Final = "1h"
_FIRST_WAIT_S: Final = 3600.0


def cache_min_age() -> float:
    """Return the seconds for which a model must not have been used before others may take its place.

    Raises:
        UsageError: the environment's value is no duration.
    """
    value = os.environ.get(MIN_AGE_ENV) or _DEFAULT_MIN_AGE
    try:
        return age_seconds(value)
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"{MIN_AGE_ENV}: {value[:40]!r} {error}") from None


def prune_repeatedly(tree: Path, limits: PruneLimits, *, every_s: float | None) -> int:
    """Prune once, or again and again until SIGTERM. Then the first round removes nothing by age: after a machine was
    off for weeks, those who hold models need a while to start, and the round after it sees who does.

    Raises:
        CommandError: the tree cannot be read.
    """
    with ends_at_sigterm("stopped by SIGTERM"):
        for number in count():
            is_first = every_s is not None and number == 0
            started = time.time()
            try:
                pruned = prune_tree(tree, replace(limits, max_age=None) if is_first else limits)
            except OSError as error:
                raise CommandError(
                    f"cannot read {tree}: {error.strerror or error}; name the directory with --tree that has the "
                    "stores of namespaces"
                ) from error
            _print(pruned, started)
            if every_s is None:
                return OK
            time.sleep(min(every_s, _FIRST_WAIT_S) if is_first else every_s)
    raise AssertionError("the rounds do not end")


def _print(pruned: TreePruned, now: float) -> None:
    for model in pruned.removed:
        unused_for = duration_text(max(0.0, now - model.last_used_at))
        print(f"removed {model} ({size_text(model.size)}, unused for {unused_for})")
    for model in pruned.in_use:
        print(f"{model} is in use and stays")
    for model, reason in pruned.failed:
        print(f"cannot remove {model}: {reason}; check its owner and permissions")
    freed = size_text(sum(model.size for model in pruned.removed))
    print(f"freed {freed}; {size_text(pruned.kept_bytes)} are left", flush=True)
