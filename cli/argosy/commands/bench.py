"""`argosy bench`: repeatable measurements.

Owns: the table of benchmarks. Must not know: how any of them measures. It names them by strings, because those of the
engine need packages that the command line does not.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from typing import Final, NamedTuple


class Benchmark(NamedTuple):
    """One line of the table."""

    name: str
    target: str
    """`module:function`; the function takes the arguments after the name and returns an exit code."""
    help: str


BENCHMARKS: Final = (
    Benchmark(
        "serve",
        "argosy_engine.benchmarks.bench_serve:main",
        "load an OpenAI endpoint: time to first token, time per token, throughput, goodput",
    ),
    Benchmark(
        "throughput",
        "argosy_engine.benchmarks.bench_throughput:main",
        "generate from many prompts in this process",
    ),
    Benchmark("latency", "argosy_engine.benchmarks.bench_latency:main", "time one batch in this process"),
    Benchmark(
        "router",
        "argosy.commands.bench_router:main",
        "compare routing policies on a trace, in simulated time",
    ),
)


def main(argv: Sequence[str]) -> int:
    table = "\n".join(f"  {benchmark.name:<10}  {benchmark.help}" for benchmark in BENCHMARKS)
    parser = argparse.ArgumentParser(
        prog="argosy bench",
        usage="argosy bench [-h] BENCHMARK ...",
        description=f"benchmarks:\n{table}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    targets = {benchmark.name: benchmark.target for benchmark in BENCHMARKS}
    parser.add_argument("benchmark", nargs="?", choices=targets, metavar="BENCHMARK")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, help="`argosy bench BENCHMARK --help` lists them"
    )
    options = parser.parse_args(argv)
    if options.benchmark is None:
        parser.error(f"choose a benchmark: {', '.join(targets)}; `argosy bench --help` describes them")
    module, _, function = targets[options.benchmark].partition(":")
    return int(getattr(importlib.import_module(module), function)(options.arguments))
