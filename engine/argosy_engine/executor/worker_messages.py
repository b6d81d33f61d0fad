"""Kinds of messages between an executor and its workers: the first byte of each; msgpack follows."""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct

INIT = b"\x00"
"""`EngineArgs`: make the worker and load the model. The first message; every rank answers with `WorkerInfo`."""
EXECUTE = b"\x01"
"""`SchedulerOutput`: run a step. Only one rank answers, with `ModelRunnerOutput`; on the others only a failure does."""
SAMPLE = b"\x02"
"""`GrammarBitmask` or None, for the previous step, which awaits it and is answered only now."""
CALL = b"\x03"
"""`CollectiveRpc`: call a method of the worker. Every rank answers."""
LEND = b"\x04"
"""`Round`: compute the experts for a step of other engine cores. No rank answers, but for a failure."""

DONE = b"\x00"
"""Answer: the result."""
FAILED = b"\x01"
"""Answer: `WorkerFailure` of a call; the worker goes on."""
DIED = b"\x02"
"""Last message: `WorkerFailure` of the start or of a step, with which the worker's process ends."""
PROGRESS = b"\x03"
"""`LoadStep`, before the answer to `INIT` or to a call that loads weights."""


class WorkerFailure(Struct, array_like=True):
    """Error of a worker's start, step or call."""

    message: str
    is_config_error: bool = False
    is_in_collective: bool = False
    """Whether it may have failed only because another worker has ended."""
    traceback: str = ""
    """Of an error that ends the worker, bounded."""


class MessageReader(Protocol):
    """A worker's end of the way from the core."""

    def get(self) -> bytes:
        """Wait for the next message."""
        ...


class MessageWriter(Protocol):
    """A worker's end of the way to the core."""

    def send(self, message: bytes) -> None:
        """Send a message.

        Raises:
            OSError: the core has ended.
        """
        ...
