"""Batch invariance: with the CPU kernels a request's tokens and log probabilities depend on nothing but the request.

They are the same bit for bit, in bf16 as well, whatever else is in the batch, however the prompt is cut into chunks,
whether a prefix was cached or the request preempted, and with any number of threads: every sum is computed in a fixed
order, and noise is a function of seed and position.
"""

from __future__ import annotations

from typing import Any

import pytest

from argosy_engine import LLM, SamplingParams
from argosy_engine.native.library import kernels
from preemptions import PreemptionCounter

pytestmark = pytest.mark.skipif(kernels() is None, reason="torch's sums depend on the shape of the batch")

PROMPTS = [
    "Once upon a time",
    "Hello, how are you?",
    "The quick brown fox jumps over the lazy dog and then it sleeps. " * 6,
    "What is 2 plus 3?",
    "One, two, three, four, " * 9,
    "The sea",
]
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {"temperature": 1.0},
    "top_p": {"temperature": 1.0, "top_p": 0.9},
    "top_k": {"temperature": 0.8, "top_k": 20},
    "min_p": {"temperature": 1.2, "min_p": 0.05},
    "penalties": {"temperature": 0.7, "repetition_penalty": 1.2, "presence_penalty": 0.3},
}
REQUESTS = [
    (prompt, SamplingParams(max_tokens=20, ignore_eos=True, seed=index, logprobs=2, **params))
    for index, prompt in enumerate(PROMPTS)
    for params in PARAMS.values()
]


def make(**changes: Any) -> LLM:
    return LLM("builtin://tiny", device="cpu", dtype="bfloat16", **changes)


def answers(llm: LLM, requests: list[tuple[str, SamplingParams]]) -> list[Any]:
    """Tokens and log probabilities."""
    prompts, params = zip(*requests, strict=True)
    results = llm.generate(list(prompts), list(params), use_tqdm=False)
    return [(list(result.outputs[0].token_ids), result.outputs[0].logprobs) for result in results]


@pytest.fixture(scope="module")
def alone() -> list[Any]:
    """Of each request with an engine to itself: one thread, nothing cached."""
    llm = make(threads=1, enable_prefix_caching=False, num_gpu_blocks_override=256)
    found = [answers(llm, [request])[0] for request in REQUESTS]
    assert len({tuple(tokens) for tokens, _ in found}) > len(PROMPTS)
    return found


@pytest.mark.parametrize(
    ("changes", "chosen", "is_preempted"),
    [
        ({"threads": 2, "num_gpu_blocks_override": 512}, slice(None), False),
        (
            {"threads": 1, "max_num_batched_tokens": 48, "max_num_seqs": 12, "num_gpu_blocks_override": 512},
            slice(None),
            False,
        ),
        # Every second request, penalties included: each preemption computes a request anew.
        (
            {"threads": 1, "max_num_seqs": 18, "num_gpu_blocks_override": 32, "watermark": 0.0},
            slice(1, None, 2),
            True,
        ),
    ],
    ids=["one batch", "small steps", "preempted"],
)
def test_a_request_gets_the_same_tokens_in_any_batch(
    changes: dict[str, Any], chosen: slice, is_preempted: bool, alone: list[Any]
) -> None:
    llm = make(**changes)
    preemptions = PreemptionCounter(llm.client)
    requests, expected = REQUESTS[chosen], alone[chosen]
    assert answers(llm, requests) == expected, "cold"
    backwards = answers(llm, requests[::-1])  # over prefixes that are cached now
    assert backwards[::-1] == expected, "warm"
    assert bool(preemptions.total) == is_preempted
