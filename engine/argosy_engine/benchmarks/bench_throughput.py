"""`argosy bench throughput`: generates from a data set's prompts in this process, as `vllm bench throughput` does.

Owns: the run and its figures. Must not know: how prompts are made, and the engine behind `LLM`.

Exit codes: 0 the run took place, 1 no prompt was answered or the model cannot be fetched now, 2 wrong usage, or a model
that cannot be served.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Annotated, Literal

from msgspec import Meta, Struct
from msgspec.structs import replace

from argosy_engine.api.engine_flag_parser import EngineFlagParser
from argosy_engine.benchmarks.benchmark_error import FAILURE, BenchmarkError
from argosy_engine.benchmarks.dataset_args import DatasetArgs, Text, Tokens
from argosy_engine.benchmarks.offline_command import (
    add_vllm_bench_flags,
    check_writable,
    run_offline,
    write_json,
)
from argosy_engine.benchmarks.prompt_datasets import SampleRequest
from argosy_engine.benchmarks.prompt_tokenizer import load_tokenizer
from argosy_engine.config import EngineArgs
from argosy_engine.frontend.llm import LLM, RequestOutput
from argosy_engine.params.sampling_params import MAX_N, SamplingParams
from argosy_protocol.program.flags import Flag

_EPILOG = (
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
        int, Meta(ge=0, le=1 << 20, description="other prompts that are run before the clock starts")
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    parser = EngineFlagParser(
        "argosy bench throughput",
        "Generate from many prompts in this process and measure throughput.",
        _EPILOG,
    )
    add_vllm_bench_flags(parser)
    parser.add_config(BenchThroughputArgs, "benchmark")
    parser.add_engine_flags()
    return run_offline(parser, argv, BenchThroughputArgs, run)


def run(args: BenchThroughputArgs, engine_args: EngineArgs) -> int:
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
