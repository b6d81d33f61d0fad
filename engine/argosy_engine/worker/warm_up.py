"""Dummy steps that a worker runs before the first request: to measure their memory, and to compile kernels.

The largest steps are run to measure their peak: they use the whole token budget and sample for every request. Their
requests share one block of a two-block cache: their attention results are meaningless, their memory use is not. Design:
vLLM's `profile_run`.

The warm-up runs the variants of the Triton kernels that a model and its sampler can need. A variant is compiled when it
is first launched, which takes a second or more, in which every request would wait. The compiled code is kept in
Triton's cache (`~/.triton/cache`, or TRITON_CACHE_DIR), so that the next start only loads it.

The host functions choose by shapes and by a few facts about a step. So the dummy steps vary the number of rows, the
queries per row, the length of the context and what the sampler does, and for experts the number of tokens, by which
they are sorted in chunks and multiplied in tiles; each is a step as the scheduler sends them.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from argosy_engine.config import EngineArgs
from argosy_engine.errors import ConfigError
from argosy_engine.messages import GrammarBitmask, NewRequest, SchedulerOutput
from argosy_engine.model_configs.vision_config import LargestImage
from argosy_engine.params import SamplingParams
from argosy_engine.sizing.resources import DeviceMemory
from argosy_engine.triton_kernels.launch import Variant, launched_variants
from argosy_engine.worker.model_runner import ModelRunner

logger = logging.getLogger(__name__)


def measure_activations(
    runner: Callable[[int, int], ModelRunner],
    args: EngineArgs,
    max_model_len: int,
    device: torch.device,
    memory: DeviceMemory,
    graph_sizes: Sequence[int] = (),
    mixed_sizes: Sequence[int] = (),
    image: LargestImage | None = None,
) -> int:
    """Measure the bytes needed on a CUDA device besides weights and KV cache.

    These are the peak of the largest steps and of encoding the largest image, CUDA graphs, and libraries.

    Args:
        runner: makes a ModelRunner from (num_blocks, max_model_len).
        graph_sizes: decode steps that will be captured; ascending.
        mixed_sizes: mixed steps that will be captured, by their tokens; ascending.
        memory: the device's memory before anything was loaded.
        image: the largest, if images are served.

    Raises:
        ConfigError: a step or the image does not fit.
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
    if image is not None:
        try:
            profiled.encode_largest(image)
            torch.cuda.synchronize(device)
        except torch.OutOfMemoryError:
            raise ConfigError(
                f"the largest image, of {image.num_patches} patches, cannot be encoded beside the weights; make images "
                "smaller (--mm-processor-kwargs), or serve texts alone (--language-model-only)"
            ) from None
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    peak += _measure_graphs(profiled, mixed_sizes, device, is_mixed=True)
    peak += _measure_graphs(profiled, graph_sizes, device)
    del profiled
    gc.collect()  # a runner and its graphs refer to each other
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    libraries = memory.available_bytes - free - torch.cuda.memory_reserved(device)
    return peak + max(libraries, 0)


def _measure_graphs(
    runner: ModelRunner, sizes: Sequence[int], device: torch.device, *, is_mixed: bool = False
) -> int:
    """Return the bytes that CUDA graphs of these sizes will take, beside those that the runner has.

    All of them share the memory of intermediate results, which the largest determines, and take some each. So the two
    largest are captured, and the second counts for all others. Design: vLLM's `profile_cudagraph_memory`.
    """
    used = []
    for size in list(reversed(sizes))[:2]:
        free, _ = torch.cuda.mem_get_info(device)
        if not (runner.capture_graphs([], mixed=[size]) if is_mixed else runner.capture_graphs([size])):
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


_GREEDY = SamplingParams(temperature=0.0, max_tokens=1)
_LIMITED = SamplingParams(temperature=0.8, top_p=0.9, seed=0, max_tokens=1)
_BIASED = SamplingParams(temperature=0.8, seed=0, max_tokens=1, logit_bias={0: 0.0}, frequency_penalty=0.1)
_BIASED_AND_LIMITED = _BIASED.replace(top_p=0.9)
_ALTERNATIVES = (0, 1, 5, 20, 128)
_FEW_QUERIES = (2, 3, 5, 9, 17, 33)
"""Queries per request at which attention may choose other tiles."""


class _Step(NamedTuple):
    """Requests of (length, computed tokens), and how they sample."""

    shapes: list[tuple[int, int]]
    sampling: SamplingParams
    has_grammar: bool = False
    has_image: bool = False
    """Whether the tokens of the last one are those of an image."""


def warm_up(
    runner: ModelRunner,
    args: EngineArgs,
    max_model_len: int,
    on_step: Callable[[], None] = lambda: None,
    *,
    has_tiles: bool = False,
) -> set[Variant]:
    """Run the steps, log how many variants of kernels they launched and how long that took, and return the variants.

    The runner must not have any requests. Block 1 of its cache is overwritten.

    Args:
        on_step: called after each step.
        has_tiles: whether kernels choose their tiles by the number of tokens, as those of experts and of quantised
            weights do.
    """
    steps = [*_steps(args, max_model_len)]
    if runner.has_key_ends:
        steps += [
            step._replace(has_image=True)
            for step in steps
            if step.sampling is _GREEDY and step.shapes[-1][0] - step.shapes[-1][1] > 1
        ]
    if has_tiles:
        steps += _tile_steps(args, max_model_len)
    started = time.perf_counter()
    with launched_variants() as variants:
        for step in steps:
            requests = [
                dummy_request(runner, args, row, *shape, step.sampling)
                for row, shape in enumerate(step.shapes)
            ]
            if step.has_image:
                requests[-1] = runner.with_dummy_image(requests[-1])
            grammar = allow_all(runner, requests) if step.has_grammar else None
            runner.execute(dummy_step(requests, grammar)).get()
            runner.execute(dummy_step([], None, [request.request_id for request in requests]))
            on_step()
    if runner.device.type == "cuda":
        torch.cuda.synchronize(runner.device)
    seconds = time.perf_counter() - started
    logger.info("warmed up %d variants of Triton kernels in %.1f s", len(variants), seconds)
    return variants


def _steps(args: EngineArgs, max_model_len: int) -> Iterator[_Step]:
    most_rows, most_tokens = args.max_num_seqs, args.max_num_batched_tokens
    longest = max_model_len - 1
    contexts = sorted({min(2 * args.block_size, longest), longest})
    counts = sorted({*(1 << power for power in range(most_rows.bit_length())), min(3, most_rows), most_rows})
    for context in contexts:
        for count in counts:
            yield _Step([(context, context - 1)] * count, _GREEDY)
    context = contexts[0]
    for queries in (*_FEW_QUERIES, most_tokens):
        queries = min(queries, most_tokens, longest)
        yield _Step([(queries, 0)], _GREEDY)
        if most_rows > 1 and most_tokens > queries:
            yield _Step([(context, context - 1), (queries, 0)], _GREEDY)
    most_alternatives = args.max_logprobs if args.max_logprobs >= 0 else max(_ALTERNATIVES)
    samplings = [
        _LIMITED,
        _BIASED,
        _BIASED_AND_LIMITED,
        *(
            sampling.replace(logprobs=count)
            for count in _ALTERNATIVES
            if count <= most_alternatives
            for sampling in (_GREEDY, _BIASED)
        ),
    ]
    for count in sorted({1, most_rows}):
        for sampling in samplings:
            yield _Step([(context, context - 1)] * count, sampling)
        for sampling in (_GREEDY, _LIMITED):
            yield _Step([(context, context - 1)] * count, sampling, has_grammar=True)


def _tile_steps(args: EngineArgs, max_model_len: int) -> Iterator[_Step]:
    """Yield prompts of every number of tokens at which chunks or tiles become larger: powers of two, and one more."""
    longest = max_model_len - 1
    most = min(args.max_num_batched_tokens, args.max_num_seqs * longest)
    for power in range(1, most.bit_length()):
        for tokens in (1 << power, (1 << power) + 1):
            if tokens <= most:
                parts = -(-tokens // longest)
                yield _Step([(tokens // parts + (row < tokens % parts), 0) for row in range(parts)], _GREEDY)
