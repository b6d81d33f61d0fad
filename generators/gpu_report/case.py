"""Case: one use of a kernel, or of all that a step of a model needs, whose launches are compiled and reported."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from argosy_engine.triton_kernels.launch import DeviceTraits


@dataclass(frozen=True, slots=True)
class Case:
    """One call of a kernel's host function on fake CUDA tensors."""

    label: str
    """Shapes and dtypes, as a reader of the report looks for them."""
    call: Callable[[], object]
    """Creates the arguments and calls the host function; runs under FakeTensorMode, device traits and recording."""
    is_sampled: bool = False
    """Whether `make test` compiles it too."""
    is_step: bool = False
    """Whether `call` is of many kernels, does all that by itself and returns the launches."""


Cases = Callable[[DeviceTraits], Iterator[Case]]
"""Yields every configuration that the host function can choose on a device."""
