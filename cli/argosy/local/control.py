"""What is said over the control socket: requests of a command, replies of the supervisor.

Owns the messages, one JSON document per line. Must not know how a fleet is run or shown. Invariant: every reply
to one request is a complete picture, so a reader may skip all but the last.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec
from msgspec import Struct

from argosy_operator.resource.types import InferenceService

MAX_MESSAGE_BYTES: Final = 8 * 1024 * 1024
"""A thousand services with long pod templates stay below."""

Phase = Literal["Pending", "Starting", "Ready", "Routable", "Draining", "Stopping", "BackOff"]
"""`Starting`: the process runs, the model loads. `Ready`: the engine says so. `Routable`: and the router too.
`Draining`: the router sends nothing new; requests finish. `BackOff`: it died and waits for its restart."""


class Apply(Struct, frozen=True, kw_only=True, tag=True):
    """Make the fleet equal to `services`; answered with a `FleetStatus` now and after every change."""

    services: tuple[InferenceService, ...]
    stop_on_disconnect: bool = False
    """Ends the fleet when this connection closes: `argosy up` in the foreground."""


class Watch(Struct, frozen=True, kw_only=True, tag=True):
    """Answered with a `FleetStatus` now and after every change."""


class Stop(Struct, frozen=True, kw_only=True, tag=True):
    """End the fleet; the connection closes when the supervisor has exited."""

    grace_s: float = 10.0
    """How long requests under way may take to finish."""


Request = Apply | Watch | Stop


class ReplicaStatus(Struct, frozen=True, kw_only=True, tag=True):
    """One replica's process, as `argosy ps` shows it."""

    name: str
    service: str
    revision: str
    is_current: bool
    """Whether the revision is the wanted one."""
    phase: Phase
    reason: str = ""
    """Why it is not routable, or why it last stopped."""
    restarts: int = 0
    pid: int | None = None
    url: str = ""
    gpus: tuple[int, ...] = ()
    inflight: int = 0
    started: float = 0.0
    """Unix time of the process's start."""


class ServiceStatus(Struct, frozen=True, kw_only=True, tag=True):
    """One InferenceService, with its replicas."""

    key: str
    model: str
    desired: int
    revision: str
    replicas: tuple[ReplicaStatus, ...] = ()
    reason: str = ""
    """Why the service is not as wanted; empty when it is."""

    @property
    def routable(self) -> int:
        return sum(replica.phase == "Routable" for replica in self.replicas)

    @property
    def is_settled(self) -> bool:
        """Whether exactly the wanted replicas run, all of them routable and of the wanted revision."""
        return len(self.replicas) == self.desired and all(
            replica.phase == "Routable" and replica.is_current for replica in self.replicas
        )


class RouterStatus(Struct, frozen=True, kw_only=True, tag=True):
    """The router's process."""

    url: str
    is_ready: bool
    admin_url: str = ""
    """Empty while it does not run."""
    reason: str = ""
    restarts: int = 0
    pid: int | None = None


class FleetStatus(Struct, frozen=True, kw_only=True, tag=True):
    """Everything that runs."""

    pid: int
    router: RouterStatus
    services: tuple[ServiceStatus, ...] = ()
    is_stopping: bool = False

    @property
    def is_settled(self) -> bool:
        return self.router.is_ready and all(service.is_settled for service in self.services)


class Refused(Struct, frozen=True, kw_only=True, tag=True):
    """The request cannot be carried out; nothing was changed."""

    message: str


Reply = FleetStatus | Refused

_requests: Final = msgspec.json.Decoder(Request)
_replies: Final = msgspec.json.Decoder(Reply)
_encoder: Final = msgspec.json.Encoder()


def encode(message: Request | Reply) -> bytes:
    return _encoder.encode(message) + b"\n"


def decode_request(line: bytes) -> Request:
    """Raises msgspec.DecodeError (ValidationError included) for anything else."""
    return _requests.decode(line)


def decode_reply(line: bytes) -> Reply:
    """Raises msgspec.DecodeError (ValidationError included) for anything else."""
    return _replies.decode(line)
