"""`--quantization int8` and `int4`: an unquantised model has the tokens of one whose weights were quantised and widened
again."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from argosy_engine.api.doctor import diagnose
from argosy_engine.attention import cpu_attn
from argosy_engine.config import EngineArgs
from argosy_engine.errors import ConfigError
from argosy_engine.layers.linear_method import linear_method
from argosy_engine.layers.products import quantized_weight
from argosy_engine.model_configs.quantization_config import HEAD_BITS, INTEGER_BITS
from argosy_engine.models.config_file import load_model_config
from argosy_engine.models.loader import load_model
from argosy_engine.native.build import usable_variant
from argosy_engine.native.library import PackedLinear, kernels
from argosy_engine.sizing.kv_cache_sizing import estimate_weights
from argosy_engine.sizing.resources import DeviceMemory
from transformers_checkpoints import write_checkpoint
from transformers_sweep import served

pytestmark = pytest.mark.skipif(kernels() is None, reason="no CPU kernels here")
CPU = torch.device("cpu")

MODELS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"head_dim": 32}),  # all layers are one call
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"hidden_size": 80, "head_dim": 32}),  # in one call too; most layers keep their precision
    ("qwen3_moe", {}),
    ("gpt_oss", {}),  # whose experts are stacked
    ("gemma3_text", {}),  # whose activation the kernels do not compute
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("quantization", INTEGER_BITS)
@pytest.mark.parametrize(
    ("model_type", "fields"), MODELS, ids=[f"{each}-{i}" for i, (each, _) in enumerate(MODELS)]
)
def test_tokens_are_those_of_the_widened_weights(
    model_type: str,
    fields: dict[str, Any],
    quantization: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fused: list[int] = []
    call = cpu_attn.NativeDecoder.__call__

    def counted(self: cpu_attn.NativeDecoder, x: torch.Tensor, meta: Any) -> torch.Tensor:
        fused.append(len(x))
        return call(self, x, meta)

    monkeypatch.setattr(cpu_attn.NativeDecoder, "__call__", counted)
    reference = write_checkpoint(model_type, tmp_path, **fields)
    if (
        quantization == "int4" and model_type != "gemma3_text"
    ):  # rounding is seen, so this test would see it missing
        assert served(reference, tmp_path, model_impl="argosy", quantization=quantization).kind == "wrong"
    assert widen_weights(reference, INTEGER_BITS[quantization])
    assert served(reference, tmp_path, model_impl="argosy", quantization=quantization)[:2] == ("served", "")
    is_one_call = model_type == "llama" and reference.config.head_dim % usable_variant().lanes == 0
    assert bool(fused) == is_one_call


@torch.no_grad()
def widen_weights(model: torch.nn.Module, bits: int) -> int:
    """Round the weights that the engine quantises; returns their number. A tied head becomes one of its own."""
    count = 0
    head = quantized_weight(model.lm_head.weight, HEAD_BITS)
    if head is not None:
        model.lm_head.weight = torch.nn.Parameter(head.widened(torch.float32))
        count += 1
    for name, weight in model.named_parameters():
        if weight.ndim < 2 or re.search(r"embed|lm_head|(mlp\.gate|router)\.weight|bias", name):
            continue
        is_transposed = weight.ndim == 3 and "gpt_oss" in type(model).__module__
        rows = weight.transpose(1, 2) if is_transposed else weight
        quantized = quantized_weight(rows.flatten(0, -2), bits)
        if quantized is not None:
            rows.copy_(quantized.widened(torch.float32).view(rows.shape))
            count += 1
    return count


def test_a_scale_is_of_a_group_and_the_largest_magnitude_is_kept() -> None:
    weight = torch.randn(5, 192, generator=torch.Generator().manual_seed(0))
    weight[2, 64:128] *= 1e4
    weight[3] = 0.0
    for bits in (8, 4):
        quantized = quantized_weight(weight, bits)
        assert quantized is not None
        assert quantized.group == 64
        steps = quantized.scales.repeat_interleave(64, dim=1)
        error = (quantized.widened(torch.float32) - weight).abs()
        assert (error <= steps * (0.5 + 1e-3)).all()
        assert (quantized.widened(torch.float32)[3] == 0).all()
    assert quantized_weight(torch.randn(4, 80), 4) is None


def test_what_cannot_be_quantised_is_refused(tmp_path: Path) -> None:
    write_checkpoint("llama", tmp_path)
    config = load_model_config(tmp_path)
    with pytest.raises(
        ConfigError, match=r"int8 .*the CPU kernels are off or do not run here in float16; leave"
    ):
        linear_method(config, "int8", dtype=torch.float16, device=CPU, uses_triton=False)
    gpu = torch.device("cuda")
    with pytest.raises(ConfigError, match=r"int4 .*the Triton kernels do not serve here; leave"):
        linear_method(config, "int4", dtype=torch.float16, device=gpu, uses_triton=False)
    with pytest.raises(ConfigError, match=r"int4 .*in bfloat16 and float16; leave"):
        linear_method(config, "int4", dtype=torch.float32, device=gpu, uses_triton=True)
    args = EngineArgs.of(model="builtin://tiny", quantization="int8", dtype="float32")
    memory = DeviceMemory("cuda", "a GPU", 1 << 34, 1 << 34)
    with pytest.raises(ConfigError, match="in bfloat16 and float16; leave"):
        diagnose(args, memory)
    assert diagnose(EngineArgs.of(model="builtin://tiny", quantization="int8", dtype="bfloat16"), memory).fits


def test_the_estimate_is_what_weights_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "head_dim": 64}
    write_checkpoint("llama", tmp_path, **fields)
    config = load_model_config(tmp_path)
    taken: list[int] = []
    make = PackedLinear.__init__

    def counted(self: PackedLinear, struct: Any, *kept: torch.Tensor | None) -> None:
        taken.append(sum(each.nbytes for each in kept if each is not None))
        make(self, struct, *kept)

    monkeypatch.setattr(PackedLinear, "__init__", counted)
    for quantization in (None, *INTEGER_BITS):
        taken.clear()
        loaded = load_model(
            tmp_path,
            config,
            dtype=torch.bfloat16,
            device=CPU,
            attention_backend="cpu",
            quantization=quantization,
            max_positions=64,
            load_format="auto",
            seed=0,
        )
        estimate = estimate_weights(config, loaded.elements, 2, "cpu", quantization=quantization)
        embedding = config.vocab_size * config.hidden_size * 2
        assert abs(estimate - embedding - sum(taken)) < 0.02 * estimate, quantization
