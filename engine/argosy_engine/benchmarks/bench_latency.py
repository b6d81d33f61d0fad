"""`argosy bench latency`: times one batch from its prompts to its last token, as `vllm bench latency` does.

Owns: the run and its figures. Must not know: the engine behind `LLM`. Prefixes are not cached unless a flag asks for
it: every iteration has the same prompts.

Exit codes: 0 the run took place, 1 it failed or the model cannot be fetched now, 2 wrong usage, or a model that cannot
be served.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Final

import numpy as np
from msgspec import Meta, Struct

from argosy_engine.api.engine_flag_parser import EngineFlagParser
from argosy_engine.benchmarks.benchmark_error import FAILURE, BenchmarkError
from argosy_engine.benchmarks.dataset_args import Count, SomeTokens, Text
from argosy_engine.benchmarks.offline_command import (
    add_vllm_bench_flags,
    check_writable,
    run_offline,
    write_json,
)
from argosy_engine.benchmarks.run_progress import run_progress
from argosy_engine.config import EngineArgs
from argosy_engine.frontend.beam_search import BeamSearchParams
from argosy_engine.frontend.llm import LLM
from argosy_engine.params.sampling_params import MAX_N, SamplingParams
from argosy_protocol.program.flags import Flag

PERCENTILES: Final = (10, 25, 50, 75, 90, 99)
_EPILOG = (
    "Exit codes: 0 the run took place, 1 it failed, or the model cannot be fetched now, 2 wrong usage, or a model that "
    "cannot be served."
)


class BenchLatencyArgs(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The batch, and how often it is run."""

    input_len: Annotated[SomeTokens, Meta(description="tokens of each prompt, drawn at random")] = 32
    output_len: Annotated[SomeTokens, Meta(description="tokens to generate")] = 128
    batch_size: Annotated[Count, Meta(description="prompts of the batch")] = 8
    n: Annotated[int, Meta(ge=1, le=MAX_N, description="choices per prompt, or the beam's width")] = 1
    use_beam_search: Annotated[bool, Meta(description="search by beams instead of sampling")] = False
    num_iters_warmup: Annotated[
        int, Meta(ge=0, le=1 << 20, description="iterations before the clock starts")
    ] = 10
    num_iters: Annotated[Count, Meta(description="iterations that are timed")] = 30
    disable_tqdm: Annotated[bool, Meta(description="show no progress")] = False
    output_json: Annotated[Text | None, Meta(description="file for the figures"), Flag(metavar="FILE")] = None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    parser = EngineFlagParser(
        "argosy bench latency",
        "Generate from one batch in this process and measure how long it takes.",
        _EPILOG,
    )
    add_vllm_bench_flags(parser)
    parser.add_config(BenchLatencyArgs, "benchmark")
    parser.add_engine_flags()
    return run_offline(parser, argv, BenchLatencyArgs, run, {"enable_prefix_caching": False})


def run(args: BenchLatencyArgs, engine_args: EngineArgs) -> int:
    """Load the model, time the batches, and print and save the figures; return the exit code.

    Raises:
        BenchmarkError, EngineError: it cannot run.
    """
    check_writable(args.output_json)
    with LLM.from_engine_args(engine_args) as llm:
        if args.input_len + args.output_len > llm.config.max_model_len:
            raise BenchmarkError(
                f"--input-len {args.input_len} and --output-len {args.output_len} exceed the context of "
                f"{llm.config.max_model_len} tokens; shorten them or raise --max-model-len"
            )
        rng = np.random.default_rng(engine_args.seed or 0)
        prompts = rng.integers(0, llm.config.vocab_size, (args.batch_size, args.input_len)).tolist()
        with run_progress(
            "warming up", args.num_iters_warmup, "iterations", is_shown=not args.disable_tqdm
        ) as shown:
            for _ in range(args.num_iters_warmup):
                _time_batch(llm, args, prompts)
                shown.done()
        latencies = []
        with run_progress("benchmark", args.num_iters, "iterations", is_shown=not args.disable_tqdm) as shown:
            for _ in range(args.num_iters):
                latencies.append(_time_batch(llm, args, prompts))
                shown.done()
    percentiles = dict(zip(PERCENTILES, np.percentile(latencies, PERCENTILES).tolist(), strict=True))
    average = float(np.mean(latencies))
    print(f"Avg latency: {average} seconds")
    for percent, value in percentiles.items():
        print(f"{percent}% percentile latency: {value} seconds")
    if args.output_json is not None:
        write_json(
            args.output_json,
            {
                "model_id": engine_args.canonical_name,
                "avg_latency": average,
                "latencies": latencies,
                "percentiles": percentiles,
            },
        )
    return 0


def _time_batch(llm: LLM, args: BenchLatencyArgs, prompts: list[list[int]]) -> float:
    """Run the batch once; return the seconds.

    Raises:
        BenchmarkError: a prompt failed.
    """
    started = time.perf_counter()
    if args.use_beam_search:
        llm.beam_search(
            prompts, BeamSearchParams(beam_width=args.n, max_tokens=args.output_len, ignore_eos=True)
        )
        return time.perf_counter() - started
    params = SamplingParams(n=args.n, temperature=1.0, top_p=1.0, ignore_eos=True, max_tokens=args.output_len)
    results = llm.generate(prompts, params, use_tqdm=False)
    elapsed = time.perf_counter() - started
    if error := next((result.error for result in results if result.error is not None), None):
        raise BenchmarkError(f"a prompt failed: {error}", FAILURE)
    return elapsed
