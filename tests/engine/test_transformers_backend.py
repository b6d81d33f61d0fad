"""Decoders of transformers' modelling code: a few architectures against it, what is refused, and their flags.

The whole list: `test_transformers_architectures`.
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from argosy_engine.api.doctor import diagnose
from argosy_engine.attention.torch_attn import TorchBackend
from argosy_engine.checkpoint.model_folder import resolve_model
from argosy_engine.config import EngineArgs
from argosy_engine.core.proc.core_client import InprocClient
from argosy_engine.errors import ConfigError
from argosy_engine.messages import EngineCoreRequest
from argosy_engine.model_configs import transformers_config
from argosy_engine.model_configs.transformers_config import TransformersConfig
from argosy_engine.models.config_file import load_model_config
from argosy_engine.models.loader import complete_config
from argosy_engine.models.transformers_weights import load_transformers, probe
from argosy_engine.params import SamplingParams
from argosy_engine.sizing.kv_cache_sizing import check_model
from argosy_engine.sizing.resources import DeviceMemory
from transformers_checkpoints import write_checkpoint
from transformers_sweep import EXACT, outcome, served

CPU = torch.device("cpu")


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A checkpoint of an architecture that is not ours: Arcee's MLP has no gate."""
    write_checkpoint("arcee", tmp_path)
    return tmp_path


def refusal(path: Path, **flags: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        InprocClient(EngineArgs.of(model=str(path), **{**EXACT, **flags}))
    return str(caught.value)


def edit(path: Path, **fields: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


@pytest.mark.parametrize(
    "model_type",
    [
        "gpt_oss",  # sinks, and a window in every other layer
        "deepseek_v3",  # values that are smaller than keys; experts in groups
        "llama4_text",  # attention in chunks
        "mimo_v2_flash",  # layers with different numbers of KV heads
        "qwen3_5_text",  # DeltaNet in most layers
        "falcon_h1",  # Mamba 2 beside attention in every layer
        "mamba",  # states alone, and a scan that begins without one
    ],
)
def test_greedy_tokens_are_those_of_transformers(model_type: str, tmp_path: Path) -> None:
    assert outcome(model_type, tmp_path, model_impl="transformers")[:2] == ("served", "")


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "apertus"])
def test_layers_in_our_kernels_give_the_tokens_of_transformers(model_type: str, tmp_path: Path) -> None:
    """Heads of a size that the CPU kernels compute on every machine; Qwen3's have windows in some layers."""
    found = outcome(model_type, tmp_path, {"head_dim": 32}, model_impl="transformers")
    assert found[:2] == ("served", "")
    assert found.cached_tokens


@pytest.mark.parametrize("model_type", ["nemotron_h", "zamba2"])
def test_step_sizes_of_prompts_have_no_lower_bound(model_type: str, tmp_path: Path) -> None:
    """As those of decodes, of which transformers bounds none."""
    reference = write_checkpoint(model_type, tmp_path, time_step_min=0.5)
    tokens = torch.arange(3, 40).unsqueeze(0)
    bounded = reference(tokens).logits[0, -1]
    for module in reference.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = (0.0, math.inf)
    assert (reference(tokens).logits[0, -1] - bounded).abs().max() > 0.1
    assert served(reference, tmp_path, model_impl="transformers")[:2] == ("served", "")


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("qwen3_moe", {}),
        ("hy_v3", {}),
        ("phimoe", {"intermediate_size": 37}),
        ("gpt_oss", {"intermediate_size": 50}),  # weights that are transposed, of even rows
    ],
)
def test_experts_of_sizes_that_torch_s_grouped_product_does_not_take(
    model_type: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    """With its default transformers fails."""
    reference = write_checkpoint(model_type, tmp_path, **{"moe_intermediate_size": 37, **fields})
    with pytest.raises(RuntimeError, match="multiple of 16 bytes"):
        reference(torch.arange(3, 40).unsqueeze(0))
    reference.set_experts_implementation("eager")  # type: ignore[operator]
    assert served(reference, tmp_path, model_impl="transformers")[:2] == ("served", "")


@pytest.mark.parametrize("limit", [[0.5, math.inf], [0.0, 0.5]])
def test_step_sizes_that_decodes_do_not_bound_are_refused(limit: list[float], tmp_path: Path) -> None:
    write_checkpoint("falcon_h1", tmp_path, time_step_limit=limit)
    assert "continues a state otherwise than it computes a whole prompt" in refusal(tmp_path)


def test_an_architecture_of_ours_runs_on_either_code(tmp_path: Path) -> None:
    write_checkpoint("qwen3", tmp_path)
    assert not isinstance(load_model_config(tmp_path), TransformersConfig)
    found = outcome("qwen3", tmp_path, model_impl="transformers")
    assert found[:2] == ("served", "")
    assert found.preemptions


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("deepseek_v4", "DeepseekV4Attention attends to other keys than those of its tokens"),
        ("bloom", "BloomForCausalLM cannot be served by transformers' modelling code"),
    ],
)
def test_what_it_cannot_compute_is_refused_by_name(model_type: str, message: str, tmp_path: Path) -> None:
    write_checkpoint(model_type, tmp_path)
    assert message in refusal(tmp_path, model_impl="transformers")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"model_impl": "argosy"}, "own; leave out --model-impl argosy, and transformers' code runs it"),
        ({"kv_cache_dtype": "fp8", "attention_backend": "torch"}, "use --kv-cache-dtype auto"),
        ({"quantization": "fp8"}, "leave out the flag"),
        ({"compilation_config": {"level": 3}}, "--compilation-config level 0"),
    ],
)  # fmt: skip
def test_flags_that_do_not_work_with_it_are_refused(
    flags: dict[str, Any], message: str, foreign: Path
) -> None:
    assert message in refusal(foreign, **flags)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"kv_cache_dtype": "fp8", "attention_backend": "torch"}, "use --kv-cache-dtype auto"),
        ({"quantization": "fp8"}, "leave out the flag"),
    ],
)  # fmt: skip
def test_doctor_names_flags_that_do_not_work(flags: dict[str, Any], message: str, foreign: Path) -> None:
    (foreign / "tokenizer.json").write_bytes(
        (resolve_model("builtin://tiny") / "tokenizer.json").read_bytes()
    )
    with pytest.raises(ConfigError, match=message):
        diagnose(EngineArgs.of(model=str(foreign), **flags), DeviceMemory("cpu", "a CPU", 8 << 30, 8 << 30))


def test_it_is_no_pipeline(foreign: Path) -> None:
    with pytest.raises(
        ConfigError, match="--pipeline-parallel-size 2: transformers' modelling code has no stages"
    ):
        check_model(EngineArgs.of(model=str(foreign), pipeline_parallel_size=2))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"auto_map": {"AutoModelForCausalLM": "modeling.Arcee"}}, "that is never done"),
        ({"architectures": ["PhiForCausalLM"]}, "PhiForCausalLM is not supported: transformers"),
        ({"model_type": "unheard-of"}, "no model_type 'unheard-of'"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers 1000000000 exceeds 4096"),
        ({"hidden_size": "big"}, "transformers refuses it"),
        ({"num_hidden_layers": 5}, "lacks model.layers.4."),
        ({"num_hidden_layers": 3}, "has what the model does not use: model.layers.3."),
        ({"vocab_size": 299}, "has in another shape "),
    ],
)
def test_malformed_configs_are_refused(fields: dict[str, Any], message: str, foreign: Path) -> None:
    edit(foreign, **fields)
    assert message in refusal(foreign)


def test_rope_that_depends_on_the_longest_request_serves_the_original_length(tmp_path: Path) -> None:
    write_checkpoint("phi3", tmp_path)
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": 64}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, **factors}
    edit(tmp_path, rope_parameters=rope, original_max_position_embeddings=64)
    assert load_model_config(tmp_path).max_position_embeddings == 64


def test_without_transformers_the_refusal_names_the_extra(
    foreign: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers_config, "MIN_VERSION", (99, 0))
    assert "transformers 99.0 or later, and " in refusal(foreign)
    assert "`pip install '.[transformers]'` in the checkout, or `pip install 'FILE.whl" in refusal(foreign)


def test_an_architecture_that_is_misunderstood_is_refused(foreign: Path) -> None:
    """As if what a model asks attention for had been read wrongly."""
    config = complete_config(load_model_config(foreign))
    assert isinstance(config, TransformersConfig)
    for change in ({"scale": 0.3}, {"sliding_window": 20}, {"logit_softcap": 2.0}):
        layers = tuple(msgspec.structs.replace(layer, **change) for layer in config.attention)
        wrong = msgspec.structs.replace(config, attention=layers)
        with torch.inference_mode():
            model, _ = load_transformers(
                foreign, wrong, TorchBackend(torch.float32), dtype=torch.float32, device=CPU, seed=None
            )
            with pytest.raises(
                ConfigError, match="logits differ from those with transformers' own attention"
            ):
                probe(wrong, model, torch.float32, CPU)


def test_a_scan_that_begins_without_a_state_is_found_though_rounding_hides_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A state that matters little: in bfloat16 logits differ by less than rounding may."""
    reference: Any = write_checkpoint("mamba", tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    with torch.no_grad():
        for layer in reference.backbone.layers:
            layer.mixer.out_proj.weight.mul_(0.35)
    reference.to(torch.bfloat16).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(raw | {"dtype": "bfloat16"}))
    config = complete_config(load_model_config(tmp_path))
    assert isinstance(config, TransformersConfig)
    model, _ = load_transformers(
        tmp_path, config, TorchBackend(torch.bfloat16), dtype=torch.bfloat16, device=CPU, seed=None
    )
    with caplog.at_level("INFO"):
        probe(config, model, torch.bfloat16, CPU)
    assert "states take token by token" in caplog.text


def test_a_stored_head_that_is_not_the_embedding_is_used(tmp_path: Path) -> None:
    reference = write_checkpoint("vaultgemma", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    head = torch.randn(tensors["model.embed_tokens.weight"].shape, generator=torch.Generator().manual_seed(1))
    save_file({**tensors, "lm_head.weight": head}, file, metadata={"format": "pt"})
    reference.lm_head.weight = torch.nn.Parameter(head)
    client = InprocClient(EngineArgs.of(model=str(tmp_path), **EXACT))
    sampling = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    prompt = list(range(5, 40))
    client.add_request(EngineCoreRequest("a", prompt, sampling, time.time()))
    tokens: list[int] = []
    while client.has_work:
        for output in client.step().outputs:
            tokens += output.new_token_ids
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    assert tokens == logits.argmax(-1).tolist()


def test_dummy_weights_follow_the_seed(foreign: Path) -> None:
    client = InprocClient(EngineArgs.of(model=str(foreign), load_format="dummy", seed=4, **EXACT))
    again = InprocClient(EngineArgs.of(model=str(foreign), load_format="dummy", seed=4, **EXACT))
    other = InprocClient(EngineArgs.of(model=str(foreign), load_format="dummy", seed=5, **EXACT))
    assert client.config.model_fingerprint == again.config.model_fingerprint
    assert client.config.model_fingerprint != other.config.model_fingerprint


def test_doctor_sizes_the_cache_as_the_engine_does(foreign: Path) -> None:
    args = EngineArgs.of(model=str(foreign), **EXACT, num_gpu_blocks_override=20)
    (foreign / "tokenizer.json").write_bytes(
        (resolve_model("builtin://tiny") / "tokenizer.json").read_bytes()
    )
    found = diagnose(args, DeviceMemory("cpu", "a CPU", 8 << 30, 8 << 30))
    assert found.budget is not None
    client = InprocClient(args)
    assert found.budget.block_bytes == client.config.memory.block_bytes


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}),
        ("olmoe", {"clip_qkv": 0.5}),
        ("ernie4_5_moe", {"use_bias": True}),
        ("gpt_oss", {"swiglu_limit": 5.0}),
    ],
)
def test_what_our_code_does_not_compute_of_a_family_falls_to_transformers(
    model_type: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    assert outcome(model_type, tmp_path, fields)[:2] == ("served", "")
    assert isinstance(load_model_config(tmp_path), TransformersConfig)
    assert "not" in refusal(tmp_path, model_impl="argosy")
