"""The cases of each kernel, one module per kernel module with a function `cases`."""

from gpu_report.case import Cases

ALL_CASES: dict[str, Cases] = {}
"""By the name of the kernel module."""
