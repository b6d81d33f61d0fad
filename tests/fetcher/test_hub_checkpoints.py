"""Checkpoints as hubs publish them, read through the hub and run by the engine."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from argosy_engine import LLM
from argosy_engine.models.registry import architectures
from argosy_engine.params import SamplingParams
from greedy_reference import differing_tokens
from hub_repositories import files_under
from hub_server import HubServer
from hub_sources import download, hub_source
from published_checkpoints import PUBLISHED

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_what_is_published_is_of_our_architectures() -> None:
    """One of each model file; what differs from Llama by its config alone is in llama_shapes."""
    published = {checkpoint.config["architectures"][0] for checkpoint in PUBLISHED.values()}
    assert published <= set(architectures())
    llamas = {
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
    }
    assert published >= {*llamas, "GPT2LMHeadModel", "Gemma3ForCausalLM", "OPTForCausalLM"}


@pytest.mark.parametrize("kind", PUBLISHED)
def test_a_model_from_a_hub_answers_as_its_reference_does(kind: str, tmp_path: Path) -> None:
    checkpoint = PUBLISHED[kind]
    published, fetched = tmp_path / "published", tmp_path / "fetched"
    published.mkdir()
    checkpoint.write(published)
    reference = AutoModelForCausalLM.from_pretrained(published, dtype=torch.float32).eval()
    with HubServer() as hub:
        hub.add_model(checkpoint.repo_id, files_under(published))
        source = hub_source(hub, checkpoint.repo_id)
        files = [file for file in source.snapshot().files if file.path not in checkpoint.unserved]
        download(source, files, fetched)
    rng = random.Random(5)
    prompts = [[rng.randrange(4, 300) for _ in range(length)] for length in (1, 17, 60)]
    llm = LLM(
        str(fetched), dtype="float32", device="cpu", threads=1, num_gpu_blocks_override=64, max_model_len=100
    )
    try:
        results = llm.generate(prompts, GREEDY, use_tqdm=False)
    finally:
        llm.close()
    for prompt, result in zip(prompts, results, strict=True):
        assert differing_tokens(reference, prompt, result.token_ids) == []
