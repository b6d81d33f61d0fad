"""Results of a benchmark: medians, the printed table, and the file that suite.py makes its summary from."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

Values = dict[str, dict[str, list[float]]]
"""Maps contenders (ours first) to figures (names with units), and these to one value per round."""


def median(values: Values, contender: str, figure: str) -> float | None:
    """Return the median of a figure; None if it was not measured."""
    measured = values.get(contender, {}).get(figure)
    return statistics.median(measured) if measured else None


def table(values: Values) -> str:
    """Return a Markdown table of medians, each peer's followed by the ratio of ours to it."""
    ours, *peers = values
    lines = [" | ".join(["| ", ours, *(f"{peer} | ours is" for peer in peers)]) + " |"]
    lines.append("|---" * (2 + 2 * len(peers)) + "|")
    for figure, measured in values[ours].items():
        own = statistics.median(measured)
        cells = [figure, f"{own:.4g}"]
        for peer in peers:
            other = median(values, peer, figure)
            cells += ["", ""] if other is None else [f"{other:.4g}", f"{own / other:.2f}x"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def save(values: Values, file: Path | None) -> None:
    if file is not None:
        file.write_text(json.dumps(values, indent=1) + "\n")
