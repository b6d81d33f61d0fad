"""The Triton kernels in whole models of every architecture, against transformers."""

from dataclasses import replace as replace_fields

import pytest
import torch
from msgspec.structs import replace

from argosy_engine.attention.params import AttentionParams
from argosy_engine.attention.selector import AttentionNeeds, select_backend
from argosy_engine.errors import ConfigError
from argosy_engine.model_configs.sharding import WHOLE, Sharding
from argosy_engine.models.config_file import load_model_config
from argosy_engine.models.loader import load_model
from attention_cases import model_inputs
from gemma4_shapes import EXPERTS
from random_checkpoints import KINDS, make_checkpoint
from thread_ranks import run_threads
from transformers_checkpoints import write_checkpoint

BLOCK_SIZE = 16
PROMPT, DECODED = 18, 1
WINDOW = 12
"""Like a block, shorter than the prompt."""
LAYER = AttentionParams(num_heads=4, num_kv_heads=2, head_dim=64, scale=0.125)


@torch.inference_mode()
def logits(path, token_ids, backend="triton", *, has_fp8_kv_cache=False, sharding=WHOLE, communicator=None):
    """Return the logits of a prompt and of decodes after it, [tokens, vocab_size], by one rank."""
    config = load_model_config(path)
    model = load_model(
        path,
        config,
        dtype=torch.float32,
        device=torch.device("cpu"),
        attention_backend=backend,
        has_fp8_kv_cache=has_fp8_kv_cache,
        max_positions=64,
        load_format="auto",
        seed=0,
        sharding=sharding,
        communicator=communicator,
    ).model
    for layer in model.attention_layers:
        shape = layer.kv_cache_shape(3, BLOCK_SIZE)
        if len(shape) == 5:  # with strided blocks
            shape = (shape[1], shape[0], *shape[2:])
        cache = torch.full(shape, torch.nan).to(layer.kv_cache_dtype)
        layer.bind(cache.transpose(0, 1) if len(shape) == 5 else cache)
    tables = torch.tensor([[2, 0]])
    ours = []
    for start, end in [(0, PROMPT), *((at, at + 1) for at in range(PROMPT, len(token_ids)))]:
        hidden = model.forward(model_inputs(token_ids[start:end], start, tables, BLOCK_SIZE))
        ours.append(model.logits(hidden))
    return torch.cat(ours)


TOKEN_IDS = list(range(2, 2 + PROMPT + DECODED))


def write(name, path):
    """Write a checkpoint with one layer of each kind, or two alike, and return the reference model."""
    kind = KINDS[name]
    layers = {"n_layer": 2} if name == "gpt2" else {"num_hidden_layers": 2}
    windows = {"sliding_window": WINDOW} if "sliding_window" in kind.fields else {}
    if "max_window_layers" in kind.fields:
        windows["max_window_layers"] = 1
    return make_checkpoint(replace_fields(kind, fields={**kind.fields, **layers, **windows}), path)


@pytest.mark.parametrize(
    "name",
    ["llama3-rope", "qwen2-window", "qwen3-yarn", "gemma2", "gemma3", "gpt2", "opt-post-norm", "qwen3-moe"],
)
def test_prompt_and_decodes_have_the_logits_of_transformers(name, tmp_path):
    reference = write(name, tmp_path)
    with torch.inference_mode():
        expected = reference(torch.tensor([TOKEN_IDS])).logits[0].float()
    torch.testing.assert_close(logits(tmp_path, TOKEN_IDS), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("bloom", {}),
        ("cohere", {"use_qk_norm": True, "num_key_value_heads": 2}),
        ("deepseek_v2", {"n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy"}),
        ("deepseek_v3", {"q_lora_rank": None, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3}),
        ("falcon", {"new_decoder_architecture": True}),
        ("gemma4_text", {**EXPERTS, "num_kv_shared_layers": 0}),
        ("glm4_moe", {"first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3}),
        ("gpt_oss", {"sliding_window": WINDOW}),
        ("granitemoe", {"residual_multiplier": 0.4, "logits_scaling": 2.5}),
        ("llama4_text", {"no_rope_layers": [1, 0], "moe_layers": [0], "floor_scale": 4}),
        ("minimax_m2", {"rotary_dim": 12}),
        ("mpt", {}),
        ("qwen2_moe", {}),
        ("smollm3", {"no_rope_layers": [0, 1]}),
    ],
)
def test_families_have_the_logits_of_transformers(model_type, fields, tmp_path):
    reference = write_checkpoint(
        model_type,
        tmp_path,
        **fields,
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"] if model_type == "gpt_oss" else None,
    )
    with torch.inference_mode():
        expected = reference(torch.tensor([TOKEN_IDS])).logits[0].float()
    torch.testing.assert_close(logits(tmp_path, TOKEN_IDS), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("name", "has_whole_experts"), [("gemma2", False), ("qwen3-moe", True)])
def test_ranks_have_the_logits_of_one_process(name, has_whole_experts, tmp_path):
    write(name, tmp_path)
    ranks = run_threads(
        2,
        lambda group: logits(
            tmp_path, TOKEN_IDS, sharding=Sharding(group.rank, 2, has_whole_experts), communicator=group
        ),
    )
    assert torch.equal(*ranks)
    torch.testing.assert_close(ranks[0], logits(tmp_path, TOKEN_IDS, "torch"), atol=1e-4, rtol=1e-4)


def test_an_fp8_kv_cache_gives_what_torch_gives_with_one(tmp_path):
    write("qwen3-yarn", tmp_path)
    ours, torchs = (
        logits(tmp_path, TOKEN_IDS, backend, has_fp8_kv_cache=True) for backend in ("triton", "torch")
    )
    exact = logits(tmp_path, TOKEN_IDS, "torch")
    error = (ours - torchs).square().mean().sqrt()
    assert error < 0.1 * (torchs - exact).square().mean().sqrt()


def test_on_a_cpu_the_interpreter_computes_in_float32_only(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    needs = AttentionNeeds("cpu", "float32", 16, [LAYER])
    assert select_backend(needs, "triton").name == "triton"
    with pytest.raises(ConfigError, match="use --dtype float32"):
        select_backend(needs._replace(dtype="bfloat16"), "triton")


def test_a_gpu_uses_the_kernels():
    choice = select_backend(AttentionNeeds("cuda", "bfloat16", 16, [LAYER]))
    assert (choice.name, dict(choice.refused)) == ("triton", {"cpu": "it computes on CPUs only"})


@pytest.mark.parametrize(
    ("device", "layer", "reason"),
    [
        ("cpu", LAYER, "computes on GPUs"),
        ("cuda", replace(LAYER, head_dim=576), "head size of 576 is more than 512"),
        ("cuda", replace(LAYER, num_heads=256), "more than 64 query heads"),
        ("cuda", replace(LAYER, head_dim=512, num_heads=64), "more than 16 query heads"),
    ],
)
def test_what_the_kernels_cannot_serve_is_refused(device, layer, reason):
    with pytest.raises(ConfigError, match=reason):
        select_backend(AttentionNeeds(device, "bfloat16", 16, [layer]), "triton")


def test_large_heads_in_float32_are_left_to_torch():
    needs = AttentionNeeds("cuda", "bfloat16", 16, [replace(LAYER, head_dim=512)])
    assert select_backend(needs).name == "triton"
    choice = select_backend(needs._replace(dtype="float32"))
    assert (choice.name, choice.refused["triton"]) == (
        "torch",
        "a head size of 512 is more than 256, its limit in float32",
    )
