"""Kernels that are started by the driver: it is asked for the same, byte for byte, as by Triton's launcher."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

import direct_starts
from gpu_report.cases import ALL_CASES

MAX_CALLS_PER_LAYER = 180
"""Functions that a step enters per layer, of torch, Python and C, without matrix products. It only ever gets lower."""


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[..., Any]]:
    """Call a function in one process with a driver that starts nothing, where kernels are not interpreted."""
    interprets = os.environ.pop("TRITON_INTERPRET", None)
    try:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as executor:
            yield lambda function, *arguments: executor.submit(function, *arguments).result()
    finally:
        if interprets is not None:
            os.environ["TRITON_INTERPRET"] = interprets


@pytest.mark.parametrize("module", ALL_CASES)
def test_the_driver_is_asked_for_the_same(module: str, run: Callable[..., Any]) -> None:
    counts = run(direct_starts.compare_module, module)
    assert counts["direct"] == counts["launches"] > 0


def test_what_was_compiled_is_started_directly_from_then_on(run: Callable[..., Any]) -> None:
    found = run(direct_starts.known_and_unknown)
    is_taken = {name: starts[1] for name, starts in found.items()}
    assert is_taken == {name: name != "a boolean" for name in found}
    already_known = ["nothing", "a parameter of torch"]
    assert [name for name, starts in found.items() if starts[0]] == already_known


def test_values_that_change_are_passed_anew(run: Callable[..., Any]) -> None:
    grid, pointers, integers, (factor,) = run(direct_starts.values)
    assert grid == ((4, 5, 6), (32, 1, 1), 0)
    assert pointers == (True, True)
    assert integers == (-3, 1 << 40, 2)
    assert factor == pytest.approx(0.1)


def test_what_is_not_certain_to_be_the_same_is_left_to_triton(run: Callable[..., Any]) -> None:
    found = run(direct_starts.refusals)
    assert found.pop("no scratch") == ([False, True, True], "")
    assert [starts for starts, _ in found.values()] == [[False] * 3] * len(found)
    assert {name: reason.split(" rather")[0] for name, (_, reason) in found.items()} == {
        "clusters": "2 blocks per cluster, 8192 bytes of shared memory, warps of 32",
        "a cooperative grid": "launch_cooperative_grid is True",
        "programmatic launches": "launch_pdl is True",
        "scratch space": "profile_scratch_size is 8",
        "much shared memory": "1 blocks per cluster, 233472 bytes of shared memory, warps of 32",
        "instruments": "it is instrumented: x",
        "a parameter more": "its parameters take [8, 8, 4, 8, 4, 4, 8, 8, 4] bytes",
        "many more": "its parameters take [8, 8, 4, 8, 4, 4, 8, 8, 8, 8, 8] bytes",
    }


def test_contexts_profilers_and_wrong_addresses_are_noticed(run: Callable[..., Any]) -> None:
    assert run(direct_starts.surroundings) == {
        "no context": [False, False],
        "another context": [False, True],
        "a profiler": [False],
        "none again": [True],
        "at last": [True],
    }


def test_a_start_checks_the_launches_and_says_the_outcome(run: Callable[..., Any]) -> None:
    assert run(direct_starts.start_up, True) == (True, "kernels are started by the CUDA driver directly")
    is_direct, said = run(direct_starts.start_up, False)
    assert not is_direct
    assert said.startswith(
        "kernels are started by Triton's launcher, which takes the host longer: a kernel wrote [0.0,"
    )
    assert run(direct_starts.without_compiler) == (
        False,
        "kernels are started by Triton's launcher, which takes the host longer: Failed to find C compiler.",
    )


def test_a_layer_costs_the_host_few_calls(run: Callable[..., Any]) -> None:
    """Of time, `bench/engine/gpu_host.py` tells; this is what can't vary."""
    found, by_triton = run(direct_starts.step_counts, True), run(direct_starts.step_counts, False)
    assert {name: launches for name, (launches, _) in found.items()} == {"decode": 6, "mixed": 5}
    assert {name: launches for name, (launches, _) in by_triton.items()} == {"decode": 6, "mixed": 5}
    for name, (_, calls) in found.items():
        assert calls <= MAX_CALLS_PER_LAYER
        assert 2 * calls <= by_triton[name][1]
