"""launch: the one place where our kernels are started, and where launches can be recorded instead.

A recorded launch has the same kernel, arguments and options as a real one, so that what `make gpu-report` compiles
ahead of time, and what the tests count, is what a device would run. Fake CUDA tensors (`FakeTensorMode`) take the place
of real ones there.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

Grid = tuple[int, ...]
Variant = tuple[Hashable, ...]
"""What Triton compiles a kernel for: its name, types, constants, and facts about integers."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch."""

    kernel: Any
    """The function decorated by `triton.jit`."""
    grid: Grid
    arguments: dict[str, Any]
    """Tensors, numbers and compile-time constants by parameter name."""
    num_warps: int
    num_stages: int

    @property
    def name(self) -> str:
        """The kernel's name without a leading underscore."""
        return str(self.kernel.__name__).lstrip("_")

    @property
    def variant(self) -> Variant:
        """Launches of one variant share their code, if their tensors are aligned to 16 bytes alike."""
        interpreted = getattr(self.kernel, "kwargs", {})
        general = (
            getattr(self.kernel, "do_not_specialize", None) or interpreted.get("do_not_specialize") or ()
        )
        return (
            self.name,
            self.num_warps,
            self.num_stages,
            *(_specialization(name, value, name in general) for name, value in self.arguments.items()),
        )


def _specialization(name: str, value: Any, is_general: bool) -> Hashable:
    if isinstance(value, torch.Tensor):
        return value.dtype
    if name.isupper() or value is None:
        return value  # type: ignore[no-any-return] # compile-time constants are numbers and booleans
    if isinstance(value, int) and not is_general:
        return value == 1, value % 16 == 0
    return type(value).__name__


_recorded: ContextVar[list[Launch] | None] = ContextVar("recorded", default=None)
_variants: ContextVar[set[Variant] | None] = ContextVar("variants", default=None)


def launch(kernel: Any, grid: Grid, *, num_warps: int = 4, num_stages: int = 3, **arguments: Any) -> None:
    """Start a kernel on the current device and stream, or record the launch within `recorded_launches`.

    Args:
        grid: programs along each axis; nothing is launched if one of them is 0.
        arguments: the kernel's parameters by name.
    """
    if not all(grid):
        return
    launches = _recorded.get()
    if launches is None:
        kernel[grid](**arguments, num_warps=num_warps, num_stages=num_stages)
        variants = _variants.get()
        if variants is not None:
            variants.add(Launch(kernel, grid, arguments, num_warps, num_stages).variant)
    else:
        launches.append(Launch(kernel, grid, arguments, num_warps, num_stages))


@contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """Record launches into the returned list instead of starting them; outputs are left as they were allocated."""
    launches: list[Launch] = []
    token = _recorded.set(launches)
    try:
        yield launches
    finally:
        _recorded.reset(token)


@contextmanager
def launched_variants() -> Iterator[set[Variant]]:
    """Collect the variants that are started in the returned set."""
    variants: set[Variant] = set()
    token = _variants.set(variants)
    try:
        yield variants
    finally:
        _variants.reset(token)
