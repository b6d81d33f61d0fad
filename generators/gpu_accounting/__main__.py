"""Writes the table of counts: python -m gpu_accounting [--model NAME] [--into FILE]."""

from __future__ import annotations

import argparse
from pathlib import Path

from gpu_accounting.measurement import StepCounts, count_steps
from gpu_accounting.models import MODELS

_START, _END = "<!-- gpu-accounting: start -->", "<!-- gpu-accounting: end -->"


def main() -> None:
    """Print the table, or put it between its markers in a page."""
    parser = argparse.ArgumentParser(prog="gpu_accounting", description=__doc__)
    parser.add_argument("--model", action="append", choices=list(MODELS), help="default: all of them")
    parser.add_argument("--into", type=Path, help="page that contains the table between two markers")
    args = parser.parse_args()
    counts = [each for model in args.model or MODELS for each in count_steps(model)]
    table = "\n".join([*_HEAD, *map(table_line, counts)])
    if args.into is None:
        print(table)
        return
    before, _, rest = args.into.read_text().partition(_START)
    _, _, after = rest.partition(_END)
    args.into.write_text(f"{before}{_START}\n{table}\n{_END}{after}")


_HEAD = [
    "| model | step | launches per layer | outside | sampling | copies to device, to host | GB moved | ratio |",
    "|---|---|---|---|---|---|---|---|",
]


def table_line(counts: StepCounts) -> str:
    """Return a step's line of the table."""
    cells = [counts.model, counts.shape.name]
    if counts.hidden_sync:
        cells += [f"cannot be followed: {counts.hidden_sync}", "", "", "", "", ""]
    else:
        ratio = counts.num_bytes / counts.necessary_bytes
        cells += [
            f"{counts.layer:g}",
            f"{counts.rest:g}",
            str(counts.sampling),
            f"{counts.copies_to_device}, {counts.copies_to_host}",
            f"{counts.num_bytes / 1e9:.2f}",
            f"{ratio:.2f}" if counts.shape.decodes and not counts.shape.prompts else "",
        ]
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
