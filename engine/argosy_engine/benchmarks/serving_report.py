"""What a run of `argosy bench serve` leaves: its figures, defined as in vllm.benchmarks.serve, and how they are told.

The report has the lines of `vllm bench serve`, which scripts search for, the JSON object its keys, which plotting
scripts read, and an HTML page shows the measurements; its size is bounded, whatever the run's. Must not know: how
anything was measured. All latencies of `MetricSummary` are milliseconds; failed requests count in `failed` only.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import numpy as np

from argosy_engine.benchmarks.benchmark_command import FAILURE, BenchmarkError
from argosy_engine.benchmarks.load_generator import RequestFuncOutput
from argosy_engine.benchmarks.serve_args import BenchServeArgs, pairs


@dataclass(frozen=True, slots=True)
class MetricSummary:
    """The distribution of one metric in ms; zeros if nothing was measured."""

    mean: float
    median: float
    std: float
    percentiles: tuple[tuple[float, float], ...]
    """Pairs of a percentile (0 to 100) and its value."""

    @classmethod
    def of(cls, seconds: Sequence[float] | np.ndarray, percentiles: Sequence[float]) -> MetricSummary:
        values = np.asarray(seconds if len(seconds) else [0.0]) * 1000.0
        at = np.percentile(values, percentiles)
        return cls(
            mean=float(values.mean()),
            median=float(np.median(values)),
            std=float(values.std()),
            percentiles=tuple(zip(percentiles, at.tolist(), strict=True)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingMetrics:
    """Figures of a run. Throughputs are per second of its duration."""

    duration: float
    completed: int
    failed: int
    total_input: int
    total_input_sequences: int
    total_output: int
    request_throughput: float
    input_sequence_throughput: float
    request_goodput: float | None
    """Requests per second that met every objective; None without objectives."""
    output_throughput: float
    total_token_throughput: float
    max_output_tokens_per_s: float
    """Tokens in the best second of the run."""
    max_concurrent_requests: int
    """Most requests that ran at one time."""
    summaries: dict[str, MetricSummary]
    """By the metric's name: ttft, tpot, itl, e2el, client_queue_time, e2el_including_client_queue."""


def serving_metrics(
    outputs: Sequence[RequestFuncOutput],
    duration: float,
    percentiles: Sequence[float],
    objectives: dict[str, float] | None = None,
) -> ServingMetrics:
    """
    Args:
        duration: of the run, in seconds.
        percentiles: to compute, each from 0 to 100.
        objectives: bounds in ms of ttft, tpot and e2el, all of which a request meets to count as goodput.
    """
    good = [output for output in outputs if output.success]
    tpots = [tpot(output) for output in good]
    values: dict[str, list[float] | np.ndarray] = {
        "ttft": [output.ttft for output in good],
        "tpot": [value for value in tpots if value is not None],
        "itl": np.concatenate([output.itl for output in good]) if good else [],
        "e2el": [output.latency for output in good],
        "client_queue_time": [output.client_queue_time for output in good],
        "e2el_including_client_queue": [output.latency + output.client_queue_time for output in good],
    }
    total_input = sum(output.prompt_len for output in good)
    total_output = sum(output.output_tokens for output in good)
    sequences = sum(output.num_input_sequences for output in good)
    return ServingMetrics(
        duration=duration,
        completed=len(good),
        failed=len(outputs) - len(good),
        total_input=total_input,
        total_input_sequences=sequences,
        total_output=total_output,
        request_throughput=len(good) / duration,
        input_sequence_throughput=sequences / duration,
        request_goodput=sum(_meets(output, objectives) for output in good) / duration if objectives else None,
        output_throughput=total_output / duration,
        total_token_throughput=(total_input + total_output) / duration,
        # The last second is not a whole one, so that no second of a short run may reach the mean.
        max_output_tokens_per_s=float(tokens_per_second(good).max(initial=total_output / duration)),
        max_concurrent_requests=int(concurrency(good)[1].max(initial=0)),
        summaries={name: MetricSummary.of(seconds, percentiles) for name, seconds in values.items()},
    )


def tpot(output: RequestFuncOutput) -> float | None:
    """Return a request's seconds per output token after the first; None if there is only one."""
    if output.output_tokens < 2:
        return None
    return (output.latency - output.ttft) / (output.output_tokens - 1)


def tokens_per_second(outputs: Sequence[RequestFuncOutput]) -> np.ndarray:
    """Return the output tokens in each second since the first request was sent; float64 [seconds].

    An event counts as many tokens as the request's events have on average.
    """
    if not outputs:
        return np.zeros(0)
    start = min(output.start_time for output in outputs)
    times, weights = [], []
    for output in outputs:
        arrivals = output.start_time + output.ttft + np.cumsum([0.0, *output.itl])
        times.append(arrivals - start)
        weights.append(np.full(len(arrivals), output.output_tokens / len(arrivals)))
    return np.bincount(np.concatenate(times).astype(np.int64), np.concatenate(weights))


def concurrency(outputs: Sequence[RequestFuncOutput]) -> tuple[np.ndarray, np.ndarray]:
    """Return the times, in seconds since the first request was sent, at which the number of running requests changes,
    and the number from then on; float64 and int64 [2 * len(outputs)]."""
    if not outputs:
        return np.zeros(0), np.zeros(0, np.int64)
    starts = np.array([output.start_time for output in outputs])
    ends = starts + np.array([output.latency for output in outputs])
    times = np.concatenate([starts, ends]) - starts.min()
    changes = np.concatenate([np.ones(len(starts), np.int64), np.full(len(ends), -1)])
    order = np.lexsort((changes, times))  # at the same time ends come first
    return times[order], np.cumsum(changes[order])


def _meets(output: RequestFuncOutput, objectives: dict[str, float]) -> bool:
    measured = {"ttft": output.ttft, "tpot": tpot(output) or 0.0, "e2el": output.latency}
    return all(measured[name] * 1000.0 <= bound for name, bound in objectives.items())


MAX_ERRORS: Final = 10
_COLUMNS: Final = 50
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
    return "\n".join([*lines, "=" * _COLUMNS])


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
    return text.center(_COLUMNS, fill)


def _line(label: str, value: float) -> str:
    return f"{label:<40} {value:<10}" if isinstance(value, int) else f"{label:<40} {value:<10.2f}"


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


def prepare_result_file(path: Path) -> None:
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


def save_result(path: Path, document: dict[str, Any], *, appends: bool) -> None:
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


MAX_ROWS: Final = 400
"""Requests of the timeline: the first ones."""
MAX_SPANS: Final = 50
"""Stretches of tokens of one request in the timeline; those beyond are one of the slowest kind."""
_POINTS: Final = 400
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 860, 220, 70, 14, 34
_ROW = 6
_COLORS: Final = ("#2563eb", "#d97706", "#059669", "#7c3aed")
_PREFILL, _SPEEDS = "#cbd5e1", ("#16a34a", "#f59e0b", "#dc2626")
_STYLE = (
    "body{font:14px system-ui,sans-serif;max-width:900px;margin:2em auto;color:#1f2937}"
    "pre{background:#f8fafc;padding:1em;overflow:auto}svg{display:block;margin:.3em 0 1.6em}"
    "text{font:11px system-ui,sans-serif;fill:#475569}h2{font-size:1.05em;margin:1em 0 0}i{font-style:normal}"
)


def page(
    title: str, report: str, outputs: Sequence[RequestFuncOutput], itl_thresholds_ms: tuple[float, float]
) -> str:
    """Return the HTML page of a run.

    Args:
        report: the printed table.
        itl_thresholds_ms: bounds between fast, slow and stalled tokens.
    """
    good = sorted((output for output in outputs if output.success), key=lambda output: output.start_time)
    has_tokens = any(output.itl for output in good)
    parts = [f"<h1>{html.escape(title)}</h1><pre>{html.escape(report)}</pre>"]
    if good:
        latencies = {"E2EL": [output.latency for output in good]}
        if has_tokens:
            latencies["TTFT"] = [output.ttft for output in good]
            parts.append(_section("Requests by time (share, ms)", _distribution(latencies)))
            pace = {
                "TPOT": [value for output in good if (value := tpot(output)) is not None],
                "ITL": np.concatenate([output.itl for output in good]).tolist(),
            }
            parts.append(_section("Tokens by time (share, ms)", _distribution(pace)))
            tokens = tokens_per_second(good)
            until_end = np.append(tokens, tokens[-1])
            parts.append(
                _section("Output tokens per second (s)", _steps(np.arange(len(until_end)), until_end))
            )
        else:
            parts.append(_section("Requests by time (share, ms)", _distribution(latencies)))
        parts.append(_section("Running requests (s)", _steps(*concurrency(good))))
        note = f"the first {MAX_ROWS} of {len(good)} requests" if len(good) > MAX_ROWS else "each request"
        low, high = (f"{bound:g}" for bound in itl_thresholds_ms)
        kinds = ("until the first token", f"ITL below {low} ms", f"to {high} ms", "above")
        legend = " ".join(
            f'<i style="color:{color}">&#9632;</i> {kind}'
            for color, kind in zip((_PREFILL, *_SPEEDS), kinds, strict=True)
        )
        parts.append(
            _section(f"Timeline of {note} (s)", f"<p>{legend}</p>" + _timeline(good, itl_thresholds_ms))
        )
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style>\n{body}\n</html>\n"
    )


def _section(title: str, content: str) -> str:
    return f"<h2>{html.escape(title)}</h2>{content}"


def _distribution(series: Mapping[str, Sequence[float]]) -> str:
    """Draw the share of values up to each time; `series` are seconds by name."""
    most = max((max(values) for values in series.values() if len(values)), default=0.0) * 1e3 or 1.0
    shares = np.linspace(0.0, 1.0, _POINTS)
    lines = []
    for (name, values), color in zip(series.items(), _COLORS, strict=False):
        if len(values):
            points = np.quantile(np.asarray(values) * 1e3, shares)
            lines.append(_polyline(points, shares, most, 1.0, color))
            at = _LEFT + 10 + 60 * len(lines)
            lines.append(f'<text x="{at}" y="{_HEIGHT - 4}" style="fill:{color}">{name}</text>')
    return _chart(lines, most, 1.0)


def _steps(times: np.ndarray, values: np.ndarray) -> str:
    """Draw a value over time, thinned to the largest one within each point."""
    span, top = max(float(times[-1]), 1e-3), max(float(values.max()), 1.0)
    if len(times) > _POINTS:
        edges = np.unique(np.linspace(0, len(times), _POINTS, endpoint=False).astype(int))
        times, values = times[edges], np.maximum.reduceat(values, edges)
    line = _polyline(np.repeat(times, 2)[1:], np.repeat(values, 2)[:-1], span, top, _COLORS[0])
    return _chart([line], span, top)


def _polyline(xs: np.ndarray, ys: np.ndarray, right: float, top: float, color: str) -> str:
    points = " ".join(
        f"{_LEFT + x / right * (_WIDTH - _LEFT - 10):.1f},{_y(y / top):.1f}"
        for x, y in zip(xs.tolist(), ys.tolist(), strict=True)
    )
    return f'<polyline fill="none" stroke="{color}" stroke-width="1.5" points="{points}"/>'


def _y(share: float) -> float:
    return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)


def _chart(lines: Sequence[str], right: float, top: float) -> str:
    grid = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        x, y = _LEFT + share * (_WIDTH - _LEFT - 10), _y(share)
        grid.append(f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - 10}" stroke="#e2e8f0"/>')
        grid.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{top * share:.4g}</text>')
        grid.append(f'<text x="{x:.1f}" y="{_HEIGHT - 18}" {_anchor(share)}>{right * share:.4g}</text>')
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}">{"".join([*grid, *lines])}</svg>'


def _anchor(share: float) -> str:
    """Keep the last number of an axis within the drawing."""
    return f'text-anchor="{"end" if share == 1.0 else "middle"}"'


def _timeline(outputs: Sequence[RequestFuncOutput], thresholds_ms: tuple[float, float]) -> str:
    """Draw each request as a bar: the wait for its first token, then stretches of tokens of one speed."""
    shown = outputs[:MAX_ROWS]
    start = shown[0].start_time
    span = max(output.start_time + output.latency for output in shown) - start or 1e-3
    scale = (_WIDTH - _LEFT - 10) / span
    bars = []
    for row, output in enumerate(shown):
        offset = output.start_time - start
        for begin, end, color in _stretches(output, thresholds_ms):
            x, width = _LEFT + (offset + begin) * scale, max((end - begin) * scale, 0.5)
            bars.append(
                f'<rect x="{x:.1f}" y="{row * _ROW}" width="{width:.1f}" height="{_ROW - 1}" fill="{color}"/>'
            )
    height = len(shown) * _ROW + 18
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        x = _LEFT + share * (_WIDTH - _LEFT - 10)
        bars.append(f'<text x="{x:.1f}" y="{height - 4}" {_anchor(share)}>{span * share:.4g}</text>')
    return f'<svg viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}">{"".join(bars)}</svg>'


def _stretches(
    output: RequestFuncOutput, thresholds_ms: tuple[float, float]
) -> Iterator[tuple[float, float, str]]:
    """Iterate over (begin, end, color) of a request, in seconds since it was sent."""
    yield 0.0, output.ttft or output.latency, _PREFILL
    kinds = np.digitize(np.asarray(output.itl) * 1e3, thresholds_ms)
    ends = output.ttft + np.cumsum(output.itl)
    begin, first, count = output.ttft, 0, 0
    for index, kind in enumerate(kinds.tolist()):
        is_last = index + 1 == len(kinds)
        if is_last or (kinds[index + 1] != kind and count + 1 < MAX_SPANS):
            end = float(ends[index])
            yield begin, end, _SPEEDS[int(kinds[first : index + 1].max())]
            begin, first, count = end, index + 1, count + 1
