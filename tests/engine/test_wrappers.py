"""Text parts of models for images: their tokens against the whole model in transformers, names of tensors, refusals."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

from argosy_engine.api.doctor import diagnose
from argosy_engine.attention.torch_attn import TorchBackend
from argosy_engine.checkpoint.model_folder import resolve_model
from argosy_engine.config import EngineArgs
from argosy_engine.core.proc.core_client import InprocClient
from argosy_engine.errors import ConfigError
from argosy_engine.model_configs.model_use import HfOverrides, ModelUse
from argosy_engine.model_configs.transformers_config import TransformersConfig
from argosy_engine.model_configs.wrapper_config import NATIVE_WRAPPERS
from argosy_engine.models.config_file import check_fetched_config, load_model_config, parse_config
from argosy_engine.models.loader import complete_config, load_model
from argosy_engine.models.transformers_weights import load_transformers
from argosy_engine.sizing.resources import DeviceMemory
from argosy_fetcher.errors import UnsupportedModel
from processes import free_port, running
from transformers_checkpoints import WRAPPER_TYPES, small_wrapper_config, write_checkpoint, write_folder
from transformers_sweep import EXACT, outcome, served

IN_GUIDES = ("qwen3_vl", "qwen3_5")
"""Types with which the command line and request of guides to vLLM are tried."""
GUIDE = """
    --dtype auto --tensor-parallel-size 1 --gpu-memory-utilization 0.85 --max-model-len 1024 --language-model-only
    --enable-auto-tool-choice --tool-call-parser qwen3_coder --reasoning-parser qwen3 --enable-chunked-prefill
    --enable-prefix-caching --async-scheduling
"""
GUIDE_REQUEST: dict[str, Any] = {
    "stream": False,
    "temperature": 0.7,
    "max_tokens": 150,
    "messages": [{"role": "user", "content": "Quel temps fait-il \u00e0 Paris aujourd'hui ?"}],
    "chat_template_kwargs": {"enable_thinking": False},
    "tool_choice": "auto",
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "q",
                "description": "Get the current weather for a specific location.",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "x": {"type": "string", "description": "The city and country, e.g., Paris, France"}
                    },
                    "required": ["x"],
                    "additionalProperties": False,
                },
                "strict": True,
            },
        }
    ],
}
OURS = (
    "gemma3",
    "gemma4",
    "glm4v",
    "glm4v_moe",
    "idefics3",
    "internvl",
    "llama4",
    "llava",
    "llava_next",
    "llava_onevision",
    "mistral3",
)
OURS += ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "smolvlm")
ORIGIN = {"gemma3": "Gemma3ForConditionalGeneration", "qwen3_vl": "Qwen3VLForConditionalGeneration"}
REFUSED = {
    "paligemma": "cannot be followed",  # tokens of a prompt attend to later ones
}
"""Types that are not served, and what the refusal says."""
IN_LLAVA = (
    ("model.language_model.", "language_model.model."),
    ("lm_head.", "language_model.lm_head."),
    ("model.vision_tower.", "vision_tower."),
    ("model.multi_modal_projector.", "multi_modal_projector."),
)
IN_QWEN = (("model.language_model.", "model."), ("model.visual.", "visual."))


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    file = path / "config.json"
    raw = json.loads(file.read_text())
    change(raw)
    file.write_text(json.dumps(raw))


def retold(path: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    """Write the tensors of a checkpoint anew."""
    file = path / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})


def renamed(path: Path, prefixes: tuple[tuple[str, str], ...], *, are_older: bool = True) -> None:
    """Give the tensors of a checkpoint their older names, or the newer ones, whichever of the two it has."""

    def new_name(name: str) -> str:
        for newer, older in prefixes:
            for known in (newer, older):
                if name.startswith(known):
                    return (older if are_older else newer) + name.removeprefix(known)
        return name

    retold(path, lambda tensors: {new_name(name): tensor for name, tensor in tensors.items()})


def refusal(path: Path, **flags: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        InprocClient(EngineArgs.of(model=str(path), **{**EXACT, **flags}))
    return str(caught.value)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("model_type", WRAPPER_TYPES)
def test_greedy_tokens_are_those_of_the_whole_model(model_type: str, tmp_path: Path) -> None:
    found = outcome(model_type, tmp_path, model_impl="transformers")
    if model_type in REFUSED:
        assert found.kind == "refused", found
        assert REFUSED[model_type] in found.detail
        assert "ForConditionalGeneration" in found.detail
    else:
        assert found[:2] == ("served", "")


@pytest.mark.parametrize("model_type", OURS)
def test_our_own_decoders_compute_text_parts(model_type: str, tmp_path: Path) -> None:
    assert outcome(model_type, tmp_path, model_impl="argosy")[:2] == ("served", "")
    config = load_model_config(tmp_path)
    assert config.wrapper in NATIVE_WRAPPERS
    assert not isinstance(config, TransformersConfig)


def test_a_text_part_may_be_of_another_family(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 48,
            "llama_4_scaling_beta": 0.7}  # fmt: skip
    fields = {"text_type": "ministral3", "rope_parameters": rope}
    assert outcome("mistral3", tmp_path, fields, model_impl="argosy")[:2] == ("served", "")
    assert load_model_config(tmp_path).architecture == "Ministral3ForCausalLM"


def test_stacked_experts_of_qwen3_vl_are_stored_either_way(tmp_path: Path) -> None:
    """As transformers writes them and as they are published, with layers without experts and more of each token."""
    fields = {
        "mlp_only_layers": [1],
        "num_experts_per_tok": 3,
        "norm_topk_prob": False,
    }  # which it does not know
    reference = write_checkpoint("qwen3_vl_moe", tmp_path, **fields)

    def exchanged(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor

    for _ in range(2):
        assert served(reference, tmp_path, model_impl="argosy")[:2] == ("served", "")
        retold(tmp_path, lambda tensors: {name: exchanged(name, each) for name, each in tensors.items()})
    for inner in (32, 64):
        edit(tmp_path, lambda raw: raw["text_config"].update(moe_intermediate_size=inner))  # noqa: B023
        assert "shapes do not tell how they are stored" in refusal(tmp_path, model_impl="argosy")


def test_each_of_our_text_parts_is_tried() -> None:
    assert len(OURS) == len(NATIVE_WRAPPERS)


@pytest.mark.parametrize("model_impl", ["argosy", "transformers"])
@pytest.mark.parametrize(
    ("model_type", "prefixes"), [("gemma3", IN_LLAVA), ("mistral3", IN_LLAVA), ("qwen2_5_vl", IN_QWEN)]
)
def test_older_and_newer_names_of_tensors_are_known(
    model_type: str, prefixes: tuple[tuple[str, str], ...], model_impl: str, tmp_path: Path
) -> None:
    reference = write_checkpoint(model_type, tmp_path)
    for are_older in (False, True):
        renamed(tmp_path, prefixes, are_older=are_older)
        assert served(reference, tmp_path, model_impl=model_impl)[:2] == ("served", "")


@pytest.mark.parametrize("model_impl", ["argosy", "transformers"])
def test_other_parts_are_left_unread_and_nothing_else(model_impl: str, tmp_path: Path) -> None:
    reference = write_checkpoint("qwen3_vl", tmp_path)
    more = torch.ones(3)
    retold(
        tmp_path,
        lambda tensors: {
            **{name: tensor for name, tensor in tensors.items() if "visual.blocks" not in name},
            "model.visual.new.weight": more,
            "mtp.fc.weight": more.clone(),
        },
    )
    assert served(reference, tmp_path, model_impl=model_impl, language_model_only=True)[:2] == ("served", "")
    retold(tmp_path, lambda tensors: {**tensors, "model.language_model.layers.0.gate.weight": more})
    assert "layers.0.gate.weight" in refusal(tmp_path, model_impl=model_impl)


@pytest.mark.parametrize("model_impl", ["argosy", "transformers"])
def test_a_text_part_that_lacks_tensors_is_refused(model_impl: str, tmp_path: Path) -> None:
    write_checkpoint("qwen3_vl", tmp_path)
    norms = "layers.2.self_attn.q_norm.weight"
    retold(tmp_path, lambda tensors: {name: each for name, each in tensors.items() if norms not in name})
    assert norms in refusal(tmp_path, model_impl=model_impl)


def test_a_tensor_under_two_names_is_refused(tmp_path: Path) -> None:
    write_checkpoint("mistral3", tmp_path)
    renamed(tmp_path, IN_LLAVA, are_older=False)
    norm = "model.language_model.norm.weight"
    retold(tmp_path, lambda tensors: {**tensors, "language_model.model.norm.weight": tensors[norm].clone()})
    assert "model.norm.weight twice" in refusal(tmp_path)


def test_the_log_says_that_the_text_part_is_served(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    write_checkpoint("mistral3", tmp_path)
    InprocClient(EngineArgs.of(model=str(tmp_path), **EXACT, language_model_only=True))
    assert any(
        "Mistral3ForConditionalGeneration: its text part is served" in each for each in caplog.messages
    )


@pytest.mark.parametrize("model_type", ["glm_ocr", "mistral3"])
@pytest.mark.parametrize("field", ["text_config", "vision_config"])
def test_counts_have_a_bound(model_type: str, field: str, tmp_path: Path) -> None:
    write_checkpoint(model_type, tmp_path)
    edit(tmp_path, lambda raw: raw[field].update(num_hidden_layers=10**9))
    assert "num_hidden_layers 1000000000 exceeds 4096" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw.update(architectures=["Gemma3ForConditionalGeneration"]), "transformers 5"),
        (lambda raw: raw.update(auto_map={"AutoModel": "modeling.X"}), "that is never done"),
        (lambda raw: raw.update(model_type="unheard-of"), "no model_type 'unheard-of'"),
        (
            lambda raw: raw.update(quantization_config={"quant_method": "aqlm", "bits": 2}),
            "quant_method 'aqlm'",
        ),
        (lambda raw: raw["text_config"].update(num_hidden_layers=5), "layers.4."),
    ],
)
def test_malformed_configs_are_refused(
    change: Callable[[dict[str, Any]], Any], message: str, tmp_path: Path
) -> None:
    write_checkpoint("glm_ocr", tmp_path)
    edit(tmp_path, change)
    assert message in refusal(tmp_path)


@pytest.mark.parametrize("model_impl", ["auto", "argosy"])
def test_a_text_part_in_no_wrapper_is_refused(model_impl: Any) -> None:
    """As transformers reads the config, by its model_type."""
    raw = small_wrapper_config("qwen3_5").to_dict()
    raw |= {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "llama"}
    with pytest.raises(ConfigError, match=r"text part|malformed|no decoder of texts alone"):
        parse_config(raw, {}, {}, model_impl)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"model_impl": "argosy"}, "leave out --model-impl argosy"),
        ({"runner": "pooling"}, "only generates here"),
        ({"quantization": "fp8"}, "leave out the flag"),
    ],
)
def test_flags_that_do_not_work_with_it_are_refused(
    flags: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_checkpoint("glm_ocr", tmp_path)
    assert message in refusal(tmp_path, **flags)


def test_a_part_that_texts_need_is_not_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a wrapper computed something else without it, rather than fail."""
    own = Qwen3VLModel.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if hasattr(self, "visual"):
            self.visual(torch.zeros(1))
        return own(self, *args, **kwargs)

    monkeypatch.setattr(Qwen3VLModel, "forward", forward)
    write_checkpoint("qwen3_vl", tmp_path)
    assert "it runs model.visual for texts, too" in refusal(tmp_path, model_impl="transformers")


def test_configs_as_they_are_published(tmp_path: Path) -> None:
    """Of Gemma 3, whose text part has few fields, and Qwen2.5-VL, which has them beside the vision part's."""
    gemma = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": [1, 106],
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "torch_dtype": "bfloat16",
        "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
    }
    qwen = {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "eos_token_id": 151645,
        "hidden_act": "silu",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "max_position_embeddings": 128000,
        "max_window_layers": 28,
        "model_type": "qwen2_5_vl",
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vision_config": {"depth": 32, "out_hidden_size": 3584},
        "vocab_size": 152064,
    }
    (tmp_path / "config.json").write_text(json.dumps(gemma))
    found: Any = load_model_config(tmp_path)
    assert (found.architecture, found.dtype, found.eos_token_ids) == (
        "Gemma3ForCausalLM",
        "bfloat16",
        (1, 106),
    )
    assert (found.num_attention_heads, found.num_key_value_heads, found.vocab_size) == (8, 4, 262208)
    assert (found.rope_global.kind, found.rope_global.factor, found.rope_global.theta) == ("linear", 8.0, 1e6)
    assert (found.rope_local.kind, found.rope_local.theta) == ("default", 10000.0)
    assert found.sliding_windows[:6] == (1024,) * 5 + (None,)
    assert found.tie_word_embeddings
    (tmp_path / "config.json").write_text(json.dumps(qwen))
    found = load_model_config(tmp_path)
    assert (found.architecture, found.dtype, found.eos_token_ids) == (
        "Qwen2ForCausalLM",
        "bfloat16",
        (151645,),
    )
    assert (found.num_hidden_layers, found.num_key_value_heads, found.vocab_size) == (28, 4, 152064)
    assert (found.rope.kind, found.rope.theta, found.attention_bias, found.output_bias) == (
        "default",
        1e6,
        True,
        False,
    )
    assert found.sliding_windows == (None,) * 28
    assert not found.tie_word_embeddings
    use = ModelUse(hf_overrides=HfOverrides.of({"rope_theta": 5e6}))
    assert load_model_config(tmp_path, use).rope.theta == 5e6  # type: ignore[attr-defined]


def test_rope_of_the_text_part_can_be_overridden(tmp_path: Path) -> None:
    write_checkpoint("mistral3", tmp_path)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    use = ModelUse(hf_overrides=HfOverrides.of({"text_config": {"rope_scaling": yarn}}))
    own: Any = load_model_config(tmp_path)
    found: Any = load_model_config(tmp_path, use)
    assert (found.rope.kind, found.rope.factor, found.max_position_embeddings) == ("yarn", 4.0, 2048)
    assert found.rope.theta == own.rope.theta


def test_layers_that_are_not_quantised_have_the_names_of_the_text_part(tmp_path: Path) -> None:
    write_checkpoint("mistral3", tmp_path)
    fp8 = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
                "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
            }
        },
        "ignore": [
            "language_model.lm_head",
            "model.vision_tower.transformer.layers.0.attention.q_proj",
            "model.language_model.layers.1.mlp.down_proj",
            "re:.*vision_tower.*",
        ],
    }
    edit(tmp_path, lambda raw: raw.update(quantization_config=fp8))
    quantization = load_model_config(tmp_path).quantization
    assert quantization is not None
    assert not quantization.quantises("lm_head")
    assert not quantization.quantises("model.layers.1.mlp.down_proj")
    assert quantization.quantises("model.layers.0.mlp.down_proj")
    assert "quantised" in refusal(tmp_path)  # because the tensors are not


def test_a_model_is_refused_before_it_is_fetched() -> None:
    for raw, message in (
        ({"architectures": ["BartForConditionalGeneration"], "model_type": "bart"}, "is not supported"),
        ({"architectures": ["MllamaTextForConditionalGeneration"], "text_config": {}}, "no model_type None"),
        ({"architectures": ["Florence2ForConditionalGeneration"], "model_type": "florence2", "vision_config": {}},
         "no text part"),
    ):  # fmt: skip
        with pytest.raises(UnsupportedModel, match=message):
            check_fetched_config("hf://a/b", raw)


def test_fields_of_the_text_part_can_be_overridden(tmp_path: Path) -> None:
    write_checkpoint("gemma3", tmp_path)
    own = load_model_config(tmp_path)

    def overridden(**fields: Any) -> Any:
        return load_model_config(tmp_path, ModelUse(hf_overrides=HfOverrides.of(fields)))

    assert own.max_position_embeddings == 512
    assert overridden(text_config={"max_position_embeddings": 64}).max_position_embeddings == 64
    assert overridden(eos_token_id=[7, 8]).eos_token_ids[:2] == (7, 8)
    with pytest.raises(ConfigError, match="would change nothing"):
        overridden(max_position_embeddings=64)


def test_fields_that_transformers_reads_can_be_overridden(tmp_path: Path) -> None:
    write_checkpoint("arcee", tmp_path)

    def overridden(**fields: Any) -> Any:
        return load_model_config(tmp_path, ModelUse(hf_overrides=HfOverrides.of(fields)))

    assert overridden(max_position_embeddings=64).max_position_embeddings == 64
    with pytest.raises(ConfigError, match="would change nothing"):
        overridden(no_such_field=64)


def test_the_fingerprint_knows_the_code_and_all_tensors(tmp_path: Path) -> None:
    write_checkpoint("qwen3_vl", tmp_path)

    def fingerprint(**flags: Any) -> str:
        return InprocClient(EngineArgs.of(model=str(tmp_path), **EXACT, **flags)).config.model_fingerprint

    before = fingerprint()
    assert before == fingerprint(model_impl="argosy")
    assert before != fingerprint(model_impl="transformers")
    norm = "model.language_model.norm.weight"
    retold(tmp_path, lambda tensors: {**tensors, norm: tensors[norm] + 1})
    assert fingerprint() != before


@pytest.mark.parametrize("model_impl", ["argosy", "transformers"])
@pytest.mark.parametrize("model_type", ["gemma3", "qwen3_vl"])
def test_doctor_counts_the_text_part_only(model_type: str, model_impl: str, tmp_path: Path) -> None:
    write_checkpoint(model_type, tmp_path)
    tokenizer = resolve_model("builtin://tiny") / "tokenizer.json"
    (tmp_path / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    args = EngineArgs.of(model=str(tmp_path), **EXACT, num_gpu_blocks_override=20, model_impl=model_impl)
    found = diagnose(args, DeviceMemory("cpu", "a CPU", 8 << 30, 8 << 30))
    assert found.budget is not None
    assert found.text_part_of == ORIGIN[model_type]
    client = InprocClient(args)
    assert found.budget.block_bytes == client.config.memory.block_bytes
    assert found.budget.weights_bytes == client.config.memory.weights_bytes
    assert found.budget.activation_bytes == client.config.memory.activation_bytes


def test_a_load_by_transformers_tells_how_far_it_is(tmp_path: Path) -> None:
    write_checkpoint("glm_ocr", tmp_path)
    config = complete_config(load_model_config(tmp_path))
    assert isinstance(config, TransformersConfig)
    backend, shares = TorchBackend(torch.float32), []
    with torch.inference_mode():
        load_transformers(
            tmp_path, config, backend, dtype=torch.float32, device=torch.device("cpu"), seed=None,
            on_loaded=shares.append,
        )  # fmt: skip
    assert len(shares) > 10
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    read: list[tuple[int, int]] = []
    load_model(
        tmp_path, config, dtype=torch.float32, device=torch.device("cpu"), attention_backend="torch",
        max_positions=512, load_format="auto", seed=0, on_read=lambda *each: read.append(each),
    )  # fmt: skip
    text = sum(
        each.nbytes
        for name, each in load_file(tmp_path / "model.safetensors").items()
        if "visual" not in name
    )
    assert len(read) > 10
    assert read[-1] == (text, text)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("model_type", IN_GUIDES)
def test_a_guide_to_vllm_is_followed(model_type: str, tmp_path: Path) -> None:
    write_folder(model_type, tmp_path / "model")
    port = free_port()
    command = [
        "argosy_engine.api.serve",
        "--model",
        str(tmp_path / "model"),
        "--port",
        str(port),
        *GUIDE.split(),
    ]
    command += [
        "--served-model-name",
        "guide",
        "--num-gpu-blocks-override",
        "80",
        "--device",
        "cpu",
        "--threads",
        "1",
    ]
    log = tmp_path / "log"
    with running(command, log, port=port) as server, httpx.Client(base_url=server.url, timeout=60) as client:

        def chat(**fields: Any) -> httpx.Response:
            return client.post("/v1/chat/completions", json={**GUIDE_REQUEST, "model": "guide", **fields})

        answer = chat().raise_for_status().json()
        assert answer["usage"]["completion_tokens"] <= 150
        message = answer["choices"][0]["message"]
        assert message["role"] == "assistant"
        assert "reasoning" not in message, "the prompt has ended it"
        streamed = chat(stream=True, seed=1).raise_for_status().text
        assert streamed.rstrip().endswith("data: [DONE]")
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        refused = chat(messages=[{"role": "user", "content": [image]}])
        assert refused.status_code == 400
        assert "image_url" in refused.json()["error"]["message"]
        assert client.get("/v1/models").json()["data"][0]["id"] == "guide"
    text = log.read_text()
    assert "tool calls qwen3_coder, reasoning qwen3" in text
    assert "its text part is served" in text
