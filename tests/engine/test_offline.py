"""`LLM`: prompts and parameters as lists."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from argosy_engine import LLM, SamplingParams
from argosy_engine.errors import InvalidRequest
from argosy_engine.frontend.llm import RequestOutput


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    made = LLM("builtin://tiny", device="cpu", threads=1, num_gpu_blocks_override=64, max_model_len=256)
    yield made
    made.close()


def test_a_stop_token_is_among_the_ids_and_not_in_the_text(llm: LLM) -> None:
    def run(**fields: Any) -> RequestOutput:
        return llm.generate("Once", SamplingParams(temperature=0.0, max_tokens=8, **fields), use_tqdm=False)[
            0
        ]

    free = run()
    stop = free.token_ids[3]
    at = free.token_ids.index(stop)
    decode = llm.processor.tokenizer.decode
    dropped, shown = run(stop_token_ids=(stop,)), run(stop_token_ids=(stop,), include_stop_str_in_output=True)
    assert dropped.token_ids == shown.token_ids == free.token_ids[: at + 1]
    assert dropped.stop_reason == shown.stop_reason == stop
    assert (dropped.text, shown.text) == (decode(free.token_ids[:at]), decode(free.token_ids[: at + 1]))


def test_parameters_are_for_all_prompts_or_one_for_each(llm: LLM) -> None:
    prompts = ["The sea", "Once upon a time"]
    short, long = (SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (2, 7))
    shared = llm.generate(prompts, long, use_tqdm=False)
    assert [len(result.token_ids) for result in shared] == [7, 7]
    own = llm.generate(prompts, [short, long], use_tqdm=False)
    assert [result.token_ids for result in own] == [shared[0].token_ids[:2], shared[1].token_ids]
    with pytest.raises(InvalidRequest, match="1 sampling_params for 2 prompts"):
        llm.generate(prompts, [short], use_tqdm=False)
    assert llm.generate([], use_tqdm=False) == []
