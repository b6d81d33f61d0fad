"""`LLM`: prompts and parameters as lists."""

from __future__ import annotations

import pytest

from argosy_engine import LLM, SamplingParams
from argosy_engine.errors import InvalidRequest


def test_parameters_are_for_all_prompts_or_one_for_each() -> None:
    llm = LLM("builtin://tiny", device="cpu", threads=1, num_gpu_blocks_override=64, max_model_len=256)
    prompts = ["The sea", "Once upon a time"]
    short, long = (SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (2, 7))
    shared = llm.generate(prompts, long, use_tqdm=False)
    assert [len(result.token_ids) for result in shared] == [7, 7]
    own = llm.generate(prompts, [short, long], use_tqdm=False)
    assert [result.token_ids for result in own] == [shared[0].token_ids[:2], shared[1].token_ids]
    with pytest.raises(InvalidRequest, match="1 sampling_params for 2 prompts"):
        llm.generate(prompts, [short], use_tqdm=False)
    assert llm.generate([], use_tqdm=False) == []
