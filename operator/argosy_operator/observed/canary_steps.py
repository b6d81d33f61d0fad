"""Whether time and figures alone may move a service's canary, as its status says."""

from __future__ import annotations

from typing import Final

from argosy_operator.kinds import Object

_STEPPING: Final = ("Starting", "Analyzing", "Held")


def has_canary_steps(obj: Object) -> bool:
    """Whether the resource has a canary that has still to pass a step."""
    rollout = obj.get("status", {}).get("rollout") or {}
    return rollout.get("phase") in _STEPPING and not obj["metadata"].get("deletionTimestamp")
