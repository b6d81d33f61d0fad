"""Compiles every case for every device and judges what came out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from argosy_engine.triton_kernels.launch import (
    KNOWN_DEVICES,
    DeviceTraits,
    Launch,
    assume_device,
    recorded_launches,
)
from gpu_report.case import Case
from gpu_report.cases import ALL_CASES
from gpu_report.compilation import CompiledKernel, compile_launch


@dataclass(frozen=True, slots=True)
class Row:
    """One launch of one case on one device."""

    module: str
    case: str
    device: str
    launch: Launch
    compiled: CompiledKernel | None
    fault: str
    """Why the kernel must not be launched so; empty if all is well."""


def compiled_rows(modules: list[str], devices: list[str], *, only_sample: bool = False) -> Iterator[Row]:
    """Compile the launches of these modules' cases for these devices."""
    for module in modules:
        for name in devices:
            traits = KNOWN_DEVICES[name]
            for case in ALL_CASES[module](traits):
                if case.is_sampled or not only_sample:
                    yield from _rows(module, case, name, traits)


def launches_of(case: Case, traits: DeviceTraits) -> list[Launch]:
    """Run a case without a device and return what it would launch there."""
    if case.is_step:
        return cast("list[Launch]", case.call())
    with FakeTensorMode(allow_non_fake_inputs=True), assume_device(traits), recorded_launches() as launches:
        case.call()
    return launches


def _rows(module: str, case: Case, device: str, traits: DeviceTraits) -> Iterator[Row]:
    for launch in launches_of(case, traits):
        try:
            compiled = compile_launch(launch, traits)
        except Exception as error:
            yield Row(module, case.label, device, launch, None, f"does not compile: {error}")
            continue
        yield Row(module, case.label, device, launch, compiled, _fault(launch, compiled, traits))


def _fault(launch: Launch, compiled: CompiledKernel, traits: DeviceTraits) -> str:
    if compiled.spilled_bytes:
        return f"spills {compiled.spilled_bytes} bytes per thread"
    if compiled.shared_bytes > traits.shared_memory:
        return f"needs {compiled.shared_bytes} bytes of shared memory, the device has {traits.shared_memory}"
    is_wide = any(
        isinstance(value, torch.Tensor) and value.dtype is torch.float32
        for value in launch.arguments.values()
    )
    if compiled.has_dot and not compiled.tensor_core and not is_wide:
        return "multiplies matrices without tensor cores"
    return ""
