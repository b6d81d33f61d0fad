"""Models on transformers' code whose layers ranks share by transformers' own plans: logits of each rank are those of
transformers, and what a plan does not divide is refused by name at the start."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from argosy_engine.api.doctor import diagnose
from argosy_engine.checkpoint.model_folder import resolve_model
from argosy_engine.config import EngineArgs
from argosy_engine.core.proc.core_client import InprocClient
from argosy_engine.errors import ConfigError
from argosy_engine.model_configs.model_use import ModelUse
from argosy_engine.model_configs.sharding import Sharding
from argosy_engine.models.config_file import load_model_config
from argosy_engine.models.loader import complete_config
from argosy_engine.sizing.kv_cache_sizing import check_model
from argosy_engine.sizing.resources import DeviceMemory
from fp8_checkpoints import quantize_checkpoint
from greedy_reference import differing_tokens
from rank_logits import TOKENS, logits_of
from thread_ranks import run_threads
from transformers_checkpoints import write_checkpoint
from transformers_sweep import EXACT, generated

FOREIGN = ModelUse(model_impl="transformers")


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def edit(path: Path, **fields: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def rank_logits(path: Path, size: int = 2) -> list[torch.Tensor]:
    return run_threads(size, lambda group: logits_of(path, group, Sharding(group.rank, size), use=FOREIGN))


@torch.inference_mode()
def reference_logits(reference: torch.nn.Module) -> torch.Tensor:
    found: torch.Tensor = reference(torch.tensor([TOKENS])).logits[0]
    return found


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("arcee", {}),
        ("arcee", {"vocab_size": 308}),  # an output head that is divided
        ("arcee", {"attention_bias": True, "mlp_bias": True}),
        ("cohere2", {}),  # windows, and a head that is tied
        ("gemma", {}),
        ("phi", {}),  # biases, behind sums as well
        ("llama4_text", {}),  # chunks, experts
        ("mimo_v2_flash", {}),  # sinks, KV heads that differ between layers, experts
        ("qwen2_moe", {}),
    ],
)
def test_ranks_have_the_logits_of_transformers(
    model_type: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    expected = reference_logits(write_checkpoint(model_type, tmp_path, **fields))
    for found in rank_logits(tmp_path):
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)


def test_four_ranks(tmp_path: Path) -> None:
    fields = {"num_attention_heads": 4, "num_key_value_heads": 4}
    expected = reference_logits(write_checkpoint("arcee", tmp_path, **fields))
    for found in rank_logits(tmp_path, 4):
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)


def test_a_quantised_checkpoint_is_divided(tmp_path: Path) -> None:
    write_checkpoint("arcee", tmp_path)
    quantize_checkpoint(tmp_path, "fp8-block")
    whole = logits_of(tmp_path / "widened", use=FOREIGN)
    for found in rank_logits(tmp_path):
        torch.testing.assert_close(found, whole, atol=2e-4, rtol=2e-4)


def test_ranks_have_the_states_of_a_model_without_a_head(tmp_path: Path) -> None:
    reference: Any = write_checkpoint("arcee", tmp_path)
    with torch.inference_mode():
        expected = reference.model(torch.tensor([TOKENS])).last_hidden_state[0]
    use = ModelUse(runner="pooling")
    for found in run_threads(2, lambda group: logits_of(tmp_path, group, Sharding(group.rank, 2), use=use)):
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)


def test_experts_are_not_spread(tmp_path: Path) -> None:
    write_checkpoint("mimo_v2_flash", tmp_path)
    with pytest.raises(ConfigError, match="whose experts are divided like other layers"):
        check_model(EngineArgs.of(model=str(tmp_path), tensor_parallel_size=2, enable_expert_parallel=True))


def test_worker_processes_serve_the_tokens_of_transformers(tmp_path: Path) -> None:
    reference = write_checkpoint("arcee", tmp_path)
    args = EngineArgs.of(model=str(tmp_path), **EXACT, tensor_parallel_size=2)
    with closing(InprocClient(args)) as client:
        outputs, _ = generated(client, [TOKENS, TOKENS[:5]])
    for prompt, tokens in zip((TOKENS, TOKENS[:5]), outputs.values(), strict=True):
        assert not differing_tokens(reference, prompt, tokens)
        assert tokens


def refusal(path: Path, size: int = 2) -> str:
    args = EngineArgs.of(model=str(path), model_impl="transformers", tensor_parallel_size=size)
    (path / "tokenizer.json").write_bytes((resolve_model("builtin://tiny") / "tokenizer.json").read_bytes())

    def start() -> None:
        check_model(args)
        complete_config(load_model_config(path, FOREIGN), size)

    with pytest.raises(ConfigError) as caught:
        start()
    with pytest.raises(ConfigError) as told:
        diagnose(args, DeviceMemory("cpu", "a CPU", 8 << 30, 8 << 30))
    assert str(told.value) == str(caught.value), "argosy doctor says the same"
    return str(caught.value)


@pytest.mark.parametrize(
    ("model_type", "fields", "size", "message"),
    [
        (
            "gpt_bigcode",
            {},
            2,
            "transformers has no plan (base_model_tp_plan) to divide GPTBigCodeForCausalLM",
        ),
        ("hunyuan_v1_dense", {}, 2, "its plan leaves 4 of 4 heads"),
        ("phimoe", {}, 2, "its plan leaves 4 of 4 heads and 2 of 2 KV heads"),
        ("olmo2", {}, 2, "its plan leaves 4 of 4 heads and 2 of 2 KV heads"),
        ("arcee", {}, 4, "4 heads and 2 KV heads are not multiples of it"),
        ("arcee", {}, 3, "num_attention_heads 4 is not a multiple of it"),
        (
            "mimo_v2_flash",
            {"moe_intermediate_size": 47},
            2,
            "two times 47 features, which 2 ranks cannot divide",
        ),
        ("falcon_h1", {}, 2, "transformers has no plan|its layers keep states"),
        ("llama4", {}, 2, "models for images run on one device"),
    ],
)
def test_what_a_plan_does_not_divide_is_refused_by_name(
    model_type: str, fields: dict[str, Any], size: int, message: str, tmp_path: Path
) -> None:
    write_checkpoint(model_type, tmp_path, **fields)
    found = refusal(tmp_path, size)
    assert any(part in found for part in message.split("|")), found
    assert f"--tensor-parallel-size {size}" in found
