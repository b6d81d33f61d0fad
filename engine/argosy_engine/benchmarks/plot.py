"""Plot: a run as one HTML page of inline SVG, which needs no library, no script and no network.

Owns: the drawing. Must not know: flags and files. Invariant: the page has a bounded size, whatever the run's.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np

from argosy_engine.benchmarks.endpoint_request import RequestFuncOutput
from argosy_engine.benchmarks.serving_metrics import concurrency, tokens_per_second, tpot

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
