"""What of the installation answers now, whatever a service's status says: its routers, and the operator.

A status is what an operator wrote last: after `helm uninstall` it says that a service is ready, for good. Owns what is
read of the routers' Service and of the operator's Lease. Must not know how objects are read. Invariant: what cannot be
read, for want of a permission say, is no problem.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from argosy.diagnosis.chain import Link
from argosy.diagnosis.remedies import remedy
from argosy_resource.types import GROUP

Object = Mapping[str, Any]

LEASE: Final = "argosy-operator"
"""Name of the operator's Lease, in the routers' namespace."""
UNREADABLE: Final = f"{GROUP}/unreadable-namespaces"
"""Annotation of the Lease: why the operator cannot read namespaces, by their names, as JSON."""
NOT_WATCHED: Final = "NotWatched"
SILENT_S: Final = 120.0
"""Seconds without a renewal after which nobody holds the Lease. It is renewed every 2 s; the rest is for clocks."""
_REASON: Final = re.compile("[A-Za-z]{1,40}")
"""Whoever may write Leases of this name in another namespace would have a diagnosis say any sentence."""
_SERVICE: Final = re.compile(r"([a-z0-9-]+)\.([a-z0-9-]+)\.svc(\.|$)")


class Installation(Struct, frozen=True, kw_only=True):
    """Routers and operator of a service, as far as they could be read."""

    router: str = ""
    """The routers' Service, as `namespace/name`; empty if the status names none."""
    endpoints: int | None = None
    """Routers that are ready behind it; None if that is not known."""
    absence: str = ""
    """Why no operator runs; empty if one does, or if that is not known."""
    lease_namespace: str = ""
    """Where the operator's Lease is; empty if that is not known."""
    unreadable: str = ""
    """Why the operator cannot read the service's namespace; empty if it can, or if that is not known."""

    @property
    def is_status_old(self) -> bool:
        """Whether no operator keeps the status of the service up to date."""
        return bool(self.absence or self.unreadable)

    @property
    def has_no_router(self) -> bool:
        return self.endpoints == 0


def router_service(service: Object) -> tuple[str, str] | None:
    """Namespace and name of the routers' Service, by the URL of the status; None if it names none of the cluster's."""
    url = service.get("status", {}).get("url") or ""
    try:
        found = _SERVICE.match(urlsplit(url).hostname or "")
    except ValueError:  # such as a bracket that is not closed
        return None
    return (found[2], found[1]) if found else None


def num_ready(slices: Sequence[Object]) -> int:
    """Number of pods that are ready behind a Service, by its EndpointSlices, of which each address family has some."""
    ready = {
        (endpoint.get("targetRef") or {}).get("name") or (endpoint.get("addresses") or [""])[0]
        for each in slices
        for endpoint in each.get("endpoints") or ()
        if (endpoint.get("conditions") or {}).get("ready") is not False
    }
    return len(ready)


def operator_absence(lease: Object | None, namespace: str, now: datetime.datetime) -> str:
    """Why no operator runs, by its Lease, which is None if there is none; empty if one does."""
    name = f"Lease {namespace}/{LEASE}"
    if lease is None:
        return f"there is no {name}"
    spec = lease.get("spec", {})
    if not spec.get("holderIdentity"):
        return f"nobody holds {name}"
    try:
        renewed = datetime.datetime.fromisoformat(spec.get("renewTime") or "")
        silent = (now - renewed).total_seconds()
    except (ValueError, TypeError):
        return ""
    return f"{name} was last renewed at {spec['renewTime']}" if silent > SILENT_S else ""


def unreadable_reason(lease: Object | None, namespace: str) -> str:
    """Why the operator that holds a Lease cannot read a namespace; empty if it can, or does not say so."""
    told = ((lease or {}).get("metadata", {}).get("annotations") or {}).get(UNREADABLE) or "{}"
    try:
        reasons = msgspec.json.decode(told, type=dict[str, str])
    except msgspec.MsgspecError:
        return ""
    reason = reasons.get(namespace) or reasons.get("*") or ""
    return reason if _REASON.fullmatch(reason) else ""


def shortcoming(found: Installation, namespace: str) -> str:
    """What the operator does not do for a namespace that it cannot read, or not watch."""
    verb = "has no watch of" if found.unreadable == NOT_WATCHED else "cannot read"
    return f"{verb} namespace {namespace} ({found.unreadable})"


def remedy_of_unreadable(found: Installation, namespace: str) -> str:
    """What to do about a namespace that the operator cannot read."""
    where = f"`kubectl describe lease -n {found.lease_namespace} {LEASE}` shows the answer that it got"
    if found.unreadable not in ("Forbidden", "NamespaceGone"):
        return where
    return (
        f"restore the RoleBinding argosy-operator-{found.lease_namespace} in namespace {namespace}, which helm upgrade "
        f"does, or take the namespace out of the chart's watchNamespaces; {where}"
    )


def router_link(found: Installation) -> tuple[Link, ...]:
    """Whether a router answers at the service's URL; nothing if that is not known."""
    if found.endpoints is None:
        return ()
    where = f"Service {found.router}"
    if found.has_no_router:
        detail = f"{where} has no endpoint that is ready, whatever the status says"
        return (Link(name="router", state="failed", detail=detail, remedy=remedy("NoRouter")),)
    return (Link(name="router", state="done", detail=f"{where}, {found.endpoints} ready"),)


def operator_note(found: Installation, namespace: str) -> tuple[str, ...]:
    """What it means for the service that no operator runs, or that it may not read the service; nothing otherwise."""
    if found.unreadable:
        late = "and changes, new pods and scaling wait for it"
        if found.unreadable == NOT_WATCHED:
            late = "and changes take until the next resync, minutes"
        return (
            f"the operator {shortcoming(found, namespace)}. The status is its last one, {late}. What helps: "
            f"{remedy_of_unreadable(found, namespace)}",
        )
    if not found.absence:
        return ()
    return (
        f"no operator runs: {found.absence}. The status is its last one; changes, new pods and scaling wait for it. "
        "`kubectl get deployment,lease -A | grep argosy-operator` shows it",
    )
