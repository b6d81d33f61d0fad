"""Warm-up: runs the variants of the Triton kernels that a model and its sampler can need, before the first request.

A variant is compiled when it is first launched, which takes a second or more, in which every request would wait. The
compiled code is kept in Triton's cache (`~/.triton/cache`, or TRITON_CACHE_DIR), so that the next start only loads it.

The host functions choose by shapes and by a few facts about a step. So the dummy steps vary the number of rows, the
queries per row, the length of the context and what the sampler does, and for experts the number of tokens, by which
they are sorted in chunks and multiplied in tiles; each is a step as the scheduler sends them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from argosy_engine.config import EngineArgs
from argosy_engine.params.sampling_params import SamplingParams
from argosy_engine.triton_kernels.launch import Variant, launched_variants
from argosy_engine.worker.memory_profiling import allow_all, dummy_request, dummy_step
from argosy_engine.worker.model_runner import ModelRunner

logger = logging.getLogger(__name__)

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


def warm_up(
    runner: ModelRunner,
    args: EngineArgs,
    max_model_len: int,
    on_step: Callable[[], None] = lambda: None,
    *,
    has_experts: bool = False,
) -> set[Variant]:
    """Run the steps, log how many variants of kernels they launched and how long that took, and return the variants.

    The runner must not have any requests. Block 1 of its cache is overwritten.

    Args:
        on_step: called after each step.
        has_experts: whether layers of the model are mixtures of experts.
    """
    steps = [*_steps(args, max_model_len)]
    if has_experts:
        steps += _expert_steps(args, max_model_len)
    started = time.perf_counter()
    with launched_variants() as variants:
        for step in steps:
            requests = [
                dummy_request(runner, args, row, *shape, step.sampling)
                for row, shape in enumerate(step.shapes)
            ]
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


def _expert_steps(args: EngineArgs, max_model_len: int) -> Iterator[_Step]:
    """Yield prompts of every number of tokens at which chunks or tiles become larger: powers of two, and one more."""
    longest = max_model_len - 1
    most = min(args.max_num_batched_tokens, args.max_num_seqs * longest)
    for power in range(1, most.bit_length()):
        for tokens in (1 << power, (1 << power) + 1):
            if tokens <= most:
                parts = -(-tokens // longest)
                yield _Step([(tokens // parts + (row < tokens % parts), 0) for row in range(parts)], _GREEDY)
