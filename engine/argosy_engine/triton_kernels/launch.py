"""launch: the one place where our kernels are started, and where launches can be recorded instead. DeviceTraits: what
the choice of a kernel's configuration depends on.

A recorded launch has the same kernel, arguments and options as a real one, so that what `make gpu-report` compiles
ahead of time, and what the tests count, is what a device would run. Fake CUDA tensors (`FakeTensorMode`) take the place
of real ones there.

Triton takes longer to find the compiled kernel of a launch than many kernels take to run. So it is asked once for each
set of facts about the arguments that it compiles for, and later launches find the compiled kernel here. Where
`direct_launch` has found that it can, it starts them by the driver, without Triton's launcher.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch


def cdiv(x: int, y: int) -> int:
    """Return x / y, rounded up. (Triton's `cdiv`, which kernels can call as well, takes the host much longer.)"""
    return -(-x // y)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of 2 that is at least n, which is 1 or more."""
    return 1 << (n - 1).bit_length()


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
_num_observers = 0
"""Of all threads: unless there are any, launches need not look at these two."""
_observer_lock = threading.Lock()


def launch(kernel: Any, grid: Grid, *, num_warps: int = 4, num_stages: int = 3, **arguments: Any) -> None:
    """Start a kernel on the current device and stream, or record the launch within `recorded_launches`.

    Args:
        grid: programs along each axis; nothing is launched if one of them is 0.
        arguments: the kernel's parameters by name.
    """
    if not _num_observers:  # nearly always: this is in the way of every launch
        if all(grid):
            start_kernel(kernel, grid, num_warps, num_stages, arguments)
        return
    if not all(grid):
        return
    launches = _recorded.get()
    if launches is not None:
        launches.append(Launch(kernel, grid, arguments, num_warps, num_stages))
        return
    start_kernel(kernel, grid, num_warps, num_stages, arguments)
    variants = _variants.get()
    if variants is not None:
        variants.add(Launch(kernel, grid, arguments, num_warps, num_stages).variant)


_compiled: dict[Hashable, Any] = {}
"""Compiled kernels, by what decides their code, or more than that."""
MAX_COMPILED = 8192
"""Where integers take ever new values, the dictionary starts anew."""


class DirectLaunches(Protocol):
    """Starts compiled kernels without Triton's launcher (`direct_launch.Direct`)."""

    def kernel(self, params: Any) -> Any:
        """Make what `start` and `learn` of a kernel are asked of."""
        ...

    def learn(self, kernel: Any, key: bytes, compiled: Any) -> None:
        """Take up what Triton has compiled for arguments of a key."""
        ...


_direct: DirectLaunches | None = None


class _Known:
    """What does not change between launches of a function decorated by `triton.jit`, or of an interpreted one."""

    __slots__ = ("direct", "general", "kernel", "names")

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        params = getattr(kernel, "params", None)
        self.names: tuple[str, ...] | None = None
        """Of its parameters; None: it is interpreted."""
        self.direct: Any = None
        """The `Kernel` of `driver_launch.c`; None: Triton starts it."""
        if params is not None:
            self.names = tuple(each.name for each in params)
            self.general = tuple(position for position, each in enumerate(params) if each.do_not_specialize)
            """Positions of parameters whose values Triton leaves open."""
            if _direct is not None:
                self.direct = _direct.kernel(params)


_known: dict[int, _Known] = {}
"""By id: to hash such a function takes longer."""


def set_direct(direct: DirectLaunches | None) -> None:
    """Start compiled kernels by this from now on; None: by Triton's launcher."""
    global _direct
    _direct = direct
    _known.clear()
    _compiled.clear()  # its keys have the ids of what was known


def start_kernel(kernel: Any, grid: Grid, num_warps: int, num_stages: int, arguments: dict[str, Any]) -> bool:
    """Start a kernel; see `launch`. Return whether it was started directly."""
    known = _known.get(id(kernel))
    if known is None:
        known = _known[id(kernel)] = _Known(kernel)
    if known.direct is None:
        _start_by_triton(known, grid, num_warps, num_stages, arguments)
        return False
    key = known.direct.start(grid, num_warps, num_stages, arguments)
    if key is True:
        return True
    compiled = _start_by_triton(known, grid, num_warps, num_stages, arguments)
    if key and _direct is not None:
        _direct.learn(known.direct, key, compiled)
    return False


def _start_by_triton(
    known: _Known, grid: Grid, num_warps: int, num_stages: int, arguments: dict[str, Any]
) -> Any:
    """Start a kernel by Triton's launcher and return what was compiled."""
    kernel = known.kernel
    if known.names is None:
        return kernel[grid](**arguments, num_warps=num_warps, num_stages=num_stages)
    values = [arguments[name] for name in known.names]
    key = _key(values, known.general, (id(kernel), num_warps, num_stages))
    compiled = _compiled.get(key)
    if compiled is not None:
        compiled[grid + (1,) * (3 - len(grid))](*values)
        return compiled
    if len(_compiled) >= MAX_COMPILED:
        _compiled.clear()
    compiled = _compiled[key] = kernel[grid](**arguments, num_warps=num_warps, num_stages=num_stages)
    return compiled


def _key(values: list[Any], general: tuple[int, ...], launched: tuple[int, int, int]) -> Hashable:
    """Return a key of what a kernel is compiled for.

    Triton looks at a tensor's dtype and whether it is aligned to 16 bytes, at whether an integer is 1 or a multiple of
    16, and at its width (`native_specialize_impl`). Integers are taken as they are: that is cheaper, and most of them
    are strides, which a model does not change.
    """
    key: list[Hashable] = [
        (value.dtype if value.data_ptr() & 15 == 0 else (value.dtype,))
        if isinstance(value, torch.Tensor)
        else value
        for value in values
    ]
    for position in general:
        key[position] = -0x80000000 <= values[position] <= 0x7FFFFFFF
    # All tensors of a launch are on one device, and compiled code is loaded into one.
    return (*launched, getattr(values[0], "device", None), *key)


@contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """Record launches into the returned list instead of starting them; outputs are left as they were allocated."""
    launches: list[Launch] = []
    with _observed(_recorded, launches):
        yield launches


@contextmanager
def launched_variants() -> Iterator[set[Variant]]:
    """Collect the variants that are started in the returned set."""
    variants: set[Variant] = set()
    with _observed(_variants, variants):
        yield variants


@contextmanager
def _observed(variable: ContextVar[Any], collected: Any) -> Iterator[None]:
    global _num_observers
    token = variable.set(collected)
    with _observer_lock:
        _num_observers += 1
    try:
        yield
    finally:
        with _observer_lock:
            _num_observers -= 1
        variable.reset(token)


@dataclass(frozen=True, slots=True, eq=False)
class DeviceTraits:
    """Limits of one GPU. There is one object per device, by which choices are kept: it is hashed in every launch."""

    capability: int
    """Compute capability as major * 10 + minor: 80 (A100), 90 (H100), 100 (B200), 120 (RTX 50)."""
    num_sms: int
    shared_memory: int
    """Bytes of shared memory that one block may use."""
    registers_per_sm: int = 65536
    warps_per_sm: int = 64
    shared_memory_per_sm: int = 0

    @property
    def has_fp8(self) -> bool:
        return self.capability >= 89


KNOWN_DEVICES = {
    "A100": DeviceTraits(80, 108, 163 << 10, shared_memory_per_sm=164 << 10),
    "L40S": DeviceTraits(89, 142, 99 << 10, warps_per_sm=48, shared_memory_per_sm=100 << 10),
    "H100": DeviceTraits(90, 132, 227 << 10, shared_memory_per_sm=228 << 10),
    "B200": DeviceTraits(100, 148, 227 << 10, shared_memory_per_sm=228 << 10),
    "RTX 5090": DeviceTraits(120, 170, 99 << 10, warps_per_sm=48, shared_memory_per_sm=100 << 10),
}
"""Devices that kernels are compiled for ahead of time. Source: CUDA C++ Programming Guide, "Compute Capabilities"."""

_assumed: ContextVar[DeviceTraits | None] = ContextVar("assumed", default=None)


def device_traits(device: torch.device) -> DeviceTraits:
    """Return the traits of a device. Of a CPU, where kernels run in Triton's interpreter, those of an H100."""
    assumed = _assumed.get()
    if assumed is not None:
        return assumed
    return _read_traits(device.index or 0) if device.type == "cuda" else KNOWN_DEVICES["H100"]


@contextmanager
def assume_device(traits: DeviceTraits) -> Iterator[None]:
    """Let `device_traits` return these, for fake tensors of a device that the machine does not have."""
    token = _assumed.set(traits)
    try:
        yield
    finally:
        _assumed.reset(token)


@cache
def _read_traits(index: int) -> DeviceTraits:
    properties = torch.cuda.get_device_properties(index)
    return DeviceTraits(
        capability=properties.major * 10 + properties.minor,
        num_sms=properties.multi_processor_count,
        shared_memory=properties.shared_memory_per_block_optin,
        registers_per_sm=properties.regs_per_multiprocessor,
        warps_per_sm=properties.max_threads_per_multi_processor // 32,
        shared_memory_per_sm=properties.shared_memory_per_multiprocessor,
    )
