"""Models with sliding windows, or attention in chunks, through the whole engine: prompts in several steps, preempted,
and on cached prefixes."""

from __future__ import annotations

import random
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from argosy_engine.config import EngineArgs
from argosy_engine.core.proc.core_client import InprocClient
from argosy_engine.messages import EngineCoreRequest
from argosy_engine.params import SamplingParams
from deepseek_shapes import EXPANDED
from gemma4_shapes import SHARED
from greedy_reference import differing_tokens
from random_checkpoints import KINDS, make_checkpoint
from transformers_checkpoints import VOCAB_SIZE, write_checkpoint
from transformers_sweep import EXACT, generated

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


_KINDS_OF_ATTENTION: list[tuple[str, dict[str, Any]]] = [
    ("qwen3", {}),
    ("mistral", {"sliding_window": 5}),
    ("gemma3_text", {}),
    ("gemma4_text", SHARED),
    ("gpt_oss", {}),
    ("llama4_text", {"attention_chunk_size": 20}),
    ("deepseek_v2", {}),
    ("deepseek_v3", EXPANDED),
    ("bloom", {}),
]
_FLAGS: list[dict[str, Any]] = [
    {},
    {"async_scheduling": True},
    {"attention_backend": "torch"},
    {"model_impl": "transformers"},
]
_SHARING = [
    pytest.param(model_type, fields, flags, id=" ".join((model_type, *map(str, flags.values()))))
    for model_type, fields in _KINDS_OF_ATTENTION
    for flags in _FLAGS
    if (model_type, flags)
    != ("bloom", {"model_impl": "transformers"})  # its biases are computed by ours only
]


@pytest.mark.parametrize(("model_type", "fields", "flags"), _SHARING)
def test_requests_of_one_step_read_the_blocks_that_it_writes(
    model_type: str, fields: dict[str, Any], flags: dict[str, Any], tmp_path: Path
) -> None:
    """A block is in the prefix cache as soon as the step that fills it is scheduled."""
    model = write_checkpoint(model_type, tmp_path, **fields)
    rng = random.Random(9)
    prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(90)]
    prompts = [prompt, prompt, [*prompt[:64], 5, 6, 7], prompt[:33], [*prompt, 8], prompt[:7]]
    chosen = {"model_impl": "argosy", "block_size": 8, "max_num_batched_tokens": 512, **flags}
    with closing(InprocClient(EngineArgs.of(model=str(tmp_path), **EXACT, **chosen))) as client:
        outputs, hits = generated(client, prompts)
    assert [hits[index] for index in range(len(prompts))] == [0, 88, 64, 32, 88, 0]
    for index, each in enumerate(prompts):
        assert differing_tokens(model, each, outputs[index]) == [], index
