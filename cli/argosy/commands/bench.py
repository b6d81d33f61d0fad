"""`argosy bench`: repeatable measurements.

Owns: the table of benchmarks. Must not know: how any of them measures.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from typing import Final

_BENCHMARKS: Final = {
    "router": ("argosy.commands.bench_router:main", "compare routing policies on a trace, in simulated time"),
}


def main(argv: Sequence[str]) -> int:
    table = "\n".join(f"  {name:<8}  {text}" for name, (_, text) in _BENCHMARKS.items())
    parser = argparse.ArgumentParser(
        prog="argosy bench",
        description=f"benchmarks:\n{table}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("benchmark", choices=_BENCHMARKS, metavar="BENCHMARK")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, help="`argosy bench BENCHMARK --help` lists them"
    )
    options = parser.parse_args(argv)
    module, _, function = _BENCHMARKS[options.benchmark][0].partition(":")
    return int(getattr(importlib.import_module(module), function)(options.arguments))
