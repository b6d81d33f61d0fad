"""`--hf-overrides`: an engine with them is the engine of a checkpoint whose config.json says the same."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from argosy_engine import LLM
from argosy_engine.checkpoint.model_folder import resolve_model
from argosy_engine.errors import ConfigError
from argosy_engine.model_configs.model_use import HfOverrides, ModelUse
from argosy_engine.models.config_file import load_model_config
from argosy_engine.params import SamplingParams

TINY = resolve_model("builtin://tiny")
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
PER_LAYER = {
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
GEMMA = {
    "architectures": ["Gemma3ForCausalLM"],
    "vocab_size": 8,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rope_parameters": PER_LAYER,
}


def checkpoint(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def config_of(folder: Path, overrides: dict[str, Any]) -> Any:
    return load_model_config(folder, ModelUse(hf_overrides=HfOverrides.of(overrides)))


def tiny_config(**changed: Any) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((TINY / "config.json").read_text())
    return {name: value for name, value in (config | changed).items() if value != "absent"}


@pytest.mark.parametrize(
    ("own", "overrides", "same_as"),
    [
        ({}, {"rope_scaling": YARN}, {"rope_parameters": {"rope_theta": 1e4, **YARN}}),
        ({}, {"rope_parameters": YARN}, {"rope_parameters": {"rope_theta": 1e4, **YARN}}),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rope_theta": "absent"},
            {"rope_scaling": YARN},
            {"rope_parameters": {"rope_theta": 5e5, **YARN}},
        ),
        (
            {"rope_parameters": "absent", "rope_scaling": YARN},
            {"rope_parameters": None},
            {"rope_parameters": "absent"},
        ),
        ({}, {"rope_theta": 3e5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 3e5}}),
        (
            {"rope_parameters": {"rope_theta": 1e4, **YARN}},
            {"rope_theta": 3e5},
            {"rope_parameters": {"rope_theta": 3e5, **YARN}},
        ),
        ({"rms_norm_eps": 1e-5}, {"rms_norm_eps": 1e-6}, {}),
        ({}, {"max_position_embeddings": 64}, {"max_position_embeddings": 64}),
        ({}, {"eos_token_id": [2, 3]}, {"eos_token_id": [2, 3]}),
        ({"quantization_config": {"quant_method": "gptq"}}, {"quantization_config": None}, {}),
        ({"auto_map": {"AutoConfig": "x.Y"}}, {"auto_map": None}, {}),
    ],
)
def test_the_config_is_that_of_a_file_that_says_the_same(
    own: dict[str, Any], overrides: dict[str, Any], same_as: dict[str, Any], tmp_path: Path
) -> None:
    wanted = config_of(checkpoint(tmp_path / "changed", tiny_config(**same_as)), {})
    assert config_of(checkpoint(tmp_path / "own", tiny_config(**own)), overrides) == wanted


_PART = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
GLM = {
    "architectures": ["Glm4ForCausalLM"],
    "vocab_size": 8,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "rope_parameters": _PART,
}


@pytest.mark.parametrize(
    ("overrides", "rope_parameters"),
    [
        ({"rope_scaling": YARN}, {**_PART, **YARN}),
        (
            {"rope_parameters": {**YARN, "partial_rotary_factor": 1.0}},
            {**_PART, **YARN, "partial_rotary_factor": 1.0},
        ),
        ({"partial_rotary_factor": 1.0}, {**_PART, "partial_rotary_factor": 1.0}),
        ({"rope_theta": 3e5}, {**_PART, "rope_theta": 3e5}),
    ],
)
def test_the_part_of_a_head_that_is_rotated_stays_unless_it_is_overridden(
    overrides: dict[str, Any], rope_parameters: dict[str, Any], tmp_path: Path
) -> None:
    wanted = config_of(checkpoint(tmp_path / "changed", {**GLM, "rope_parameters": rope_parameters}), {})
    assert config_of(checkpoint(tmp_path / "own", GLM), overrides) == wanted


@pytest.mark.parametrize(
    ("config", "overrides", "reason"),
    [
        (
            tiny_config(),
            {"rope_sclaing": YARN, "sliding_windw": 3},
            "rope_sclaing, sliding_windw: what this engine",
        ),
        (
            tiny_config(),
            {"rope_scaling": {"rope_type": "longrope"}},
            "with --hf-overrides: RoPE scaling 'longrope'",
        ),
        (tiny_config(), {"rope_scaling": "yarn"}, "malformed"),
        (tiny_config(), {"hidden_size": "x"}, "with --hf-overrides: .*hidden_size"),
        (tiny_config(), {"architectures": ["LlamaForCausalLM"]}, "not a Qwen3ForCausalLM with another head"),
        (tiny_config(), {"text_config": {"rope_theta": 3.0}}, "text_config: what this engine reads"),
        (GEMMA, {"rope_scaling": YARN}, "rope_parameters for each layer type; give them as it does"),
        (GEMMA, {"rope_theta": 3e5}, "rope_parameters for each layer type"),
        (GEMMA, {"rope_scaling": None}, "rope_parameters for each layer type"),
    ],
)
def test_an_override_without_a_meaning_is_refused(
    config: dict[str, Any], overrides: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=reason):
        config_of(checkpoint(tmp_path / "model", config), overrides)


def test_parameters_of_each_layer_type_are_replaced_together(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model", GEMMA)
    scaled = {**PER_LAYER, "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6}}
    config = config_of(model, {"rope_parameters": scaled})
    assert (config.rope_global.theta, config.rope_global.factor) == (2e6, 8.0)
    assert config.rope_local == config_of(model, {}).rope_local


def test_tokens_and_fingerprint_are_those_of_an_edited_copy(tmp_path: Path) -> None:
    edited = tmp_path / "edited"
    shutil.copytree(TINY, edited)
    scaling = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    (edited / "config.json").write_text(json.dumps(tiny_config(rope_parameters=scaling)))
    found = []
    for model, overrides in (
        (TINY, {}),
        (TINY, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
        (edited, {}),
    ):
        llm = LLM(
            str(model),
            dtype="float32",
            device="cpu",
            threads=1,
            num_gpu_blocks_override=16,
            max_model_len=128,
            hf_overrides=overrides,
        )
        with closing(llm):
            params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0)
            (output,) = llm.generate([list(range(5, 45))], params, use_tqdm=False)
            found.append((llm.config.model_fingerprint, output.outputs[0].cumulative_logprob))
    assert found[1] == found[2]
    assert found[0][0] != found[1][0]
    assert found[0][1] != found[1][1]
