"""Figures by which contenders are compared, and their table.

Owns one contender's figures, medians over rounds, and Markdown. Must not know how requests were sent.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields

from contenders import OURS, SGLANG
from open_loop import Answer


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of one contender under one load."""

    requests: float
    cached_share: float
    of_oracle: float
    ttft_p50_ms: float
    ttft_p90_ms: float
    ttft_p99_ms: float
    errors: float


Row = dict[str, Figures]
"""Maps contenders to their figures under one load."""


def quantile(values: Sequence[float], share: float) -> float:
    """Return a quantile; NaN if there are no values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else float("nan")


def figures(answers: Sequence[Answer], oracle: float) -> Figures:
    """Compute the figures of all answers.

    Args:
        oracle: share of the prompt tokens that a single unbounded cache would have held.
    """
    complete = [answer for answer in answers if not answer.error]
    cached = sum(answer.cached_tokens for answer in complete)
    share = cached / max(1, sum(answer.prompt_tokens for answer in complete))
    ttft_ms = [answer.ttft_s * 1e3 for answer in complete]
    return Figures(
        requests=len(answers),
        cached_share=share,
        of_oracle=share / oracle,
        ttft_p50_ms=quantile(ttft_ms, 0.5),
        ttft_p90_ms=quantile(ttft_ms, 0.9),
        ttft_p99_ms=quantile(ttft_ms, 0.99),
        errors=len(answers) - len(complete),
    )


def median(rounds: Sequence[Figures]) -> Figures:
    """Return the medians of all figures except the errors, which are summed."""
    values = {
        field.name: statistics.median(getattr(each, field.name) for each in rounds)
        for field in fields(Figures)
    }
    return Figures(**values | {"errors": sum(each.errors for each in rounds)})


def best_peer(row: Row) -> Figures | None:
    """Return the best of the peer's settings for each figure; None if the peer was not measured."""
    peers = [row[name] for name in SGLANG if name in row]
    if not peers:
        return None
    return Figures(
        **{
            field.name: (max if field.name in ("cached_share", "of_oracle") else min)(
                getattr(each, field.name) for each in peers
            )
            for field in fields(Figures)
        }
    )


def markdown(table: dict[str, Row], label: str) -> str:
    """Return a Markdown table with one line per load and contender. `ours is` is the ratio of our TTFT to theirs.

    Args:
        label: heading of the column of loads.
    """
    lines = [
        f"| {label} | router | cached | of oracle | TTFT p50 ms | p90 ms | p99 ms | p50, p90, p99: ours is | errors |",
        "|" + "---|" * 9,
    ]
    for load, row in table.items():
        for contender, each in row.items():
            lines.append(
                f"| {load} | {contender} | {each.cached_share:.1%} | {each.of_oracle:.3f} | {each.ttft_p50_ms:.0f} "
                f"| {each.ttft_p90_ms:.0f} | {each.ttft_p99_ms:.0f} "
                f"| {'' if contender == OURS else ratios(row[OURS], each)} | {each.errors:g} |"
            )
        if OURS in row and (peer := best_peer(row)) is not None:
            lines.append(
                f"| {load} | sglang-router, the better of each | {peer.cached_share:.1%} | {peer.of_oracle:.3f} "
                f"| {peer.ttft_p50_ms:.0f} | {peer.ttft_p90_ms:.0f} | {peer.ttft_p99_ms:.0f} "
                f"| {ratios(row[OURS], peer)} | |"
            )
    return "\n".join(lines)


def ratios(ours: Figures, theirs: Figures) -> str:
    pairs = (
        (ours.ttft_p50_ms, theirs.ttft_p50_ms),
        (ours.ttft_p90_ms, theirs.ttft_p90_ms),
        (ours.ttft_p99_ms, theirs.ttft_p99_ms),
    )
    return ", ".join(f"{mine / other:.2f}x" for mine, other in pairs)
