"""A Mamba-2 layer between its projections equals what float64 gives token by token, over blocks with stale states."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import pytest
import torch
from msgspec.structs import replace

from argosy_engine.attention.params import MambaParams
from argosy_engine.layers.mamba import CpuMamba, GroupMeans, MambaWeights, TorchMamba
from argosy_engine.native.library import kernels
from delta_net_cases import STEPS, Spans
from mamba_cases import SIZES, Run, check_ranks, check_steps, outputs_of, reference, weights_of


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def cpu_kernels(params: MambaParams) -> Run:
    loaded = kernels()
    if loaded is None:
        pytest.skip("no CPU kernels on this machine")
    return CpuMamba(params, weights_of(params), loaded)


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("sizes", ["aligned", "one head", "published", "many"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_the_cpu_kernels(sizes: str, dtype: torch.dtype, steps: str) -> None:
    check_steps(cpu_kernels(SIZES[sizes]), SIZES[sizes], dtype, STEPS[steps])


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@torch.inference_mode()
def test_torch(sizes: str, dtype: torch.dtype, steps: str) -> None:
    params = SIZES[sizes]
    check_steps(TorchMamba(params, weights_of(params)), params, dtype, STEPS[steps])


@pytest.mark.parametrize(
    ("groups", "num_ranks", "norm"), [(1, 2, "after_gate"), (1, 4, "before_gate"), (2, 4, "after_gate")]
)
@pytest.mark.parametrize(
    ("is_native", "dtype"), [(True, torch.float32), (True, torch.bfloat16), (False, torch.float32)]
)
def test_ranks_that_share_groups(
    is_native: bool,
    dtype: torch.dtype,
    groups: int,
    num_ranks: int,
    norm: Literal["after_gate", "before_gate"],
) -> None:
    loaded = kernels()
    if is_native and loaded is None:
        pytest.skip("no CPU kernels on this machine")

    def make(params: MambaParams, weights: MambaWeights, means: GroupMeans) -> Run:
        if is_native and loaded is not None:
            return CpuMamba(params, weights, loaded, means)
        return TorchMamba(params, weights, means)

    params = replace(SIZES["aligned"], num_groups=groups, norm=norm)
    check_ranks(make, params, dtype, STEPS["several requests"], num_ranks)


@torch.inference_mode()
def test_outputs_of_the_cpu_kernels_do_not_depend_on_how_steps_are_cut() -> None:
    params = SIZES["published"]
    run = cpu_kernels(params)
    cut: list[Spans] = [[(0, 33)], [(33, 34)], [(34, 35)], [(35, 90)]]
    ((_, whole),) = outputs_of(run, params, torch.float32, [[(0, 90)]])
    ((_, parts),) = outputs_of(run, params, torch.float32, cut)
    beside = outputs_of(run, params, torch.float32, [[(0, 90), (0, 41)]])
    assert torch.equal(whole, parts)
    assert torch.equal(whole, beside[0][1])


@pytest.mark.parametrize("is_native", [False, True])
@torch.inference_mode()
def test_step_sizes_from_nothing_to_all(is_native: bool) -> None:
    """Heads of very small ones keep their digits, those of very large ones see their own token alone."""
    params = MambaParams(num_heads=28, head_dim=16, num_groups=1, state_size=16, kernel_size=2, norm=None)
    weights = weights_of(params)._replace(dt_bias=torch.linspace(-14, 14, 28), skip=torch.zeros(28))
    loaded = kernels()
    if is_native and loaded is None:
        pytest.skip("no CPU kernels on this machine")
    run: Run = TorchMamba(params, weights)
    if is_native and loaded is not None:
        run = CpuMamba(params, weights, loaded)
    ((given, ours),) = outputs_of(run, params, torch.float32, [[(0, 90)], [(90, 91)]])
    expected = reference(params, weights, given[: len(ours)]).view(len(ours), 28, 16)
    error = (ours.view_as(expected) - expected).abs().amax((0, 2)) / expected.abs().amax((0, 2))
    assert error.max() < 1e-5
