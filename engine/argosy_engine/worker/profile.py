"""Peak memory of the largest step, measured by running it: every token of the budget, every request sampled.

The requests are made up and share one block of a cache of two: what they attend to is nonsense, what they cost is not.
(vLLM's `profile_run`.)
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from argosy_engine.config import EngineArgs
from argosy_engine.errors import ConfigError
from argosy_engine.sample.params import SamplingParams
from argosy_engine.worker.device import DeviceMemory
from argosy_engine.worker.model_runner import ModelRunner
from argosy_engine.worker.step import NewRequest, SchedulerOutput


def measure_activations(
    runner: Callable[[int, int], ModelRunner],
    args: EngineArgs,
    max_model_len: int,
    device: torch.device,
    memory: DeviceMemory,
) -> int:
    """Bytes on a CUDA device beside weights and KV cache: the peak of the largest step, and what libraries took.

    Args:
        runner: makes a ModelRunner of (num_blocks, max_model_len).
        memory: of the device before anything was loaded.

    Raises:
        ConfigError: the step does not fit.
    """
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    try:
        run_largest_step(runner(2, max_model_len), args, max_model_len)
        torch.cuda.synchronize(device)
    except torch.OutOfMemoryError:
        raise ConfigError(
            f"a step of --max-num-batched-tokens {args.max_num_batched_tokens} tokens for --max-num-seqs "
            f"{args.max_num_seqs} requests does not fit beside the weights; lower one of them"
        ) from None
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    libraries = memory.available_bytes - free - torch.cuda.memory_reserved(device)
    return peak + max(libraries, 0)


def run_largest_step(runner: ModelRunner, args: EngineArgs, max_model_len: int) -> int:
    """Runs one prefill that fills the token budget and samples as many requests as may run; returns how many."""
    tokens = args.max_num_batched_tokens
    count = max(min(args.max_num_seqs, tokens), 1)
    lengths = [tokens // count + (row < tokens % count) for row in range(count)]
    lengths = [min(length, max_model_len - 1) for length in lengths]
    logprobs = runner.vocab_size if args.max_logprobs < 0 else args.max_logprobs
    sampling = SamplingParams(temperature=1.0, top_p=0.9, top_k=50, seed=0, max_tokens=1, logprobs=logprobs)
    num_groups = len(runner.groups)
    requests = [
        NewRequest(
            f"profile-{row}", [0] * length, [[1] * -(-length // args.block_size)] * num_groups, 0, sampling
        )
        for row, length in enumerate(lengths)
    ]
    scheduled = {request.request_id: len(request.token_ids) for request in requests}
    result = runner.execute(_step(requests, scheduled, [])).get()
    runner.execute(_step([], {}, list(scheduled)))
    return sum(bool(sampled) for sampled in result.sampled_token_ids)


def _step(new: list[NewRequest], scheduled: dict[str, int], finished: list[str]) -> SchedulerOutput:
    return SchedulerOutput(
        new_requests=new,
        new_block_ids={},
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        finished_request_ids=finished,
        scheduled_spec_token_ids={},
    )
