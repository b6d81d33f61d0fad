"""The `routable` readiness gate of a pod: when it opens, when it closes.

Owns the decision on a pod's condition and the patch that carries it. Must not know how routers are asked, or when.
The operator is the gate's sole writer. Invariants: a gate opens when a router sends the pod requests, or when it is
known that no router is alive, so that a fleet without routers does not lock up; it closes only on drain or
deletion, so that a router which loses a replica for a moment does not disturb rollouts and disruption budgets.
"""

from __future__ import annotations

from typing import Any, Literal

from argosy_operator.names import ROUTABLE_GATE
from argosy_operator.observed.observation import Routers
from argosy_operator.observed.pod import Pod

GateStatus = Literal["True", "False"]


def gate_status(pod: Pod, routers: Routers) -> GateStatus | None:
    """The status that the gate should change to; None to leave it as it is."""
    is_open = pod.gate == "True"
    if pod.is_terminating:
        return "False" if is_open else None
    if pod.is_finished or not routers.known:
        return None
    if is_open:
        return "False" if pod.uid in routers.draining else None
    if pod.uid in routers.routable:
        return "True"
    if routers.alive == 0 and pod.containers_ready:
        return "True"
    return None


def gate_patch(pod: Pod, status: GateStatus, *, now: str, router_lives: bool) -> dict[str, Any]:
    """Strategic merge patch of the pod's status. Its UID keeps the patch from another pod of the same name
    (StatefulSet, fast recreation)."""
    if status == "False":
        reason, message = "Draining", "the replica takes no new requests"
    elif router_lives:
        reason, message = "RouterSynced", "a router sends requests to the replica"
    else:
        reason, message = "NoRouter", "no router answers; only the Service leads to the replica"
    condition = {
        "type": ROUTABLE_GATE,
        "status": status,
        "reason": reason,
        "message": message,
        "lastTransitionTime": now,
    }
    return {"metadata": {"uid": pod.uid}, "status": {"conditions": [condition]}}
