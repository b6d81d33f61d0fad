"""What a router tells the operator: which replicas it is connected to and synced with.

Served on the router's admin port at `GET /internal/replicas`. The operator is the sole writer of the pods'
`routable` gate and derives it from these reports.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

REPORT_PATH = "/internal/replicas"
ADMIN_KEY_UID = "argosy:router-admin"
"""`keys.internal_key(fleet_key, ADMIN_KEY_UID)` is the bearer key of the admin port's internal routes."""

ReplicaState = Literal[
    "connecting", "synced", "stale", "foreign", "suspect", "ejected", "half-open", "draining"
]
"""`synced`: telemetry snapshot complete. `foreign`: not one of our engines, healthy. Both are routable. `suspect`: used
when nothing better is there. `half-open`: ejected, and about to be tried with one request."""


class ReplicaReport(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One replica as one router sees it."""

    service: str
    """`namespace/name` of the service."""
    name: str
    """Pod name, or the endpoint's name in the local fleet."""
    uid: str = ""
    """Pod UID; empty outside Kubernetes."""
    url: str
    state: ReplicaState
    routable: bool
    """Whether this router would send it a request now."""
    epoch: str = ""
    """The engine's epoch from its hello frame."""
    inflight: int = 0


class RoutableReport(Struct, frozen=True, kw_only=True):
    """The whole answer of one router."""

    router: str
    version: int = 1
    revision: int = 0
    """Grows with every change. `GET REPORT_PATH?after=N&wait=SECONDS` answers as soon as the revision differs from N,
    or after SECONDS (at most 60) with the same report: a long poll, so that the gate opens without a polling delay."""
    fleet_revision: str = ""
    """xxh3 hex digest of the fleet document in use, so that the operator knows which one the router follows."""
    replicas: tuple[ReplicaReport, ...] = ()
