"""Embeddings equal those made of transformers' hidden states, however the steps are cut."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from argosy_engine import LLM
from argosy_engine.errors import InvalidRequest
from argosy_engine.frontend.pooling import (
    MAX_TOKEN_NUMBERS,
    check_token_numbers,
    encode,
    pooling_request,
)
from argosy_engine.frontend.renderer import TokenizedPrompt
from argosy_engine.params import PoolingParams, SamplingParams
from random_checkpoints import KINDS, make_checkpoint
from transformers_checkpoints import VOCAB_SIZE, write_checkpoint

EXACT = {"dtype": "float32", "device": "cpu", "threads": 1}
MATRYOSHKA = {"hf_overrides": {"is_matryoshka": True}}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=["mistral-window", "opt-post-norm", "gemma3", "qwen3.5"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(engine with small steps, reference model)"""
    path = tmp_path_factory.mktemp(request.param)
    reference = make_checkpoint(KINDS[request.param], path)
    tiny = Path(__file__).parents[2] / "models" / "argosy-tiny"
    (path / "tokenizer.json").write_bytes((tiny / "tokenizer.json").read_bytes())
    llm = LLM(
        str(path),
        **EXACT,
        **MATRYOSHKA,
        max_num_batched_tokens=48,
        num_gpu_blocks_override=128,
        mamba_block_size=16,
    )
    yield llm, reference
    llm.close()


@torch.inference_mode()
def expected(reference: torch.nn.Module, token_ids: list[int], params: PoolingParams) -> torch.Tensor:
    states = reference.base_model(torch.tensor([token_ids])).last_hidden_state[0].float()
    vector = {"mean": states.mean(dim=0), "cls": states[0]}.get(params.pooling_type or "last", states[-1])
    vector = vector[: params.dimensions]
    is_raw = params.use_activation is False or params.normalize is False
    return vector if is_raw else F.normalize(vector, dim=0)


@pytest.mark.parametrize(
    "params",
    [
        PoolingParams(),
        PoolingParams(pooling_type="mean"),
        PoolingParams(pooling_type="mean", normalize=False),
        PoolingParams(pooling_type="cls", use_activation=False),
        PoolingParams(normalize=False, dimensions=5),
        PoolingParams(dimensions=7),
    ],
    ids=str,
)
def test_vectors_equal_transformers(params: PoolingParams, model: Any) -> None:
    llm, reference = model
    rng = random.Random(1)
    prompts = [[rng.randrange(2, 512) for _ in range(length)] for length in (1, 5, 16, 47, 48, 49, 130)]
    prompts.append([*prompts[-1][:64], 3])
    for _ in range(2):  # the second time from the prefix cache, where it is of use
        results = llm.encode(prompts, params, use_tqdm=False)
        for prompt, result in zip(prompts, results, strict=True):
            assert result.prompt_token_ids == prompt
            ours = torch.tensor(result.outputs.embedding)
            torch.testing.assert_close(ours, expected(reference, prompt, params), atol=2e-4, rtol=2e-4)
    cached = [result.num_cached_tokens for result in results]
    assert (max(cached) >= 112) == (params.pooling_type is None), cached


@pytest.mark.parametrize(
    "model_type",
    [
        "bamba", "cohere", "cohere2", "deepseek_v3", "falcon_h1", "granitemoehybrid", "lfm2", "lfm2_moe",
        "llama4_text", "nemotron_h", "starcoder2",
    ],
)  # fmt: skip
def test_other_decoders_of_ours_embed(model_type: str, tmp_path: Path) -> None:
    reference = write_checkpoint(model_type, tmp_path)
    tiny = Path(__file__).parents[2] / "models" / "argosy-tiny"
    (tmp_path / "tokenizer.json").write_bytes((tiny / "tokenizer.json").read_bytes())
    rng = random.Random(4)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (1, 7, 57)]
    flags: dict[str, Any] = {
        **EXACT,
        "runner": "pooling",
        "model_impl": "argosy",
        "max_num_batched_tokens": 16,
    }
    with closing(LLM(str(tmp_path), **flags)) as llm:
        embedded = llm.embed([{"prompt_token_ids": each} for each in prompts], use_tqdm=False)
    body: Any = reference.model
    for prompt, output in zip(prompts, embedded, strict=True):
        with torch.inference_mode():
            states = body(input_ids=torch.tensor([prompt])).last_hidden_state[0]
        vector = torch.tensor(output.outputs.embedding)
        torch.testing.assert_close(vector, F.normalize(states[-1].float(), dim=0), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "params", [PoolingParams(), PoolingParams(use_activation=False, dimensions=5)], ids=str
)
def test_every_token_has_a_vector(params: PoolingParams, model: Any) -> None:
    llm, reference = model
    rng = random.Random(3)
    prompts = [[rng.randrange(2, 512) for _ in range(length)] for length in (1, 47, 130)]
    for _ in range(2):  # the second time with a prefix cache, which is of no use
        results = llm.encode(prompts, params.replace(task="token_embed"), use_tqdm=False)
        for prompt, result in zip(prompts, results, strict=True):
            with torch.inference_mode():
                states = reference.base_model(torch.tensor([prompt])).last_hidden_state[0].float()
            states = states[:, : params.dimensions]
            wanted = states if params.use_activation is False else F.normalize(states, dim=-1)
            torch.testing.assert_close(torch.tensor(result.outputs.data), wanted, atol=2e-4, rtol=2e-4)


def test_vectors_and_tokens_share_a_step(model: Any) -> None:
    llm, reference = model
    rng = random.Random(2)
    prompts = [[rng.randrange(2, 512) for _ in range(20)] for _ in range(4)]
    sampling = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    alone = [result.token_ids for result in llm.generate(prompts, sampling, use_tqdm=False)]
    llm.client.core.kv.reset_prefix_cache()
    requests = [
        request
        for prompt in prompts
        for request in (
            *llm.input_processor.process_inputs(TokenizedPrompt(prompt, []), sampling),
            pooling_request(
                llm.input_processor, TokenizedPrompt(prompt, []), PoolingParams(pooling_type="mean")
            ),
        )
    ]
    for request in requests:
        llm.client.add_request(request)
    tokens: dict[str, list[int]] = {}
    vectors: dict[str, list[float]] = {}
    while llm.client.has_work:
        for out in llm.client.step().outputs:
            if out.pooling_output is None:
                tokens.setdefault(out.request_id, []).extend(out.new_token_ids)
            else:
                vectors[out.request_id] = out.pooling_output
    assert [tokens[request.request_id] for request in requests[::2]] == alone
    for prompt, request in zip(prompts, requests[1::2], strict=True):
        torch.testing.assert_close(
            torch.tensor(vectors[request.request_id]),
            expected(reference, prompt, PoolingParams(pooling_type="mean")),
            atol=2e-4,
            rtol=2e-4,
        )


def test_texts_are_embedded_with_one_call() -> None:
    llm = LLM("builtin://tiny", **EXACT, num_gpu_blocks_override=64)
    one, two = llm.embed(["red lantern", "red lantern"], use_tqdm=False)
    (alone,) = llm.embed("red lantern", use_tqdm=False)
    assert len(one.outputs.embedding) == llm.config.embedding_size
    assert one.outputs.embedding == pytest.approx(two.outputs.embedding, abs=1e-5)
    assert one.outputs.embedding == pytest.approx(alone.outputs.embedding, abs=1e-5)
    assert sum(value * value for value in one.outputs.embedding) == pytest.approx(1.0, abs=1e-5)
    llm.close()


def test_bad_parameters_are_refused_before_anything_runs(model: Any) -> None:
    llm, _ = model
    for fields, message in (
        ({"pooling_typ": "mean"}, "did you mean 'pooling_type'"),
        ({"pooling_type": "max"}, "max"),
        ({"normalize": 3}, "bool"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            PoolingParams(**fields)
    for dimensions in (0, -1, llm.config.embedding_size + 1):
        with pytest.raises(InvalidRequest, match="dimensions must be"):
            llm.encode([[1, 2]], PoolingParams(dimensions=dimensions), use_tqdm=False)
    with pytest.raises(InvalidRequest, match="empty"):
        llm.encode([[1, 2], []], use_tqdm=False)
    assert not llm.client.has_work


def test_an_interrupted_call_leaves_nothing_behind(model: Any) -> None:
    llm, _ = model

    def interrupt(tokens: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        encode(
            llm.client,
            llm.input_processor,
            [TokenizedPrompt([5] * 40, []), TokenizedPrompt([6] * 40, []), TokenizedPrompt([7] * 100, [])],
            PoolingParams(pooling_type="mean"),
            interrupt,
        )
    assert not llm.client.has_work
    (result,) = llm.encode([[5] * 40], PoolingParams(pooling_type="mean"), use_tqdm=False)
    assert len(result.outputs.embedding) == llm.config.embedding_size


def test_vectors_of_too_many_tokens_are_refused(model: Any) -> None:
    llm, _ = model
    resolved = PoolingParams(task="token_embed")
    most = MAX_TOKEN_NUMBERS // llm.config.embedding_size
    check_token_numbers(llm.config, resolved, most)
    with pytest.raises(InvalidRequest, match=f"send at most {most} tokens at once"):
        check_token_numbers(llm.config, resolved, most + 1)
    check_token_numbers(llm.config, PoolingParams(task="embed"), most + 1)
