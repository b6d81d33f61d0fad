"""Makes Triton's interpreter replace the functions of `triton.language` once per launch, instead of once per call.

Looking for them takes milliseconds, which a kernel that is made of many functions would pay thousands of times. They
are found at the first launch.
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
    known: list[_Replacements] = []

    def patch_again(kernel: Any) -> _Replacements:
        if not known:
            scope = patch(everywhere)
            known.append(_Replacements(scope))
            scope.restore()
        known[0].apply()
        return known[0]

    interpreter._patch_lang = patch_again
    interpreter.InterpretedFunction.__call__ = _call


class _Replacements:
    """What a scope of the interpreter has replaced."""

    def __init__(self, scope: Any) -> None:
        originals: dict[tuple[int, str], tuple[Any, str, Any]] = {}
        for owner, name, original in scope._changes:
            originals.setdefault((id(owner), name), (owner, name, original))
        self._originals = list(originals.values())
        self._replaced = [(owner, name, vars(owner)[name]) for owner, name, _ in self._originals]

    def apply(self) -> None:
        for change in self._replaced:
            setattr(*change)

    def restore(self) -> None:
        for owner, name, original in self._originals:
            if original is interpreter._MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, original)


def _call(function: Any, *args: Any, **kwargs: Any) -> Any:
    return function.rewrite()(*args, **kwargs)
