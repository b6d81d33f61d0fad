"""Levels of sleep, which client and core check."""

from __future__ import annotations

from argosy_engine.errors import UtilityFailed

LEVELS = (1, 2)


def check_level(level: int) -> None:
    """
    Raises:
        UtilityFailed: the level does not exist.
    """
    if level not in LEVELS:
        raise UtilityFailed(f"there is no sleep level {level}; there are {LEVELS[0]} and {LEVELS[1]}")
