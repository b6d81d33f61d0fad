"""Compiles the sampled cases of a module of kernels, by the program that writes the report on all cases.

In the tests' own process kernels are interpreted, so this is for another one.
"""

from __future__ import annotations

import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO

from gpu_report.__main__ import main


def compile_samples(module: str) -> tuple[int, str]:
    """Return the program's exit status, which is 1 if a launch is at fault, and what it printed."""
    printed = StringIO()
    sys.argv = ["gpu_report", "--sample", "--module", module]
    with redirect_stdout(printed), redirect_stderr(printed):
        status = main()
    return status, printed.getvalue()
