"""launch: the one place where our kernels are started, and where launches can be recorded instead.

A recorded launch has the same kernel, arguments and options as a real one, so that what `make gpu-report` compiles
ahead of time, and what the tests count, is what a device would run. Fake CUDA tensors (`FakeTensorMode`) take the place
of real ones there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

Grid = tuple[int, ...]


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


_recorded: ContextVar[list[Launch] | None] = ContextVar("recorded", default=None)


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
