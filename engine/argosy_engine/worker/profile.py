"""Peak memory of the largest steps, measured by running them: every token of the budget, every request sampled.

The requests are made up and share one block of a cache of two: what they attend to is nonsense, what they cost is not.
(vLLM's `profile_run`.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from argosy_engine.config import EngineArgs
from argosy_engine.errors import ConfigError
from argosy_engine.sample.params import SamplingParams
from argosy_engine.worker.device import DeviceMemory
from argosy_engine.worker.model_runner import ModelRunner
from argosy_engine.worker.step import GrammarBitmask, NewRequest, SchedulerOutput


def measure_activations(
    runner: Callable[[int, int], ModelRunner],
    args: EngineArgs,
    max_model_len: int,
    device: torch.device,
    memory: DeviceMemory,
) -> int:
    """Bytes on a CUDA device beside weights and KV cache: the peak of the largest steps, and what libraries took.

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
        run_largest_steps(runner(2, max_model_len), args, max_model_len)
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


def run_largest_steps(runner: ModelRunner, args: EngineArgs, max_model_len: int) -> int:
    """Runs two steps that fill the token budget and sample as many requests as may run, with everything a request can
    ask of the sampler; returns how many tokens were sampled.

    One step computes short prompts from their start. In the other all requests are as long as may be: decodes, and
    one chunk of a prompt.
    """
    tokens = args.max_num_batched_tokens
    count = max(min(args.max_num_seqs, tokens), 1)
    shares = [tokens // count + (row < tokens % count) for row in range(count)]
    prompts = [min(share, max_model_len - 1) for share in shares]
    chunks = [1] * (count - 1) + [min(tokens - count + 1, max_model_len - 1)]
    num_sampled = 0
    for lengths, computed in (
        (prompts, [0] * count),
        ([max_model_len - 1] * count, [max_model_len - 1 - chunk for chunk in chunks]),
    ):
        requests = [
            _request(runner, args, row, *shape)
            for row, shape in enumerate(zip(lengths, computed, strict=True))
        ]
        result = runner.execute(_step(requests, _grammar(runner, requests))).get()
        runner.execute(_step([], None, [request.request_id for request in requests]))
        num_sampled += sum(bool(sampled) for sampled in result.sampled_token_ids)
    return num_sampled


def _request(runner: ModelRunner, args: EngineArgs, row: int, length: int, num_computed: int) -> NewRequest:
    sampling = SamplingParams(
        temperature=2.0,
        top_p=0.999999,  # a nucleus of nearly the whole vocabulary
        min_p=1e-9,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        repetition_penalty=1.1,
        seed=0,
        max_tokens=1,
        logprobs=runner.vocab_size if args.max_logprobs < 0 else args.max_logprobs,
    )
    blocks = [1] * -(-length // args.block_size)
    return NewRequest(f"profile-{row}", [0] * length, [blocks] * len(runner.groups), num_computed, sampling)


def _grammar(runner: ModelRunner, requests: list[NewRequest]) -> GrammarBitmask:
    """One that allows everything."""
    words = len(requests) * -(-runner.vocab_size // 32)
    return GrammarBitmask([request.request_id for request in requests], b"\xff" * (4 * words))


def _step(
    new: list[NewRequest], grammar: GrammarBitmask | None, finished: Sequence[str] = ()
) -> SchedulerOutput:
    scheduled = {request.request_id: len(request.token_ids) - request.num_computed_tokens for request in new}
    return SchedulerOutput(
        new_requests=new,
        new_block_ids={},
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        finished_request_ids=list(finished),
        scheduled_spec_token_ids={},
        grammar=grammar,
    )
