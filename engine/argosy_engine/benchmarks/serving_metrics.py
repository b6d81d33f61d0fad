"""Serving metrics: latencies, throughput and goodput of a run, defined as in vllm.benchmarks.serve.

Owns: the formulas. Must not know: how anything was measured or is printed. All latencies of `MetricSummary` are
milliseconds; failed requests count in `failed` only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from argosy_engine.benchmarks.endpoint_request import RequestFuncOutput


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
