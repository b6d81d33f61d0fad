"""Objects of a cluster as `argosy why` reads them: a service, its pods, and what is wrong with them."""

from __future__ import annotations

from typing import Any

Object = dict[str, Any]


def condition(kind: str, status: str, reason: str = "", message: str = "") -> Object:
    return {"type": kind, "status": status, "reason": reason, "message": message}


def service(*conditions: Object, seen: int = 3, **spec: Any) -> Object:
    return {
        "metadata": {"name": "qwen", "namespace": "team", "generation": 3},
        "spec": {"model": {"source": "hf://org/model"}, "replicas": 2, **spec},
        "status": {
            "observedGeneration": seen,
            "revision": "new",
            "routable": "2/2",
            "url": "http://router/v1",
            "model": "qwen",
            "conditions": list(conditions),
        },
    }


def pod(
    name: str = "qwen-0",
    *,
    conditions: dict[str, str] | None = None,
    engine: Object | None = None,
    fetch: Object | None = None,
    revision: str = "new",
    **status: Any,
) -> Object:
    """A pod whose conditions are all True, but those given, and whose engine runs unless told otherwise."""
    true = dict.fromkeys(
        (
            "PodScheduled",
            "PodReadyToStartContainers",
            "ContainersReady",
            "inference.argosy.dev/routable",
            "Ready",
        ),
        "True",
    )
    shown = {"name": "engine", "ready": engine is None, "state": {"running": {}}, **(engine or {})}
    found: Object = {
        "metadata": {"name": name, "labels": {"inference.argosy.dev/revision": revision}},
        "spec": {"nodeName": "node-a", "initContainers": [{"name": "fetch-model"}] if fetch else []},
        "status": {
            "phase": "Running",
            "conditions": [
                {"type": kind, "status": value} for kind, value in {**true, **(conditions or {})}.items()
            ],
            "containerStatuses": [shown],
            "initContainerStatuses": [{"name": "fetch-model", **fetch}] if fetch else [],
            **status,
        },
    }
    return found


NOT_LOADED = {"ContainersReady": "False", "inference.argosy.dev/routable": "False", "Ready": "False"}
CREATING = {"ready": False, "state": {"waiting": {"reason": "PodInitializing"}}}
NOT_READY = condition("Ready", "False", "Starting", "0/2 updated replicas ready")


def scaled(wanted: int, *conditions: Object, **spec: Any) -> Object:
    """A service with spec.scaling that has decided on this number."""
    found = service(*conditions, scaling={"minReplicas": 0, "maxReplicas": 4}, **spec)
    found["status"]["scaling"] = {"wanted": wanted}
    return found


def unscheduled(message: str) -> Object:
    found = pod(conditions=NOT_LOADED, engine=CREATING)
    found["spec"]["nodeName"] = None
    found["status"]["conditions"][0] = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": message,
    }
    return found


def fetching(message: str, reason: str = "Fetching") -> Object:
    found = pod(conditions=NOT_LOADED, engine=CREATING, fetch={"ready": False, "state": {"running": {}}})
    found["status"]["conditions"].append(
        {
            "type": "inference.argosy.dev/ModelCached",
            "status": "False",
            "reason": reason,
            "message": message,
        }
    )
    return found


def failed_fetch(message: str) -> Object:
    fetch = {
        "ready": False,
        "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}},
        "lastState": {"terminated": {"reason": "Error", "exitCode": 1, "message": message}},
    }
    return pod(conditions=NOT_LOADED, engine=CREATING, fetch=fetch)


NO_NAME_SERVER = (
    "hf://org/model: https://huggingface.co does not answer ([Errno -3] Temporary failure in name resolution)"
)
EXITED = {
    "reason": "Error",
    "exitCode": 2,
    "message": "Traceback\nargosy serve: --max-model-len is too large\n",
}


NO_GPU = "0/2 nodes are available: 2 Insufficient nvidia.com/gpu."


CRASHING = {
    "ready": False,
    "restartCount": 4,
    "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s"}},
    "lastState": {"terminated": EXITED},
}
