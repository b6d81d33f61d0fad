"""Loading checkpoints: refusals and their messages, other layouts, memory and progress."""

from __future__ import annotations

import json
import logging
import logging.handlers
import re
import shutil
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace as replace_field
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig as ReferenceConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.logging import warning_once

from argosy_engine import LLM, EngineArgs, SamplingParams
from argosy_engine.api.doctor import diagnose
from argosy_engine.api.doctor import main as doctor
from argosy_engine.checkpoint import weights
from argosy_engine.checkpoint.shards import checkpoint_elements
from argosy_engine.errors import ConfigError
from argosy_engine.layers.embedding import inverse_frequencies
from argosy_engine.model_configs.gemma_config import GemmaConfig
from argosy_engine.model_configs.model_use import AS_IT_IS, ModelUse
from argosy_engine.model_configs.rope_config import RopeParameters, rope_fields
from argosy_engine.models import loader, registry
from argosy_engine.models.config_file import REPLACED_CODE, load_model_config, parse_config
from argosy_engine.models.loader import LoadProgress, complete_config, load_model, plan_weights
from argosy_engine.sizing.resources import DeviceMemory
from fp8_checkpoints import quantize_checkpoint
from random_checkpoints import KINDS, make_checkpoint
from transformers_checkpoints import architecture_of, small_config, write_checkpoint

CPU = torch.device("cpu")
MEMORY = DeviceMemory("cpu", "a CPU", 8 << 30, 8 << 30)
TOKENIZER = Path(__file__).parents[2] / "models" / "argosy-tiny" / "tokenizer.json"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """name -> (directory, reference model)"""
    cache: dict[str, tuple[Path, torch.nn.Module]] = {}

    def make(name: str) -> tuple[Path, torch.nn.Module]:
        if name not in cache:
            path = tmp_path_factory.mktemp(name)
            cache[name] = (path, make_checkpoint(KINDS[name], path))
        return cache[name]

    return make


@pytest.fixture
def llama(made: Any, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    path = tmp_path / "llama"
    shutil.copytree(made("llama")[0], path)
    return path


@pytest.fixture
def sharded(made: Any, tmp_path: Path) -> Path:
    path = tmp_path / "sharded"
    shutil.copytree(made("llama3-rope")[0], path)
    return path


def load(path: Path, dtype: torch.dtype = torch.float32, use: ModelUse = AS_IT_IS) -> Any:
    config = complete_config(load_model_config(path, use))
    return load_model(
        path,
        config,
        dtype=dtype,
        device=CPU,
        attention_backend="torch",
        max_positions=64,
        load_format="auto",
        seed=0,
    ).model


def with_tokenizer(path: Path) -> Path:
    shutil.copy(TOKENIZER, path)
    return path


def change_tensors(path: Path, change: Any) -> None:
    file = path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def change_config(path: Path, **fields: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


# Tensors that do not fit


def test_one_error_names_every_wrong_tensor(llama: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.1.mlp.up_proj.weight"], tensors["model.norm.weight"]
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)
        tensors["model.layers.2.mlp.down_proj.weight"] = torch.zeros(64, 100)

    change_tensors(llama, change)
    with pytest.raises(ConfigError) as error:
        load(llama)
    message = str(error.value)
    assert "2 missing: model.layers.1.mlp.up_proj.weight, model.norm.weight" in message
    assert "1 unexpected: model.layers.0.self_attn.q_proj.bias" in message
    assert "model.layers.2.mlp.down_proj.weight is [64, 100], not [64, 128]" in message


def test_a_long_list_of_wrong_tensors_is_cut(llama: Path) -> None:
    change_config(llama, num_hidden_layers=40)
    with pytest.raises(ConfigError, match=r"324 missing: .* and 318 more") as error:
        load(llama)
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantised_tensors_are_refused(llama: Path, dtype: torch.dtype) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    change_tensors(llama, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    with pytest.raises(ConfigError, match=f"quantised or not floating point: {name} is"):
        load(llama)


def test_nothing_is_read_before_the_headers_fit(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change_tensors(llama, lambda tensors: tensors.pop("model.norm.weight"))
    monkeypatch.setattr(weights.SafetensorsWeights, "take", lambda *_: pytest.fail("a tensor was read"))
    with pytest.raises(ConfigError, match=r"model\.norm\.weight"):
        load(llama)


# Damaged and hostile files


@pytest.mark.parametrize(
    ("shape", "message"), [([1] * 17, "length <= 16"), ([-1], ">= 0"), ([1 << 70], "<= 9223372036854775807")]
)
def test_a_shape_that_no_tensor_has_is_refused(shape: list[int], message: str, tmp_path: Path) -> None:
    """The product of tens of thousands of large numbers takes seconds to compute."""
    header = json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(ConfigError, match=re.escape(message)):
        checkpoint_elements(tmp_path)


def test_damaged_files_are_refused(llama: Path) -> None:
    file = llama / "model.safetensors"
    whole = file.read_bytes()
    for name, content in {
        "cut off": whole[:-100],
        "cut off in the header": whole[:50],
        "empty": b"",
        "huge header": (1 << 60).to_bytes(8, "little") + whole[8:],
        "header is no JSON": whole[:8] + b"x" * (len(whole) - 8),
        "pickle": b"\x80\x04\x95" + whole,
    }.items():
        file.write_bytes(content)
        try:
            load(llama)
        except ConfigError as error:
            assert "damaged" in str(error), name  # noqa: PT017
        else:
            pytest.fail(f"{name} was loaded")


@pytest.mark.parametrize(
    "shard", ["../llama.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "model.bin", 7, None]
)
def test_shards_outside_of_the_checkpoint_are_refused(sharded: Path, shard: Any) -> None:
    index = sharded / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"] = shard
    index.write_text(json.dumps(content))
    for read in (load, checkpoint_elements):
        with pytest.raises(ConfigError, match="in its own folder"):
            read(sharded)


def test_a_missing_shard_and_a_wrong_index_are_named(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    shards = sorted(set(content["weight_map"].values()))
    assert len(shards) > 2
    other = next(shard for shard in shards if shard != content["weight_map"]["model.norm.weight"])
    content["weight_map"]["model.norm.weight"] = other
    index.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"1 missing: model\.norm\.weight"):
        load(sharded)
    (sharded / shards[1]).unlink()
    for read in (load, checkpoint_elements):
        with pytest.raises(ConfigError, match=f"{shards[1]} is missing"):
            read(sharded)


def test_other_formats_are_refused(llama: Path) -> None:
    (llama / "model.safetensors").rename(llama / "pytorch_model.bin")
    for read in (load, checkpoint_elements):
        with pytest.raises(ConfigError, match=r"no model\.safetensors; other weight formats"):
            read(llama)


# Configs

KIMI = {
    "AutoConfig": "configuration_deepseek.DeepseekV3Config",
    "AutoModel": "modeling_deepseek.DeepseekV3Model",
    "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
    "AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None],
}
NEMOTRON = {"AutoConfig": "c.NemotronHConfig", "AutoModelForCausalLM": "m.NemotronHForCausalLM"}


@pytest.mark.parametrize(
    ("model_type", "fields", "is_replaced"),
    [
        ("deepseek_v3", {"model_type": "kimi_k2", "auto_map": KIMI}, True),
        ("deepseek_v3", {"auto_map": {**KIMI, "AutoModel": "m.DeepseekModel"}}, True),
        ("deepseek_v3", {"auto_map": {"AutoModel": "m.DeepseekModel"}}, False),
        ("deepseek_v3", {"model_type": "deepseek_v4", "auto_map": KIMI}, False),
        ("deepseek_v3", {"auto_map": {**KIMI, "AutoConfig": "c.KimiConfig"}}, False),
        ("deepseek_v3", {"auto_map": {**KIMI, "AutoModelForCausalLM": "m.DeepseekV2ForCausalLM"}}, False),
        ("deepseek_v3", {"auto_map": "DeepseekV3ForCausalLM"}, False),
        ("nemotron_h", {"auto_map": NEMOTRON}, True),
        ("nemotron_h", {"model_type": "llama", "auto_map": NEMOTRON}, False),
        (
            "nemotron_h",
            {"architectures": ["LoopForCausalLM"], "auto_map": {"AutoModelForCausalLM": "m.LoopForCausalLM"}},
            False,
        ),
    ],
)
def test_code_that_bears_the_names_of_known_code_is_replaced(
    model_type: str, fields: dict[str, Any], is_replaced: bool
) -> None:
    raw = {**small_config(model_type).to_dict(), "architectures": [architecture_of(model_type)], **fields}
    if is_replaced:
        without = parse_config({name: value for name, value in raw.items() if name != "auto_map"}, {}, {})
        assert parse_config(raw, {}, {}) == replace_field(without, replaced_code=True)
    else:
        with pytest.raises(
            ConfigError, match=r"that is never done, and it is not called like .*--hf-overrides"
        ):
            parse_config(raw, {}, {})


@pytest.mark.parametrize("architecture", registry.architectures())
def test_only_the_experts_of_gpt_oss_are_read_from_mxfp4(architecture: str) -> None:
    types = [name for name, found in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if found == architecture]
    (model_type,) = (name for name in types if registry.is_of_type(architecture, name))
    raw = {**small_config(model_type).to_dict(), "architectures": [architecture]}
    quantised = {**raw, "quantization_config": {"quant_method": "mxfp4"}}
    if architecture == "GptOssForCausalLM":
        assert parse_config(quantised, {}, {}).quantization is not None
    else:
        with pytest.raises(
            ConfigError, match=f"MXFP4, whose layout is known of gpt-oss, not of {architecture}"
        ):
            parse_config(quantised, {}, {})


def test_stacked_experts_are_not_read_from_fp8() -> None:
    raw = {**small_config("gpt_oss").to_dict(), "architectures": ["GptOssForCausalLM"]}
    whole, ignored = {"quant_method": "fp8"}, {"modules_to_not_convert": ["*.mlp.experts*"]}
    assert parse_config({**raw, "quantization_config": {**whole, **ignored}}, {}, {}).quantization is not None
    for refused in (whole, {**whole, **ignored, "weight_block_size": [16, 16]}):
        with pytest.raises(ConfigError, match="stored stacked, which is not supported in FP8"):
            parse_config({**raw, "quantization_config": refused}, {}, {})


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite"])
def test_latent_attention_has_no_window(model_type: str) -> None:
    raw = {**small_config(model_type).to_dict(), "architectures": [architecture_of(model_type)]}
    positions = parse_config(raw, {}, {}).max_position_embeddings
    for fields in ({"sliding_window": positions - 1}, {"layer_types": ["sliding_attention"] * 4}):
        with pytest.raises(ConfigError, match=r"sliding_window .*: latent attention is to all tokens before"):
            parse_config({**raw, **fields}, {}, {})
    for fields in ({"sliding_window": positions}, {"sliding_window": 8, "use_sliding_window": False}):
        assert parse_config({**raw, **fields}, {}, {}) == parse_config(raw, {}, {})


@pytest.mark.parametrize("model_impl", ["argosy", "transformers"])
def test_a_last_layer_that_is_like_the_others_is_not_left_out(model_impl: Any, tmp_path: Path) -> None:
    write_checkpoint("glm4_moe", tmp_path)
    use = ModelUse(model_impl=model_impl)
    extra = f"model.layers.{load_model_config(tmp_path).num_hidden_layers}."

    def add(tensors: dict[str, torch.Tensor]) -> None:
        last = {name: each for name, each in tensors.items() if ".layers.3." in name}
        tensors |= {name.replace("model.layers.3.", extra): each.clone() for name, each in last.items()}
        tensors[extra + "eh_proj.weight"] = torch.zeros(64, 128)

    if model_impl == "argosy":  # transformers leaves out the layer that its published models have only
        change_tensors(tmp_path, add)
        load(tmp_path, use=use)
        diagnose(EngineArgs.of(model=str(with_tokenizer(tmp_path)), load_format="auto"), MEMORY)
        change_tensors(tmp_path, lambda tensors: tensors.pop(extra + "eh_proj.weight"))
    else:
        change_config(tmp_path, num_hidden_layers=3)
    with pytest.raises(ConfigError, match=r"further layers like the others: |does not use: model\.layers\.3"):
        load(tmp_path, use=use)
    with pytest.raises(ConfigError, match="further layers like the others: "):
        diagnose(EngineArgs.of(model=str(with_tokenizer(tmp_path)), model_impl=model_impl), MEMORY)


@pytest.mark.parametrize(
    ("fields", "flags", "code", "reason"),
    [
        ({}, {}, "argosy", None),
        ({}, {"model_impl": "transformers"}, "transformers", "--model-impl transformers asks for it"),
        ({"hidden_act": "gelu"}, {}, "transformers", "activation 'gelu' is not supported, only silu"),
    ],
)
def test_doctor_says_whose_code_runs_a_model(
    fields: dict[str, Any], flags: dict[str, Any], code: str, reason: str | None, llama: Path
) -> None:
    change_config(llama, **fields)
    diagnosis = diagnose(EngineArgs.of(model=str(with_tokenizer(llama)), **flags), MEMORY)
    assert (diagnosis.modelling_code, diagnosis.modelling_reason) == (code, reason)


def test_transformers_does_not_warn_of_defaults_that_a_config_does_not_have() -> None:
    raw = {**small_config("arcee").to_dict(), "architectures": ["ArceeForCausalLM"]}
    library, told = logging.getLogger("transformers"), logging.handlers.BufferingHandler(100)
    library.addHandler(told)
    level = library.level
    try:
        library.setLevel(logging.WARNING)
        warning_once.cache_clear()
        type(small_config("arcee"))()
        assert told.buffer
        told.flush()
        warning_once.cache_clear()
        parse_config(raw, {}, {})
    finally:
        library.setLevel(level)
        library.removeHandler(told)
    assert not told.buffer


def test_doctor_names_an_architecture_that_is_not_ours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_checkpoint("arcee", tmp_path)
    change_config(tmp_path, auto_map={"AutoModelForCausalLM": "modeling_arcee.ArceeForCausalLM"})
    assert doctor([str(with_tokenizer(tmp_path)), "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    told = "modelling code: transformers', because ArceeForCausalLM is not an architecture of argosy's own"
    assert told in lines
    assert REPLACED_CODE in lines
    assert doctor([str(tmp_path), "--device", "cpu", "--convert", "embed"]) == 2
    assert "that of models that pool often lets tokens attend to later ones" in capsys.readouterr().err
    assert doctor([str(tmp_path), "--device", "cpu", "--model-impl", "argosy"]) == 2
    refusal = capsys.readouterr().err
    assert "ArceeForCausalLM is not an architecture of argosy's own; leave out --model-impl argosy" in refusal
    assert "LlamaForCausalLM" not in refusal


@pytest.mark.parametrize("model_type", ["llama", "arcee"])
def test_doctor_refuses_to_classify_without_a_head(
    model_type: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_checkpoint(model_type, tmp_path)
    flags = [str(with_tokenizer(tmp_path)), "--device", "cpu", "--convert", "classify"]
    assert doctor(flags) == 2
    assert (
        "no head for labels by the name score.weight; a classifier has a head of its own"
        in capsys.readouterr().err
    )
    size = load_model_config(tmp_path).hidden_size
    change_tensors(tmp_path, lambda tensors: tensors.update({"score.weight": torch.zeros(2, size)}))
    assert doctor(flags) == 0


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "code": ({"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}, "auto_map asks to run Python code"),
    "architecture": (
        {"architectures": ["SwinBackbone"]},
        "SwinBackbone is not supported; there is: BambaForCausalLM, .*or serve it with vLLM behind",
    ),
    "no architecture": ({"architectures": None}, r"\(none\) is not supported"),
    "quantised": ({"quantization_config": {"quant_method": "aqlm"}}, "quant_method 'aqlm'.*engine.type vllm"),
    "dtype": ({"dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn' is not supported; there is: float32"),
    "rope kind": ({"rope_parameters": {"rope_type": "longrope"}}, "RoPE scaling 'longrope'"),
    "rope factor": ({"rope_parameters": {"rope_type": "linear"}}, "'linear' lacks factor"),
    "rope bounds": ({"rope_parameters": {"rope_type": "linear", "factor": -1}}, r"rope\.factor"),
    "llama3": (
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8,
                "original_max_position_embeddings": 64,
                "low_freq_factor": 5,
                "high_freq_factor": 4,
            }
        },
        "high_freq_factor must not be less",
    ),
    "partial": ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    "heads": ({"num_key_value_heads": 3}, "not a multiple"),
    "zero heads": ({"num_attention_heads": 0, "num_key_value_heads": 0}, "num_attention_heads"),
    "layers": ({"num_hidden_layers": 1 << 40}, "num_hidden_layers"),
    "text for a number": ({"hidden_size": "64"}, "hidden_size"),
    "nan": ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    "list": ({"rope_parameters": [1]}, "malformed"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_configs_are_refused_with_a_reason(case: str, llama: Path) -> None:
    fields, message = REFUSED[case]
    change_config(llama, **fields)
    with pytest.raises(ConfigError, match=message):
        load_model_config(llama)


def test_layer_types_are_checked(made: Any, tmp_path: Path) -> None:
    shutil.copytree(made("qwen2-window")[0], tmp_path, dirs_exist_ok=True)
    change_config(tmp_path, layer_types=["full_attention", "chunked_attention"] * 2)
    with pytest.raises(ConfigError, match="layer type 'chunked_attention'"):
        load_model_config(tmp_path)
    change_config(tmp_path, layer_types=["full_attention"])
    with pytest.raises(ConfigError, match="1 layer_types for 4 layers"):
        load_model_config(tmp_path)


def test_gemma_3_is_not_run_in_float16(made: Any) -> None:
    with pytest.raises(ConfigError, match=r"Gemma3ForCausalLM cannot run in float16: .*--dtype bfloat16"):
        load(made("gemma3")[0], torch.float16)
    load(made("gemma")[0], torch.float16)  # the first one's do not exceed its range


def test_scaling_lengthens_the_context_only_where_the_config_does_not_say_so(made: Any) -> None:
    lengths = {
        name: load_model_config(made(name)[0]).max_position_embeddings
        for name in ("llama", "llama-linear-rope", "llama3-rope", "qwen3-yarn")
    }
    assert lengths == {"llama": 512, "llama-linear-rope": 1536, "llama3-rope": 512, "qwen3-yarn": 512}


@pytest.mark.parametrize(
    ("fields", "theta", "head_dim"),
    [
        ({"rope_type": "default"}, 10000.0, 64),
        ({"rope_type": "linear", "factor": 8.0}, 1e6, 128),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            500000.0,
            128,
        ),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 1e6, 128),
        (
            {
                "rope_type": "yarn",
                "factor": 40.0,
                "original_max_position_embeddings": 4096,
                "truncate": False,
                "beta_fast": 24.0,
                "beta_slow": 2.0,
                "mscale": 1.0,
                "mscale_all_dim": 0.7,
            },
            10000.0,
            64,
        ),
    ],
)
def test_rope_frequencies_equal_transformers(fields: dict[str, Any], theta: float, head_dim: int) -> None:
    reference = ReferenceConfig(
        hidden_size=head_dim, num_attention_heads=1, rope_parameters={**fields, "rope_theta": theta}
    )
    rope = RopeParameters(**rope_fields(fields, theta=theta, max_position_embeddings=2048))
    ours = inverse_frequencies(rope, head_dim)
    if fields["rope_type"] == "default":
        expected, scaling = theta ** -(torch.arange(0, head_dim, 2).double() / head_dim), 1.0
    else:
        expected, scaling = ROPE_INIT_FUNCTIONS[fields["rope_type"]](reference, CPU)
    torch.testing.assert_close(ours.double(), expected.double(), atol=0.0, rtol=1e-6)
    assert rope.attention_scaling == pytest.approx(scaling)


def test_older_and_newer_gemma_configs_say_the_same(made: Any, tmp_path: Path) -> None:
    """Before transformers 5 the two RoPE bases were fields of their own."""
    path, _ = made("gemma3")
    new = load_model_config(path)
    assert isinstance(new, GemmaConfig)
    raw = json.loads((path / "config.json").read_text())
    assert "layer_types" in raw
    del raw["rope_parameters"], raw["layer_types"]
    raw |= {"rope_theta": 5000.0, "rope_local_base_freq": 200.0, "sliding_window_pattern": 2}
    raw["rope_scaling"] = {"rope_type": "linear", "factor": 2.0}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert load_model_config(tmp_path) == new


# Checkpoints in other layouts


def hidden_of(model: Any) -> torch.Tensor:
    return model.last_hidden_state(torch.linspace(-1, 1, 3 * 64).view(3, 64))


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt"])
def test_checkpoints_of_the_base_model_lack_its_prefix(name: str, made: Any, tmp_path: Path) -> None:
    path, reference = made(name)
    shutil.copy(path / "config.json", tmp_path)
    tensors = {key: value.clone() for key, value in reference.base_model.state_dict().items()}
    head = (
        {} if reference.config.tie_word_embeddings else {"lm_head.weight": reference.lm_head.weight.detach()}
    )
    save_file(tensors | head, tmp_path / "model.safetensors")
    assert not any(key.startswith(("model.", "transformer.")) for key in tensors)
    assert torch.equal(hidden_of(load(tmp_path)), hidden_of(load(path)))


def test_left_over_tensors_of_known_kinds_are_ignored(made: Any, tmp_path: Path) -> None:
    path, reference = made("gpt2")
    shutil.copytree(path, tmp_path, dirs_exist_ok=True)
    extra = {"lm_head.weight": reference.lm_head.weight.detach().clone()}  # tied
    extra |= {f"transformer.h.{i}.attn.bias": torch.ones(1, 1, 8, 8) for i in range(4)}
    change_tensors(tmp_path, lambda tensors: tensors.update(extra))
    assert torch.equal(hidden_of(load(tmp_path)), hidden_of(load(path)))


def generated(path: Path, **flags: Any) -> list[list[int]]:
    with LLM(str(path), device="cpu", dtype="float32", threads=1, num_gpu_blocks_override=16, **flags) as llm:
        outputs = llm.generate(
            [[7, 8, 9], [20, 30]], SamplingParams(temperature=0.0, max_tokens=8), use_tqdm=False
        )
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("name", ["gpt2", "gemma3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stored_head_that_is_not_the_embedding_is_used_though_the_config_ties_them(
    name: str, dtype: torch.dtype, made: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As transformers does, with a warning. A dtype of its own makes a head differ."""
    path, reference = made(name)
    assert reference.config.tie_word_embeddings
    shutil.copytree(path, tmp_path, dirs_exist_ok=True)
    shutil.copy(TOKENIZER, tmp_path)
    head = torch.randn(reference.lm_head.weight.shape, generator=torch.Generator().manual_seed(5)).to(dtype)
    change_tensors(tmp_path, lambda tensors: tensors.update({"lm_head.weight": head}))
    change_config(tmp_path, tie_word_embeddings=False)
    expected = generated(tmp_path)
    assert "the stored head is used" not in caplog.text
    change_config(tmp_path, tie_word_embeddings=True)
    assert generated(tmp_path) == expected
    assert "the stored head is used" in caplog.text
    change_tensors(tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
    assert generated(tmp_path) != expected


@pytest.mark.parametrize(
    ("dropped", "message"),
    [
        (
            "lm_head.weight",
            r"lm_head\.weight.* does not tie .*copy the whole checkpoint, or set \"tie_word_embeddings\"",
        ),
        ("model.layers.1.", r"9 missing: model\.layers\.1\.|of 4 layers there are no tensors of 1$"),
        ("model.embed_tokens.weight", r"1 missing: model\.embed_tokens|the embedding is missing"),
    ],
)
def test_what_is_in_no_file_is_named_by_a_load_and_by_doctor(dropped: str, message: str, llama: Path) -> None:
    shutil.copy(TOKENIZER, llama)

    def drop(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(dropped)]:
            del tensors[name]

    change_tensors(llama, drop)
    for act in (lambda: load(llama), lambda: diagnose(EngineArgs.of(model=str(llama), device="cpu"))):
        with pytest.raises(ConfigError, match=message):
            act()


# Memory


@pytest.mark.parametrize("name", KINDS)
def test_the_plan_is_what_is_loaded(name: str, made: Any) -> None:
    path, reference = made(name)
    config = load_model_config(path)
    plan = plan_weights(config, torch.bfloat16)
    corrections = [each for name, each in reference.named_buffers() if name.endswith("correction_bias")]
    precise: tuple[str, ...] = ("A_log", "dt_bias", "linear_attn.norm.weight")
    experts = getattr(config, "experts", None)
    if experts is not None and experts.has_float32_router:
        precise += ("mlp.gate.weight",)
    assert plan.num_bytes == 4 * sum(each.numel() for each in corrections) + sum(
        parameter.numel() * (4 if parameter_name.endswith(precise) else 2)
        for parameter_name, parameter in reference.named_parameters()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_are_dropped_as_soon_as_they_are_in_place(
    dtype: torch.dtype, made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the matrices in the file only the embedding, which is used as it is, outlives the next read."""
    alive: list[weakref.ref[Any]] = []
    most = 0
    take = weights.SafetensorsWeights.take

    def watched(self: Any, name: str, *shape: int, **options: Any) -> torch.Tensor:
        nonlocal most
        most = max(most, sum(ref() is not None for ref in alive))
        tensor = take(self, name, *shape, **options)
        if len(shape) > 1 and "embed" not in name:
            alive.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(weights.SafetensorsWeights, "take", watched)
    model = load(made("llama")[0], dtype)
    assert model is not None
    assert len(alive) == 4 * 7 + 1
    assert most <= 1


# Progress


def test_progress_is_printed_in_lines_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 100.0
    monkeypatch.setattr(loader.time, "monotonic", lambda: now)
    monkeypatch.setattr(loader.sys.stderr, "isatty", lambda: False, raising=False)
    caplog.set_level(logging.INFO, "argosy.models")
    gib = 1 << 30
    with LoadProgress(40 * gib) as progress:
        for _ in range(40):
            now += 0.5
            progress.advance(gib)
    assert caplog.messages == [
        "loading weights: 10.00 GiB of 40.00 GiB (25 %) after 5 s",
        "loading weights: 20.00 GiB of 40.00 GiB (50 %) after 10 s",
        "loading weights: 30.00 GiB of 40.00 GiB (75 %) after 15 s",
        "loading weights: 40.00 GiB of 40.00 GiB (100 %) after 20 s",
        "loaded 40.00 GiB of weights in 20.0 s",
    ]


def test_progress_is_a_bar_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    now = 0.0
    monkeypatch.setattr(loader.time, "monotonic", lambda: now)
    monkeypatch.setattr(loader.sys.stderr, "isatty", lambda: True, raising=False)
    caplog.set_level(logging.INFO, "argosy.models")
    with LoadProgress(3 << 30) as progress:
        now = 2.0
        progress.advance(1 << 30)
        progress.advance(1 << 30)
    assert "loading weights" in capsys.readouterr().err
    with LoadProgress(3 << 20) as progress:
        progress.advance(3 << 20)
    assert caplog.messages == ["loaded 2.00 GiB of weights in 2.0 s", "loaded 3.00 MiB of weights in 0.0 s"]


def test_a_checkpoint_in_another_dtype_fills_the_bar(
    made: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Progress counts the file's bytes: a float32 checkpoint loaded as bfloat16 ends at 100 %, not at 200."""
    seen: list[LoadProgress] = []
    original = LoadProgress.__exit__
    path, _ = made("llama")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LoadProgress, "__exit__", lambda self, *a: (seen.append(self), original(self, *a))[1])
        load(path, torch.bfloat16)
    assert (
        seen[0].done_bytes
        == seen[0].total_bytes
        == sum(t.nbytes for t in load_file(path / "model.safetensors").values())
    )


def test_loading_imports_neither_torchs_compiler_nor_transformers(made: Any, tmp_path: Path) -> None:
    script = (
        "import sys, torch\n"
        "from pathlib import Path\n"
        "from argosy_engine.models.config_file import load_model_config\n"
        "from argosy_engine.models.loader import load_model\n"
        "for path in map(Path, sys.argv[1:]):\n"
        "    load_model(path, load_model_config(path), dtype=torch.bfloat16, device=torch.device('cpu'),\n"
        "        attention_backend='torch', max_positions=64, load_format='auto', seed=0)\n"
        "heavy = 'torch._dynamo', 'torch._inductor', 'sympy', 'transformers'\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    paths = [
        str(made(name)[0]) for name in ("qwen3-yarn", "mistral-window", "gpt2", "opt", "qwen3-moe", "gemma3")
    ]
    for kind, form in (
        ("llama", "compressed-tensors-channel"),
        ("llama", "modelopt"),
        ("qwen3-moe", "compressed-tensors-tensor"),
    ):
        path = tmp_path / f"{kind}-{form}"
        make_checkpoint(replace(KINDS[kind], is_sharded=False), path)
        quantize_checkpoint(path, form)
        paths.append(str(path))
    done = subprocess.run(
        [sys.executable, "-P", "-c", script, *paths], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
