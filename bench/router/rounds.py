"""What benchmarks that run in rounds share: their options, what they say of the machine, and the file of figures.

Must not know what is measured, nor how figures are nested.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def rounds_parser(description: str | None) -> argparse.ArgumentParser:
    """Make the parser of a benchmark whose module's docstring is its description. Its output is read as it comes."""
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="all rounds' figures")
    return parser


def machine(rounds: int) -> str:
    """The end of a benchmark's conditions."""
    return (
        f"medians of {rounds}; {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"load average {os.getloadavg()[0]:.1f} at the start."
    )


def write_rounds(file: Path | None, conditions: str, rounds: Sequence[Any]) -> None:
    """Write the figures of all rounds, if a file was asked for."""
    if file is not None:
        file.write_text(json.dumps({"conditions": conditions, "rounds": rounds}, indent=1) + "\n")
