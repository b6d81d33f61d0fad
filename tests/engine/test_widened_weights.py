"""Weights that are widened as they are loaded: FP8 with scales per block, and experts in MXFP4."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from argosy_engine.api.doctor import diagnose
from argosy_engine.checkpoint.model_folder import resolve_model
from argosy_engine.config import EngineArgs
from argosy_engine.core.proc.core_client import InprocClient
from argosy_engine.errors import ConfigError
from argosy_engine.model_configs.sharding import Sharding
from argosy_engine.models.config_file import load_model_config
from argosy_engine.models.loader import plan_weights
from argosy_engine.sizing.kv_cache_sizing import estimate_weights
from argosy_engine.sizing.resources import DeviceMemory
from fp8_checkpoints import quantize_checkpoint, write_packed_experts
from gemma4_shapes import EXPERTS as GEMMA4_EXPERTS
from rank_logits import TOKENS, logits_of
from thread_ranks import run_threads
from transformers_checkpoints import write_checkpoint
from transformers_sweep import EXACT


def edit(path: Path, **fields: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def packed_logits(path: Path) -> torch.Tensor:
    """Write a gpt-oss whose experts are in MXFP4; return transformers' logits of `TOKENS` with the same numbers."""
    reference = write_packed_experts(path)
    with torch.inference_mode():
        return reference(torch.tensor([TOKENS])).logits[0]


@pytest.mark.parametrize("form", ["fp8-block", "compressed-tensors-block"])
@pytest.mark.parametrize("model_type", ["deepseek_v3", "glm4_moe", "phi3", "ernie4_5", "qwen3"])
def test_blocks_count_for_what_they_stand_for(model_type: str, form: str, tmp_path: Path) -> None:
    write_checkpoint(model_type, tmp_path)
    quantize_checkpoint(tmp_path, form)
    with torch.inference_mode():
        expected = logits_of(tmp_path / "widened")
        assert torch.equal(logits_of(tmp_path), expected)
    ranks = run_threads(2, lambda group: logits_of(tmp_path, group, Sharding(group.rank, 2)))
    torch.testing.assert_close(ranks[0], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("model_type", "fields", "form"),
    [
        ("qwen3_vl_moe", {}, "compressed-tensors-channel"),
        ("qwen3_vl_moe", {}, "fp8-block"),
        ("gemma4_text", GEMMA4_EXPERTS, "compressed-tensors-block"),
    ],
)
def test_stacked_experts_stay_unquantised_among_fp8_layers(
    model_type: str, fields: dict[str, Any], form: str, tmp_path: Path
) -> None:
    """They are no linear layers, so that no list of exceptions names them. What they are stored in counts."""
    write_checkpoint(model_type, tmp_path, **fields)
    quantize_checkpoint(tmp_path, form)
    shutil.copy(resolve_model("builtin://tiny") / "tokenizer.json", tmp_path)
    args, memory = EngineArgs.of(model=str(tmp_path)), DeviceMemory("cpu", "a CPU", 8 << 30, 8 << 30)
    with torch.inference_mode():
        expected = logits_of(tmp_path / "widened")
        torch.testing.assert_close(logits_of(tmp_path), expected, atol=1e-5, rtol=1e-5)
    assert diagnose(args, memory).modelling_code == "argosy"
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    name = next(name for name in stored if name.endswith("experts.down_proj"))
    save_file(stored | {name: stored[name].to(torch.float8_e4m3fn)}, file)
    for start in (lambda: logits_of(tmp_path), lambda: diagnose(args, memory)):
        with pytest.raises(ConfigError, match=r"experts\.down_proj of .* in F8_E4M3, which is not supported"):
            start()


def test_experts_in_mxfp4_have_the_numbers_of_transformers(tmp_path: Path) -> None:
    expected = packed_logits(tmp_path)
    with torch.inference_mode():
        torch.testing.assert_close(logits_of(tmp_path), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("has_whole_experts", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_take_their_part_of_mxfp4(size: int, has_whole_experts: bool, tmp_path: Path) -> None:
    """A quarter of 64 features is half a block."""
    expected = packed_logits(tmp_path)
    ranks = run_threads(
        size, lambda group: logits_of(tmp_path, group, Sharding(group.rank, size, has_whole_experts))
    )
    torch.testing.assert_close(ranks[0], expected, atol=1e-4, rtol=1e-4)


def test_estimates_are_those_of_widened_weights(tmp_path: Path) -> None:
    packed_logits(tmp_path)
    config = load_model_config(tmp_path)
    plain = tmp_path / "plain"
    write_checkpoint("gpt_oss", plain, hidden_size=96, intermediate_size=64, head_dim=32)
    packed, widened, unquantised = (
        estimate_weights(each, plan_weights(each, torch.bfloat16).elements, 2, device)
        for each, device in ((config, "cuda"), (config, "cpu"), (load_model_config(plain), "cpu"))
    )
    assert unquantised < widened < 1.1 * unquantised
    assert packed < 0.75 * unquantised


def refusal(path: Path, **flags: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        InprocClient(EngineArgs.of(model=str(path), **EXACT, **flags))
    return str(caught.value)


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    write_checkpoint("qwen3", tmp_path)
    assert "is quantised by" not in refusal(tmp_path, quantization="mxfp4")
    edit(tmp_path, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    assert "weight_scale_inv" in refusal(tmp_path)
    edit(tmp_path, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 1 << 40]})
    assert "scales per block of" in refusal(tmp_path)


def test_scales_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    write_checkpoint("qwen3", tmp_path)
    quantize_checkpoint(tmp_path, "fp8-block")
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    name = "model.layers.1.mlp.up_proj.weight_scale_inv"
    tensors[name][0, 0] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert f"{name} of {tmp_path} has numbers that are not finite" in refusal(tmp_path)
