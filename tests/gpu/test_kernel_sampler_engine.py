"""A whole engine on the triton backend, in the interpreter: its sampler is the one of kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from argosy_engine import LLM, SamplingParams
from argosy_engine.triton_kernels import sampling
from shallow_model import write_shallow_model

PROMPTS = ["The ship", "A harbour at night"]
ENGINE: dict[str, Any] = {
    "load_format": "dummy",
    "device": "cpu",
    "dtype": "float32",
    "threads": 1,
    "block_size": 16,
    "max_model_len": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "kv_cache_memory_bytes": 1 << 22,
}


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, LLM]]:
    """An engine of each backend, for all tests: starting one takes longer than its answers."""
    model = str(write_shallow_model(tmp_path_factory.mktemp("models") / "shallow"))
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("TRITON_INTERPRET", "1")
        yield {
            backend: stack.enter_context(LLM(model, attention_backend=backend, **ENGINE))
            for backend in ("torch", "triton")
        }


@pytest.fixture
def draws(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the sampling kernels as they are launched."""
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
def test_greedy_tokens_are_those_of_the_torch_sampler(
    name: str, engines: dict[str, LLM], draws: list[str]
) -> None:
    def generate(backend: str) -> list[Any]:
        return [output.outputs[0] for output in engines[backend].generate(PROMPTS, GREEDY[name])]

    expected = generate("torch")
    assert not draws
    outputs = generate("triton")
    assert set(draws) == {"_scan_logits", "_draw_tokens"}
    for ours, theirs in zip(outputs, expected, strict=True):
        assert (ours.token_ids, ours.finish_reason) == (theirs.token_ids, theirs.finish_reason)
        assert (ours.logprobs is None) == (theirs.logprobs is None)
