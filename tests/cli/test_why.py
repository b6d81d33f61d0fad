"""`argosy why`: which link of the chain fails, and what is said about it."""

from __future__ import annotations

import datetime
import json
import os
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_kubectl import fake_kubectl

from argosy.commands import why
from argosy.diagnosis.chain import (
    MAX_LINES,
    MAX_WIDTH,
    Diagnosis,
    Link,
    load_step,
    render,
    render_json,
    until_first_problem,
)
from argosy.diagnosis.cluster_chain import cluster_diagnosis, log_source, suspect
from argosy.diagnosis.installation import num_ready, operator_absence, router_service
from argosy.diagnosis.kubectl import Kubectl
from argosy.diagnosis.local_chain import local_diagnosis
from argosy.diagnosis.remedies import REMEDIES
from argosy.errors import FAILURE, OK, CommandError
from argosy.local.control_messages import FleetStatus, ReplicaStatus, RouterStatus, ServiceStatus

ROOT = Path(__file__).parents[2]
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

CASES: dict[str, tuple[Object, list[Object], str, str, list[str]]] = {
    "no operator": (service(seen=-1), [], "operator", "failed", ["never seen", "watchNamespaces"]),
    "an operator that stands still": (service(seen=2), [], "operator", "failed", ["generation 2, not 3"]),
    "a field that is wrong": (
        service(condition("Stalled", "True", "InvalidSpec", "spec.replicas: too many")),
        [],
        "accepted",
        "failed",
        ["spec.replicas: too many", "correct the field"],
    ),
    "a value that the API server refuses": (
        service(
            condition(
                "Degraded", "True", "ApiError", "PATCH deployments/qwen-engine: 422: less than cpu limit"
            ),
            condition("WorkloadReady", "False", "Starting", "0/2 updated replicas ready"),
        ),
        [],
        "accepted",
        "failed",
        ["ApiError: PATCH", "less than cpu limit", "correct the field of spec"],
    ),
    "a name that is taken": (
        service(condition("Degraded", "True", "NameConflict", "'qwen' belongs to the older other/qwen")),
        [pod()],
        "accepted",
        "failed",
        ["other/qwen", "spec.model.servedName or spec.model.aliases"],
    ),
    "paused": (
        service(condition("Ready", "False", "Paused", "the spec was changed"), paused=True),
        [],
        "accepted",
        "failed",
        ["spec.paused to false"],
    ),
    "stopped": (
        service(condition("Ready", "True", "Stopped"), replicas=0),
        [],
        "pods",
        "stopped",
        ["stopped pods", "spec.replicas is 0: requests get 503", "kubectl scale isvc qwen --replicas=1"],
    ),
    "stopped, its last replica still ends": (
        service(condition("Ready", "False", "RollingOut"), replicas=0),
        [],
        "pods",
        "stopped",
        ["spec.replicas is 0"],
    ),
    "scaled to zero": (
        service(condition("Ready", "True", "ScaledToZero"), replicas=0),
        [],
        "ready",
        "failed",
        [],
    ),
    "a quota": (
        service(condition("WorkloadReady", "False", "FailedCreate", "exceeded quota")),
        [],
        "pods",
        "failed",
        ["exceeded quota", "quota or Pod Security"],
    ),
    "no node": (
        service(NOT_READY),
        [unscheduled("0/2 nodes are available: 2 Insufficient nvidia.com/gpu.")],
        "node",
        "failed",
        ["pod qwen-0", "Insufficient nvidia.com/gpu", "add a node that fits"],
    ),
    "a cordoned node": (
        service(NOT_READY),
        [unscheduled("0/1 nodes are available: 1 node(s) were unschedulable.")],
        "node",
        "failed",
        ["kubectl uncordon a node that fits, add one"],
    ),
    "no claim": (
        service(NOT_READY),
        [unscheduled('persistentvolumeclaim "models" not found')],
        "node",
        "failed",
        ['"models" not found', "claimName"],
    ),
    "no volume yet": (
        service(NOT_READY),
        [pod(conditions={**NOT_LOADED, "PodReadyToStartContainers": "False"}, engine=CREATING)],
        "volumes",
        "waiting",
        ["not mounted yet"],
    ),
    "a fetch that goes on": (
        service(NOT_READY),
        [fetching("43 % 12.1/28.0 GiB, eta 70 s")],
        "model",
        "waiting",
        ["43 % 12.1/28.0 GiB, eta 70 s", "what to do: wait while it goes on", "qwen-0 -c fetch-model`"],
    ),
    "a fetch whose source gives no answer": (
        service(NOT_READY),
        [
            fetching(
                f"resolving the revision: waiting for hf://org/model (attempt 5 in 8.0 s): {NO_NAME_SERVER}"
            )
        ],
        "model",
        "waiting",
        ["cluster's DNS", "NetworkPolicies", "HF_ENDPOINT", "modelFetch.env", "a pvc:// source", "by itself"],
    ),
    "a fetch that gave up on its source": (
        service(NOT_READY),
        [failed_fetch(f"hf://org/model: gave up after 9 failures in a row: {NO_NAME_SERVER}")],
        "model",
        "failed",
        ["cluster's DNS", "NetworkPolicies", "HF_ENDPOINT", "modelFetch.env", "a pvc:// source", "by itself"],
    ),
    "a store that is locked": (
        service(NOT_READY),
        [fetching("waits for pod other", "StoreLocked")],
        "model",
        "failed",
        ["waits for pod other", "delete the one that stands still"],
    ),
    "a fetch that failed": (
        service(NOT_READY),
        [failed_fetch("401: no token")],
        "model",
        "failed",
        ["container fetch-model", "exit code 1", "401: no token", "tried again by itself"],
    ),
    "no image": (
        service(NOT_READY),
        [
            pod(
                conditions=NOT_LOADED,
                engine={
                    "ready": False,
                    "state": {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}},
                },
            )
        ],
        "engine",
        "failed",
        ["container engine", "ImagePullBackOff: not found", "correct engine.image of the Helm chart"],
    ),
    "an engine that exits": (
        service(NOT_READY),
        [
            pod(
                conditions=NOT_LOADED,
                engine={
                    "ready": False,
                    "restartCount": 4,
                    "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s"}},
                    "lastState": {"terminated": EXITED},
                },
            )
        ],
        "engine",
        "failed",
        ["exit code 2", "--max-model-len is too large", "4 restarts", "the last line of the log"],
    ),
    "too little memory": (
        service(NOT_READY),
        [
            pod(
                conditions=NOT_LOADED,
                engine={
                    "ready": False,
                    "state": {"terminated": {"reason": "OOMKilled", "exitCode": 137}},
                },
            )
        ],
        "engine",
        "failed",
        ["OOMKilled, exit code 137", "spec.resources.memory"],
    ),
    "evicted": (
        service(NOT_READY),
        [pod(conditions=NOT_LOADED, phase="Failed", reason="Evicted", message="The node was low on disk")],
        "engine",
        "failed",
        ["low on disk", "sizeLimit"],
    ),
    "a load": (
        service(NOT_READY),
        [pod(conditions=NOT_LOADED, engine={"ready": False, "state": {"running": {"startedAt": "T1"}}})],
        "loaded",
        "waiting",
        ["loads the model since T1", "the last line of the log"],
    ),
    "no router": (
        service(NOT_READY, condition("Routable", "Unknown", "NoRouter", "no router answers")),
        [pod(conditions={"inference.argosy.dev/routable": "False"})],
        "routable",
        "failed",
        ["no router answers", "router.replicas"],
    ),
    "a rollout": (
        service(condition("Ready", "False", "RollingOut", "1 old replicas still serve")),
        [pod()],
        "ready",
        "waiting",
        ["1 old replicas still serve"],
    ),
    "all is well": (
        service(condition("Ready", "True", "ReplicasRoutable")),
        [pod()],
        "ready",
        "done",
        ["2/2 replicas routable", "http://router/v1", "'qwen'"],
    ),
    "served, and degraded": (
        service(
            condition("Ready", "True", "ReplicasRoutable"),
            condition("Degraded", "True", "CanaryNotFound", "there is no InferenceService 'next'"),
        ),
        [pod()],
        "ready",
        "done",
        ["note: CanaryNotFound", "'next'"],
    ),
    "arguments that the engine refuses": (
        service(condition("Stalled", "True", "InvalidEngineArgs", "--max-logprobs must be at least -1")),
        [],
        "accepted",
        "failed",
        ["--max-logprobs must be", "correct the flag"],
    ),
    "an account that is not listed": (
        service(condition("Stalled", "True", "ServiceAccountNotAllowed", "serviceAccountName is 'x'")),
        [],
        "accepted",
        "failed",
        ["serviceAccountName is 'x'", "engine.serviceAccounts"],
    ),
    "idle at zero": (
        scaled(
            0, condition("Ready", "True", "ScaledToZero", "the next one is held until a replica has started")
        ),
        [],
        "ready",
        "done",
        ["the next one is held"],
    ),
    "paused at zero": (
        scaled(0, condition("Ready", "False", "Paused", "no replica starts while paused"), paused=True),
        [],
        "accepted",
        "failed",
        ["no replica starts", "spec.paused to false"],
    ),
    "a scaled service whose spec.replicas is 0": (
        scaled(3, NOT_READY, replicas=0),
        [],
        "pods",
        "waiting",
        ["3 replicas wanted", "none exist yet"],
    ),
    "scaled to zero and not there yet": (
        scaled(0, condition("Ready", "False", "RollingOut", "1 replica ends")),
        [],
        "ready",
        "waiting",
        ["0 replicas wanted", "1 replica ends"],
    ),
    "scaled by two": (
        scaled(2, NOT_READY, condition("Degraded", "True", "ScaledTwice", "an-hpa writes spec.replicas")),
        [unscheduled("0/2 nodes are available")],
        "node",
        "failed",
        ["note: ScaledTwice: an-hpa writes", "remove one of the two"],
    ),
    "a time zone that does not exist": (
        scaled(
            2,
            condition("Ready", "True", "ReplicasRoutable"),
            condition("Degraded", "True", "UnknownTimeZone", "schedules in Mars are ignored"),
        ),
        [pod()],
        "ready",
        "done",
        ["note: UnknownTimeZone", "correct spec.scaling.schedules"],
    ),
}
CASES["scaled to zero"] = (*CASES["scaled to zero"][:2], "pods", "stopped", ["--replicas=1"])


@pytest.mark.parametrize("case", CASES)
def test_the_first_link_that_is_not_done_is_told(case: str) -> None:
    resource, pods, name, state, words = CASES[case]
    found = cluster_diagnosis(resource, pods, log=["a line", "the last line of the log"])
    text = render(found)
    assert (found.links[-1].name, found.links[-1].state) == (name, state), text
    assert [link for link in found.links[:-1] if link.state != "done"] == []
    assert all(word in text for word in words), text
    assert text.startswith("team/qwen\n")


NO_GPU = "0/2 nodes are available: 2 Insufficient nvidia.com/gpu."


NOT_SERVING = {"ContainersReady": "False", "Ready": "False"}
"""Of a pod that has served: its gate stays open while the engine is started again."""


def deleted(*conditions: Object, **metadata: Any) -> Object:
    found = service(*conditions)
    found["metadata"] |= {"deletionTimestamp": "2026-11-27T12:00:00Z", **metadata}
    return found


def of_old_revision() -> Object:
    return pod("qwen-old", revision="old")


@pytest.mark.parametrize(
    ("resource", "pods", "is_served"),
    [
        (scaled(4, NOT_READY), [pod("a"), pod("b"), unscheduled(NO_GPU)], True),
        (service(NOT_READY), [pod("a"), unscheduled(NO_GPU)], True),
        (service(NOT_READY), [unscheduled(NO_GPU)], False),
        (service(NOT_READY), [of_old_revision(), unscheduled(NO_GPU)], True),
        (service(NOT_READY), [pod("a"), of_old_revision(), unscheduled(NO_GPU)], True),
        (service(condition("Ready", "False", "CanaryFailed")), [of_old_revision()], True),
        (service(condition("Ready", "False", "CanaryHeld")), [of_old_revision(), pod("a")], True),
        (service(NOT_READY, seen=2), [pod("a"), unscheduled(NO_GPU)], False),
        (service(condition("Ready", "True"), seen=2), [pod("a"), pod("b")], False),
        (service(NOT_READY), [pod("a", conditions=NOT_SERVING), unscheduled(NO_GPU)], False),
        (deleted(condition("Ready", "True")), [pod("a")], False),
        (
            service(NOT_READY, condition("Routable", "Unknown", "NoRouter")),
            [pod("a"), unscheduled(NO_GPU)],
            False,
        ),
        (
            service(condition("Stalled", "True", "InvalidEngineArgs", "--a must be 1")),
            [pod("a"), unscheduled(NO_GPU)],
            True,
        ),
        (service(condition("Stalled", "True", "InvalidEngineArgs", "--a must be 1")), [], False),
        (service(condition("Ready", "False", "Paused"), paused=True), [of_old_revision()], True),
        (service(condition("Ready", "False", "NameConflict", "of other")), [pod("a")], False),
    ],
    ids=[
        "an added replica finds no GPU",
        "one of a fixed number finds none",
        "none is routable",
        "only the old replicas serve",
        "a rollout is under way",
        "a canary failed",
        "a canary is held",
        "the operator stands still",
        "the operator has not seen the edit of a service that was ready",
        "the engine that served has crashed",
        "the service is being deleted",
        "no router",
        "the change is refused",
        "the manifest is refused from the beginning",
        "the change is held back",
        "its name is another service's",
    ],
)
def test_a_problem_of_one_replica_is_told_while_others_serve(
    resource: Object, pods: list[Object], is_served: bool
) -> None:
    found = cluster_diagnosis(resource, pods)
    assert found.is_served is is_served
    text = render(found)
    assert found.state != "done"
    assert ("note: clients are served meanwhile" in text) is is_served


HALTED = condition("Ready", "False", "RolloutHalted", "pod qwen-0 does not come up")
CRASHING = {
    "ready": False,
    "restartCount": 4,
    "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s"}},
    "lastState": {"terminated": EXITED},
}


@pytest.mark.parametrize(
    ("failed", "own"),
    [
        (pod(conditions=NOT_LOADED, engine=CRASHING), "correct what the engine's last lines name; or "),
        (failed_fetch("401: no token"), "remove the cause that the message names; "),
        (unscheduled(NO_GPU), "add a node that fits, or change spec.resources and spec.placement; or "),
    ],
    ids=["an engine that exits", "a fetch that failed", "no node"],
)
def test_the_way_back_from_a_halted_rollout_is_told(failed: Object, own: str) -> None:
    found = cluster_diagnosis(service(HALTED), [of_old_revision(), failed])
    remedy = found.links[-1].remedy
    assert remedy.startswith(own)
    assert "or apply the previous manifest (`git revert`, say): the rollout is halted" in remedy
    assert "it is started again by itself" not in remedy
    assert "note: clients are served meanwhile: 1 replica is routable" in render(found)
    assert "previous manifest" not in cluster_diagnosis(service(NOT_READY), [failed]).links[-1].remedy


def test_a_halted_rollout_without_a_replica_that_fails_tells_the_way_back() -> None:
    found = cluster_diagnosis(service(HALTED), [pod()])
    assert found.links[-1].remedy.startswith("apply the previous manifest, or correct")


def test_what_holds_a_service_that_is_being_deleted_is_named() -> None:
    found = cluster_diagnosis(deleted(condition("Ready", "True"), finalizers=["a/b"]), [pod()])
    assert (found.links[-1].name, found.is_served) == ("manifest", False)
    assert "deleted since 2026-11-27T12:00:00Z" in found.links[-1].detail
    assert "finalizers hold it: a/b" in found.links[-1].detail
    assert "finalizer" not in cluster_diagnosis(deleted(), []).links[-1].detail


@pytest.mark.parametrize(
    ("pods", "told"),
    [
        ([pod("a")], "1 replica is routable"),
        ([pod("a"), pod("b")], "2 replicas are routable"),
        ([pod("a"), of_old_revision()], "2 replicas are routable, 1 of the newest revision"),
        ([of_old_revision()], "1 replica is routable, none of the newest revision"),
    ],
)
def test_it_is_told_whether_the_newest_revision_serves(pods: list[Object], told: str) -> None:
    found = cluster_diagnosis(service(NOT_READY), [*pods, unscheduled(NO_GPU)])
    assert found.notes == (f"clients are served meanwhile: {told}",)


def image_missing(reason: str, **engine: Any) -> Diagnosis:
    waiting = {"ready": False, "state": {"waiting": {"reason": reason, "message": "not found"}}}
    return cluster_diagnosis(service(NOT_READY, engine=engine), [pod(conditions=NOT_LOADED, engine=waiting)])


@pytest.mark.parametrize("reason", ["ImagePullBackOff", "ErrImagePull", "InvalidImageName"])
def test_who_can_correct_an_image_is_told(reason: str) -> None:
    assert "correct engine.image of the Helm chart" in image_missing(reason).links[-1].remedy
    assert "set spec.engine.image" in image_missing(reason).links[-1].remedy
    assert "correct engine.vllmImage of" in image_missing(reason, type="vllm").links[-1].remedy
    assert image_missing(reason, image="mine:1").links[-1].remedy == REMEDIES[reason]


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        ("CreateContainerConfigError", 'secret "token" not found; last run: Error, exit code 2'),
        ("ImagePullBackOff", "ImagePullBackOff: "),
        ("CrashLoopBackOff", "container engine: Error, exit code 2"),
    ],
)
def test_what_a_container_that_has_run_waits_for_is_told(reason: str, told: str) -> None:
    waiting = {"reason": reason, "message": 'secret "token" not found'}
    state = {"ready": False, "state": {"waiting": waiting}, "lastState": {"terminated": EXITED}}
    (link,) = cluster_diagnosis(service(NOT_READY), [pod(conditions=NOT_LOADED, engine=state)]).links[-1:]
    assert link.name == "engine"
    assert told in link.detail
    assert ("last lines" in link.remedy) is (reason == "CrashLoopBackOff")
    fetch = {**state, "lastState": {"terminated": {**EXITED, "message": "no such revision"}}}
    fetches = pod(conditions=NOT_LOADED, engine=CREATING, fetch=fetch)
    (link,) = cluster_diagnosis(service(NOT_READY), [fetches]).links[-1:]
    assert link.name == "model"
    assert ("no such revision" in link.detail) is (reason == "CrashLoopBackOff")


STEPS = [{"weight": 10}, {"weight": 50, "hold": True}]


@pytest.mark.parametrize(
    ("canary", "remedy"),
    [
        (
            {"steps": STEPS},
            "set spec.rollout.canary.action to Continue (with step: 2), Promote or Abort, with revision new; or remove "
            "spec.rollout.canary.steps[1].hold",
        ),
        (
            {"steps": STEPS, "hold": True},
            "set spec.rollout.canary.action to Promote or Abort, with revision new; or remove spec.rollout.canary.hold",
        ),
        ({"steps": STEPS[:1]}, REMEDIES["CanaryHeld"]),
    ],
    ids=["the step", "the rollout", "edited since"],
)
def test_the_field_that_holds_a_canary_is_named(canary: Object, remedy: str) -> None:
    resource = service(condition("Ready", "False", "CanaryHeld", "m"), rollout={"canary": canary})
    resource["status"]["rollout"] = {"step": 2, "revision": "new"}
    assert cluster_diagnosis(resource, [pod()]).links[-1].remedy == remedy


def test_the_secret_that_a_fetch_lacks_is_named() -> None:
    ended = {
        "reason": "Error",
        "exitCode": 2,
        "message": "the Secret of spec.model.secretRef is missing or empty",
    }
    failed = pod(
        conditions=NOT_LOADED, engine=CREATING, fetch={"ready": False, "state": {"terminated": ended}}
    )
    model = {"source": "hf://org/model", "secretRef": {"name": "hub-token"}}
    found = cluster_diagnosis(service(NOT_READY, model=model), [failed])
    assert "create the Secret team/hub-token" in found.links[-1].remedy


def test_the_claim_behind_the_mount_path_is_named() -> None:
    ended = {**EXITED, "message": "argosy serve: /model/nope is no directory"}
    failed = pod(conditions=NOT_LOADED, engine={"ready": False, "state": {"terminated": ended}})
    for source, told in (("pvc://torch/nope", True), ("file:///model/nope", False)):
        found = cluster_diagnosis(service(NOT_READY, model={"source": source}), [failed])
        assert ("PersistentVolumeClaim torch of spec.model.source" in found.links[-1].remedy) is told


# routers and operator, whatever the status says

URL = "http://argosy-router.argosy-system.svc:8080/v1"
NOW = datetime.datetime(2026, 11, 27, 12, tzinfo=datetime.UTC)
READY = service(condition("Ready", "True", "ReplicasRoutable"))
READY["status"]["url"] = URL
HELD = {"spec": {"holderIdentity": "argosy-operator-0", "renewTime": "2026-11-27T11:59:58.000000Z"}}


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        (URL, ("argosy-system", "argosy-router")),
        ("https://argosy-router.a.svc.cluster.local/v1", ("a", "argosy-router")),
        ("https://models.example.com/v1", None),
        ("http://[::1/v1", None),
        ("", None),
    ],
)
def test_the_routers_service_is_that_of_the_status(url: str, expected: tuple[str, str] | None) -> None:
    assert router_service({"status": {"url": url}}) == expected
    assert router_service({}) is None


def test_endpoints_count_once_and_only_while_they_are_ready() -> None:
    def endpoint(name: str, *, ready: bool | None) -> Object:
        return {"addresses": ["x"], "conditions": {"ready": ready}, "targetRef": {"name": name}}

    ipv4 = {"endpoints": [endpoint("a", ready=True), endpoint("b", ready=False), endpoint("c", ready=None)]}
    assert num_ready([ipv4, {"endpoints": [endpoint("a", ready=True)]}, {"endpoints": None}]) == 2
    assert num_ready([]) == 0


@pytest.mark.parametrize(
    ("lease", "told"),
    [
        (HELD, ""),
        ({"spec": {**HELD["spec"], "renewTime": "2026-11-27T11:57:00Z"}}, "last renewed at 2026-11-27T11:57"),
        ({"spec": {"holderIdentity": ""}}, "nobody holds Lease argosy-system/argosy-operator"),
        ({"spec": {"holderIdentity": "a", "renewTime": None}}, ""),
        (None, "there is no Lease argosy-system/argosy-operator"),
    ],
)
def test_an_operator_that_does_not_run_is_known_by_its_lease(lease: Object | None, told: str) -> None:
    found = operator_absence(lease, "argosy-system", NOW)
    assert told in found
    assert bool(found) is bool(told)


def installed(tmp_path: Path, endpoints: Object, lease: Object, resource: Object = READY) -> Diagnosis:
    program = fake_kubectl(
        tmp_path,
        {
            "get inferenceservices": resource,
            "get pods": {"items": [pod()]},
            "get endpointslices.discovery.k8s.io --namespace argosy-system "
            "--selector kubernetes.io/service-name=argosy-router": endpoints,
            "get leases.coordination.k8s.io argosy-operator --namespace argosy-system": lease,
            "get events": {"items": []},
        },
    )
    return why.in_cluster(Kubectl(program=program), "qwen")


ONE_ROUTER = {"items": [{"endpoints": [{"addresses": ["10.0.0.1"]}]}]}
NO_LEASE = {"error": 'Error from server (NotFound): leases "argosy-operator" not found'}
FORBIDDEN = {"error": "Error from server (Forbidden): leases is forbidden"}


def test_after_an_uninstall_the_last_status_is_not_believed(tmp_path: Path) -> None:
    found = installed(tmp_path, {"items": []}, {"spec": {"holderIdentity": ""}})
    assert (found.links[-1].name, found.links[-1].state, found.is_served) == ("router", "failed", False)
    text = render(found)
    assert "Service argosy-system/argosy-router has no endpoint that is ready" in text
    assert "note: no operator runs: nobody holds Lease argosy-system/argosy-operator" in text
    assert "clients are served" not in text


def test_without_an_operator_routers_serve_and_it_is_told(tmp_path: Path) -> None:
    found = installed(tmp_path, ONE_ROUTER, NO_LEASE)
    assert (found.links[-1].name, found.is_served) == ("ready", True)
    assert [link.name for link in found.links][-3:] == ["routable", "router", "ready"], "pods are looked at"
    assert "no operator runs: there is no Lease" in render(found)


def test_what_may_not_be_read_is_no_problem(tmp_path: Path) -> None:
    found = installed(tmp_path, FORBIDDEN, FORBIDDEN)
    assert ([link.name for link in found.links], found.notes) == (["manifest", "ready"], ())


@pytest.mark.parametrize(
    ("resource", "routable", "is_served"),
    [
        (READY, 2, True),
        (service(condition("Ready", "False", "RolloutHalted", "pod a does not come up")), 2, True),
        (service(condition("Ready", "False", "RolloutHalted", "pod a does not come up")), 0, False),
        (
            service(
                condition("Ready", "False", "NoRouter", "no router"),
                condition("Routable", "Unknown", "NoRouter"),
            ),
            2,
            False,
        ),
        (service(condition("Ready", "True"), seen=2), 2, False),
    ],
    ids=["ready", "halted", "halted, and none serves", "no router", "an edit is not seen"],
)
def test_without_the_right_to_read_pods_the_status_is_told(
    resource: Object, routable: int, is_served: bool, tmp_path: Path
) -> None:
    resource = {**resource, "status": {**resource["status"], "routableReplicas": routable}}
    pods = {"error": 'Error from server (Forbidden): pods is forbidden: User "a" cannot list'}
    program = fake_kubectl(tmp_path, {"get inferenceservices": resource, "get pods": pods, "get": FORBIDDEN})
    found = why.in_cluster(Kubectl(program=program), "qwen")
    text = render(found)
    assert found.is_served is is_served, text
    assert "note: its pods could not be read" in text
    assert "pods is forbidden" in text
    assert not any(link.name in ("pods", "node", "engine") for link in found.links)


def test_a_kubelets_word_on_a_log_that_is_gone_is_no_log(tmp_path: Path) -> None:
    resource, pods, *_ = CASES["an engine that exits"]
    program = fake_kubectl(
        tmp_path,
        {
            "get inferenceservices": resource,
            "get pods": {"items": pods},
            "logs qwen-0": {"text": "unable to retrieve container logs for containerd://0123\n"},
            "get events": {"items": []},
        },
    )
    found = why.in_cluster(Kubectl(program=program), "qwen")
    assert found.links[-1].lines == ()


def test_the_pod_that_has_come_least_far_is_looked_at_and_of_the_newest_revision() -> None:
    loads = pod("qwen-loads", conditions=NOT_LOADED, engine={"ready": False})
    pods = [pod("qwen-ready"), loads, unscheduled("no node")]
    assert suspect(service(), pods[:2]) is loads
    assert suspect(service(), pods) is pods[2]
    old = unscheduled("no node")
    old["metadata"]["labels"]["inference.argosy.dev/revision"] = "old"
    assert suspect(service(), [pods[0], old]) is pods[0]
    assert suspect(service(), [old]) is old
    assert suspect(service(), []) is None


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("a fetch that goes on", ("fetch-model", False)),
        ("a fetch that failed", ("fetch-model", True)),
        ("an engine that exits", ("engine", True)),
        ("too little memory", ("engine", False)),
        ("a load", ("engine", False)),
        ("no image", None),
        ("all is well", None),
    ],
)
def test_whose_log_is_read(case: str, expected: tuple[str, bool] | None) -> None:
    (only,) = CASES[case][1]
    assert log_source(only) == expected


@pytest.mark.parametrize(
    ("line", "step"),
    [
        ("2026-11-26 20:00:00 INFO [ApiServer_1] loading the model: weights, 43 %", "weights, 43 %"),
        ("INFO loading the model: kv cache", "kv cache"),
        ("loading weights: 3.00 GiB of 7.00 GiB (43 %) after 12 s", "weights, 43 %"),
        ("loaded 7.00 GiB of weights in 20.0 s", ""),
    ],
)
def test_how_far_a_load_is_is_read_from_the_log(line: str, step: str) -> None:
    assert load_step(["loading the model: config", line] if step else [line]) == step
    resource, pods, *_ = CASES["a load"]
    found = cluster_diagnosis(resource, pods, log=[line, *["GET /health"] * 2 * MAX_LINES])
    assert len(found.links[-1].lines) == MAX_LINES
    assert (f"loads the model ({step}) since T1" in render(found)) is bool(step)


def test_every_reason_that_needs_a_person_has_a_remedy() -> None:
    """Those of the table in docs/operations.md."""
    text = (ROOT / "docs" / "operations.md").read_text()
    table = text[text.index("| reason | what to do |") :].split("\n\n")[0]
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", table, re.MULTILINE)
    reasons = {reason for row in rows for reason in re.findall(r"`(\w+)`", row)}
    assert len(reasons) > 10
    assert reasons <= REMEDIES.keys()


def test_links_behind_the_first_problem_are_left_out() -> None:
    links = [Link(name=str(number), state="done" if number < 2 else "failed") for number in range(5)]
    assert [link.name for link in until_first_problem(links)] == ["0", "1", "2"]
    assert Diagnosis(service="s", links=()).state == "waiting"


def test_the_cluster_is_read_with_kubectl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    resource, pods, *_ = CASES["an engine that exits"]
    fake_kubectl(
        tmp_path,
        {
            "--namespace=team get inferenceservices.inference.argosy.dev qwen -o json": resource,
            "get pods --selector inference.argosy.dev/service=qwen": {"items": pods},
            "logs qwen-0 -c engine --tail=100 --previous": {"text": "one\nValueError: it is too long\n"},
            "get events": {"items": []},
        },
    )
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert why.main(["qwen", "-n", "team"]) == FAILURE
    shown = capsys.readouterr().out
    assert "ValueError: it is too long" in shown
    assert why.main(["qwen", "-n", "team", "-o", "json"], cluster=True) == FAILURE
    assert json.loads(capsys.readouterr().out)["links"][-1]["name"] == "engine"


@pytest.mark.parametrize(
    ("names", "told"),
    [
        ([], "there are: none"),
        (["b", "a"], "there are: a, b$"),
        ([f"s{n:02}" for n in range(12)], "s09 and 2 more"),
    ],
)
def test_a_service_must_be_named_unless_there_is_one(names: list[str], told: str, tmp_path: Path) -> None:
    resource, pods, *_ = CASES["all is well"]
    listed = {"items": [{"metadata": {"name": name}} for name in names]}
    program = fake_kubectl(tmp_path, {"get inferenceservices.inference.argosy.dev -o": listed})
    with pytest.raises(CommandError, match=f"name a service; .*{told}"):
        why.in_cluster(Kubectl(program=program), None)
    program = fake_kubectl(
        tmp_path,
        {
            "get inferenceservices.inference.argosy.dev -o": {"items": [{"metadata": {"name": "qwen"}}]},
            "get inferenceservices.inference.argosy.dev qwen": resource,
            "get pods": {"items": pods},
            "get events": {"items": []},
        },
    )
    assert why.in_cluster(Kubectl(program=program), None).is_served


def test_the_only_service_of_a_local_fleet_needs_no_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    local = ServiceStatus(
        key="default/tiny", model="tiny", desired=1, revision="r", replicas=(replica("Routable"),)
    )
    other = msgspec.structs.replace(local, key="default/other")
    router = RouterStatus(url="http://127.0.0.1:8080/v1", is_ready=True)
    services = (local,)
    monkeypatch.setattr(
        why, "current_status", lambda _, **__: FleetStatus(pid=1, router=router, services=services)
    )
    assert why.main(["--state-dir", str(tmp_path)]) == OK
    services = (local, other)
    with pytest.raises(CommandError, match="name a service; there are: other, tiny"):
        why.main(["--state-dir", str(tmp_path)])


def test_what_a_tenants_program_has_written_moves_no_cursor() -> None:
    screen = "\x1b[2J\x1b]52;c;Y3VybA==\x07all is well"
    failed = Link(name="engine", state="failed", detail=f"pod p: {screen}", lines=(f"a\tb {screen}",))
    shown = render(Diagnosis(service="team/a", links=(failed,), notes=(screen,)))
    assert all(line.isprintable() for line in shown.splitlines())
    assert "all is well" in shown
    assert "    a   b ?[2J" in shown


def test_a_line_of_any_length_is_cut() -> None:
    failed = Link(name="engine", state="failed", detail="d" * 10**6, lines=("l" * 10**6,))
    shown = render(Diagnosis(service="team/a", links=(failed,), notes=("n" * 10**6,)))
    assert len(shown) < 4 * MAX_WIDTH
    assert shown.count("more characters)") == 3


def test_json_for_a_terminal_has_what_is_not_printable_as_numbers() -> None:
    hostile = '\x1b[2J \x9b2J \x7f \u202e \U000e0001 \u00fc \U0001f600 "\n'
    found = Diagnosis(service="team/a", links=(), notes=(hostile,))
    shown = render_json(found)
    assert all(line.isprintable() for line in shown.splitlines())
    assert "\u00fc \U0001f600" in shown
    assert json.loads(shown)["notes"] == [hostile]


def test_what_kubectl_says_of_an_error_moves_no_cursor(tmp_path: Path) -> None:
    program = fake_kubectl(tmp_path, {"get": {"error": "Error from server: \x1b[2Jall is well"}})
    with pytest.raises(CommandError, match=r"\?\[2Jall is well"):
        why.in_cluster(Kubectl(program=program), "qwen")


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        (
            {
                "get inferenceservices.inference.argosy.dev qwen": {
                    "error": 'Error from server (NotFound): inferenceservices "qwen" not found'
                },
                "get inferenceservices.inference.argosy.dev -o": {"items": [{"metadata": {"name": "qwen3"}}]},
            },
            "there are: qwen3",
        ),
        (
            {"get": {"error": "error: the server doesn't have a resource type 'inferenceservices'"}},
            "install the chart",
        ),
        ({"get": {"error": "Unable to connect to the server: dial tcp: refused"}}, "dial tcp: refused"),
        (
            {
                "get": {
                    "error": "Error from server (NotFound): the server could not find the requested resource"
                }
            },
            "is not a cluster. Without a kubeconfig it asks localhost:8080",
        ),
    ],
    ids=["no such service", "no such kind", "no cluster", "a router at localhost:8080"],
)
def test_what_cannot_be_read_is_said(answers: dict[str, Object], said: str, tmp_path: Path) -> None:
    program = fake_kubectl(tmp_path, answers)
    with pytest.raises(CommandError, match=re.escape(said)):
        why.in_cluster(Kubectl(program=program), "qwen")


def test_without_kubectl_the_remedy_is_named() -> None:
    with pytest.raises(CommandError, match="is not installed"):
        Kubectl(program="no-such-kubectl").get("pods")


def test_a_volume_that_does_not_mount_is_told_by_its_event(tmp_path: Path) -> None:
    resource, pods, *_ = CASES["no volume yet"]
    event = {
        "reason": "FailedMount",
        "message": 'secret "token" not found',
        "lastTimestamp": "2026-01-01T00:00:00Z",
    }
    program = fake_kubectl(
        tmp_path,
        {
            "get inferenceservices": resource,
            "get pods": {"items": pods},
            "get events --field-selector involvedObject.name=qwen-0,type=Warning": {"items": [event]},
        },
    )
    found = why.in_cluster(Kubectl(program=program), "qwen")
    assert (found.links[-1].name, found.links[-1].state) == ("volumes", "failed")
    assert 'FailedMount: secret "token" not found' in render(found)


def test_who_makes_a_services_key_anew_is_told() -> None:
    resource, (hangs,), *_ = CASES["no volume yet"]
    hangs = msgspec.json.decode(msgspec.json.encode(hangs))
    hangs["spec"]["volumes"] = [
        {"name": "mine", "secret": {"secretName": "token"}},
        {"name": "argosy-key", "secret": {"secretName": "qwen-engine-key"}},
    ]
    for name, told in (
        ("qwen-engine-key", "the operator makes the Secret"),
        ("token", "what the event names"),
    ):
        event = f'FailedMount: MountVolume.SetUp failed for volume "v" : secret "{name}" not found'
        found = cluster_diagnosis(resource, [hangs], events=[event])
        assert found.links[-1].name == "volumes"
        assert told in found.links[-1].remedy


# replicas of several pods


def worker(name: str = "qwen-0-nodes-1", **arguments: Any) -> Object:
    """A further node of `qwen-0`, which has neither readiness gate nor probes."""
    found = pod(name, **arguments)
    found["metadata"]["labels"] |= {
        "app.kubernetes.io/component": "engine-node",
        "inference.argosy.dev/leader": "leader",
    }
    kept = [each for each in found["status"]["conditions"] if each["type"] != "inference.argosy.dev/routable"]
    found["status"]["conditions"] = kept
    return found


def loading_leader() -> Object:
    found = pod(conditions=NOT_LOADED, engine={"ready": False, "state": {"running": {"startedAt": "T1"}}})
    found["metadata"]["uid"] = "leader"
    return found


def unscheduled_worker() -> Object:
    found = worker(conditions={"ContainersReady": "False", "Ready": "False"}, engine=CREATING)
    stuck = unscheduled("0/3 nodes are available: 3 Insufficient nvidia.com/gpu.")
    found["spec"]["nodeName"] = None
    found["status"]["conditions"] = stuck["status"]["conditions"][:1]
    return found


CRASHED = {**CRASHING, "restartCount": 2}


@pytest.mark.parametrize(
    ("others", "name", "words"),
    [
        ([unscheduled_worker()], "node", ["pod qwen-0-nodes-1", "Insufficient nvidia.com/gpu"]),
        ([worker(engine=CRASHED, conditions={"ContainersReady": "False"})], "engine",
         ["pod qwen-0-nodes-1, container engine", "exit code 2", "2 restarts"]),
        ([], "loaded", ["pod qwen-0 waits", "0 of its 1 workers exist", "describe statefulset"]),
        ([worker()], "loaded", ["pod qwen-0: the engine loads the model since T1"]),
    ],
    ids=["no node takes a worker", "a worker exits", "a worker cannot be created", "all load"],
)  # fmt: skip
def test_the_further_nodes_of_a_replica_are_looked_at(
    others: list[Object], name: str, words: list[str]
) -> None:
    resource = service(NOT_READY, parallelism={"nodes": 2}, replicas=1)
    found = cluster_diagnosis(resource, [loading_leader(), *others], log=["a line"])
    text = render(found)
    assert found.links[-1].name == name, text
    assert all(word in text for word in words), text
    assert "1 exist" in text, "workers are no replicas"


def test_a_worker_that_runs_is_no_problem_and_serves_nobody() -> None:
    resource = service(NOT_READY, parallelism={"nodes": 2}, replicas=2)
    leader = pod()
    leader["metadata"]["uid"] = "leader"
    stuck = unscheduled(NO_GPU)
    stuck["metadata"]["name"] = "qwen-1"
    found = cluster_diagnosis(resource, [leader, worker(), stuck])
    assert (found.links[-1].name, found.serving) == ("node", 1)


# the local fleet


def test_what_a_canary_waits_for_is_told() -> None:
    resource = service(
        condition("Ready", "False", "CanaryAnalyzing", "step 1 of 1: revision new answers 0 %")
    )
    resource["status"]["rollout"] = {"step": 1, "revision": "new", "message": "too few requests"}
    (link,) = cluster_diagnosis(resource, [pod()]).links[-1:]
    assert link.detail.endswith("answers 0 %; too few requests")
    assert "minRequests" in link.remedy


def replica(phase: Any, reason: str = "", *, is_current: bool = True, restarts: int = 0) -> ReplicaStatus:
    return ReplicaStatus(
        name="tiny-0",
        service="default/tiny",
        revision="r",
        is_current=is_current,
        phase=phase,
        reason=reason,
        restarts=restarts,
        pid=7,
    )


@pytest.mark.parametrize(
    ("replicas", "router_ready", "name", "state", "words"),
    [
        ([replica("Routable")], True, "ready", "done", ["http://127.0.0.1:8080/v1", "'tiny'"]),
        ([replica("Routable"), replica("Ready")], True, "routable", "waiting", ["not synced"]),
        ([replica("Routable")], False, "routable", "failed", ["the port is taken", "log of router"]),
        ([replica("Starting")], True, "loaded", "waiting", ["loads the model", "log of tiny-0"]),
        (
            [replica("Routable", is_current=False), replica("BackOff", "exit code 2", restarts=3)],
            True,
            "process",
            "failed",
            ["exit code 2, 3 restarts", "log of tiny-0", "argosy logs tiny-0", "started again by itself"],
        ),
        (
            [replica("BackOff", "exited with code 2; the next `argosy up` starts it again")],
            True,
            "process",
            "failed",
            ["correct what its last lines name, and `argosy up -f FILE`. `argosy logs"],
        ),
        ([], True, "process", "waiting", ["none has started yet"]),
        (
            [replica("Routable", is_current=False), replica("Starting")],
            True,
            "loaded",
            "waiting",
            ["note: clients are served meanwhile: 1 replica is routable, none of the newest revision"],
        ),
    ],
)
def test_a_local_fleet(
    replicas: list[ReplicaStatus], router_ready: bool, name: str, state: str, words: list[str]
) -> None:
    local = ServiceStatus(key="default/tiny", model="tiny", desired=1, revision="r", replicas=tuple(replicas))
    router = RouterStatus(
        url="http://127.0.0.1:8080/v1",
        is_ready=router_ready,
        reason="" if router_ready else "the port is taken",
    )
    status = FleetStatus(pid=1, router=router, services=(local,))
    found = local_diagnosis(status, local, lambda process: [f"log of {process}"])
    text = render(found)
    assert (found.links[-1].name, found.links[-1].state) == (name, state), text
    assert all(word in text for word in words), text


def test_the_way_back_from_a_halted_rollout_of_a_local_fleet_is_told() -> None:
    local = ServiceStatus(
        key="default/tiny",
        model="tiny",
        desired=1,
        revision="r",
        reason="RolloutHalted: tiny-0 does not become ready (exit code 1)",
        replicas=(replica("Routable", is_current=False), replica("BackOff", "exit code 1")),
    )
    router = RouterStatus(url="http://127.0.0.1:8080/v1", is_ready=True)
    status = FleetStatus(pid=1, router=router, services=(local,))
    remedy = local_diagnosis(status, local, lambda _: []).links[-1].remedy
    assert "`argosy up -f FILE` with the previous manifest" in remedy
    assert "started again by itself" not in remedy


def test_a_service_that_is_scaled_to_zero_here() -> None:
    local = ServiceStatus(key="default/tiny", model="tiny", desired=0, revision="r")
    status = FleetStatus(pid=1, router=RouterStatus(url="u", is_ready=True), services=(local,))
    found = local_diagnosis(status, local, lambda _: [])
    assert (found.links[-1].state, found.links[-1].detail) == ("stopped", "spec.replicas is 0")
    assert not found.is_served


def test_the_exit_code_says_whether_clients_are_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resource, pods, *_ = CASES["all is well"]
    fake_kubectl(
        tmp_path,
        {"get inferenceservices": resource, "get pods": {"items": pods}, "get events": {"items": []}},
    )
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert why.main(["qwen", "--cluster"]) == OK
