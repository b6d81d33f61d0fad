"""What compiled parts of layers launch: counted in the code that Inductor generates for an H100, without one."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from part_launches import launches


@pytest.fixture(scope="module")
def counting_process() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as executor:
        yield executor


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_compiled_parts_launch_as_many_kernels_as_ours(
    kind: str, counting_process: ProcessPoolExecutor, tmp_path: Path
) -> None:
    found = sorted(counting_process.submit(launches, kind, tmp_path).result())
    assert dict(zip(("project", "feed_forward"), found, strict=True)) == {
        "project": (2, 2),
        "feed_forward": (4, 4),
    }


def test_norms_without_a_kernel_of_ours_are_joined_with_the_addition_before_them(
    counting_process: ProcessPoolExecutor, tmp_path: Path
) -> None:
    assert sorted(counting_process.submit(launches, "gpt2", tmp_path).result()) == [(3, 2), (5, 4)]
