"""Import of XGrammar without torch and transformers.

XGrammar's package imports both, for annotations and for features that are not used here, which takes up to four seconds
and 500 MiB. While it is imported, those of the two that are not loaded yet are replaced by placeholder modules. The
import then takes 0.5 s and 60 MiB in a process of its own, and 0.1 s in one that has loaded torch. If it fails, because
a later XGrammar needs more of them, it is repeated with the real packages.

The library below it (tvm_ffi) handles SIGSEGV with a function that looks up and prints names of functions, which is not
safe in a signal handler: it may wait for a lock that the interrupted code holds, and a process that has crashed then
hangs. The handler from before the import is put back.
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

_UNUSED = ("torch", "transformers")
_SIGACTION_BYTES = 1024
"""At least the size of C's `struct sigaction`, which is 152 with glibc on x86-64."""
_lock = threading.Lock()


class _Placeholder(types.ModuleType):
    """Module in which every name is an empty class."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda self, *args, **kwargs: None})


def import_xgrammar() -> None:
    """Import XGrammar, so that a later `import xgrammar` costs nothing. Thread-safe."""
    with _lock:
        if "xgrammar" in sys.modules:
            return
        with _kept_handler(signal.SIGSEGV):
            _import()


@contextlib.contextmanager
def _kept_handler(number: signal.Signals) -> Iterator[None]:
    """Put back what handles a signal now. In C: it may be faulthandler's function, which `signal` does not tell of."""
    sigaction = ctypes.CDLL(None).sigaction
    before = ctypes.create_string_buffer(_SIGACTION_BYTES)
    is_known = sigaction(number, None, before) == 0
    try:
        yield
    finally:
        if is_known:
            sigaction(number, before, None)


def _import() -> None:
    unused = [name for name in _UNUSED if name not in sys.modules]
    try:
        for name in unused:
            sys.modules[name] = None  # type: ignore[assignment]  # tvm_ffi works without them
        import tvm_ffi  # noqa: F401

        for name in unused:
            sys.modules[name] = _Placeholder(name)
        import xgrammar
    except Exception:
        _forget(*unused)
        for name in [name for name in sys.modules if name.partition(".")[0] == "xgrammar"]:
            del sys.modules[name]
        import xgrammar  # noqa: F401
    finally:
        _forget(*unused)


def _forget(*names: str) -> None:
    for name in names:
        if isinstance(sys.modules.get(name, None), _Placeholder | None):
            sys.modules.pop(name, None)
