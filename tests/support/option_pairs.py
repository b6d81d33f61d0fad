"""Combinations of options in which every two values of two options meet: few, where their product would be many."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest

Pair = tuple[tuple[str, int], tuple[str, int]]


def covering(options: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return combinations with one value of each option, the same ones every time.

    Each starts with a pair that none has yet, and takes of every other option the value that adds the most pairs.
    """
    missing: dict[Pair, None] = {}
    for first, second in itertools.combinations(options, 2):
        for values in itertools.product(range(len(options[first])), range(len(options[second]))):
            missing[(first, values[0]), (second, values[1])] = None
    combinations = []
    while missing:
        chosen = dict(next(iter(missing)))
        for name in options:
            if name not in chosen:
                chosen[name] = max(
                    range(len(options[name])),
                    key=lambda value: len(_pairs(options, chosen | {name: value}) & missing.keys()),
                )
        for pair in _pairs(options, chosen):
            missing.pop(pair, None)
        combinations.append({name: options[name][chosen[name]] for name in options})
    return combinations


def each_once(first: Iterable[Any], second: Iterable[Any]) -> list[Any]:
    """Return parameters for the product of two options. Every test run tries each value of both at least once, and
    `make full` the rest."""
    one, other = list(first), list(second)
    chosen = {(row % len(one), row % len(other)) for row in range(max(len(one), len(other)))}
    return [
        pytest.param(a, b, marks=() if (i, j) in chosen else pytest.mark.full)
        for i, a in enumerate(one)
        for j, b in enumerate(other)
    ]


def _pairs(options: Mapping[str, Sequence[Any]], chosen: Mapping[str, int]) -> set[Pair]:
    ordered = [(name, chosen[name]) for name in options if name in chosen]
    return {(first, second) for first, second in itertools.combinations(ordered, 2)}
