"""Which modules of transformers our CPU kernels replace, and that the replacements compute what these did."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from types import CellType, FunctionType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GemmaConfig, LlamaConfig, Qwen2Config, Qwen3Config
from transformers.models.ernie4_5 import modeling_ernie4_5
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaModel,
    LlamaRMSNorm,
)

from argosy_engine.attention.backend import AttentionMetadata, AttentionWeights
from argosy_engine.attention.cpu_attn import CpuBackend
from argosy_engine.attention.params import AttentionParams
from argosy_engine.config import EngineArgs
from argosy_engine.model_configs.transformers_config import TransformersConfig
from argosy_engine.models.config_file import load_model_config
from argosy_engine.models.loader import complete_config
from argosy_engine.models.transformers_attention import AttendingLayer, Step
from argosy_engine.models.transformers_kernels import (
    CalledLinears,
    FusedAttention,
    KernelLayers,
    KernelLinear,
    KernelMLP,
    KernelNorm,
    PartLinear,
)
from argosy_engine.models.transformers_model import TransformersModel
from argosy_engine.models.transformers_weights import load_transformers, probe
from transformers_checkpoints import write_checkpoint

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


def forwards(model: nn.Module) -> dict[str, type]:
    """Return what stands in place of modules' `forward`, by their names."""
    return {
        name: type(vars(module)["forward"])
        for name, module in model.named_modules()
        if isinstance(vars(module).get("forward"), (FusedAttention, KernelLayers))
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("model_type", "is_joined"),
    [
        ("llama", True),
        ("mistral", True),
        ("qwen2", True),
        ("qwen3", True),
        ("granite", False),  # multiplies what layers add to the residual
        ("apertus", False),  # an MLP without a gate
        ("arcee", False),  # an MLP without a gate
        ("gemma2", False),  # other norms, and a limit of scores
        ("qwen3_moe", False),  # experts
    ],
)
def test_attention_and_layers_that_are_recognised_compute_what_they_did(
    model_type: str, is_joined: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    write_checkpoint(model_type, tmp_path, head_dim=32)
    use = EngineArgs.of(model=str(tmp_path), model_impl="transformers").model_use
    config = complete_config(load_model_config(tmp_path, use))
    assert isinstance(config, TransformersConfig)
    cpu = torch.device("cpu")
    with torch.inference_mode():
        model, _ = load_transformers(tmp_path, config, CpuBackend(dtype), dtype=dtype, device=cpu, seed=None)
        assert isinstance(model, TransformersModel)
        probe(config, model, dtype, cpu)
    found = list(forwards(model.model).values())
    assert found == [KernelLayers, FusedAttention] if is_joined else found == [FusedAttention] * 4


def changed(function: Any, change: Callable[[Any], Any]) -> Any:
    """Return a copy of a function in which the innermost of those that it wraps is changed."""
    inner = getattr(function, "__wrapped__", None)
    if inner is None:
        return change(function)
    new = changed(inner, change)
    cells = [CellType(new) if cell.cell_contents is inner else cell for cell in function.__closure__]
    return FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, tuple(cells)
    )


def copied(function: Any, /, **code: Any) -> Any:
    """Return a copy of a function with parts of its code replaced."""
    return FunctionType(
        function.__code__.replace(**code),
        dict(function.__globals__),
        function.__name__,
        function.__defaults__,
    )


def with_globals(function: Any, **values: Any) -> Any:
    new = copied(function)
    new.__globals__.update(values)
    return new


def with_default(function: Any) -> Any:
    new = copied(function)
    new.__defaults__ = (0, *new.__defaults__[1:])
    return new


def with_constant(function: Any) -> Any:
    consts = tuple(0.5 if repr(each) == "0.0" else each for each in function.__code__.co_consts)
    assert consts != function.__code__.co_consts
    return copied(function, co_consts=consts)


def with_norms_swapped(function: Any) -> Any:
    names = list(function.__code__.co_names)
    first, second = names.index("input_layernorm"), names.index("post_attention_layernorm")
    names[first], names[second] = names[second], names[first]
    return copied(function, co_names=tuple(names))


def subclass(base: type, **members: Any) -> type:
    """Return a class like this one but for some members, which nothing wraps."""
    found = type("Other", (base,), {})
    for name, member in {"forward": base.__dict__["forward"], **members}.items():
        setattr(found, name, member)
    return found


def clamped(self: Any, hidden_states: torch.Tensor, **given: Any) -> Any:
    return LlamaAttention.forward(self, hidden_states.clamp(max=1.0), **given)


def called(self: Any, *args: Any, **given: Any) -> Any:
    return nn.Module.__call__(self, *args, **given)


def fused(
    attention: type = LlamaAttention,
    layer: type = LlamaDecoderLayer,
    body: type = LlamaModel,
    watched: str | None = None,
    **changes: Any,
) -> dict[str, type]:
    """Return what stands in place of the forwards of a Llama with two layers.

    Args:
        attention, layer: classes of the first of them.
        watched: part of it with a hook.
        changes: attributes of its parts, by `part__attribute`.
    """
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).eval()
    layers = model.model.layers
    first = layers[0]
    model.model.__class__, first.__class__, first.self_attn.__class__ = body, layer, attention
    for name, value in changes.items():
        part, attribute = name.split("__")
        setattr(getattr(first, part), attribute, value)
    if watched is not None:
        getattr(first, watched).register_forward_hook(lambda *_: None)
    backend = CpuBackend(torch.float32)
    params = AttentionParams(num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25)
    attending = [AttendingLayer(each.self_attn, params, backend, AttentionWeights(), 16) for each in layers]
    linears = CalledLinears(model, torch.float32)
    with torch.inference_mode():
        model(torch.randint(0, 131, (1, 9)))
        linears.use_kernels(attending)
    return forwards(model)


def recognised(**changes: Any) -> set[type]:
    """Return what stands in place of the forwards of a Llama's first layer and its attention."""
    found = fused(**changes)
    first = {kind for name, kind in found.items() if name.startswith("model.layers.0")}
    assert KernelLayers in first or found["model.layers.1"] is KernelLayers
    return first


def test_attention_is_recognised_by_its_code_and_what_that_calls() -> None:
    forward = LlamaAttention.forward
    assert recognised(attention=subclass(LlamaAttention, forward=changed(forward, copied))) == {
        FusedAttention,
        KernelLayers,
    }
    own_eager = changed(forward, lambda each: with_globals(each, eager_attention_forward=print))
    assert FusedAttention in recognised(attention=subclass(LlamaAttention, forward=own_eager))
    rotates = changed(
        forward,
        lambda each: with_globals(each, apply_rotary_pos_emb=modeling_ernie4_5.apply_rotary_pos_emb),
    )
    for change in (
        {"forward": rotates},
        {"forward": clamped},
        {"forward": changed(forward, with_constant)},
        {"forward": changed(forward, with_default)},
        {"__call__": called},
    ):
        assert recognised(attention=subclass(LlamaAttention, **change)) == set(), change


def test_rotations_that_call_another_function_are_another_computation() -> None:
    """Ernie 4.5 has the code of Llama's attention, and rotates neighbours by a function of the same name."""
    ernie: Any = modeling_ernie4_5.Ernie4_5Attention
    assert recognised(attention=ernie) == set()


def test_layers_are_recognised_by_their_code_and_their_parts() -> None:
    forward = LlamaDecoderLayer.forward
    assert KernelLayers in recognised(layer=subclass(LlamaDecoderLayer, forward=changed(forward, copied)))
    swapped = subclass(LlamaDecoderLayer, forward=changed(forward, with_norms_swapped))
    assert recognised(layer=swapped) == {FusedAttention}
    assert recognised(mlp__act_fn=nn.GELU()) == {FusedAttention}
    assert recognised(input_layernorm__variance_epsilon=0.1) == {FusedAttention}
    assert recognised(watched="mlp") == {FusedAttention}
    assert recognised(watched="self_attn") == set()


def test_layers_are_joined_in_models_whose_code_is_known() -> None:
    forward = LlamaModel.forward
    joined = {"model.layers.0", "model.layers.0.self_attn"}
    separate = joined | {"model.layers.1", "model.layers.1.self_attn"}
    assert fused().keys() == joined
    assert fused(body=subclass(LlamaModel, forward=changed(forward, copied))).keys() == joined
    other = subclass(LlamaModel, forward=changed(forward, with_default))
    assert fused(body=other).keys() == separate
    epsilons: dict[str, Any] = {
        f"{name}__variance_epsilon": 0.1 for name in ("input_layernorm", "post_attention_layernorm")
    }
    assert fused(**epsilons).keys() == separate
    narrow: dict[str, Any] = {
        f"mlp__{name}_proj": nn.Linear(64, 64, bias=False) for name in ("gate", "up", "down")
    }
    assert fused(**narrow).keys() == separate


def test_a_step_rotates_by_tables_of_its_tokens() -> None:
    positions = torch.tensor([5, 0, 1])
    none = torch.zeros(0, dtype=torch.int32)
    meta = AttentionMetadata(
        num_decodes=1,
        query_start_loc=none,
        seq_lens=none,
        positions=positions,
        slot_mapping=positions,
        block_table=none,
        query_start_loc_cpu=np.zeros(0, np.int32),
        seq_lens_cpu=np.zeros(0, np.int32),
    )
    half = torch.rand(1, 3, 4)
    cos, sin = torch.cat((half, half), dim=2), torch.cat((half, half), dim=2) / 2
    hidden = torch.zeros(1, 3, 32)
    embeddings: Any = (cos, sin)
    step = Step([], meta, None)
    assert step.rotates(hidden, embeddings, 8)
    found = step.begin_layers([], embeddings, 8)
    assert torch.equal(found.cosines, half[0])
    assert torch.equal(found.sines, half[0] / 2)
    assert found.meta.positions.tolist() == [0, 1, 2]
    assert step.begin_layers([], embeddings, 8) is found
    neighbours = half.repeat_interleave(2, dim=2)
    for embeddings, other, head_dim in [
        ((neighbours, sin), hidden, 8),
        ((cos, neighbours), hidden, 8),
        ((cos, sin), hidden.bfloat16(), 8),
        ((cos, sin), hidden, 16),
        ((cos[:, :2], sin[:, :2]), hidden, 8),
        ((cos, sin), hidden[:, :2], 8),
        (None, hidden, 8),
    ]:
        assert not Step([], meta, None).rotates(other, embeddings, head_dim)
