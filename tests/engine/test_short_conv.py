"""A short convolution between its projections equals what float64 gives, over blocks with stale states."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from argosy_engine.attention.params import ShortConvParams
from argosy_engine.layers.short_conv import CpuShortConv, TorchShortConv
from argosy_engine.native.library import kernels
from delta_net_cases import STEPS
from short_conv_cases import check_steps, weights_of


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("kernel_size", [2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_the_cpu_kernels(dtype: torch.dtype, kernel_size: int, steps: str) -> None:
    loaded = kernels()
    if loaded is None:
        pytest.skip("no CPU kernels on this machine")
    params = ShortConvParams(num_channels=48, kernel_size=kernel_size)
    check_steps(CpuShortConv(params, weights_of(params), loaded), params, dtype, STEPS[steps])


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@torch.inference_mode()
def test_torch(dtype: torch.dtype, steps: str) -> None:
    params = ShortConvParams(num_channels=10, kernel_size=3)
    check_steps(TorchShortConv(weights_of(params)), params, dtype, STEPS[steps])
