"""Messages between machine 0 of an engine and each other one, after the handshake of `node_channel`.

The machine that joins sends `NodeHello` and gets `Admission`. From then on the first byte of a message is its kind.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

MAX_HELLO_BYTES = 1 << 16
MAX_PROGRESS_CHARS = 200

START = b"\x00"
"""From machine 0: `NodeStart`. Start the workers; messages for them follow."""
MESSAGE = b"\x01"
"""From machine 0: one of `worker_messages`, for every worker."""
STOP = b"\x02"
"""From machine 0: why the engine has died, as text. Last message."""

PROGRESS = b"\x00"
"""To machine 0: what the machine is doing, as text."""
READY = b"\x01"
"""To machine 0: the model is on the machine; workers can start."""
ANSWER = b"\x02"
"""To machine 0: `RANK_BYTES` of the worker's rank, and a message of this worker."""
ENDED = b"\x03"
"""To machine 0: `WorkerExit`. Last message of a worker."""
RANK_BYTES = 2

Text = Annotated[str, Meta(max_length=4096)]


class NodeHello(Struct, frozen=True, kw_only=True):
    """What a machine says of itself."""

    node_rank: Annotated[int, Meta(ge=0, le=1023)]
    host_name: Text
    version: Text
    """Argosy's."""
    torch: Text
    device: Text
    model_name: Text
    flags: Annotated[dict[Text, Text], Meta(max_length=256)]
    """Engine flags that are not at their defaults, as JSON; long ones as a digest."""


class Admission(Struct, frozen=True, array_like=True):
    """Answer to `NodeHello`."""

    refusal: str = ""
    """Why the machine may not join; empty: it may."""
    can_retry: bool = False
    """Whether that may change by itself."""


class NodeStart(Struct, frozen=True, array_like=True):
    """Where rank 0 serves torch's store."""

    host: Text
    port: Annotated[int, Meta(ge=1, le=65535)]


class WorkerExit(Struct, frozen=True, array_like=True):
    """The end of a worker's process."""

    rank: int
    how: str
