"""Pods that fetch their model, and what they report."""

from __future__ import annotations

from typing import Any

from builders import pod_object

from argosy_operator.names import MODEL_CACHED_CONDITION
from argosy_protocol.reports import ModelProgress, Phase
from argosy_resource.engine_command import SERVICE_LABEL
from argosy_resource.pod_fields import FETCH_CONTAINER

GIB = 1 << 30
RUNNING = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
BACK_OFF = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}}
LAST_LINE = "hf://Qwen/Qwen3-8B revision 1a2b3c: 28.0 GiB fetched in 70 s"
GATED = "hf://meta/llama: gated; accept the terms on its page, and set HF_TOKEN"


def ended(code: int, message: str = "") -> dict[str, Any]:
    return {"terminated": {"exitCode": code, "reason": "Error" if code else "Completed", "message": message}}


def cached_condition(status: str, reason: str, message: str = "", **times: str) -> dict[str, str]:
    return {"type": MODEL_CACHED_CONDITION, "status": status, "reason": reason, "message": message, **times}


def fetching_pod(name: str, *, condition: dict[str, str] | None = None, **container: Any) -> dict[str, Any]:
    """A replica's pod whose init container has this status: `state`, `lastState`, `containerID`."""
    obj = pod_object(
        name,
        labels={SERVICE_LABEL: "tiny"},
        phase="Pending",
        podIP=name,
        conditions=[condition] if condition else [],
        initContainerStatuses=[{"name": FETCH_CONTAINER, **container}] if container else [],
        containerStatuses=[{"name": "engine", "state": {"waiting": {"reason": "PodInitializing"}}}],
    )
    obj["spec"]["initContainers"] = [{"name": FETCH_CONTAINER}]
    return obj


def so_far(percent: int, *, total: int = 28 * GIB, **fields: Any) -> ModelProgress:
    """A report of a fetch that has got so far."""
    return report("fetching", fetched_bytes=-(-total * percent // 100), total_bytes=total, **fields)


def report(phase: Phase, **fields: Any) -> ModelProgress:
    return ModelProgress(source="hf://Qwen/Qwen3-8B", phase=phase, **fields)
