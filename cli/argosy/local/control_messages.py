"""Messages on the control socket: the requests of commands, and the replies of the supervisor.

Owns: the messages, one JSON document per line. Must not know: how a fleet is run or shown.
Invariant: every reply to a request describes the complete state, so a reader may skip all but the last.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec
from msgspec import Struct

from argosy_resource.types import InferenceService

MAX_MESSAGE_BYTES: Final = 8 * 1024 * 1024
"""A thousand services with long pod templates take less."""

Phase = Literal["Pending", "Starting", "Ready", "Routable", "Draining", "Stopping", "BackOff"]
"""`Starting`: the process runs, and the model loads. `Ready`: the engine reports that it is ready. `Routable`: the
router may send it requests. `Draining`: the router sends no new requests, and the running ones finish. `BackOff`: the
process died and waits for its restart."""


class Apply(Struct, frozen=True, kw_only=True, tag=True):
    """Make the fleet equal to `services`. Answered with a `FleetStatus` at once and after every change."""

    services: tuple[InferenceService, ...]
    stop_on_disconnect: bool = False
    """Whether to stop the fleet when this connection closes, for `argosy up` in the foreground."""


class Watch(Struct, frozen=True, kw_only=True, tag=True):
    """Watch the fleet. Answered with a `FleetStatus` at once and after every change."""


class Stop(Struct, frozen=True, kw_only=True, tag=True):
    """Stop the fleet; the connection closes when the supervisor exits."""

    grace_s: float = 10.0
    """How long running requests may take to finish."""


Request = Apply | Watch | Stop


class ReplicaStatus(Struct, frozen=True, kw_only=True, tag=True):
    """One replica's process, as `argosy ps` shows it."""

    name: str
    service: str
    revision: str
    is_current: bool
    """Whether the revision is the desired one."""
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
    """Why the service is not in its desired state; empty if it is."""

    @property
    def routable(self) -> int:
        return sum(replica.phase == "Routable" for replica in self.replicas)

    @property
    def is_settled(self) -> bool:
        """Whether exactly the desired number of replicas run, all of them routable and of the desired revision."""
        return len(self.replicas) == self.desired and all(
            replica.phase == "Routable" and replica.is_current for replica in self.replicas
        )


class RouterStatus(Struct, frozen=True, kw_only=True, tag=True):
    """The router's process, as `argosy ps` shows it."""

    url: str
    is_ready: bool
    admin_url: str = ""
    """Empty while the process is not running."""
    reason: str = ""
    restarts: int = 0
    pid: int | None = None
    api_key_fingerprint: str | None = None
    """`StateDir.fingerprint` of the key that it requires of clients; empty if it requires none, None if the supervisor
    is of an earlier version, which does not say."""
    api_keys_file: str | None = None
    """Path of the file of client keys; empty if there is none, None if the supervisor is of an earlier version."""


class BatchStatus(Struct, frozen=True, kw_only=True, tag=True):
    """The process of `argosy batch`, as `argosy ps` shows it."""

    url: str
    pid: int | None = None
    restarts: int = 0
    reason: str = ""


class FleetStatus(Struct, frozen=True, kw_only=True, tag=True):
    """The whole fleet."""

    pid: int
    router: RouterStatus
    services: tuple[ServiceStatus, ...] = ()
    batch: BatchStatus | None = None
    """None if the supervisor is of an earlier version."""
    is_stopping: bool = False

    @property
    def is_settled(self) -> bool:
        return self.router.is_ready and all(service.is_settled for service in self.services)


class Refused(Struct, frozen=True, kw_only=True, tag=True):
    """The request was refused; nothing was changed."""

    message: str


Reply = FleetStatus | Refused

_requests: Final = msgspec.json.Decoder(Request)
_replies: Final = msgspec.json.Decoder(Reply)
_encoder: Final = msgspec.json.Encoder()


def encode(message: Request | Reply) -> bytes:
    return _encoder.encode(message) + b"\n"


def decode_request(line: bytes) -> Request:
    """Decode a request.

    Raises:
        msgspec.DecodeError: it is not one (ValidationError included).
    """
    return _requests.decode(line)


def decode_reply(line: bytes) -> Reply:
    """Decode a reply.

    Raises:
        msgspec.DecodeError: it is not one (ValidationError included).
    """
    return _replies.decode(line)
