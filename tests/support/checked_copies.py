"""A DeviceRuntime on a CPU that behaves as badly as a device may: results arrive when they are awaited, not before, and
memory that changes while a copy is under way is an error."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from argosy_engine.worker.device_runtime import PinnedMemory


@dataclass
class CheckedCopy:
    """Event of a copy."""

    source: torch.Tensor
    target: torch.Tensor | None = None
    snapshot: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.snapshot = self.source.clone()

    @torch.inference_mode()
    def synchronize(self) -> None:
        assert torch.equal(self.source, self.snapshot), "the source changed while it was copied"
        if self.target is not None:
            self.target.copy_(self.source)
            self.target = None


class CheckedRuntime:
    """Counts and checks the copies."""

    def __init__(self) -> None:
        self.to_device: list[CheckedCopy] = []
        self.to_host: list[CheckedCopy] = []
        self.num_allocations = 0

    def pinned(self, num_bytes: int) -> PinnedMemory:
        self.num_allocations += 1
        memory = torch.full((num_bytes,), 0x5A, dtype=torch.uint8)
        return PinnedMemory(memory, memory.numpy())

    def copy_to_device(self, source: torch.Tensor, target: torch.Tensor) -> CheckedCopy:
        target.copy_(source)  # in order with what reads it
        self.to_device.append(CheckedCopy(source))
        return self.to_device[-1]

    def copy_to_host(self, source: torch.Tensor, target: torch.Tensor) -> CheckedCopy:
        target.fill_(0x5A)
        self.to_host.append(CheckedCopy(source, target))
        return self.to_host[-1]
