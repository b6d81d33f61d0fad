"""Launches find the kernel that was compiled for arguments like theirs, and ask Triton for any others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from argosy_engine.triton_kernels import launch as launching
from argosy_engine.triton_kernels.launch import launch


class Kernel:
    """Stands in for a function decorated by `triton.jit`, with parameters x_ptr, size, num_rows and BLOCK."""

    params = (
        SimpleNamespace(name="x_ptr", is_constexpr=False, do_not_specialize=False),
        SimpleNamespace(name="size", is_constexpr=False, do_not_specialize=False),
        SimpleNamespace(name="num_rows", is_constexpr=False, do_not_specialize=True),
        SimpleNamespace(name="BLOCK", is_constexpr=True, do_not_specialize=False),
    )

    def __init__(self) -> None:
        self.compiled: list[dict[str, Any]] = []
        self.started: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(**arguments: Any) -> Any:
            self.compiled.append(arguments)
            return self.Compiled(self)

        return run

    class Compiled:
        def __init__(self, kernel: Kernel) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *values: self.kernel.started.append((grid, *values))


X = torch.zeros(64)
ARGUMENTS = {"x_ptr": X, "size": 64, "num_rows": 3, "BLOCK": 128}


@pytest.fixture
def kernel() -> Kernel:
    kernel = Kernel()
    launch(kernel, (2,), **ARGUMENTS)
    return kernel


@pytest.mark.parametrize(
    "changes",
    [{}, {"x_ptr": torch.ones(64)}, {"x_ptr": X[4:]}, {"num_rows": 17}, {"num_rows": 1}],
    ids=["nothing", "another tensor", "another aligned address", "an open integer", "an open one"],
)
def test_the_compiled_kernel_is_started_with_values_in_the_order_of_its_parameters(
    kernel: Kernel, changes: dict[str, Any]
) -> None:
    arguments = ARGUMENTS | changes
    launch(kernel, (4, 2), **dict(reversed(arguments.items())))
    assert len(kernel.compiled) == 1
    ((grid, *values),) = kernel.started
    assert grid == (4, 2, 1)
    assert all(found is wanted for found, wanted in zip(values, arguments.values(), strict=True))


@pytest.mark.parametrize(
    "changes",
    [
        {"x_ptr": X.half()}, {"x_ptr": X[1:]}, {"x_ptr": None}, {"size": 65}, {"size": 1}, {"size": 1 << 31},
        {"num_rows": 1 << 31}, {"BLOCK": 256}, {"num_warps": 8}, {"num_stages": 1},
    ],
    ids=str,
)  # fmt: skip
def test_what_triton_compiles_anew_is_left_to_it(kernel: Kernel, changes: dict[str, Any]) -> None:
    launch(kernel, (2,), **ARGUMENTS | changes)
    assert len(kernel.compiled) == 2
    assert not kernel.started


def test_kernels_have_compiled_forms_of_their_own(kernel: Kernel) -> None:
    other = Kernel()
    launch(other, (2,), **ARGUMENTS)
    assert (len(kernel.compiled), len(other.compiled)) == (1, 1)


def test_numbers_that_never_come_again_do_not_pile_up(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "MAX_COMPILED", 4)
    for size in range(100, 120):
        launch(kernel, (2,), **ARGUMENTS | {"size": size})
    launch(kernel, (2,), **ARGUMENTS | {"size": 119})
    assert len(kernel.compiled) == 21
    assert len(kernel.started) == 1


def test_nothing_is_started_without_programs(kernel: Kernel) -> None:
    launch(kernel, (0, 4), **ARGUMENTS)
    assert (len(kernel.compiled), len(kernel.started)) == (1, 0)
