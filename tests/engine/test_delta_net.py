"""A Gated DeltaNet between its projections equals what float64 gives token by token, over blocks with stale states."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from argosy_engine.attention.backend import StateLayer
from argosy_engine.attention.params import DeltaNetParams
from argosy_engine.layers.delta_net import CpuDeltaNet, TorchDeltaNet
from argosy_engine.native.library import kernels
from attention_cases import attention_metadata
from delta_net_cases import (
    SIZES,
    STEPS,
    Run,
    Spans,
    check_steps,
    inputs_of,
    outputs_of,
    reference,
    weights_of,
)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def cpu_kernels(params: DeltaNetParams) -> Run:
    loaded = kernels()
    if loaded is None:
        pytest.skip("no CPU kernels on this machine")
    return CpuDeltaNet(params, weights_of(params), loaded)


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("sizes", ["aligned", "one head", "published"])
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
    check_steps(TorchDeltaNet(params, weights_of(params)), params, dtype, STEPS[steps])


@torch.inference_mode()
def test_outputs_of_the_cpu_kernels_do_not_depend_on_how_steps_are_cut() -> None:
    params = SIZES["published"]
    run = cpu_kernels(params)
    cut: list[Spans] = [[(0, 33)], [(33, 34)], [(34, 35)], [(35, 90)]]
    ((_, _, whole),) = outputs_of(run, params, torch.float32, [[(0, 90)]])
    ((_, _, parts),) = outputs_of(run, params, torch.float32, cut)
    beside = outputs_of(run, params, torch.float32, [[(0, 90), (0, 41)]])
    assert torch.equal(whole, parts)
    assert torch.equal(whole, beside[0][2])


@pytest.mark.parametrize("kernel", ["cpu", "torch"])
@torch.inference_mode()
def test_a_token_that_forgets_all_costs_those_after_it_no_precision(kernel: str) -> None:
    params = SIZES["aligned"]
    weights = weights_of(params)._replace(rates=torch.full((4,), 16.0), dt_bias=torch.zeros(4))
    qkvz, ba = inputs_of(params, 60, seed=1)
    ba[:, 4:] = -6.0  # softplus of which is 0.0025
    ba[::3, 4:] = 1000.0
    loaded = kernels()
    if kernel == "cpu" and loaded is None:
        pytest.skip("no CPU kernels on this machine")
    run = (
        TorchDeltaNet(params, weights)
        if loaded is None or kernel == "torch"
        else CpuDeltaNet(params, weights, loaded)
    )
    state = StateLayer(params.state, torch.float32)
    state.bind([torch.zeros(2, *shape, dtype=dtype) for shape, dtype in state.tensors], 64)
    found = run(qkvz, ba, state, attention_metadata([(0, 60)], torch.tensor([[1]]), 64))
    torch.testing.assert_close(found.double(), reference(params, weights, qkvz, ba), atol=2e-5, rtol=2e-5)
