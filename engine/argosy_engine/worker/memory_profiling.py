"""Memory profiling: measures the peak memory of the largest steps by running them.

The steps use the whole token budget and sample for every request. The requests are dummies that share one block of a
two-block cache: their attention results are meaningless, their memory use is not. Design: vLLM's `profile_run`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

import torch

from argosy_engine.config import EngineArgs
from argosy_engine.errors import ConfigError
from argosy_engine.messages.scheduler_output import GrammarBitmask, NewRequest, SchedulerOutput
from argosy_engine.params.sampling_params import SamplingParams
from argosy_engine.sizing.device import DeviceMemory
from argosy_engine.worker.model_runner import ModelRunner


def measure_activations(
    runner: Callable[[int, int], ModelRunner],
    args: EngineArgs,
    max_model_len: int,
    device: torch.device,
    memory: DeviceMemory,
    graph_sizes: Sequence[int] = (),
) -> int:
    """Measure the bytes needed on a CUDA device besides weights and KV cache.

    These are the largest steps' peak, CUDA graphs, and libraries.

    Args:
        runner: makes a ModelRunner from (num_blocks, max_model_len).
        graph_sizes: decode steps that will be captured; ascending.
        memory: the device's memory before anything was loaded.

    Raises:
        ConfigError: a step does not fit.
    """
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    try:
        profiled = runner(2, max_model_len)
        run_largest_steps(profiled, args, max_model_len)
        torch.cuda.synchronize(device)
    except torch.OutOfMemoryError:
        raise ConfigError(
            f"a step of --max-num-batched-tokens {args.max_num_batched_tokens} tokens for --max-num-seqs "
            f"{args.max_num_seqs} requests does not fit beside the weights; lower one of them"
        ) from None
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    peak += _measure_graphs(profiled, graph_sizes, device)
    del profiled
    gc.collect()  # a runner and its graphs refer to each other
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    libraries = memory.available_bytes - free - torch.cuda.memory_reserved(device)
    return peak + max(libraries, 0)


def _measure_graphs(runner: ModelRunner, sizes: Sequence[int], device: torch.device) -> int:
    """Return the bytes that CUDA graphs of these sizes will take.

    All of them share the memory of intermediate results, which the largest determines, and take some each. So the two
    largest are captured, and the second counts for all others. Design: vLLM's `profile_cudagraph_memory`.
    """
    used = []
    for size in list(reversed(sizes))[:2]:
        free, _ = torch.cuda.mem_get_info(device)
        if not runner.capture_graphs([size]):
            return 0
        torch.cuda.empty_cache()
        left, _ = torch.cuda.mem_get_info(device)
        used.append(max(free - left, 0))
    return estimate_graphs(used, len(sizes))


def estimate_graphs(used: Sequence[int], count: int) -> int:
    """Estimate the bytes of `count` graphs from those that capturing the largest and the second took."""
    return sum(used[:1]) + sum(used[1:2]) * (count - 1)


def run_largest_steps(runner: ModelRunner, args: EngineArgs, max_model_len: int) -> int:
    """Run two steps that fill the token budget and sample for as many requests as may run.

    The requests use every feature of the sampler. One step computes short prompts from their start; in the other all
    requests have the maximum length, and the step computes decodes and one chunk of a prompt. Returns the number of
    tokens sampled in both steps.
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
            dummy_request(runner, args, row, *shape, _full_sampling(runner, args))
            for row, shape in enumerate(zip(lengths, computed, strict=True))
        ]
        result = runner.execute(dummy_step(requests, allow_all(runner, requests))).get()
        runner.execute(dummy_step([], None, [request.request_id for request in requests]))
        num_sampled += sum(bool(sampled) for sampled in result.sampled_token_ids)
    return num_sampled


def _full_sampling(runner: ModelRunner, args: EngineArgs) -> SamplingParams:
    """Parameters that use every table and kernel of the sampler."""
    return SamplingParams(
        temperature=2.0,
        top_p=0.999999,  # keeps nearly the whole vocabulary
        min_p=1e-9,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        repetition_penalty=1.1,
        seed=0,
        max_tokens=1,
        logit_bias={0: 0.0},
        allowed_token_ids=tuple(range(runner.vocab_size)),
        logprobs=runner.vocab_size if args.max_logprobs < 0 else args.max_logprobs,
    )


def dummy_request(
    runner: ModelRunner, args: EngineArgs, row: int, length: int, num_computed: int, sampling: SamplingParams
) -> NewRequest:
    """Make a request whose tokens are all in one block, which nothing else may use."""
    blocks = [1] * -(-length // args.block_size)
    return NewRequest(f"dummy-{row}", [0] * length, [blocks] * len(runner.groups), num_computed, sampling)


def allow_all(runner: ModelRunner, requests: list[NewRequest]) -> GrammarBitmask:
    """Make a bitmask that allows every token."""
    words = len(requests) * -(-runner.vocab_size // 32)
    return GrammarBitmask([request.request_id for request in requests], b"\xff" * (4 * words))


def dummy_step(
    new: list[NewRequest], grammar: GrammarBitmask | None, finished: Sequence[str] = ()
) -> SchedulerOutput:
    """Make a step that computes the rest of new requests."""
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
