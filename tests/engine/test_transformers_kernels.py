"""Which modules of transformers our CPU kernels replace, and that the replacements compute what these did."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GemmaConfig, LlamaConfig, Qwen2Config, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from argosy_engine.models.transformers_kernels import (
    CalledLinears,
    KernelLinear,
    KernelMLP,
    KernelNorm,
    PartLinear,
)

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 131,
}  # fmt: skip


def replaced(model: nn.Module, *inputs: torch.Tensor, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Run a model over inputs, and let our kernels replace what they can."""
    linears = CalledLinears(model, dtype)
    for each in inputs:
        model(each)
    linears.use_kernels()
    return model


def kinds(model: nn.Module) -> dict[str, type[nn.Module]]:
    return {name: type(module) for name, module in model.named_modules()}


class Attends(nn.Module):
    """Three layers with one input, in an order of its own, and two more that have it sometimes."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(32, 48)
        self.k = nn.Linear(32, 16, bias=False)
        self.v = nn.Linear(32, 16)
        self.sometimes = nn.Linear(32, 16)
        self.other = nn.Linear(32, 16)
        self.reads_weight = nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        v, q, k = self.v(x), self.q(x), self.k(x)
        parts = [q, k, v, nn.functional.linear(x, self.reads_weight.weight)]
        parts.append(self.other(x + 1))
        if len(x) > 3:
            parts.append(self.sometimes(x + 2))
        else:
            y = x + 1
            parts += [self.sometimes(y), self.other(y)]
        return torch.cat(parts, dim=-1)


@torch.inference_mode()
def test_layers_that_always_have_one_input_are_computed_together() -> None:
    torch.manual_seed(0)
    model = Attends()
    inputs = [torch.randn(count, 32) for count in (2, 5, 1)]
    expected = [model(each) for each in inputs]
    replaced(model, *inputs)
    found = kinds(model)
    assert found["q"] is found["k"] is found["v"] is PartLinear
    assert found["sometimes"] is found["other"] is KernelLinear
    assert found["reads_weight"] is nn.Linear  # which was not called
    for _ in range(2):
        for each, wanted in zip(inputs, expected, strict=True):
            torch.testing.assert_close(model(each), wanted)


@torch.inference_mode()
def test_a_part_is_that_of_the_input_it_is_asked_for() -> None:
    torch.manual_seed(0)
    model = Attends()
    first, second = torch.randn(3, 32), torch.randn(3, 32)
    theirs = {name: getattr(model, name) for name in "qkv"}
    wanted = {(name, i): theirs[name](x) for name in "qkv" for i, x in enumerate((first, second))}
    replaced(model, first)
    # In another order, another input between, and one part twice.
    for name, index in [("k", 0), ("k", 0), ("q", 1), ("v", 0), ("q", 0), ("v", 1), ("k", 1), ("v", 1)]:
        found = getattr(model, name)((first, second)[index])
        torch.testing.assert_close(found, wanted[name, index])


@torch.inference_mode()
def test_weights_are_kept_once() -> None:
    model = Attends()
    weights = [weakref.ref(model.q.weight), weakref.ref(model.other.weight)]
    replaced(model, torch.randn(2, 32))
    gc.collect()
    assert [each() for each in weights] == [None, None]


@pytest.mark.parametrize("config", [LlamaConfig, Qwen2Config, Qwen3Config])
@torch.inference_mode()
def test_llamas_modules_are_replaced(config: Any) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(**SIZES)).eval()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            parameter.add_(torch.randn_like(parameter) * 0.1)
    ids = torch.randint(0, 131, (1, 9))
    expected = model(ids).logits
    replaced(model, ids)
    found = kinds(model)
    assert found["model.layers.1.mlp"] is KernelMLP
    assert found["model.layers.1.input_layernorm"] is found["model.norm"] is KernelNorm
    assert {found[f"model.layers.0.self_attn.{name}_proj"] for name in "qkv"} == {PartLinear}
    assert found["model.layers.0.self_attn.o_proj"] is found["lm_head"] is KernelLinear
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_modules_that_compute_something_else_are_left() -> None:
    model = AutoModelForCausalLM.from_config(GemmaConfig(**SIZES)).eval()
    replaced(model, torch.randint(0, 131, (1, 9)))
    found = set(kinds(model).values())
    assert KernelNorm not in found  # Gemma's adds one to the weight
    assert KernelMLP not in found  # its activation is GELU
    assert PartLinear in found

    class Limited(LlamaMLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gate = self.act_fn(self.gate_proj(x)).clamp(max=7.0)
            return self.down_proj(gate * self.up_proj(x))

    class Half(LlamaRMSNorm):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden_states) / 2

    mlp = nn.Sequential(Half(64), Limited(LlamaConfig(**SIZES)))
    wanted = mlp(x := torch.randn(3, 64))
    assert {KernelMLP, KernelNorm}.isdisjoint(kinds(replaced(mlp, x)).values())
    torch.testing.assert_close(mlp(x), wanted)


@torch.inference_mode()
def test_a_norm_of_other_activations_is_computed_as_before() -> None:
    norm = nn.Sequential(LlamaRMSNorm(64))
    x = torch.randn(2, 3, 64)
    wanted, wanted_half = norm(x), norm(x.bfloat16())
    assert kinds(replaced(norm, x))["0"] is KernelNorm
    torch.testing.assert_close(norm(x), wanted)
    half = norm(x.bfloat16())
    assert half.dtype is wanted_half.dtype
    torch.testing.assert_close(half, wanted_half)
