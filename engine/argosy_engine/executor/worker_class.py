"""Worker class: loads the class that `--worker-cls` names, and checks which of its methods may be called remotely."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from argosy_engine.errors import ConfigError, UtilityFailed
from argosy_engine.worker.worker import Worker


def worker_class(path: str) -> type[Worker]:
    """Return `Worker` for `auto`, or import the subclass of `Worker` at `package.module.Class`.

    The path comes from whoever starts the engine, never from a client.

    Raises:
        ConfigError: the class cannot be imported, or is not a subclass of `Worker`.
    """
    if path == "auto":
        return Worker
    module, _, name = path.rpartition(".")
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"--worker-cls {path}: {error}; give package.module.Class") from None
    if not (isinstance(found, type) and issubclass(found, Worker)):
        raise ConfigError(f"--worker-cls {path} is not a subclass of argosy_engine.worker.worker.Worker")
    return found


def public_method(worker: Worker, name: str) -> Callable[..., Any]:
    """Return a bound method of the worker.

    Raises:
        UtilityFailed: the method does not exist or is not public.
    """
    method = None if name.startswith("_") else getattr(worker, name, None)
    if not callable(method):
        raise UtilityFailed(f"workers have no method {name[:64]!r}")
    return method
