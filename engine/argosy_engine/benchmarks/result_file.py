"""Result file: a run as one JSON object with the keys of `vllm bench serve`, which plotting scripts read.

Owns: keys, file names, saving. Must not know: how figures were computed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from argosy_engine.benchmarks.benchmark_error import FAILURE, BenchmarkError
from argosy_engine.benchmarks.endpoint_request import RequestFuncOutput
from argosy_engine.benchmarks.serve_args import BenchServeArgs, pairs
from argosy_engine.benchmarks.serving_metrics import ServingMetrics
from argosy_engine.benchmarks.serving_report import percentile_key

DETAILS: Final = (
    "input_lens",
    "output_lens",
    "start_times",
    "ttfts",
    "itls",
    "generated_texts",
    "errors",
)
"""Keys with a value per request that are kept with --save-detailed only."""


def result_document(
    args: BenchServeArgs,
    metrics: ServingMetrics,
    outputs: Sequence[RequestFuncOutput],
    *,
    model_id: str,
    tokenizer_id: str | None,
    date: datetime,
) -> dict[str, Any]:
    """Return the JSON object of a run. Times per request are seconds, those of `..._ms` milliseconds."""
    document: dict[str, Any] = {
        "date": date.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": args.backend,
        "backend": args.backend,
        "label": args.label,
        "model_id": model_id,
        "tokenizer_id": tokenizer_id,
        "num_prompts": args.data.num_prompts,
        **pairs(args.metadata, "metadata"),
        "request_rate": _finite(args.request_rate),
        "burstiness": _finite(args.burstiness),
        "max_concurrency": args.max_concurrency,
    }
    if args.ramp_up is not None:
        document |= {
            "ramp_up_strategy": args.ramp_up_strategy,
            "ramp_up_start_rps": args.ramp_up_start_rps,
            "ramp_up_end_rps": args.ramp_up_end_rps,
        }
    document |= {
        "duration": metrics.duration,
        "completed": metrics.completed,
        "failed": metrics.failed,
        "total_input_tokens": metrics.total_input,
        "request_throughput": metrics.request_throughput,
        "total_token_throughput": metrics.total_token_throughput,
        "max_concurrent_requests": metrics.max_concurrent_requests,
        "input_lens": [output.prompt_len for output in outputs],
        "latencies": [output.latency for output in outputs],
        "queue_times": [output.client_queue_time for output in outputs],
        "start_times": [output.start_time for output in outputs],
        "errors": [output.error for output in outputs],
    }
    if args.is_pooling:
        document |= {
            "total_input_sequences": metrics.total_input_sequences,
            "input_sequence_throughput": metrics.input_sequence_throughput,
        }
    else:
        document |= {
            "total_output_tokens": metrics.total_output,
            "request_goodput": metrics.request_goodput,
            "output_throughput": metrics.output_throughput,
            "max_output_tokens_per_s": metrics.max_output_tokens_per_s,
            "output_lens": [output.output_tokens for output in outputs],
            "ttfts": [output.ttft for output in outputs],
            "itls": [output.itl for output in outputs],
            "generated_texts": [output.generated_text for output in outputs],
        }
    for name in shown_metrics(args):
        summary = metrics.summaries[name]
        document[f"mean_{name}_ms"] = summary.mean
        document[f"median_{name}_ms"] = summary.median
        document[f"std_{name}_ms"] = summary.std
        document |= {percentile_key(percent, name): value for percent, value in summary.percentiles}
    if not args.save_detailed:
        for key in DETAILS:
            document.pop(key, None)
    return document


def shown_metrics(args: BenchServeArgs) -> list[str]:
    """Return the metrics whose distributions are reported: those that were asked for and exist in this run."""
    absent = {"ttft", "tpot", "itl"} if args.is_pooling else set()
    if args.max_concurrency is None:
        absent |= {"client_queue_time", "e2el_including_client_queue"}
    return [name for name in args.metrics() if name not in absent]


def result_path(args: BenchServeArgs, model_id: str, date: datetime) -> Path:
    """Return where the run is saved: what the flags say, or `LABEL-RATEqps[-concurrencyN]-MODEL-TIME.json`."""
    limit = "" if args.max_concurrency is None else f"-concurrency{args.max_concurrency}"
    if args.ramp_up is None:
        rate = f"{args.request_rate}qps"
    else:
        rate = f"ramp-up-{args.ramp_up_strategy}-{args.ramp_up_start_rps:g}qps-{args.ramp_up_end_rps:g}qps"
    model = re.sub(r"[^\w.-]", "_", model_id.rpartition("/")[2])
    name = args.result_filename or (
        f"{args.label or args.backend}-{rate}{limit}-{model}-{date.strftime('%Y%m%d-%H%M%S')}.json"
    )
    return Path(args.result_dir or "") / name


def prepare(path: Path) -> None:
    """Make the file's directory and check that it can be written, before a run whose result would be lost.

    Raises:
        BenchmarkError: it cannot.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a"):
            pass
        if path.stat().st_size == 0:
            path.unlink()
    except OSError as error:
        raise BenchmarkError(
            f"cannot write {path}: {error.strerror}; give another --result-dir or --result-filename"
        ) from None


def save(path: Path, document: dict[str, Any], *, appends: bool) -> None:
    """Write the object to the file, or append it as a further line.

    Raises:
        BenchmarkError: the file cannot be written.
    """
    try:
        with path.open("a" if appends else "w", encoding="utf-8") as file:
            if file.tell():
                file.write("\n")
            json.dump(document, file)
    except OSError as error:
        raise BenchmarkError(f"cannot write {path}: {error.strerror}", FAILURE) from None


def _finite(value: float) -> float | str:
    return value if math.isfinite(value) else "inf"
