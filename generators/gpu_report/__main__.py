"""Writes the report on kernels compiled ahead of time: python -m gpu_report [--sample] [--device NAME] [--module NAME]
[-o FILE]."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from argosy_engine.triton_kernels.launch import KNOWN_DEVICES
from gpu_report.cases import ALL_CASES
from gpu_report.report import Row, compiled_rows


def main() -> int:
    """Print or write the table; exit with 1 if any launch is at fault."""
    parser = argparse.ArgumentParser(prog="gpu_report", description=__doc__)
    parser.add_argument("--sample", action="store_true", help="only the cases that the tests compile")
    parser.add_argument(
        "--device", action="append", choices=sorted(KNOWN_DEVICES), help="default: all of them"
    )
    parser.add_argument("--module", action="append", choices=sorted(ALL_CASES), help="default: all of them")
    parser.add_argument("-o", "--output", type=Path, help="write the table there instead of printing it")
    args = parser.parse_args()
    rows = []
    modules, devices = args.module or list(ALL_CASES), args.device or list(KNOWN_DEVICES)
    for row in compiled_rows(modules, devices, only_sample=args.sample):
        print(_progress(row), file=sys.stderr, flush=True)
        rows.append(row)
    table = "\n".join([*_HEAD, *map(_line, rows)]) + "\n"
    if args.output:
        args.output.write_text(table)
    else:
        print(table, end="")
    faults = [row for row in rows if row.fault]
    print(f"{len(rows)} launches compiled, {len(faults)} at fault", file=sys.stderr)
    return 1 if faults or not rows else 0


_HEAD = [
    "| kernel | case | device | warps, stages | registers | shared memory | occupancy | matrix product | fault |",
    "|---|---|---|---|---|---|---|---|---|",
]


def _line(row: Row) -> str:
    launch, compiled = row.launch, row.compiled
    cells = [launch.name, row.case, row.device, f"{launch.num_warps}, {launch.num_stages}"]
    if compiled is None:
        cells += [""] * 4
    else:
        occupancy = compiled.occupancy(launch.num_warps, KNOWN_DEVICES[row.device])
        cells += [str(compiled.registers), f"{compiled.shared_bytes / 1024:.1f} KiB", f"{occupancy:.0%}"]
        cells += [f"`{compiled.tensor_core}`" if compiled.tensor_core else ""]
    return "| " + " | ".join([*cells, row.fault.replace("|", "\\|").replace("\n", " ")[:200]]) + " |"


def _progress(row: Row) -> str:
    return f"{row.module} {row.launch.name} {row.case} {row.device} {row.fault or 'ok'}"


if __name__ == "__main__":
    sys.exit(main())
