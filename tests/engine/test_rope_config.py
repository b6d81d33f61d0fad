"""RoPE fields of config.json: read as transformers reads them, or refused where they contradict each other."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import Gemma2Config, Gemma3TextConfig, LlamaConfig
from transformers.models.gemma2.modeling_gemma2 import Gemma2RotaryEmbedding
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from argosy_engine.errors import ConfigError
from argosy_engine.layers.embedding import inverse_frequencies
from argosy_engine.model_configs.rope_config import RopeParameters
from argosy_engine.models.config_file import check_config

SHAPE = {
    "vocab_size": 64, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 8192,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CONTEXT = "original_max_position_embeddings"


def config_of(architecture: str, fields: dict[str, Any]) -> Any:
    return check_config({**SHAPE, **fields, "architectures": [architecture]})


def check(rope: RopeParameters, expected: torch.Tensor, scaling: float) -> None:
    torch.testing.assert_close(inverse_frequencies(rope, 64).double(), expected.double(), atol=0.0, rtol=1e-6)
    assert rope.attention_scaling == pytest.approx(scaling)


@pytest.mark.parametrize("fields", [
    {"rope_theta": 5e5},
    {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
    {"rope_theta": 1e6, "rope_scaling": {**YARN, CONTEXT: 2048}},
    {"rope_theta": 1e6, "rope_scaling": YARN, CONTEXT: 2048},
    {"rope_theta": 1e6, "rope_scaling": {**YARN, CONTEXT: 4096}, CONTEXT: 2048},
    {"rope_parameters": {**YARN, "rope_theta": 1e6}, CONTEXT: 2048},
    {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}, CONTEXT: 2048},
    {"rope_parameters": {**LLAMA3, "rope_theta": 5e5, CONTEXT: 1024}, CONTEXT: 2048},
    {"rope_parameters": {**LLAMA3, "rope_theta": 5e5, "high_freq_factor": 1.0, CONTEXT: 1024}},
    {"rope_theta": 1e6, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}, "rope_scaling": YARN},
    {"rope_theta": 5.0, "rope_scaling": {"type": "linear", "factor": 2.0, "rope_theta": 3e5}},
    {"rope_scaling": {**YARN, "rope_theta": 1e6}, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
    {"rope_scaling": {}, "rope_parameters": {**YARN, "rope_theta": 1e6}},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Gemma2ForCausalLM"])
def test_frequencies_are_those_of_transformers(architecture: str, fields: dict[str, Any]) -> None:
    config_class, rotary = {
        "LlamaForCausalLM": (LlamaConfig, LlamaRotaryEmbedding),
        "Gemma2ForCausalLM": (Gemma2Config, Gemma2RotaryEmbedding),
    }[architecture]
    config = config_of(architecture, fields)
    reference = rotary(config_class(**SHAPE, **copy.deepcopy(fields)))  # which it changes
    for rope in [config.rope] if hasattr(config, "rope") else [config.rope_global, config.rope_local]:
        check(rope, reference.inv_freq, reference.attention_scaling)


@pytest.mark.parametrize("fields", [
    {"rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
        }
    },
    {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 5e5}},
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "rope_theta": 7e5,
    },
    {},
], ids=str)  # fmt: skip
def test_frequencies_of_gemma_3_are_those_of_transformers(fields: dict[str, Any]) -> None:
    fields = {**fields, "layer_types": ["sliding_attention", "full_attention"]}
    config = config_of("Gemma3ForCausalLM", fields)
    reference = Gemma3RotaryEmbedding(Gemma3TextConfig(**SHAPE, **copy.deepcopy(fields)))
    for rope, kind in ((config.rope_global, "full_attention"), (config.rope_local, "sliding_attention")):
        check(rope, getattr(reference, f"{kind}_inv_freq"), getattr(reference, f"{kind}_attention_scaling"))


@pytest.mark.parametrize(("architecture", "fields", "told"), [
    (
        "LlamaForCausalLM",
        {"rope_scaling": YARN, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
        r"rope_scaling, with rope_theta 10000, and rope_parameters, with rope_theta 1e\+06, disagree; put rope_theta",
    ),
    (
        "Gemma2ForCausalLM",
        {"rope_theta": 5e5, "rope_scaling": YARN, "rope_parameters": {"rope_theta": 1e6}},
        "with rope_theta 500000, and rope_parameters",
    ),
    ("LlamaForCausalLM", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is not supported"),
    ("LlamaForCausalLM", {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "by layer type are not"),
    ("Gemma3ForCausalLM", {"rope_parameters": {"rope_type": "linear", "factor": 8}}, "must have RoPE by layer type"),
])  # fmt: skip
def test_what_transformers_would_read_otherwise_is_refused(
    architecture: str, fields: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        config_of(architecture, fields)
