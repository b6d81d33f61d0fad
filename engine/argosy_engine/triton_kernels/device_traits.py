"""DeviceTraits: what the choice of a kernel's configuration depends on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True, slots=True)
class DeviceTraits:
    """Limits of one GPU."""

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
