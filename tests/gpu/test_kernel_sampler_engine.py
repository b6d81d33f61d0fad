"""A whole engine on the triton backend, in the interpreter: its sampler is the one of kernels."""

from __future__ import annotations

from typing import Any

import pytest

from argosy_engine import LLM, SamplingParams
from argosy_engine.triton_kernels import sampling

PROMPTS = ["The ship", "A harbour at night"]
ENGINE: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "threads": 1,
    "block_size": 16,
    "max_model_len": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "kv_cache_memory_bytes": 1 << 22,
}


def generate(backend: str, params: SamplingParams, **fields: Any) -> list[Any]:
    with LLM("builtin://tiny", attention_backend=backend, **ENGINE, **fields) as llm:
        return [output.outputs[0] for output in llm.generate(PROMPTS, params)]


@pytest.fixture
def draws(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the sampling kernels as they are launched."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    names: list[str] = []
    launch = sampling.launch

    def noted(kernel: Any, grid: Any, **arguments: Any) -> None:
        names.append(kernel.__name__)
        launch(kernel, grid, **arguments)

    monkeypatch.setattr(sampling, "launch", noted)
    return names


GREEDY = {
    "plain": SamplingParams(temperature=0.0, max_tokens=5, logprobs=2),
    "penalties": SamplingParams(temperature=0.0, max_tokens=5, repetition_penalty=1.5, presence_penalty=0.5),
    "words": SamplingParams(temperature=0.0, max_tokens=5, min_tokens=5, bad_words=("e", "the ", " of")),
    "grammar": SamplingParams(temperature=0.0, max_tokens=5, structured_outputs={"regex": "(ab|cd)+"}),
}


@pytest.mark.parametrize("name", GREEDY)
def test_greedy_tokens_are_those_of_the_torch_sampler(name: str, draws: list[str]) -> None:
    expected = generate("torch", GREEDY[name])
    assert not draws
    outputs = generate("triton", GREEDY[name])
    assert set(draws) == {"_scan_logits", "_draw_tokens"}
    for ours, theirs in zip(outputs, expected, strict=True):
        assert (ours.token_ids, ours.finish_reason) == (theirs.token_ids, theirs.finish_reason)
        assert (ours.logprobs is None) == (theirs.logprobs is None)
