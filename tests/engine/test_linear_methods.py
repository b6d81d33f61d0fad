"""Linear layers: every kernel against the definition, and a method that reads tensors of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from argosy_engine.attention.torch_attn import TorchBackend
from argosy_engine.checkpoint.weights import SafetensorsWeights, WeightPlan, Weights
from argosy_engine.errors import ConfigError
from argosy_engine.layers import linear
from argosy_engine.layers.experts import ExpertsSpec, StackedExperts
from argosy_engine.layers.layer_factory import LayerFactory
from argosy_engine.layers.linear import (
    GatedLinear,
    Linear,
    LinearSpec,
    SplitGatedLinear,
    TorchLinear,
    gated_linear_of,
    linear_of,
)
from argosy_engine.layers.linear_method import LinearMethod
from argosy_engine.layers.norms import GatedActivation, gelu_tanh_and_mul, squared_relu

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


@pytest.mark.parametrize("has_kernels", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("in_features", [31, 64])
def test_whichever_kernel_is_chosen_the_result_is_the_definition(
    has_kernels: bool, has_bias: bool, dtype: torch.dtype, in_features: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """31 bfloat16 elements are not a whole number of the CPU kernels' units."""
    if not has_kernels:
        monkeypatch.setattr(linear, "kernels_for", lambda *_: None)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, in_features, generator=generator).to(dtype)
    bias = torch.randn(96, generator=generator).to(dtype) if has_bias else None
    x = (torch.randn(5, in_features, generator=generator) / in_features**0.5).to(dtype)
    wide = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    gate, up = wide.chunk(2, dim=-1)
    tolerance = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    layer = linear_of(weight, bias)
    torch.testing.assert_close(layer(x).double(), wide, **tolerance)
    torch.testing.assert_close(layer.logits(x).double(), wide, **tolerance)
    gated = gated_linear_of(weight, bias)
    torch.testing.assert_close(gated(x).double(), F.silu(gate) * up, **tolerance)
    assert has_kernels or layer.packed is gated.packed is None
    gelu = gated_linear_of(weight, bias, gelu_tanh_and_mul)
    torch.testing.assert_close(gelu(x).double(), F.gelu(gate, approximate="tanh") * up, **tolerance)
    squared = gated_linear_of(weight, bias, squared_relu)
    torch.testing.assert_close(squared(x).double(), F.relu(wide).square(), **tolerance)


class ScaledLinearMethod(LinearMethod):
    """Weights in FP8 with one scale per projection, multiplied in the engine's dtype."""

    def load(self, weights: Weights, spec: LinearSpec) -> Linear:
        parts = []
        for name, size in spec.parts.items():
            stored = weights.take(name + ".weight", size, spec.in_features, dtype=torch.float8_e4m3fn)
            scale = weights.take(name + ".weight_scale", 1, dtype=torch.float32)
            parts.append((stored.to(scale.dtype) * scale).to(weights.dtype))
        return TorchLinear(torch.cat(parts), None)

    def load_gated(self, weights: Weights, spec: LinearSpec, activation: GatedActivation) -> GatedLinear:
        return SplitGatedLinear(self.load(weights, spec), activation)

    def load_experts(self, weights: Weights, spec: ExpertsSpec) -> StackedExperts:
        raise NotImplementedError

    def tie(self, embedding: torch.Tensor) -> Linear:
        return TorchLinear(embedding, None)


def build(weights: Weights) -> Linear:
    factory = LayerFactory(weights, TorchBackend(weights.dtype), 1, ScaledLinearMethod())
    return factory.linear({"q": 8, "k": 4}, 16)


def write(path: Path, tensors: dict[str, Any]) -> SafetensorsWeights:
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({}))
    return SafetensorsWeights(path, torch.bfloat16, CPU, prefix="")


def test_a_method_decides_which_tensors_it_reads_and_in_which_dtype(tmp_path: Path) -> None:
    plan = WeightPlan(torch.bfloat16)
    build(plan)
    assert plan.num_bytes == 12 * 16 + 2 * 4
    generator = torch.Generator().manual_seed(1)
    tensors = {
        "q.weight": torch.randn(8, 16, generator=generator).to(torch.float8_e4m3fn),
        "k.weight": torch.randn(4, 16, generator=generator).to(torch.float8_e4m3fn),
        "q.weight_scale": torch.tensor([0.5]),
        "k.weight_scale": torch.tensor([3.0]),
    }
    reader = write(tmp_path, tensors)
    reader.check(plan, [])
    assert reader.stored_bytes(plan) == plan.num_bytes
    x = torch.eye(16, dtype=torch.bfloat16)
    weight = torch.cat([tensors["q.weight"].float() * 0.5, tensors["k.weight"].float() * 3.0])
    assert torch.equal(build(reader)(x), weight.to(torch.bfloat16).t())


def test_a_tensor_of_another_dtype_than_its_method_reads_is_refused(tmp_path: Path) -> None:
    plan = WeightPlan(torch.bfloat16)
    build(plan)
    reader = write(tmp_path, {
        "q.weight": torch.zeros(8, 16), "k.weight": torch.zeros(4, 16).to(torch.float8_e4m3fn),
        "q.weight_scale": torch.ones(1), "k.weight_scale": torch.ones(1),
    })  # fmt: skip
    with pytest.raises(ConfigError, match=r"q\.weight is F32"):
        reader.check(plan, [])
