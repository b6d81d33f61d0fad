"""Reason why an engine's workers have ended, from what they said last and how their processes exited.

A worker whose peer has ended fails as well, in a collective operation, with an error that names nobody. So those that
were killed are the reason; if none was, those that failed by themselves.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple

from argosy_engine.errors import ConfigError, EngineDead, EngineError
from argosy_engine.executor.worker_messages import WorkerFailure
from argosy_protocol.program.log_format import BoundedFormatter

logger = logging.getLogger("argosy.executor")

_COLLECTIVES = ("argosy_engine.distributed.communicator", "torch.distributed")
"""Beginnings of the names of modules that exchange data with other workers, at the start as well."""


class WorkerEnd(NamedTuple):
    """The end of one worker."""

    who: str
    """Its name and process id."""
    how: str
    """How its process exited."""
    failure: WorkerFailure | None
    """Its last message; None if it had no time for one."""


def failure_of(error: Exception) -> WorkerFailure:
    """Describe an error of this worker's process that ends it."""
    if isinstance(error, ConfigError):  # meant for the person who started the engine
        return WorkerFailure(str(error), is_config_error=True)
    frames = error.__traceback__
    return WorkerFailure(
        f"{type(error).__name__}: {error}",
        is_in_collective=_is_in_collective(frames),
        traceback=BoundedFormatter().formatException((type(error), error, frames)),
    )


def _is_in_collective(frames: TracebackType | None) -> bool:
    while frames is not None:
        if str(frames.tb_frame.f_globals.get("__name__")).startswith(_COLLECTIVES):
            return True
        frames = frames.tb_next
    return False


def death_of(ends: Sequence[WorkerEnd]) -> EngineError:
    """Return the error to raise when workers have ended, and log it: a line, and the tracebacks that tell its reason.

    Args:
        ends: those that are known, by rank. There is one at least.
    """
    killed = [f"{end.who} ended: {end.how}" for end in ends if end.failure is None]
    failed = [(end.who, end.failure) for end in ends if end.failure is not None]
    for _, failure in failed:
        if failure.is_config_error:
            return ConfigError(failure.message)
    own = [(who, failure) for who, failure in failed if not failure.is_in_collective]
    causes = own or failed
    reason = "; ".join(killed or [f"{who} failed: {failure.message}" for who, failure in causes])
    logger.error("%s", reason)
    tracebacks = (
        {} if killed else {failure.message: (who, failure.traceback) for who, failure in causes[::-1]}
    )
    for who, traceback in tracebacks.values():
        logger.error("%s failed\n%s", who, traceback)
    for who, failure in failed:
        if killed or failure.is_in_collective:
            logger.debug("%s then failed: %s", who, failure.message)
    return EngineDead(reason)
