"""`argosy bench`: measurements one can repeat.

Owns the table of benchmarks. Must not know how any of them measures.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Final

from argosy.errors import OK, USAGE

_BENCHMARKS: Final = {
    "router": ("argosy.commands.bench_router:main", "compare routing policies on a trace, in simulated time"),
}


def main(argv: Sequence[str]) -> int:
    if argv and argv[0] in ("-h", "--help"):
        sys.stdout.write(_help())
        return OK
    if not argv or argv[0] not in _BENCHMARKS:
        sys.stderr.write(_help())
        return USAGE
    module, _, function = _BENCHMARKS[argv[0]][0].partition(":")
    return int(getattr(importlib.import_module(module), function)(argv[1:]))


def _help() -> str:
    lines = [f"  {name:<8}  {text}\n" for name, (_, text) in _BENCHMARKS.items()]
    return "usage: argosy bench BENCHMARK [ARGUMENTS]\n\nbenchmarks:\n" + "".join(lines)
