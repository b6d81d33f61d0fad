"""A CUDA device of torch's fake tensors: they know device, shape and dtype, and hold no values. No GPU is needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from argosy_engine.worker.device_runtime import PinnedMemory

CUDA = torch.device("cuda")
_from_numpy = torch.from_numpy


@contextmanager
def fake_cuda(mode: FakeTensorMode) -> Iterator[None]:
    """Let code create and compute fake tensors on `cuda`. Asking for a value raises; so does mixing two devices."""
    with (
        mode,
        torch.no_grad(),
        patch.object(torch, "from_numpy", lambda array: mode.from_tensor(_from_numpy(array))),
        # In inference mode copies between devices pass the fakes by.
        patch.object(torch.inference_mode, "__enter__", lambda _: None),
        patch.object(torch.inference_mode, "__exit__", lambda *_: None),
    ):
        yield


class FakeEvent:
    """An event that has always happened."""

    def synchronize(self) -> None: ...


class FakeRuntime:
    """A DeviceRuntime whose copies are operations on fake tensors.

    Attributes:
        is_copying: true while one of its copies runs, which tells them from other copies between host and device.
    """

    def __init__(self) -> None:
        self.is_copying = False

    def pinned(self, num_bytes: int) -> PinnedMemory:
        with unset_fake_temporarily():  # the host writes it
            memory = torch.zeros(num_bytes, dtype=torch.uint8)
            return PinnedMemory(memory, memory.numpy())

    def copy_to_device(self, source: torch.Tensor, target: torch.Tensor) -> FakeEvent:
        return self._copy(source, target)

    def copy_to_host(self, source: torch.Tensor, target: torch.Tensor) -> FakeEvent:
        return self._copy(source, target)

    def _copy(self, source: torch.Tensor, target: torch.Tensor) -> FakeEvent:
        self.is_copying = True
        target.copy_(source, non_blocking=True)
        self.is_copying = False
        return FakeEvent()
