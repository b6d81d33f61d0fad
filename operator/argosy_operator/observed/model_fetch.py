"""A typed view of a pod's model fetch: the init container that fetches, and the pod's condition about it.

Owns the reading of both. Must not decide anything. Invariant: a view is a function of the object alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from msgspec import Struct

from argosy_operator.names import MODEL_CACHED_CONDITION
from argosy_operator.observed.container_exit import describe_exit, last_line
from argosy_resource.pod_overlay import FETCH_CONTAINER

Object = Mapping[str, Any]
FetchState = Literal["pending", "running", "succeeded", "failed"]
"""State of the init container. `failed` lasts until its next start."""


class ModelFetch(Struct, frozen=True, kw_only=True):
    """The fetch of one pod's model."""

    state: FetchState = "pending"
    exit_message: str = ""
    """Last line of the init container that has succeeded or failed."""
    condition_status: str = ""
    """The pod's condition ModelCached; empty if it was never written."""
    condition_reason: str = ""
    condition_message: str = ""
    last_probe_time: str = ""
    """When the condition was last written (RFC 3339)."""

    @property
    def has_failed(self) -> bool:
        """Whether the last attempt failed. The next one clears that once it reports more than its start, so that
        attempts which fail at once do not alternate between two states."""
        return self.state == "failed" or (self.state == "running" and self.condition_reason == "FetchFailed")

    @property
    def is_under_way(self) -> bool:
        return self.state == "running" and not self.has_failed

    @property
    def is_blocked(self) -> bool:
        """Whether it waits for a process that has the store's lock and makes no progress."""
        return self.is_under_way and self.condition_reason == "StoreLocked"

    @property
    def failure(self) -> str:
        """Why it failed, while it has failed."""
        return self.exit_message or self.condition_message

    @property
    def summary(self) -> str:
        """How far it is, while it is under way; empty if it has not reported."""
        return self.condition_message if self.condition_reason in ("Fetching", "StoreLocked") else ""


def read_fetch(spec: Object, status: Object) -> ModelFetch | None:
    """Read the fetch from a pod; None if the pod does not fetch its model."""
    if all(each["name"] != FETCH_CONTAINER for each in spec.get("initContainers", ())):
        return None
    condition = _named(status.get("conditions", ()), "type", MODEL_CACHED_CONDITION)
    container = fetch_container(status)
    state, ended = _state(container)
    exit_message = ""
    if ended is not None:
        exit_message = last_line(ended) or ("" if state == "succeeded" else describe_exit(ended))
    return ModelFetch(
        state=state,
        exit_message=exit_message,
        condition_status=condition.get("status", ""),
        condition_reason=condition.get("reason") or "",
        condition_message=condition.get("message") or "",
        last_probe_time=condition.get("lastProbeTime") or "",
    )


def fetch_container(status: Object) -> Object:
    """Status of the init container that fetches; empty if the kubelet has not reported it."""
    return _named(status.get("initContainerStatuses", ()), "name", FETCH_CONTAINER)


def _state(container: Object) -> tuple[FetchState, Object | None]:
    """The state, and how the container ended if it did."""
    state = container.get("state", {})
    if "running" in state:
        return "running", None
    now, last = state.get("terminated"), container.get("lastState", {}).get("terminated")
    if now is not None:
        return ("failed" if now.get("exitCode") else "succeeded"), now
    if last is not None and last.get("exitCode"):
        return "failed", last
    return "pending", None


def _named(items: Any, key: str, name: str) -> Object:
    return next((each for each in items if each.get(key) == name), {})
