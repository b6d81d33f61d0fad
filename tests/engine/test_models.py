"""Every architecture gives transformers' logits and greedy tokens in fp32, however the steps are cut."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from argosy_engine.attention.selector import AUTO, AttentionNeeds, select_backend
from argosy_engine.attention.torch_attn import TorchBackend
from argosy_engine.checkpoint.weights import WeightPlan
from argosy_engine.config import EngineArgs
from argosy_engine.core.proc.core_client import InprocClient
from argosy_engine.layers.layer_factory import LayerFactory
from argosy_engine.messages import EngineCoreRequest
from argosy_engine.models import registry
from argosy_engine.models.config_file import load_model_config
from argosy_engine.models.loader import load_model
from argosy_engine.params import SamplingParams
from argosy_engine.sizing.kv_cache_sizing import planned_groups
from argosy_engine.worker.model_runner import bind_kv_cache, layer_groups, state_layers
from attention_cases import bind_sequence, sequence_inputs
from greedy_reference import differing_tokens
from llama_shapes import LLAMA_SHAPES
from random_checkpoints import KINDS, make_checkpoint
from state_shapes import MAMBA_SHAPES

EXACT = {"dtype": "float32", "device": "cpu", "threads": 1}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
BLOCK_SIZE = 16


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """name -> (directory, reference model)"""
    made: dict[str, tuple[Path, torch.nn.Module]] = {}

    def make(name: str) -> tuple[Path, torch.nn.Module]:
        if name not in made:
            path = tmp_path_factory.mktemp(name)
            made[name] = (path, make_checkpoint(KINDS[name], path))
        return made[name]

    return make


@torch.inference_mode()
def logits_of(
    path: Path,
    token_ids: list[int],
    load_format: Any = "auto",
    dtype: torch.dtype = torch.float32,
    backend: str = AUTO,
) -> torch.Tensor:
    """Logits [T, vocab_size] of one sequence in one step, by our model alone."""
    config = load_model_config(path)
    device = torch.device("cpu")
    needs = AttentionNeeds("cpu", str(dtype).removeprefix("torch."), BLOCK_SIZE, config.attention_layers)
    model = load_model(
        path,
        config,
        dtype=dtype,
        device=device,
        attention_backend=select_backend(needs, backend).name,
        max_positions=512,
        load_format=load_format,
        seed=0,
    ).model
    count = len(token_ids)
    bind_sequence(model, count, BLOCK_SIZE)
    return model.logits(model.forward(sequence_inputs(model, token_ids, 0, count, BLOCK_SIZE)))


def test_every_architecture_is_tested() -> None:
    """Here or, against more of their fields, in test_native_decoders, test_plain_decoders, test_mamba_hybrids and
    test_lfm2."""
    others = {model_type for model_type, _ in (*LLAMA_SHAPES, *MAMBA_SHAPES)} | {
        "gemma4_text",
        *("bloom", "falcon", "mpt", "xglm"),
        *("lfm2", "lfm2_moe", "nemotron_h"),
    }
    here = {kind.model for kind in KINDS.values()} | {"Qwen3ForCausalLM"}
    assert here | {MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[each] for each in others} == set(
        registry.architectures()
    )


@pytest.mark.parametrize("name", KINDS)
def test_logits_equal_transformers_and_every_option_matters(
    name: str, checkpoint: Any, tmp_path: Path
) -> None:
    path, reference = checkpoint(name)
    rng = random.Random(5)
    token_ids = [rng.randrange(2, 512) for _ in range(120)]
    with torch.inference_mode():
        expected = reference(torch.tensor([token_ids])).logits[0].float()
    ours = logits_of(path, token_ids)
    torch.testing.assert_close(ours, expected, atol=KINDS[name].tolerance, rtol=1e-4)
    for change in KINDS[name].matters:
        changed = tmp_path / "changed"
        shutil.copytree(path, changed, dirs_exist_ok=True)
        config = json.loads((path / "config.json").read_text())
        (changed / "config.json").write_text(json.dumps({**config, **change}))
        assert (logits_of(changed, token_ids) - expected).abs().max() > 1e-2, change


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_keep_what_their_config_announces(name: str, dtype: torch.dtype, checkpoint: Any) -> None:
    """The KV cache is sized by the config before a model is built, and allocated by the model's layers."""
    config = load_model_config(checkpoint(name)[0])
    plan = LayerFactory(WeightPlan(dtype), TorchBackend(dtype), 1)
    model = registry.model_class(config.architecture)(config, plan)
    groups = layer_groups(model, BLOCK_SIZE)
    assert groups == planned_groups(config, dtype.itemsize, BLOCK_SIZE)
    bind_kv_cache(model, groups, 3, BLOCK_SIZE, torch.device("cpu"), num_states=3)
    for layer in model.attention_layers:
        assert layer.kv_cache.dtype is dtype
        assert layer.kv_cache.nbytes == 3 * layer.kv_cache_spec(BLOCK_SIZE).page_bytes
    for state in state_layers(model):
        assert sum(each.nbytes for each in state.states) == 3 * state.kv_cache_spec().page_bytes


@pytest.mark.parametrize("name", KINDS)
def test_bfloat16_is_close(name: str, checkpoint: Any) -> None:
    path, reference = checkpoint(name)
    token_ids = list(range(2, 82))
    with torch.inference_mode():
        expected = reference(torch.tensor([token_ids])).logits[0].float()
    ours = logits_of(path, token_ids, dtype=torch.bfloat16).float()
    similarity = F.cosine_similarity(ours, expected, dim=-1)
    assert similarity.median() > 0.99, similarity


@pytest.mark.parametrize("name", KINDS)
def test_the_torch_backend_gives_the_same_logits(name: str, checkpoint: Any) -> None:
    path, reference = checkpoint(name)
    token_ids = list(range(2, 100))
    with torch.inference_mode():
        expected = reference(torch.tensor([token_ids])).logits[0].float()
    ours = logits_of(path, token_ids, backend="torch")
    torch.testing.assert_close(ours, expected, atol=KINDS[name].tolerance, rtol=1e-4)


@pytest.mark.parametrize("name", KINDS)
def test_greedy_tokens_equal_transformers(name: str, checkpoint: Any) -> None:
    """Batched, with chunked prefill, prompts beyond the sliding window, and prefix hits."""
    path, reference = checkpoint(name)
    client = InprocClient(
        EngineArgs.of(
            model=str(path),
            max_num_batched_tokens=64,
            mamba_block_size=32,
            num_gpu_blocks_override=256,
            **EXACT,
        )
    )
    rng = random.Random(3)
    prompts = [[rng.randrange(2, 512) for _ in range(length)] for length in (1, 7, 23, 24, 25, 60, 150)]
    prompts.append([*prompts[-1][:100], 5, 6, 7])  # its prefix is cached by the time it is admitted
    outputs: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
    num_cached = 0
    for batch in (range(len(prompts) - 1), range(len(prompts) - 1, len(prompts))):
        for index in batch:
            client.add_request(EngineCoreRequest(str(index), prompts[index], GREEDY, time.time()))
        while client.has_work:
            for out in client.step().outputs:
                outputs[out.request_id] += out.new_token_ids
                num_cached += out.prefill_stats.num_cached_tokens if out.prefill_stats else 0
    client.close()
    wrong = {
        index: lines
        for index, prompt in enumerate(prompts)
        if (lines := differing_tokens(reference, prompt, outputs[str(index)]))
    }
    assert not wrong, json.dumps(wrong, indent=1)
    assert all(len(output) == GREEDY.max_tokens for output in outputs.values())
    assert num_cached >= 96


@pytest.mark.parametrize("name", KINDS)
def test_dummy_weights_run(name: str, checkpoint: Any, tmp_path: Path) -> None:
    path, _ = checkpoint(name)
    shutil.copy(path / "config.json", tmp_path)
    logits = logits_of(tmp_path, [3, 4, 5, 6], load_format="dummy")
    assert logits.shape == (4, 512)
    assert torch.isfinite(logits).all()
    assert logits.std() > 0.01
