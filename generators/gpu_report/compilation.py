"""compile_launch: a recorded launch, compiled for a device as the launcher would compile it there, without the device.

Triton's own `warmup` specialises the arguments (types, alignment, integers that are 1) and compiles; only its driver is
replaced, because a real one would open the GPU. Registers, spills and shared memory are read back from the cubin by
`cuobjdump`, tensor-core instructions from the PTX; both tools come with Triton.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # silences a warning; this is also Triton's default

import torch
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from argosy_engine.triton_kernels.launch import DeviceTraits, Launch

_TOOLS = Path(triton.backends.nvidia.__file__).parent / "bin"
_TENSOR_CORE = re.compile(r"\b(mma\.sync|wgmma\.mma_async|tcgen05\.mma)\b")


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """What a launch needs on one device."""

    registers: int
    """Per thread."""
    spilled_bytes: int
    """Stack and local memory per thread; 0 where nothing spills."""
    shared_bytes: int
    """Per block, static and dynamic."""
    tensor_core: str
    """Instruction of the first matrix product, such as `wgmma.mma_async`; empty if there is none."""
    has_dot: bool
    """Whether the kernel multiplies matrices (`tl.dot`)."""

    def occupancy(self, num_warps: int, device: DeviceTraits) -> float:
        """Share of the device's warps that can be resident at a time, 0 to 1, by registers and shared memory."""
        registers_per_warp = -(-self.registers * 32 // 256) * 256
        by_registers = device.registers_per_sm // (registers_per_warp * num_warps)
        by_shared = device.shared_memory_per_sm // (self.shared_bytes + 1024)
        by_warps = device.warps_per_sm // num_warps
        return min(by_registers, by_shared, by_warps, 32) * num_warps / device.warps_per_sm


class _Driver:
    """Stands in for Triton's CUDA driver as far as compilation asks it."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return self._capability  # the launcher caches kernels by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda")


def compile_launch(launch: Launch, device: DeviceTraits) -> CompiledKernel:
    """Compile a launch that was recorded on fake CUDA tensors.

    Raises:
        Exception: whatever Triton or ptxas raise if the kernel does not compile for the device.
    """
    driver.set_active(_Driver(device.capability))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a fake tensor's data pointer is asked for its alignment
        compiled = launch.kernel.warmup(
            **launch.arguments, grid=launch.grid, num_warps=launch.num_warps, num_stages=launch.num_stages
        )
    usage = _resource_usage(compiled.asm["cubin"])
    instruction = _TENSOR_CORE.search(compiled.asm["ptx"])
    return CompiledKernel(
        registers=usage["REG"],
        spilled_bytes=usage["STACK"] + usage["LOCAL"],
        shared_bytes=max(int(compiled.metadata.shared), usage["SHARED"]),
        tensor_core=instruction[1] if instruction else "",
        has_dot="tt.dot" in compiled.asm["ttir"],
    )


def _resource_usage(cubin: bytes) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        printed = subprocess.run(  # noqa: S603
            [_TOOLS / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", printed)}
