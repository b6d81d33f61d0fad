"""Tells which build of the router runs: compiled modules, or the Python sources alone.

A wheel for one platform has an extension module beside every module that can be compiled, and Python prefers it.
"""

from __future__ import annotations

from importlib.machinery import EXTENSION_SUFFIXES
from typing import Literal

from argosy_router.http import sse

BUILD_KIND: Literal["compiled", "pure"] = (
    "compiled" if sse.__file__.endswith(tuple(EXTENSION_SUFFIXES)) else "pure"
)
"""Taken from one module for all: a build compiles all of them, or fails."""
