"""Handshake between a client and the process of its engine core, in this order: Hello, Handshake, Loading, Ready.

Between Loading and Ready `Advanced` tells how far the load is, any number of times. `Failed` takes the place of
`Ready` if the core cannot start. Clients in further API processes answer `Attached` instead of `Handshake`.
"""

from __future__ import annotations

from msgspec import Struct

from argosy_engine.config import EngineArgs
from argosy_engine.distributed.lockstep import LockstepEnds
from argosy_engine.messages.load_step import LoadStep
from argosy_engine.resolved_config import ResolvedConfig


class Hello(Struct, tag="HELLO", tag_field="status"):
    """First message of the core process to its client."""

    pid: int


class Handshake(Struct, tag="INIT", tag_field="status"):
    """The client's answer: the arguments to run with."""

    engine_args: EngineArgs
    data_parallel_rank: int = 0
    lockstep: LockstepEnds | None = None
    """Of cores that share experts: what the core's process has inherited."""


class Attached(Struct, tag="ATTACHED", tag_field="status"):
    """The answer of a client that did not start the core."""

    client_index: int


class Loading(Struct, tag="LOADING", tag_field="status"):
    """The sockets of all clients are connected, so their files may be deleted; the core loads the model."""


class Advanced(Struct, tag="PROGRESS", tag_field="status"):
    """The load has advanced."""

    step: LoadStep


class Ready(Struct, tag="READY", tag_field="status"):
    """The core is ready to serve with this configuration."""

    config: ResolvedConfig


class Failed(Struct, tag="FAILED", tag_field="status"):
    """The core could not start. `message` is meant for the person who started it."""

    message: str
    is_config_error: bool


HandshakeMessage = Hello | Handshake | Attached | Loading | Advanced | Ready | Failed
