"""Quantised checkpoints of architectures that only transformers' code runs: served with the tokens of the numbers that
they stand for, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from argosy_engine.api.doctor import diagnose
from argosy_engine.checkpoint.model_folder import resolve_model
from argosy_engine.config import EngineArgs
from argosy_engine.core.proc.core_client import InprocClient
from argosy_engine.errors import ConfigError
from argosy_engine.model_configs.transformers_config import TransformersConfig
from argosy_engine.models.config_file import load_model_config
from argosy_engine.sizing.resources import DeviceMemory
from fp8_checkpoints import FORMATS, quantize_checkpoint, write_packed_experts
from transformers_checkpoints import write_checkpoint
from transformers_sweep import EXACT, Outcome, served


def widened_reference(path: Path, class_: Any = AutoModelForCausalLM) -> torch.nn.Module:
    """Return transformers' model of what the quantised numbers stand for."""
    model = class_.from_pretrained(path / "widened", dtype=torch.float32, attn_implementation="eager")
    reference: torch.nn.Module = model.eval()
    return reference


def quantised(model_type: str, form: str, path: Path) -> Outcome:
    write_checkpoint(model_type, path)
    quantize_checkpoint(path, form)
    return served(widened_reference(path), path, model_impl="transformers")


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """An FP8 checkpoint of an architecture that is not ours."""
    write_checkpoint("arcee", tmp_path)
    quantize_checkpoint(tmp_path, "compressed-tensors-channel")
    return tmp_path


def refusal(path: Path, **flags: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        InprocClient(EngineArgs.of(model=str(path), **{**EXACT, **flags}))
    return str(caught.value)


@pytest.mark.parametrize("form", FORMATS)
def test_tokens_are_those_of_the_widened_weights(form: str, tmp_path: Path) -> None:
    assert quantised("arcee", form, tmp_path)[:2] == ("served", "")
    assert isinstance(load_model_config(tmp_path), TransformersConfig)


@pytest.mark.parametrize(
    ("model_type", "form"),
    [
        ("mimo_v2_flash", "fp8-block"),  # experts one by one, which transformers joins
        (
            "llama4",
            "compressed-tensors-channel",
        ),  # within a wrapper, where a scale is per channel of a fused tensor
        ("falcon_h1", "fp8"),  # Mamba 2 reads weights of its layers itself
    ],
)
def test_names_and_layouts_that_transformers_changes(model_type: str, form: str, tmp_path: Path) -> None:
    assert quantised(model_type, form, tmp_path)[:2] == ("served", "")


def test_a_checkpoint_in_bfloat16_is_widened_to_it(foreign: Path) -> None:
    flags = {**EXACT, "dtype": "bfloat16"}
    client = InprocClient(EngineArgs.of(model=str(foreign), **flags))
    assert client.config.dtype == "bfloat16"


Tensors = dict[str, torch.Tensor]
LAYER = "model.layers.1.mlp.up_proj"


def _without_scale(tensors: Tensors) -> None:
    del tensors[f"{LAYER}.weight_scale"]


def _plain_beside_scale(tensors: Tensors) -> None:
    tensors[f"{LAYER}.weight"] = tensors[f"{LAYER}.weight"].float()


def _negative_scale(tensors: Tensors) -> None:
    tensors[f"{LAYER}.weight_scale"] *= -1


def _too_few_scales(tensors: Tensors) -> None:
    tensors[f"{LAYER}.weight_scale"] = tensors[f"{LAYER}.weight_scale"][:4].clone()


def _other_format(tensors: Tensors) -> None:
    tensors[f"{LAYER}.weight"] = tensors[f"{LAYER}.weight"].float().to(torch.float8_e5m2)


def _integers(tensors: Tensors) -> None:
    tensors[f"{LAYER}.weight"] = tensors[f"{LAYER}.weight"].float().to(torch.int8)


def _quantised_embedding(tensors: Tensors) -> None:
    name = "model.embed_tokens.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without_scale, f"{LAYER}.weight is F8_E4M3, and there is no {LAYER}.weight_scale"),
        (_plain_beside_scale, f"{LAYER}.weight_scale is the scale of a weight that is not quantised"),
        (_negative_scale, "has scales that are not finite or not greater than 0"),
        (_too_few_scales, "there are 96 scales"),
        (_other_format, f"{LAYER}.weight is F8_E5M2"),
        (_integers, f"{LAYER}.weight is I8"),
        (_quantised_embedding, "model.embed_tokens.weight is F8_E4M3"),
    ],
)
def test_tensors_that_are_not_as_config_says_are_refused(
    change: Callable[[Tensors], None], message: str, foreign: Path
) -> None:
    file = foreign / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    assert message in refusal(foreign)


def edit(path: Path, description: dict[str, Any] | None) -> None:
    file = path / "config.json"
    raw = json.loads(file.read_text())
    raw.pop("quantization_config")
    file.write_text(json.dumps(raw if description is None else {**raw, "quantization_config": description}))


@pytest.mark.parametrize(
    ("description", "message"),
    [
        ({"quant_method": "hqq", "bits": 4}, "quant_method 'hqq' is not supported"),
        ({"quant_method": "aqlm"}, "quant_method 'aqlm' is not supported"),
        (None, "is F8_E4M3, and config.json has no quantization_config"),
        ({"quant_method": "mxfp4"}, "in MXFP4, whose layout is known of gpt-oss, not of ArceeForCausalLM"),
        (FORMATS["fp8-block"], "weight_scale_inv"),
        (
            {**FORMATS["compressed-tensors-channel"], "ignore": ["lm_head", LAYER]},
            f"{LAYER}.weight is F8_E4M3, and config.json says that it is not quantised",
        ),
    ],
)
def test_other_descriptions_are_refused(
    description: dict[str, Any] | None, message: str, foreign: Path
) -> None:
    edit(foreign, description)
    assert message in refusal(foreign)


@pytest.mark.parametrize("flag", ["fp8", "modelopt"])
def test_a_flag_for_another_scheme_is_refused(flag: str, foreign: Path) -> None:
    assert "the checkpoint is quantised by compressed-tensors" in refusal(foreign, quantization=flag)


def test_experts_in_mxfp4_have_the_numbers_of_transformers(tmp_path: Path) -> None:
    reference = write_packed_experts(tmp_path)
    assert served(reference, tmp_path, model_impl="transformers")[:2] == ("served", "")


def test_mxfp4_is_of_the_experts_alone(tmp_path: Path) -> None:
    write_packed_experts(tmp_path)
    file = tmp_path / "model.safetensors"
    name = "model.layers.0.self_attn.o_proj.weight"
    tensors = load_file(file)
    save_file({**tensors, name: tensors[name].to(torch.float8_e4m3fn)}, file, metadata={"format": "pt"})
    assert f"{name} is F8_E4M3 [" in refusal(tmp_path, model_impl="transformers")


def test_doctor_counts_widened_weights_on_a_gpu(foreign: Path) -> None:
    (foreign / "tokenizer.json").write_bytes(
        (resolve_model("builtin://tiny") / "tokenizer.json").read_bytes()
    )
    gpu = DeviceMemory("cuda", "a GPU", 8 << 30, 8 << 30)
    found = diagnose(EngineArgs.of(model=str(foreign), dtype="bfloat16"), gpu)
    (foreign / "widened" / "tokenizer.json").write_bytes((foreign / "tokenizer.json").read_bytes())
    plain = diagnose(EngineArgs.of(model=str(foreign / "widened"), dtype="bfloat16"), gpu)
    assert found.budget is not None
    assert plain.budget is not None
    assert found.budget.weights_bytes >= plain.budget.weights_bytes
