"""Makes Triton's interpreter replace the functions of `triton.language` once per launch, instead of once per call.

Replacing them takes a millisecond, which a kernel that is made of many functions would pay thousands of times.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def patch_once_per_launch() -> None:
    """Replace the interpreter's call of a function by another, for this process."""
    patch = interpreter._patch_lang
    everywhere = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    interpreter._patch_lang = lambda kernel: patch(everywhere)
    interpreter.InterpretedFunction.__call__ = _call


def _call(function: Any, *args: Any, **kwargs: Any) -> Any:
    return function.rewrite()(*args, **kwargs)
