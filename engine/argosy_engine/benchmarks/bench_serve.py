"""`argosy bench serve`: loads an OpenAI endpoint and reports latency and throughput, as `vllm bench serve` does.

Owns: the order of a run, from the flags to the saved result. Must not know: how requests are sent and figures computed.

Exit codes: 0 the run took place, 1 no request was answered or the server cannot be used, 2 wrong usage.
"""

from __future__ import annotations

import os
import random
import sys
import uuid
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import numpy as np

from argosy_engine.benchmarks.benchmark_command import (
    FAILURE,
    SERVE_REFUSED,
    SERVE_WITHOUT_EFFECT,
    BenchmarkError,
    run_progress,
)
from argosy_engine.benchmarks.endpoint_check import align_prompts, list_models, wait_until_ready
from argosy_engine.benchmarks.load_generator import LoadResult, RequestTemplate, arrival_times, run_load
from argosy_engine.benchmarks.prompt_datasets import (
    PromptTokenizer,
    SampleRequest,
    WordTokenizer,
    load_tokenizer,
    with_ids,
)
from argosy_engine.benchmarks.serve_args import BenchServeArgs, pairs
from argosy_engine.benchmarks.serving_report import (
    first_errors,
    page,
    prepare_result_file,
    report,
    result_document,
    result_path,
    save_result,
    serving_metrics,
    shown_metrics,
)
from argosy_engine.benchmarks.streaming_http import StreamingHttp
from argosy_engine.osproc import raise_descriptor_limit
from argosy_engine.vllm_flags import add_vllm_flags, check_vllm_flags
from argosy_protocol.program.flags import FlagParser, InvalidValue

MAX_CLIENT_CPU: Final = 0.8
"""Share of one core above which this program itself may have slowed the run."""
_EPILOG = (
    "Exit codes: 0 the run took place, also if some requests failed; 1 none was answered, or the server cannot be "
    "used; 2 wrong usage."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    import uvloop

    parser = FlagParser(
        "argosy bench serve",
        "Send prompts to an OpenAI endpoint and measure time to first token, time per output token, throughput and "
        "goodput.",
        _EPILOG,
    )
    parser.add_config(BenchServeArgs, "endpoint and prompts")
    add_vllm_flags(parser, SERVE_WITHOUT_EFFECT, SERVE_REFUSED)
    options = parser.parse_args(argv)
    check_vllm_flags(parser, options, without_effect=SERVE_WITHOUT_EFFECT, refused=SERVE_REFUSED)
    try:
        args = parser.build(BenchServeArgs, options)
        args.check()
        raise_descriptor_limit()  # each request in flight has a connection
        return uvloop.run(run(args))
    except InvalidValue as error:
        parser.error(str(error))
    except BenchmarkError as error:
        print(f"argosy bench serve: {error}", file=sys.stderr)
        return error.exit_code


async def run(args: BenchServeArgs) -> int:
    """Run a benchmark whose flags were checked, and print and save its result; return the exit code.

    Raises:
        BenchmarkError: it cannot run.
    """
    try:
        client = StreamingHttp(args.url, _headers(args), verifies=not args.insecure)
    except ValueError as error:
        raise BenchmarkError(f"{error}; --base-url, --host and --header say where and how to ask") from None
    try:
        known = await list_models(client, args.ready_check_timeout_sec)
        model_id = args.model or _first(known, client.url)
        name = args.served_model_name or model_id
        date = datetime.now().astimezone()
        path = result_path(args, model_id, date)
        if args.save_result or args.append_result or args.is_plotted:
            prepare_result_file(path)
        tokenizer, tokenizer_id = _tokenizer(args, model_id)
        prefix = args.request_id_prefix
        samples = args.data.samples(tokenizer, args.seed, is_chat=args.backend == "openai-chat")
        if args.data.is_random:
            samples, is_exact = await align_prompts(client, name, samples)
            if tokenizer_id is None and not is_exact:
                print("prompts have one token per word, as far as is known", file=sys.stderr)
        samples = with_ids(samples, f"bench-{uuid.uuid4().hex[:8]}-" if prefix is None else prefix)
        template = RequestTemplate(
            backend=args.backend,
            path=args.path,
            model=name,
            ignore_eos=args.ignores_eos,
            logprobs=args.logprobs,
            extra_body={**args.sampling.fields(), **(args.extra_body or {})},
        )
        if args.ready_check_timeout_sec or (known and name not in known):
            await wait_until_ready(client, template, samples[0], known, args.ready_check_timeout_sec)
        result = await _load(args, client, template, samples)
    finally:
        await client.close()
    return _publish(args, result, path, model_id=model_id, tokenizer_id=tokenizer_id, date=date)


async def _load(
    args: BenchServeArgs, client: StreamingHttp, template: RequestTemplate, samples: Sequence[SampleRequest]
) -> LoadResult:
    is_shown = not args.disable_tqdm
    if count := args.num_warmups:
        with run_progress("warming up", count, is_shown=is_shown) as shown:
            await run_load(
                client,
                template,
                [samples[0]] * count,
                [0.0] * count,
                args.max_concurrency,
                on_done=lambda output: shown.done(is_failed=not output.success),
            )
    rng = np.random.default_rng(args.seed)
    times = arrival_times(len(samples), args.request_rate, args.burstiness, args.ramp_up, rng)
    with run_progress("benchmark", len(samples), is_shown=is_shown) as shown:
        return await run_load(
            client,
            template,
            samples,
            times,
            args.max_concurrency,
            _adapters(args, len(samples)),
            on_done=lambda output: shown.done(is_failed=not output.success),
        )


def _publish(args: BenchServeArgs, result: LoadResult, path: Path, **facts: Any) -> int:
    """Print, save and draw the result; return the exit code."""
    metrics = serving_metrics(result.outputs, result.duration, args.percentiles(), args.objectives())
    if errors := first_errors(result.outputs):
        print(errors, file=sys.stderr)
    text = report(
        metrics,
        shown_metrics(args),
        is_pooling=args.is_pooling,
        max_concurrency=args.max_concurrency,
        request_rate=None if args.request_rate == float("inf") else args.request_rate,
    )
    print(text)
    if result.client_cpu_s > MAX_CLIENT_CPU * result.duration:
        print(
            f"this client used {result.client_cpu_s / result.duration:.0%} of a core and may have slowed the run; run "
            "several with a share of the rate each",
            file=sys.stderr,
        )
    if args.save_result or args.append_result:
        document = result_document(args, metrics, result.outputs, **facts)
        save_result(path, document, appends=args.append_result)
        print(f"saved {path}", file=sys.stderr)
    if args.is_plotted:
        drawn = path.with_suffix(".html")
        title = f"{facts['model_id']} at {args.url}, {facts['date']:%Y-%m-%d %H:%M}"
        drawn.write_text(page(title, text, result.outputs, args.itl_thresholds()), "utf-8")
        print(f"drawn {drawn}", file=sys.stderr)
    if metrics.completed:
        return 0
    print("argosy bench serve: no request was answered", file=sys.stderr)
    return FAILURE


def _headers(args: BenchServeArgs) -> dict[str, str]:
    given = pairs(args.header, "header")
    key = os.environ.get("OPENAI_API_KEY")
    if key and "authorization" not in (name.lower() for name in given):
        return {"Authorization": f"Bearer {key}", **given}
    return given


def _first(known: list[str] | None, url: str) -> str:
    if not known:
        raise BenchmarkError(f"{url} lists no models; give --model", FAILURE)
    print(f"--model is not given: {known[0]}, the first of {url}", file=sys.stderr)
    return known[0]


def _tokenizer(args: BenchServeArgs, model_id: str) -> tuple[PromptTokenizer, str | None]:
    """Return the tokenizer and its name; no name if it is the one of words."""
    if args.skip_tokenizer_init:
        return WordTokenizer(), None
    if args.tokenizer is not None:
        return load_tokenizer(args.tokenizer), args.tokenizer
    try:
        return load_tokenizer(model_id), model_id
    except BenchmarkError:  # the name may be the server's own
        print(
            f"no tokenizer for {model_id!r} here, so prompts are made of words; --tokenizer takes a directory or "
            "ORG/NAME",
            file=sys.stderr,
        )
        return WordTokenizer(), None


def _adapters(args: BenchServeArgs, count: int) -> list[str]:
    """Return the adapter of each request; empty if there are none."""
    names = args.lora_modules
    if not names:
        return []
    if args.lora_assignment == "round-robin":
        return [names[index % len(names)] for index in range(count)]
    return random.Random(args.seed).choices(names, k=count)  # noqa: S311
