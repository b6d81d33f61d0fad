"""Fetching: what commands that bring a model into the store have in common.

Owns the engine's refusal of models that it does not serve, and the translation of the fetcher's errors into those of
commands. Must not know arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any, Final

from argosy.errors import CommandError, UsageError
from argosy_fetcher.errors import FetchError, InvalidSource, TransientError
from argosy_fetcher.progress_display import printable
from argosy_fetcher.source_uri import SourceUri

_ENGINE_CHECKS: Final = "argosy_engine.models.fetch_check"
"""The engine's refusals of models that it does not serve. Named, not imported, because the command line does not depend
on the engine, which need not be installed."""


def engine_check(uri: SourceUri, **layout: int) -> Callable[[dict[str, Any]], None] | None:
    """Return the engine's check of a config.json; None if the engine cannot be imported.

    Args:
        layout: the devices among which the model is divided, as in `spec.parallelism`.
    """
    check = _engine_function("check_fetched_config")
    return None if check is None else partial(check, uri.name, **layout)


def check_local_model(source: str, **layout: int) -> None:
    """Check a model that is on this machine, if the engine can be imported.

    Args:
        layout: see `engine_check`.

    Raises:
        UnsupportedModel: the engine could not load it.
    """
    if (check := _engine_function("check_local_model")) is not None:
        check(source, **layout)


def _engine_function(name: str) -> Callable[..., None] | None:
    try:
        return getattr(import_module(_ENGINE_CHECKS), name)
    except ModuleNotFoundError:
        return None


@contextmanager
def fetch_errors() -> Iterator[None]:
    """Raise the fetcher's errors as those of a command, each on one line.

    Raises:
        UsageError: the source is malformed.
        CommandError: the model cannot be fetched.
    """
    try:
        yield
    except InvalidSource as error:
        raise UsageError(printable(str(error))) from error
    except (FetchError, TransientError) as error:
        raise CommandError(printable(str(error))) from error
