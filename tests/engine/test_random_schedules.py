"""Random schedules of requests with latents, with states, and with blocks that are given back have transformers' greedy
tokens and log probabilities.

Prompts share prefixes that end at blocks and beside them, and some are equal; requests are aborted, preempted, stopped
by a token while a step is in flight, and resumed with the output of an earlier run, as after a migration. Everything
that a step may hold is scarce, at random: tokens, requests, blocks, states.
"""

from __future__ import annotations

import random
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import Struct

from argosy_engine.config import EngineArgs
from argosy_engine.core.proc.core_client import InprocClient
from argosy_engine.messages import EngineCoreOutput, EngineCoreRequest, FinishReason
from argosy_engine.models.config_file import load_model_config
from argosy_engine.models.loader import complete_config
from argosy_engine.params import SamplingParams
from argosy_engine.sample.token_logprobs import TokenLogprobs
from argosy_engine.sizing.kv_cache_sizing import planned_groups, request_blocks
from gemma4_shapes import SHARED
from greedy_reference import TIE
from thread_workers import thread_workers
from transformers_checkpoints import VOCAB_SIZE, write_checkpoint
from transformers_sweep import EXACT

_MAX_MODEL_LEN = 200
_LONGEST_PROMPT = 150
_LOGPROB_TOLERANCE = 2e-3
_STATES = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "states": ("qwen3_5_text", {**_STATES, "linear_value_head_dim": 32, "linear_conv_kernel_dim": 9}),
    "states and experts": ("qwen3_next", {**_STATES, "linear_value_head_dim": 24}),
    "latents": ("deepseek_v2", {"q_lora_rank": None}),
    "latents that are expanded": ("deepseek_v3", {"kv_lora_rank": 48}),
    "chunks": ("llama4_text", {"attention_chunk_size": 20}),
    "pages of two sizes, shared by layers": ("gemma4_text", SHARED),
}


class _Run(Struct):
    """A request, and what has come of it."""

    prompt: list[int]
    resumed: list[int]
    params: SamplingParams
    output: list[int] = []
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish: FinishReason | None = None

    def take(self, output: EngineCoreOutput) -> None:
        assert output.error is None, output.error
        self.output += output.new_token_ids
        self.logprobs += output.logprobs or []
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        self.finish = output.finish_reason


class _Schedule:
    """Requests to an engine, and when they are added, computed and aborted."""

    def __init__(self, rng: random.Random, client: InprocClient, block_size: int) -> None:
        self.rng, self.client, self.block_size = rng, client, block_size
        self.roots = [[rng.randrange(3, VOCAB_SIZE) for _ in range(_LONGEST_PROMPT)] for _ in range(3)]
        self.roots[1][: 2 * block_size] = self.roots[0][: 2 * block_size]
        self.roots[2][: 2 * block_size + 5] = self.roots[1][: 2 * block_size + 5]
        self.runs: list[_Run] = []
        self.live: dict[str, _Run] = {}
        self.num_cached = self.num_preempted = 0

    def prompt(self) -> list[int]:
        rng, size = self.rng, self.block_size
        blocks = size * rng.randint(1, _LONGEST_PROMPT // size - 1)
        length = rng.choice((1, 2, blocks - 1, blocks, blocks + 1, rng.randint(3, 60)))
        own = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.choice((0, 0, 1, 20)))]
        return [*rng.choice(self.roots)[:length], *own]

    def add(self) -> None:
        rng = self.rng
        prompt, resumed = self.prompt(), []
        if self.runs and rng.random() < 0.4:
            earlier = rng.choice(self.runs)
            prompt = earlier.prompt
            if rng.random() < 0.5:
                resumed = earlier.output[: rng.randint(0, 20)]
        most = min(len(resumed) + rng.choice((1, 2, 30, 60)), _MAX_MODEL_LEN - len(prompt))
        if len(resumed) >= most:
            return
        stops = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.choice((0, 0, 0, 40)))]
        params = SamplingParams(
            temperature=0.0,
            max_tokens=most,
            ignore_eos=True,
            stop_token_ids=() if set(stops) & set(resumed) else tuple(stops),
            logprobs=rng.choice((None, 2)),
            prompt_logprobs=rng.choice((None, None, None, 1)),
        )
        run, name = _Run(prompt, resumed, params, output=list(resumed)), str(len(self.runs))
        self.runs.append(run)
        self.live[name] = run
        request = EngineCoreRequest(
            name, prompt, params, time.time(), priority=rng.choice((0, 1)), resume_token_ids=resumed
        )
        self.client.add_request(request)

    def step(self) -> None:
        outputs = self.client.step()
        if outputs.stats is not None:
            self.num_preempted += outputs.stats.num_preemptions
        for output in outputs.outputs:
            if (run := self.live.get(output.request_id)) is not None:
                run.take(output)
                if output.prefill_stats is not None:
                    self.num_cached += output.prefill_stats.num_cached_tokens
                if run.finish is not None:
                    del self.live[output.request_id]

    def run(self, num_rounds: int) -> None:
        rng = self.rng
        for _ in range(num_rounds):
            for _ in range(rng.choice((1, 2, 4))):
                self.add()
            for _ in range(rng.choice((1, 3, 12))):
                self.step()
            if self.live and rng.random() < 0.2:
                name = rng.choice(list(self.live))
                del self.live[name]
                self.client.abort_requests([name])
        while self.client.has_work:
            self.step()
        assert not self.live
        assert self.client.call_utility("check")


def differences(model: torch.nn.Module, run: _Run) -> list[str]:
    """Return what of a run transformers' model gives otherwise."""
    logits = model(torch.tensor([run.prompt + run.output])).logits[0].float()
    first, found = len(run.prompt) - 1, []
    own = logits[first : first + len(run.output)]
    for position, (row, token) in enumerate(zip(own, run.output, strict=True)):
        if (gap := (row.max() - row[token]).item()) > TIE:
            found.append(f"token {position} of {len(run.output)} is {gap:.1e} below the best")
    scored = [*enumerate(run.prompt_logprobs or []), *enumerate(run.logprobs, first + len(run.resumed))]
    expected = logits.log_softmax(-1)
    for position, entry in scored:
        if (run.prompt + run.output)[position + 1] != entry.token_ids[0]:
            found.append(f"the log probability at {position} is of another token")
        theirs = expected[position, entry.token_ids]
        if (theirs - torch.tensor(entry.logprobs)).abs().max() > _LOGPROB_TOLERANCE:
            found.append(f"log probabilities at {position} are {entry.logprobs}, not {theirs.tolist()}")
    if run.finish is FinishReason.LENGTH and len(run.output) != run.params.max_tokens:
        found.append(f"{len(run.output)} tokens of {run.params.max_tokens}")
    stops = [token in run.params.stop_token_ids for token in run.output]
    if any(stops[:-1]) or (run.finish is FinishReason.STOP) != (stops[-1:] == [True]):
        found.append(f"ended by {run.finish} with {stops}")
    return found


def flags_of(rng: random.Random) -> dict[str, Any]:
    """Return flags that leave little of everything but blocks (`least_blocks`), and enough for one request."""
    return {
        "block_size": rng.choice((16, 32)),
        "max_model_len": _MAX_MODEL_LEN,
        "max_num_batched_tokens": rng.choice((16, 23, 100)),
        "max_num_seqs": rng.choice((5, 8)),
        "max_num_mixed_prefill_tokens": rng.choice((16, 19)),
        "long_prefill_token_threshold": rng.choice((0, 5)),
        "mamba_block_size": rng.choice((16, 32, 48)),
        "kv_cache_memory_bytes": rng.choice((200_000, 600_000)),  # of states 3 or 4, and more
        "scheduling_policy": rng.choice(("fcfs", "priority")),
        "watermark": 0.0,
    }


def least_blocks(args: EngineArgs) -> int:
    """Return how many blocks one request needs, the null block included."""
    config = complete_config(load_model_config(Path(args.model), args.model_use))
    return request_blocks(planned_groups(config, 4, args.block_size), _MAX_MODEL_LEN, args) + 1


def check_schedules(shape: str, seeds: range, path: Path, **flags: Any) -> None:
    """Run one schedule for each seed, and compare all requests with transformers."""
    model_type, fields = SHAPES[shape]
    model = write_checkpoint(model_type, path, **fields)
    num_cached = num_preempted = 0
    for seed in seeds:
        rng = random.Random(seed)
        chosen = {**EXACT, **flags_of(rng), "model_impl": "argosy", **flags}
        blocks = least_blocks(EngineArgs.of(model=str(path), **chosen)) + rng.choice((0, 1))
        args = EngineArgs.of(model=str(path), num_gpu_blocks_override=blocks, **chosen)
        with closing(InprocClient(args)) as client:
            schedule = _Schedule(rng, client, chosen["block_size"])
            schedule.run(14)
        num_cached += schedule.num_cached
        num_preempted += schedule.num_preempted
        with torch.inference_mode():
            wrong = {
                index: lines for index, run in enumerate(schedule.runs) if (lines := differences(model, run))
            }
        assert not wrong, f"seed {seed}, {chosen}: {wrong}"
    assert num_cached
    assert num_preempted


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_are_those_of_transformers(shape: str, async_scheduling: bool, tmp_path: Path) -> None:
    check_schedules(shape, range(1), tmp_path, async_scheduling=async_scheduling)


@pytest.mark.parametrize(("shape", "stages"), [("states", 2), ("states and experts", 3), ("latents", 2)])
def test_stages_with_steps_in_flight_give_them_too(shape: str, stages: int, tmp_path: Path) -> None:
    with thread_workers():
        check_schedules(shape, range(1), tmp_path, pipeline_parallel_size=stages)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_more_schedules(shape: str, async_scheduling: bool, tmp_path: Path) -> None:
    check_schedules(shape, range(1, 16), tmp_path, async_scheduling=async_scheduling)
