"""Lets the tests of kernels compute on a GPU, although all their tensors are on the CPU.

The storage of every tensor of a launch is copied to the device before it and back after it, whole, so that views keep
their strides and tensors that share memory go on sharing it. FP8 products are torch's and run there, too: those of a
CPU know one scale only.

A kernel is started twice, on copies of their own: the first start is Triton's, which compiles it, and the results are
those of the second one, which goes past Triton's launcher where `direct_launch` has found that it can.
"""

from __future__ import annotations

from typing import Any

import torch

from argosy_engine.triton_kernels import launch as launching
from argosy_engine.triton_kernels.direct_launch import use_direct_launches

_FP8_PRODUCT = "_scaled_mm"


def launch_on_gpu() -> None:
    """Replace what starts a kernel, and torch's FP8 product, for this process."""
    use_direct_launches(torch.device("cuda", torch.cuda.current_device()))
    start, product = launching.start_kernel, getattr(torch, _FP8_PRODUCT)

    def start_on_gpu(
        kernel: Any, grid: Any, num_warps: int, num_stages: int, arguments: dict[str, Any]
    ) -> None:
        for _ in range(2):
            copies: dict[int, tuple[torch.UntypedStorage, torch.Tensor]] = {}
            on_device = {name: _moved(value, copies) for name, value in arguments.items()}
            start(kernel, grid, num_warps, num_stages, on_device)
            torch.cuda.synchronize()
        for storage, copy in copies.values():
            _bytes(storage).copy_(copy)

    def product_on_gpu(*arguments: Any, **options: Any) -> torch.Tensor:
        copies: dict[int, tuple[torch.UntypedStorage, torch.Tensor]] = {}
        return product(*(_moved(value, copies) for value in arguments), **options).cpu()

    launching.start_kernel = start_on_gpu
    setattr(torch, _FP8_PRODUCT, product_on_gpu)


def _moved(value: Any, copies: dict[int, tuple[torch.UntypedStorage, torch.Tensor]]) -> Any:
    if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
        return value
    storage = value.untyped_storage()
    if storage.data_ptr() not in copies:
        copies[storage.data_ptr()] = storage, _bytes(storage).cuda()
    copy = copies[storage.data_ptr()][1]
    view = torch.empty(0, dtype=value.dtype, device=copy.device)
    return view.set_(copy.untyped_storage(), value.storage_offset(), value.shape, value.stride())


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)
