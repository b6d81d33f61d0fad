"""The pod condition `ModelCached`: what it says about the fetch of the pod's model, and when it changes.

Owns the decision on the condition and the patch that carries it. Must not know how fetches are asked, or when. The
operator is the condition's sole writer. Invariants: the condition changes only if its text does; a report never
overrides what the init container's end says.

    False  Fetching     the init container runs: its progress
    False  StoreLocked  it waits for a process that makes no progress: the one that has the store's lock
    True   Cached       it has succeeded: its last line
    False  FetchFailed  it has failed: its last line. Stays until the next attempt fetches
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from argosy_operator.names import MODEL_CACHED_CONDITION
from argosy_operator.observed.pod import Pod
from argosy_protocol.model_progress import ModelProgress, summary


class CachedChange(Struct, frozen=True, kw_only=True):
    """A pod's condition `ModelCached` is to change."""

    pod: Pod
    status: Literal["True", "False"]
    reason: Literal["Cached", "Fetching", "StoreLocked", "FetchFailed"]
    message: str


def cached_change(pod: Pod, progress: ModelProgress | None) -> CachedChange | None:
    """The condition as it should become; None to leave it as it is. `progress` is the pod's last report, if any."""
    fetch = pod.fetch
    if fetch is None or not pod.is_alive:
        return None
    if fetch.state == "succeeded":
        message = fetch.exit_message or "the model is stored"
        change = CachedChange(pod=pod, status="True", reason="Cached", message=message)
    elif fetch.state == "failed":
        change = CachedChange(pod=pod, status="False", reason="FetchFailed", message=fetch.exit_message)
    elif fetch.state == "running" and progress is not None:
        if fetch.has_failed and progress.phase in ("resolving", "waiting"):
            return None
        is_blocked = progress.phase == "blocked" and bool(progress.note)
        change = CachedChange(
            pod=pod,
            status="False",
            reason="StoreLocked" if is_blocked else "Fetching",
            message=summary(progress),
        )
    else:
        return None
    present = (fetch.condition_status, fetch.condition_reason, fetch.condition_message)
    return None if present == (change.status, change.reason, change.message) else change


def cached_patch(change: CachedChange, *, now: str) -> dict[str, Any]:
    """Strategic merge patch of the pod's status. Its UID keeps the patch from another pod of the same name."""
    condition = {
        "type": MODEL_CACHED_CONDITION,
        "status": change.status,
        "reason": change.reason,
        "message": change.message,
        "lastProbeTime": now,
    }
    assert change.pod.fetch is not None
    if change.pod.fetch.condition_status != change.status:
        condition["lastTransitionTime"] = now
    return {"metadata": {"uid": change.pod.uid}, "status": {"conditions": [condition]}}
