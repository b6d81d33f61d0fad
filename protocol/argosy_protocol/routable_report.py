"""A router's report to the operator: which replicas it is connected to and synced with.

The router's admin port serves it at `GET /internal/replicas`. The operator derives the pods' `routable` gate, of which
it is the only writer, from these reports.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct, structs

REPORT_PATH = "/internal/replicas"
ADMIN_KEY_UID = "argosy:router-admin"
"""`bearer_keys.internal_key(fleet_key, ADMIN_KEY_UID)` is the bearer key of the admin port's internal routes."""

ReplicaState = Literal[
    "connecting", "synced", "stale", "foreign", "suspect", "ejected", "half-open", "draining"
]
"""`synced`: the telemetry snapshot is complete. `foreign`: a healthy engine that is not ours. Both are routable.
`suspect`: used only if no better replica is left. `half-open`: ejected, and to be probed with one request."""


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
    """The report of one router: of all services, or of those that have changed since another one (`base`).

    Whoever gives the `epoch` of the last report beside its revision gets what has changed since. A router that does not
    know epochs ignores it, and one that has started anew, or no longer knows what has changed, answers with all: so
    does either to a reader that gives none.
    """

    router: str
    version: int = 1
    revision: int = 0
    """Incremented with every change. `GET REPORT_PATH?after=N&wait=SECONDS` is a long poll, so that the gate opens
    without a polling delay: it answers once the revision differs from N, or after SECONDS (at most 60). `&epoch=E` asks
    for the changes only."""
    fleet_revision: str = ""
    """xxh3 hex digest of the fleet document that the router follows."""
    epoch: str = ""
    """Random for each process of a router: revisions of another one count differently."""
    base: int | None = None
    """The revision since which this report has the changes; None if it is whole."""
    services: tuple[str, ...] = ()
    """With `base`: the services (`namespace/name`) that have changed. `replicas` are all that they have now."""
    replicas: tuple[ReplicaReport, ...] = ()


def with_changes(before: RoutableReport | None, report: RoutableReport) -> RoutableReport | None:
    """The whole report after `before` and the changes of `report`; None if these are the changes of another one."""
    if report.base is None:
        return report
    if before is None or (before.epoch, before.revision) != (report.epoch, report.base):
        return None
    changed = frozenset(report.services)
    kept = tuple(each for each in before.replicas if each.service not in changed)
    return structs.replace(report, base=None, services=(), replicas=kept + report.replicas)
