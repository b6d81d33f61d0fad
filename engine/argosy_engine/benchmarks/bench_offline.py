"""`argosy bench throughput` and `argosy bench latency`: an engine in this process, without a server.

Owns: the runs, their figures and the figures' file, and errors as exit codes: 0 the run took place, 1 it failed or the
model cannot be fetched now, 2 wrong usage, or a model that cannot be served. Must not know: how prompts are made, and
the engine behind `LLM`. For latency prefixes are not cached unless a flag asks for it: every iteration has the same
prompts.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

import numpy as np
from msgspec import Meta, Struct
from msgspec.structs import replace

from argosy_engine.api.engine_flag_parser import EngineFlagParser
from argosy_engine.benchmarks.benchmark_command import (
    FAILURE,
    OFFLINE_REFUSED,
    OFFLINE_WITHOUT_EFFECT,
    USAGE,
    BenchmarkError,
    run_progress,
)
from argosy_engine.benchmarks.prompt_datasets import (
    Count,
    DatasetArgs,
    SampleRequest,
    SomeTokens,
    Text,
    Tokens,
    load_tokenizer,
)
from argosy_engine.config import EngineArgs
from argosy_engine.errors import ConfigError, EngineError, InvalidRequest
from argosy_engine.frontend.beam_search import BeamSearchParams
from argosy_engine.frontend.llm import LLM, RequestOutput
from argosy_engine.params import MAX_N, SamplingParams
from argosy_engine.vllm_flags import ENGINE_REFUSED, ENGINE_WITHOUT_EFFECT, add_vllm_flags, check_vllm_flags
from argosy_engine.vllm_settings import SETTINGS
from argosy_protocol.program.flags import Flag, InvalidValue

Args = TypeVar("Args")


def add_vllm_bench_flags(parser: EngineFlagParser) -> None:
    """Add vLLM's flags without a setting. The help text has those of its benchmarks; those of its engine are in that
    of `argosy serve`."""
    add_vllm_flags(parser, OFFLINE_WITHOUT_EFFECT, OFFLINE_REFUSED)
    add_vllm_flags(parser, ENGINE_WITHOUT_EFFECT, ENGINE_REFUSED, SETTINGS, is_listed=False)


def run_offline(
    parser: EngineFlagParser,
    argv: Sequence[str] | None,
    cls: type[Args],
    run: Callable[[Args, EngineArgs], int],
    defaults: Mapping[str, Any] | None = None,
) -> int:
    """Parse the command line, run the benchmark and return the exit code. Errors are one line on standard error.

    Args:
        cls: the benchmark's own flags, which the parser has.
        defaults: of engine flags, where they differ from the engine's.
    """
    options = parser.parse_args(argv)
    for name, value in (defaults or {}).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    try:
        args = parser.build(cls, options)
    except InvalidValue as error:
        parser.error(str(error))
    engine_args = parser.engine_args(options)
    without_effect = (*ENGINE_WITHOUT_EFFECT, *OFFLINE_WITHOUT_EFFECT)
    refused = (*ENGINE_REFUSED, *OFFLINE_REFUSED)
    check_vllm_flags(parser, options, without_effect, refused, engine_args.data_parallel_size)
    try:
        return run(args, engine_args)
    except BenchmarkError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return error.exit_code
    except EngineError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return USAGE if isinstance(error, ConfigError | InvalidRequest) else FAILURE


def check_writable(path: str | None) -> None:
    """Make sure, before a run that takes long, that its figures can be written. A new file is left empty.

    Raises:
        BenchmarkError: the file cannot be written.
    """
    if path is not None:
        with _writing(path):
            Path(path).open("ab").close()


def write_json(path: str, document: Mapping[str, Any]) -> None:
    """Write the figures.

    Raises:
        BenchmarkError: the file cannot be written.
    """
    with _writing(path):
        Path(path).write_text(json.dumps(document, indent=4) + "\n", "utf-8")


@contextlib.contextmanager
def _writing(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BenchmarkError(f"cannot write {path}: {error.strerror}; give another --output-json") from None


_THROUGHPUT_EPILOG = (
    "Exit codes: 0 the run took place, 1 no prompt was answered, or the model cannot be fetched now, 2 wrong usage, or "
    "a model that cannot be served."
)


class BenchThroughputArgs(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is generated, and where the figures go."""

    backend: Annotated[
        Literal["argosy", "argosy-chat", "vllm", "vllm-chat"],
        Meta(description="complete the prompts, or answer them as chats; by vLLM's names as well"),
    ] = "argosy"
    n: Annotated[int, Meta(ge=1, le=MAX_N, description="choices per prompt")] = 1
    num_warmups: Annotated[
        int,
        Meta(ge=0, le=1 << 20, description="other prompts that are run before the clock starts"),
    ] = 0
    prefix_len: Annotated[
        Tokens | None, Meta(description="tokens that all random prompts begin with, as --random-prefix-len")
    ] = None
    output_json: Annotated[Text | None, Meta(description="file for the figures"), Flag(metavar="FILE")] = None
    data: DatasetArgs = DatasetArgs()

    @property
    def is_chat(self) -> bool:
        return self.backend.endswith("-chat")

    def samples(self, name: str, seed: int, count: int) -> list[SampleRequest]:
        """Return `count` prompts for the model of that name.

        Raises:
            BenchmarkError: they cannot be made.
        """
        data = replace(self.data, num_prompts=count)
        if self.prefix_len is not None:
            data = replace(data, random_prefix_len=self.prefix_len)
        return data.samples(load_tokenizer(name), seed, is_chat=self.is_chat)


def bench_throughput(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    parser = EngineFlagParser(
        "argosy bench throughput",
        "Generate from many prompts in this process and measure throughput.",
        _THROUGHPUT_EPILOG,
    )
    add_vllm_bench_flags(parser)
    parser.add_config(BenchThroughputArgs, "benchmark")
    parser.add_engine_flags()
    return run_offline(parser, argv, BenchThroughputArgs, run_throughput)


def run_throughput(args: BenchThroughputArgs, engine_args: EngineArgs) -> int:
    """Load the model, generate, and print and save the figures; return the exit code.

    Raises:
        BenchmarkError, EngineError: it cannot run.
    """
    args.data.check()
    check_writable(args.output_json)
    if args.data.random_batch_size > 1:
        raise BenchmarkError("--random-batch-size is for embeddings of `argosy bench serve`; leave it out")
    model = engine_args.canonical_name
    seed = engine_args.seed or 0
    samples = args.samples(engine_args.model, seed, args.data.num_prompts)
    warmups = args.samples(engine_args.model, seed + 1, args.num_warmups) if args.num_warmups else []
    with LLM.from_engine_args(engine_args) as llm:
        _check_lengths(samples, llm.config.max_model_len)
        if warmups:
            _generate(llm, args, warmups, use_bar=False)
        started = time.perf_counter()
        results = _generate(llm, args, samples, use_bar=True)
        elapsed = time.perf_counter() - started
    good = [result for result in results if result.error is None]
    for error in dict.fromkeys(result.error for result in results if result.error is not None):
        print(f"failed: {error}", file=sys.stderr)
    num_prompt = sum(len(result.prompt_token_ids) for result in good)
    num_output = sum(len(choice.token_ids) for result in good for choice in result.outputs)
    total = num_prompt + num_output
    print(
        f"Throughput: {len(good) / elapsed:.2f} requests/s, {total / elapsed:.2f} total tokens/s, "
        f"{num_output / elapsed:.2f} output tokens/s"
    )
    print(f"Total num prompt tokens:  {num_prompt}")
    print(f"Total num output tokens:  {num_output}")
    if args.output_json is not None:
        write_json(
            args.output_json,
            {
                "model_id": model,
                "elapsed_time": elapsed,
                "num_requests": len(good),
                "total_num_tokens": total,
                "requests_per_second": len(good) / elapsed,
                "tokens_per_second": total / elapsed,
            },
        )
    return 0 if good else FAILURE


def _check_lengths(samples: Sequence[SampleRequest], max_model_len: int) -> None:
    """Raises BenchmarkError if no prompt fits; the others are reported as failed."""
    shortest = min(sample.prompt_len + sample.expected_output_len for sample in samples)
    if shortest > max_model_len:
        raise BenchmarkError(
            f"prompts and answers have {shortest} tokens and more, which exceed the context of {max_model_len}; "
            "shorten them (--input-len, --output-len) or raise --max-model-len"
        )


def _generate(
    llm: LLM, args: BenchThroughputArgs, samples: Sequence[SampleRequest], *, use_bar: bool
) -> list[RequestOutput]:
    params = [
        SamplingParams(n=args.n, temperature=1.0, ignore_eos=True, max_tokens=sample.expected_output_len)
        for sample in samples
    ]
    prompts = [str(sample.prompt) for sample in samples]
    if args.is_chat:
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
        return llm.chat(chats, params, use_tqdm=use_bar)
    return llm.generate(prompts, params, use_tqdm=use_bar)


PERCENTILES: Final = (10, 25, 50, 75, 90, 99)
_LATENCY_EPILOG = (
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


def bench_latency(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    parser = EngineFlagParser(
        "argosy bench latency",
        "Generate from one batch in this process and measure how long it takes.",
        _LATENCY_EPILOG,
    )
    add_vllm_bench_flags(parser)
    parser.add_config(BenchLatencyArgs, "benchmark")
    parser.add_engine_flags()
    return run_offline(parser, argv, BenchLatencyArgs, run_latency, {"enable_prefix_caching": False})


def run_latency(args: BenchLatencyArgs, engine_args: EngineArgs) -> int:
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
