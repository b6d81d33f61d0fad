"""Models with sliding windows, or attention in chunks, through the whole engine: prompts in several steps, preempted,
and on cached prefixes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from argosy_engine.config import EngineArgs
from argosy_engine.core.proc.core_client import InprocClient
from argosy_engine.messages import EngineCoreRequest
from argosy_engine.params import SamplingParams
from greedy_reference import differing_tokens
from random_checkpoints import KINDS, make_checkpoint
from transformers_checkpoints import write_checkpoint

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


@pytest.mark.parametrize(
    ("name", "num_groups"), [("gemma3", 2), ("qwen2-window", 2), ("mistral-window", 1), ("llama4_text", 4)]
)
def test_tokens_equal_transformers_where_blocks_are_given_back(
    name: str, num_groups: int, tmp_path: Path
) -> None:
    threads = torch.get_num_threads()
    if name == "llama4_text":
        model = write_checkpoint(name, tmp_path, attention_chunk_size=20)
    else:
        model = make_checkpoint(KINDS[name], tmp_path)
    client = InprocClient(
        EngineArgs.of(
            model=str(tmp_path), dtype="float32", device="cpu", threads=1, block_size=8, max_model_len=128,
            max_num_batched_tokens=40, num_gpu_blocks_override=13 * num_groups + 1,
        )
    )  # fmt: skip
    core = client.core
    assert len(core.kv.groups) == num_groups
    rng = random.Random(5)
    prompts = [[rng.randrange(2, 128) for _ in range(rng.randrange(20, 84))] for _ in range(8)]
    prompts = [longer for prompt in prompts for longer in (prompt, [*prompt, 7, 9])]
    outputs: dict[str, list[int]] = {}
    num_preemptions = num_hit_tokens = 0
    for index, prompt in enumerate(prompts):
        client.add_request(EngineCoreRequest(str(index), prompt, GREEDY, 0.0))
    while client.has_work:
        step = client.step()
        assert step.stats is not None
        num_preemptions += step.stats.num_preemptions
        num_hit_tokens += step.stats.prefix_cache_hits
        for out in step.outputs:
            outputs.setdefault(out.request_id, []).extend(out.new_token_ids)
        core.scheduler.check()
    client.close()
    torch.set_num_threads(threads)
    for index, prompt in enumerate(prompts):
        assert differing_tokens(model, prompt, outputs[str(index)]) == [], f"{name}, prompt {index}"
    assert num_hit_tokens > 0
    assert num_preemptions > 0
