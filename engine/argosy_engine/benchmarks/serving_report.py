"""Serving report: a run's figures as text, with the lines of `vllm bench serve`, which scripts search for.

Owns: the text. Must not know: the formulas.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from argosy_engine.benchmarks.endpoint_request import RequestFuncOutput
from argosy_engine.benchmarks.serving_metrics import ServingMetrics

MAX_ERRORS: Final = 10
_WIDTH: Final = 50
TITLES: Final = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
    "client_queue_time": ("Client Queue Time", "Client-side Queueing"),
    "e2el_including_client_queue": ("E2EL incl. Client Queue", "Queue-inclusive End-to-end Latency"),
}
"""Metric -> its name in a line, and over its lines."""


def report(
    metrics: ServingMetrics,
    shown: Sequence[str],
    *,
    is_pooling: bool = False,
    max_concurrency: int | None = None,
    request_rate: float | None = None,
) -> str:
    """Return the table of a run.

    Args:
        shown: metrics whose distributions are shown.
        is_pooling: the answers were vectors, without tokens.
        request_rate: as configured; None if all requests were sent at once.
    """
    lines = [
        _title(" Serving Benchmark Result ", "="),
        _line("Successful requests:", metrics.completed),
        _line("Failed requests:", metrics.failed),
    ]
    if max_concurrency is not None:
        lines.append(_line("Maximum request concurrency:", max_concurrency))
    if request_rate is not None:
        lines.append(_line("Request rate configured (RPS):", request_rate))
    lines.append(_line("Benchmark duration (s):", metrics.duration))
    lines.append(_line("Total input tokens:", metrics.total_input))
    if not is_pooling:
        lines.append(_line("Total generated tokens:", metrics.total_output))
    lines.append(_line("Request throughput (req/s):", metrics.request_throughput))
    if is_pooling:
        lines.append(_line("Input throughput (inputs/s):", metrics.input_sequence_throughput))
    if metrics.request_goodput is not None:
        lines.append(_line("Request goodput (req/s):", metrics.request_goodput))
    if not is_pooling:
        lines.append(_line("Output token throughput (tok/s):", metrics.output_throughput))
        lines.append(_line("Peak output token throughput (tok/s):", metrics.max_output_tokens_per_s))
    lines.append(_line("Peak concurrent requests:", float(metrics.max_concurrent_requests)))
    lines.append(_line("Total token throughput (tok/s):", metrics.total_token_throughput))
    for name in shown:
        short, title = TITLES[name]
        summary = metrics.summaries[name]
        lines.append(_title(title, "-"))
        lines.append(_line(f"Mean {short} (ms):", summary.mean))
        lines.append(_line(f"Median {short} (ms):", summary.median))
        lines += [_line(f"P{_plain(percent)} {short} (ms):", value) for percent, value in summary.percentiles]
    return "\n".join([*lines, "=" * _WIDTH])


def first_errors(outputs: Sequence[RequestFuncOutput]) -> str:
    """Return a line for each of the first different errors of a run, with its number; empty if nothing failed."""
    counts: dict[str, int] = {}
    for output in outputs:
        if output.error:
            counts[output.error] = counts.get(output.error, 0) + 1
    lines = [f"{count} failed: {error}" for error, count in list(counts.items())[:MAX_ERRORS]]
    left = sum(list(counts.values())[MAX_ERRORS:])
    return "\n".join([*lines, f"{left} failed for other reasons"] if left else lines)


def percentile_key(percent: float, metric: str) -> str:
    """Return the JSON key of a percentile, such as `p99_ttft_ms`."""
    return f"p{_plain(percent)}_{metric}_ms"


def _plain(percent: float) -> str:
    return str(int(percent)) if percent == int(percent) else str(percent)


def _title(text: str, fill: str) -> str:
    return text.center(_WIDTH, fill)


def _line(label: str, value: float) -> str:
    return f"{label:<40} {value:<10}" if isinstance(value, int) else f"{label:<40} {value:<10.2f}"
