"""The `routable` readiness gate of a pod: when it opens, when it closes.

Owns the decision on a pod's condition and the patch that carries it. Must not know how routers are asked, or when.
The operator is the gate's sole writer. Invariants: a gate opens when a router sends the pod requests, or when it is
known that no router is alive, so that a fleet without routers does not lock up; it closes only on drain or
deletion, so that a router which loses a replica for a moment does not disturb rollouts and disruption budgets; one
that has closed opens again REOPEN_SECONDS later at the earliest, because an engine may say that it drains as often as
it likes, and each change is a write.
"""

from __future__ import annotations

from typing import Any, Final, Literal

from argosy_operator.names import ROUTABLE_GATE
from argosy_operator.observed.elapsed import seconds_between
from argosy_operator.observed.observation import Routers
from argosy_operator.observed.pod import Pod

GateStatus = Literal["True", "False"]

REOPEN_SECONDS: Final = 15
"""An engine that drains ends, and starts anew in the same pod only if it was killed for want of an answer, say."""


def gate_status(pod: Pod, routers: Routers, time: str = "") -> GateStatus | None:
    """The status that the gate should change to at `time` (RFC 3339); None to leave it as it is."""
    is_open = pod.gate == "True"
    if pod.is_terminating:
        return "False" if is_open else None
    if pod.is_finished or not routers.known:
        return None
    if is_open:
        return "False" if pod.uid in routers.draining else None
    if seconds_until_reopened(pod, time) > 0:
        return None
    if pod.uid in routers.routable:
        return "True"
    if routers.alive == 0 and pod.containers_ready:
        return "True"
    return None


def seconds_until_reopened(pod: Pod, time: str) -> float:
    """Seconds until a gate that has closed may open again; 0 or less if it may. A time that is still to come is of
    another operator's clock, and counts as long past."""
    if pod.gate != "False" or not pod.gate_since or not time:
        return 0.0
    closed_for = seconds_between(pod.gate_since, time)
    return REOPEN_SECONDS - closed_for if closed_for >= 0 else 0.0


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
