"""Tables for conditions: the status follows from resource, observation and plan."""

from __future__ import annotations

from typing import Any

import pytest
from builders import CONFIG, NOW, gate_condition, isvc_object, pod, pod_object
from harness import new_cluster
from msgspec import convert, to_builtins

from argosy_operator.cluster.store import Store
from argosy_operator.desired.children import plan_children
from argosy_operator.names import SERVED_ANNOTATION
from argosy_operator.observation import Observation, Routers
from argosy_operator.pod import Pod, Problem, read_pod
from argosy_operator.reconcile.metrics import OperatorMetrics
from argosy_operator.reconcile.reporter import Reporter
from argosy_operator.status.report import invalid_status, status
from argosy_resource.fleet_document import LossReason, LostName
from argosy_resource.types import InferenceServiceStatus, parse

REVISION = plan_children(parse(isvc_object()), Observation(), CONFIG).revision
ALIVE = Routers(known=True, alive=1)
OWN = frozenset({"team/tiny"})


def live_deployment(
    replicas: int = 2, *, seen: bool = True, conditions: tuple[Any, ...] = ()
) -> dict[str, Any]:
    wanted = plan_children(parse(isvc_object(replicas=replicas)), Observation(), CONFIG).deployment
    return {
        **wanted,
        "metadata": {**wanted["metadata"], "generation": 2},
        "status": {"observedGeneration": 2 if seen else 1, "conditions": list(conditions)},
    }


def report(
    pods: tuple[Pod, ...] = (),
    *,
    replicas: int = 2,
    deployment: dict[str, Any] | None = None,
    routers: Routers = ALIVE,
    lost_names: tuple[LostName, ...] = (),
    lacks_canary: bool = False,
    failure: Problem | None = None,
    **spec: Any,
) -> InferenceServiceStatus:
    service = parse(isvc_object(replicas=replicas, **spec))
    deployment = deployment if deployment is not None else live_deployment(replicas)
    observed = Observation(
        deployment=deployment, pods=pods, routers=routers, lost_names=lost_names, lacks_canary=lacks_canary
    )
    plan = plan_children(service, observed, CONFIG)
    return status(service, observed, plan, config=CONFIG, now=NOW, failure=failure)


def lost(name: str, reason: LossReason = "NameConflict") -> LostName:
    return LostName(name=name, reason=reason, why="is another's")


def new(number: int, **state: Any) -> Pod:
    return pod(f"new-{number}", REVISION, **state)


def old(number: int, **state: Any) -> Pod:
    return pod(f"old-{number}", "old", **state)


def states(made: InferenceServiceStatus) -> dict[str, tuple[str, str]]:
    return {each.type: (each.status, each.reason) for each in made.conditions}


STARTING = {"ready": False, "gate": ""}
NOWHERE = {**STARTING, "node": ""}
NO_CLAIM = '0/2 nodes are available: persistentvolumeclaim "weights" not found. preemption: not helpful.'
NO_GPU = "0/2 nodes are available: 2 Insufficient nvidia.com/gpu."
LONG_AGO, LATELY = "2025-12-31T23:54:59Z", "2025-12-31T23:55:01Z"
GPU_REVISION = plan_children(parse(isvc_object(resources={"gpu": {}})), Observation(), CONFIG).revision
LOST = {"is_ready": False, "is_lost": True}
CRASH = Problem("CrashLoopBackOff", "back-off 10s")
CANARY = {"canary": {"service": "next", "weight": 10}}
NO_HOST_PATH = {
    "type": "ReplicaFailure",
    "status": "True",
    "reason": "FailedCreate",
    "message": 'pods "a" is forbidden: violates PodSecurity "restricted:latest": restricted volume types '
    '(volume "argosy-models" uses restricted volume type "hostPath")',
}
QUOTA = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": "quota"}
DEADLINE = {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}

READY = ("True", "ReplicasRoutable")
COMPLETE = ("False", "Complete")
FINE = ("False", "AsExpected")


@pytest.mark.parametrize(
    ("name", "made", "expected"),
    [
        (
            "at rest",
            report((new(1), new(2))),
            {"Ready": READY, "Progressing": COMPLETE, "WorkloadReady": ("True", "ReplicasReady"),
             "Routable": READY, "Degraded": FINE},
        ),
        (
            "just created",
            status(parse(isvc_object()), Observation(), plan_children(parse(isvc_object()), Observation(), CONFIG),
                   config=CONFIG, now=NOW),
            {"Ready": ("False", "RollingOut"), "Progressing": ("True", "Reconciling"),
             "Routable": ("False", "WaitingForReplicas"), "Degraded": FINE},
        ),
        (
            "containers start",
            report((new(1, **STARTING), new(2, **STARTING))),
            {"Ready": ("False", "Starting"), "Progressing": ("True", "WaitingForReplicas"),
             "WorkloadReady": ("False", "Starting"), "Degraded": FINE},
        ),
        (
            "ready, but no router is synced",
            report((new(1, gate=""), new(2, gate=""))),
            {"Ready": ("False", "WaitingForRouter"), "WorkloadReady": ("True", "ReplicasReady"),
             "Routable": ("False", "WaitingForRouter"), "Progressing": ("True", "WaitingForReplicas")},
        ),
        ("one of two routable, none may be missing", report((new(1), new(2, gate=""))),
         {"Ready": ("False", "WaitingForRouter")}),
        ("one of two routable, one may be missing",
         report((new(1), new(2, gate="")), rollout={"maxUnavailable": 1, "maxSurge": 1}), {"Ready": READY}),
        ("the only one may be missing, yet none is not ready",
         report((new(1, gate=""),), replicas=1, rollout={"maxUnavailable": 1}),
         {"Ready": ("False", "WaitingForRouter")}),
        ("deployment controller has not seen the change",
         report((new(1), new(2)), deployment=live_deployment(seen=False)),
         {"Ready": ("False", "RollingOut"), "Progressing": ("True", "Reconciling")}),
        ("surge pod starts, old ones serve", report((new(1, **STARTING), old(1), old(2))),
         {"Ready": ("False", "RollingOut"), "Progressing": ("True", "RollingOut"), "Routable": READY}),
        ("new ones serve, an old one still does", report((new(1), new(2), old(1))),
         {"Ready": ("False", "RollingOut"), "Progressing": ("True", "RollingOut")}),
        ("one is gone, without a change", report((new(1),)),
         {"Ready": ("False", "WaitingForReplicas"), "Progressing": ("True", "Scaling")}),
        ("one is gone during a change", report((new(1),), deployment=live_deployment(seen=False)),
         {"Ready": ("False", "RollingOut")}),
        ("old one drains", report((new(1), new(2), old(1, is_terminating=True, gate="False"))), {"Ready": READY}),
        ("scaling down", report((new(1), new(2), new(3))),
         {"Ready": ("False", "RollingOut"), "Progressing": ("True", "Scaling")}),
        ("stopped", report((), replicas=0),
         {"Ready": ("True", "Stopped"), "Progressing": COMPLETE, "Routable": ("False", "Stopped"), "Stalled": FINE}),
        ("crash loop", report((new(1), new(2, **STARTING, problem=CRASH))),
         {"Ready": ("False", "CrashLoopBackOff"), "WorkloadReady": ("False", "CrashLoopBackOff"),
          "Degraded": ("True", "CrashLoopBackOff")}),
        ("no node", report((new(1), new(2, **STARTING, node="", unschedulable="0/2 nodes"))),
         {"Ready": ("False", "Unschedulable"), "Degraded": FINE}),
        ("quota", report((), deployment=live_deployment(conditions=(QUOTA,))),
         {"Ready": ("False", "FailedCreate"), "Degraded": ("True", "FailedCreate")}),
        ("deadline", report((new(1, **STARTING), old(1)), deployment=live_deployment(conditions=(DEADLINE,))),
         {"Progressing": ("False", "ProgressDeadlineExceeded"), "Degraded": ("True", "ProgressDeadlineExceeded")}),
        ("no router is alive", report((new(1), new(2)), routers=Routers(known=True)),
         {"Ready": ("False", "NoRouter"), "Routable": ("Unknown", "NoRouter")}),
        ("routers send it nothing", report((new(1), new(2)), routers=Routers(known=True, alive=1, unsent=OWN)),
         {"Ready": ("False", "WaitingForRouter"), "Routable": ("False", "WaitingForRouter")}),
        ("a router that may send it requests is silent",
         report((new(1), new(2)), routers=Routers(known=True, alive=1, unsent=OWN, unreachable=("r2",))),
         {"Ready": ("Unknown", "RouterUnreachable"), "Routable": ("Unknown", "RouterUnreachable")}),
        ("operator has just started", report((new(1), new(2)), routers=Routers()), {"Ready": READY}),
        ("name lost", report((new(1), new(2)), lost_names=(lost("x", "NameReserved"), lost("tiny"))),
         {"Ready": ("False", "NameConflict"), "Degraded": ("True", "NameConflict")}),
        ("alias lost", report((new(1), new(2)), lost_names=(lost("x"),)),
         {"Ready": READY, "Degraded": ("True", "NameConflict")}),
        ("alias refused", report((new(1), new(2)), lost_names=(lost("x", "NameRefused"),)),
         {"Ready": READY, "Degraded": ("True", "NameRefused"), "Stalled": ("False", "AsExpected")}),
        ("canary is not there", report((new(1), new(2)), router=CANARY, lacks_canary=True),
         {"Ready": READY, "Degraded": ("True", "CanaryNotFound")}),
        ("canary is there", report((new(1), new(2)), router=CANARY), {"Ready": READY, "Degraded": FINE}),
        ("child of somebody else", report((), failure=Problem("ChildNotOwned", "Service 'x'")),
         {"Ready": ("False", "ChildNotOwned"), "Degraded": ("True", "ChildNotOwned")}),
        ("paused at rest", report((new(1), new(2)), paused=True),
         {"Ready": READY, "Progressing": ("False", "Paused")}),
        ("paused, then edited", report((old(1), old(2)), paused=True, engine={"threads": 3}),
         {"Ready": ("False", "Paused"), "Progressing": ("False", "Paused")}),
        ("node of the only replica is dead", report((new(1, **LOST),), replicas=1),
         {"Ready": ("False", "NodeLost"), "WorkloadReady": ("False", "NodeLost"), "Routable": ("False", "NodeLost"),
          "Degraded": ("True", "NodeLost"), "Stalled": FINE}),
        ("node of one of two is dead, one may be missing",
         report((new(1), new(2, **LOST)), rollout={"maxUnavailable": 1}),
         {"Ready": READY, "Routable": READY, "Degraded": ("True", "NodeLost")}),
        ("kubelet has not seen the open gate yet", report((new(1), new(2, is_ready=False))),
         {"Ready": ("False", "WaitingForRouter"), "WorkloadReady": ("True", "ReplicasReady"), "Degraded": FINE}),
        ("at rest, in kstatus' words", report((new(1), new(2))), {"Reconciling": COMPLETE, "Stalled": FINE}),
        ("starting, in kstatus' words", report((new(1), new(2, **STARTING))),
         {"Reconciling": ("True", "WaitingForReplicas"), "Stalled": FINE}),
        ("crash loop at the start may still heal", report((new(1), new(2, **STARTING, problem=CRASH))),
         {"Stalled": FINE}),
        ("new replica fails beside a serving one", report((new(1, **STARTING, problem=CRASH), old(1), old(2))),
         {"Progressing": ("False", "RolloutHalted"), "Reconciling": ("False", "RolloutHalted"),
          "Stalled": ("True", "RolloutHalted"), "Routable": READY, "Ready": ("False", "RolloutHalted")}),
        ("no node took the old replica, the new one starts",
         report((new(1, **STARTING), old(1, **NOWHERE, unschedulable=NO_GPU, unschedulable_since=LONG_AGO)),
                replicas=1),
         {"Ready": ("False", "RollingOut"), "WorkloadReady": ("False", "Starting"), "Degraded": FINE}),
        ("the old replica crashes, the new one starts",
         report((new(1, **STARTING), old(1, **STARTING, problem=CRASH)), replicas=1),
         {"Ready": ("False", "RollingOut"), "WorkloadReady": ("False", "Starting"), "Degraded": FINE}),
        ("the old replica crashes, there is no new one yet",
         report((old(1, **STARTING, problem=CRASH),), replicas=1), {"Degraded": ("True", "CrashLoopBackOff")}),
        ("deadline, in kstatus' words",
         report((new(1, **STARTING), old(1)), deployment=live_deployment(conditions=(DEADLINE,))),
         {"Reconciling": ("False", "ProgressDeadlineExceeded"), "Stalled": ("True", "ProgressDeadlineExceeded")}),
        ("child of somebody else, in kstatus' words", report((), failure=Problem("ChildNotOwned", "Service 'x'")),
         {"Progressing": ("False", "ChildNotOwned"), "Reconciling": ("False", "ChildNotOwned"),
          "Stalled": ("True", "ChildNotOwned")}),
        ("a refused argument", report((), failure=Problem("InvalidEngineArgs", "x")),
         {"Ready": ("False", "InvalidEngineArgs"), "Progressing": ("False", "InvalidEngineArgs"),
          "Reconciling": ("False", "InvalidEngineArgs"), "Stalled": ("True", "InvalidEngineArgs")}),
        ("its claim does not exist", report((new(1, **NOWHERE, unschedulable=NO_CLAIM),), replicas=1),
         {"Ready": ("False", "ClaimNotFound"), "Degraded": ("True", "ClaimNotFound")}),
        ("no node has its GPUs, for long",
         report((new(1, **NOWHERE, unschedulable=NO_GPU, unschedulable_since=LONG_AGO),)),
         {"Ready": ("False", "Unschedulable"), "Degraded": ("True", "Unschedulable")}),
        ("no node has its GPUs, yet",
         report((new(1, **NOWHERE, unschedulable=NO_GPU, unschedulable_since=LATELY),)),
         {"Ready": ("False", "Unschedulable"), "Degraded": FINE}),
        ("a rollout waits for a GPU for long",
         report((pod("s", GPU_REVISION, **NOWHERE, unschedulable=NO_GPU, unschedulable_since=LONG_AGO), old(1)),
                replicas=1, resources={"gpu": {}}),
         {"Progressing": ("True", "WaitingForCapacity"), "Degraded": FINE, "Routable": READY}),
        ("evicted pods do not count", report((new(1), new(2), new(3, is_finished=True, **STARTING))), {"Ready": READY}),
    ],
)  # fmt: skip
def test_conditions(name: str, made: InferenceServiceStatus, expected: dict[str, tuple[str, str]]) -> None:
    found = states(made)
    assert {kind: found[kind] for kind in expected} == expected, name
    assert list(found) == [
        "Ready", "Progressing", "WorkloadReady", "ModelCached", "Routable", "Degraded", "Reconciling", "Stalled"
    ]  # fmt: skip
    assert all(condition.observed_generation == 1 for condition in made.conditions)


SCALED = {"scaling": {"maxReplicas": 4, "metrics": {"concurrency": 10}}}
AT_LEAST_TWO = {
    "scaling": {
        "maxReplicas": 4,
        "metrics": {"concurrency": 10},
        "schedules": [{"name": "always", "start": "0 0 * * *", "end": "0 0 1 6 *", "minReplicas": 2}],
    }
}


@pytest.mark.parametrize(
    ("name", "made", "ready"),
    [
        ("one is added", report((new(1),), replicas=2, **SCALED), ("True", "ReplicasRoutable")),
        (
            "the Deployment is not written yet",
            report((new(1),), replicas=2, deployment=live_deployment(1, seen=False), **SCALED),
            ("True", "ReplicasRoutable"),
        ),
        (
            "one finds no node",
            report((new(1), new(2, **NOWHERE, unschedulable=NO_GPU)), replicas=2, **SCALED),
            ("True", "ReplicasRoutable"),
        ),
        ("one too many", report((new(1), new(2)), replicas=1, **SCALED), ("True", "ReplicasRoutable")),
        ("none is up", report((new(1, **STARTING),), replicas=2, **SCALED), ("False", "WaitingForReplicas")),
        ("an old one serves", report((new(1), old(2)), replicas=2, **SCALED), ("False", "RollingOut")),
        (
            "fewer than a schedule asks for",
            report(
                (new(1),),
                replicas=2,
                deployment=live_deployment(2),
                rollout={"maxUnavailable": 0},
                **AT_LEAST_TWO,
            ),
            ("False", "WaitingForReplicas"),
        ),
    ],
)
def test_a_scaled_service_is_ready_while_clients_are_served(
    name: str, made: InferenceServiceStatus, ready: tuple[str, str]
) -> None:
    assert states(made)["Ready"] == ready


@pytest.mark.parametrize(
    ("manager", "time", "reason"),
    [
        ("k9s", "2025-12-31T23:50:01Z", "ScaledTwice"),
        ("k9s", "2025-12-31T23:50:00Z", "AsExpected"),
        ("kubectl-scale", NOW, "AsExpected"),
        ("kube-controller-manager", "2025-06-01T00:00:00Z", "ScaledTwice"),
        ("k9s", "0000-01-01T00:00:00Z", "ScaledTwice"),  # which the API server takes, and Python does not
    ],
)
def test_a_foreign_scaling_counts_while_it_may_be_repeated(manager: str, time: str, reason: str) -> None:
    service = isvc_object(replicas=1, **SCALED)
    service["metadata"]["managedFields"] = [{"manager": manager, "subresource": "scale", "time": time}]
    observed = Observation(deployment=live_deployment(1), pods=(new(1),), routers=ALIVE)
    parsed = parse(service)
    plan = plan_children(parsed, observed, CONFIG)
    made = status(parsed, observed, plan, config=CONFIG, now=NOW)
    assert states(made)["Degraded"][1] == reason


def test_a_service_that_is_paused_at_zero_is_not_ready() -> None:
    zero = {"scaling": {"minReplicas": 0, "maxReplicas": 4}}
    served = live_deployment(0)
    served["metadata"]["annotations"] = {SERVED_ANNOTATION: REVISION}
    idle = report(replicas=0, deployment=served, **zero)
    assert states(idle)["Ready"] == ("True", "ScaledToZero")
    assert states(report(replicas=0, **zero))["Ready"] == ("Unknown", "Untried")
    paused = report(replicas=0, paused=True, **zero)
    assert states(paused)["Ready"] == ("False", "Paused")
    messages = {each.type: each.message for each in paused.conditions}
    assert "unpause" in messages["Ready"]
    assert "held" not in messages["Routable"]
    unscaled = report(replicas=0, paused=True)
    assert states(unscaled)["Ready"] == ("True", "Stopped"), "as its spec says"


@pytest.mark.parametrize(
    ("limits", "outcome"),
    [
        ({}, "requests are refused with 503"),
        ({"holdTimeoutSeconds": 30}, "requests are held for 30 s, then refused with"),
    ],
)
def test_a_stopped_service_says_that_no_request_starts_it(limits: dict[str, int], outcome: str) -> None:
    made = report(replicas=0, router={"limits": limits})
    for kind in ("Ready", "Routable"):
        told = next(each.message for each in made.conditions if each.type == kind)
        assert told.startswith(f"spec.replicas is 0: {outcome}")
        assert told.endswith(
            "no request does without spec.scaling or an autoscaler: kubectl scale isvc tiny --replicas=1"
        )


def test_rollout_without_a_spare_gpu_says_so() -> None:
    gpu = {"resources": {"gpu": {}}}
    revision = plan_children(parse(isvc_object(replicas=2, **gpu)), Observation(), CONFIG).revision
    starved = pod("s", revision, **STARTING, node="", unschedulable="2 Insufficient nvidia.com/gpu.")
    made = report((starved, old(1), old(2)), **gpu)
    assert states(made)["Progressing"] == ("True", "NoGPUForSurge")
    assert states(made)["Routable"] == READY
    patient = report((starved, old(1), old(2)), rollout={"inPlaceAfterSeconds": 600}, **gpu)
    assert states(patient)["Progressing"] == ("True", "NoGPUForSurge")
    messages = {each.type: each.message for each in patient.conditions}
    assert "within 600 s" in messages["Progressing"]
    assert states(patient)["Degraded"][0] == "False"


def test_numbers() -> None:
    made = report((new(1), new(2, **STARTING), old(1), old(2, is_terminating=True)))
    assert (made.replicas, made.updated_replicas, made.ready_replicas) == (3, 2, 2)
    assert (made.routable_replicas, made.draining_replicas, made.routable) == (2, 1, "2/2")
    assert (made.observed_generation, made.url, made.model) == (1, "http://router/v1", "tiny")
    assert made.revision == REVISION
    assert made.selector == "app.kubernetes.io/component=engine,inference.argosy.dev/service=tiny"


def test_message_names_the_pod_and_its_trouble() -> None:
    made = report((new(1), new(2, **STARTING, problem=Problem("ImagePullBackOff", "not found"))))
    message = next(each.message for each in made.conditions if each.type == "Ready")
    told = "not found; the manifest does not name this image: it is engine.image of the Helm chart"
    assert message == f"1/2 updated replicas ready; pod new-2: {told}"


@pytest.mark.parametrize(
    ("engine", "message", "source"),
    [
        ({}, "not found", "engine.image"),
        ({"type": "vllm", "device": "cuda"}, "not found", "engine.vllmImage"),
        ({"image": "mine:1"}, "not found", ""),
        ({"image": "mine:1"}, f"{CONFIG.engine_image} not found", "engine.image"),
    ],
    ids=["the default", "vLLM's default", "the manifest's", "the default that fetches"],
)
def test_an_image_that_the_manifest_does_not_name_is_told_to_be_the_charts(
    engine: dict[str, Any], message: str, source: str
) -> None:
    spec = {"engine": engine, **({"resources": {"gpu": {}}} if "device" in engine else {})}
    revision = plan_children(parse(isvc_object(**spec)), Observation(), CONFIG).revision
    failing = pod("new", revision, **STARTING, problem=Problem("ImagePullBackOff", message))
    for others, kind in (((), "Degraded"), ((old(1),), "Progressing")):
        made = report((failing, *others), replicas=1, **spec)
        told = next(each.message for each in made.conditions if each.type == kind)
        assert message in told
        assert (f"it is {source} of the Helm chart" in told) is bool(source), told


@pytest.mark.parametrize(
    ("model", "message", "named"),
    [
        (
            {"source": "hf://a/b", "secretRef": {"name": "token"}},
            "the Secret of spec.model.secretRef is missing or empty",
            "spec.model.secretRef names token",
        ),
        (
            {"source": "pvc://weights/new"},
            "/model/new is no directory",
            "/model is the root of the PersistentVolumeClaim weights",
        ),
        ({"source": "file:///model/x"}, "/model/x is no directory", ""),
    ],
)
def test_what_a_message_of_a_pod_means_is_named(model: dict[str, Any], message: str, named: str) -> None:
    revision = plan_children(parse(isvc_object(model=model)), Observation(), CONFIG).revision
    failing = pod("p", revision, **STARTING, problem=Problem("CrashLoopBackOff", message))
    made = report((failing,), replicas=1, model=model)
    told = next(each.message for each in made.conditions if each.type == "Degraded")
    assert told.startswith(f"pod p: {message}; {named}" if named else f"pod p: {message}")
    assert named or told == f"pod p: {message}"


@pytest.mark.parametrize(
    ("name", "since", "prepared", "is_told"),
    [
        ("for three minutes", "2025-12-31T23:57:00Z", "False", True),
        ("for a minute", "2025-12-31T23:59:00Z", "False", False),
        ("mounted", "2025-12-31T23:57:00Z", "True", False),
        ("an older kubelet", "2025-12-31T23:57:00Z", None, False),
    ],
)
def test_volumes_that_are_not_mounted_are_told(
    name: str, since: str, prepared: str | None, is_told: bool
) -> None:
    conditions = [{"type": "PodScheduled", "status": "True", "lastTransitionTime": since}]
    if prepared is not None:
        conditions.append({"type": "PodReadyToStartContainers", "status": prepared})
    labels = {"inference.argosy.dev/revision": REVISION}
    made = report(
        (read_pod(pod_object("p", labels=labels, phase="Pending", conditions=conditions)),), replicas=1
    )
    state = next(each for each in made.conditions if each.type == "WorkloadReady")
    assert (state.status, state.reason) == ("False", "VolumesNotMounted" if is_told else "Starting")
    assert ("pod p: its volumes are not mounted yet" in state.message) is is_told, name
    assert ("kubectl describe pod p" in state.message) is is_told
    assert states(made)["Degraded"] == FINE


@pytest.mark.parametrize("cache", ["node", "none"])
def test_a_node_that_may_have_no_cache_is_named(cache: str) -> None:
    model = {"source": "hf://org/name", "cache": {"type": cache}}
    plan = plan_children(parse(isvc_object(model=model)), Observation(), CONFIG)
    deployment = live_deployment(1)
    deployment["metadata"]["labels"] = plan.deployment["metadata"]["labels"]
    deployment["spec"] = {**plan.deployment["spec"], "replicas": 1}
    waiting = pod("p", plan.revision, **STARTING, unmounted_since="2025-12-31T23:00:00Z")
    made = report((waiting,), replicas=1, deployment=deployment, model=model)
    told = next(each.message for each in made.conditions if each.type == "WorkloadReady")
    assert "kubectl describe pod p" in told
    assert ("node node-a may have no node cache" in told) == (cache == "node")


async def looked_at_again(resource: dict[str, Any], *pods: Pod) -> list[float]:
    """Seconds until a service is reconciled again for what time alone changes."""
    cluster = new_cluster()
    later: list[float] = []
    service = parse(resource)
    cluster.create(isvc_object(replicas=1))
    reporter = Reporter(
        cluster,
        Store(),
        CONFIG,
        metrics=OperatorMetrics(),
        now=lambda: NOW,
        look_again=lambda name, seconds: later.append(seconds),
    )
    observed = Observation(deployment=live_deployment(1), pods=pods)
    await reporter.report(service, observed, plan_children(service, observed, CONFIG), None)
    return later


@pytest.mark.parametrize(
    ("since", "is_late"),
    [("2025-12-31T23:29:59Z", True), ("2025-12-31T23:30:01Z", False), ("", False)],
    ids=["too long", "not long", "not told"],
)
async def test_a_replica_that_does_not_become_ready_is_no_progress_for_ever(
    since: str, is_late: bool
) -> None:
    """Kubernetes has a deadline for rollouts, and none for a replica that takes the place of another one."""
    starting = new(1, **STARTING, unready_since=since)
    made = report((starting, new(2)))
    late = ("ProgressDeadlineExceeded", "AsExpected")
    found = states(made)
    assert found["Progressing"] == (("False", late[0]) if is_late else ("True", "WaitingForReplicas"))
    assert found["Reconciling"][0] == ("False" if is_late else "True")
    for kind in ("Degraded", "Stalled"):
        assert found[kind] == (("True", late[0]) if is_late else ("False", late[1]))
    told = next(each.message for each in made.conditions if each.type == "Progressing")
    assert ("pod new-1 has not been ready for 1800 s" in told) is is_late
    again = await looked_at_again(isvc_object(replicas=1), starting)
    assert again == ([1.0] if since and not is_late else [])


def test_since_when_a_pod_is_not_ready() -> None:
    for value, since in (("False", "2025-12-31T23:00:00Z"), ("True", "")):
        condition = {"type": "Ready", "status": value, "lastTransitionTime": "2025-12-31T23:00:00Z"}
        assert read_pod(pod_object("p", conditions=[condition])).unready_since == since


async def test_the_service_is_looked_at_again_when_its_volumes_have_taken_too_long() -> None:
    starting = new(1, **STARTING, unmounted_since="2025-12-31T23:59:00Z")
    assert await looked_at_again(isvc_object(replicas=1), starting) == [60.0]


@pytest.mark.parametrize(("manager", "later"), [("k9s", [540.0]), ("kube-controller-manager", [])])
async def test_the_service_is_looked_at_again_when_a_foreign_scaling_has_aged(
    manager: str, later: list[float]
) -> None:
    resource = isvc_object(replicas=1, **SCALED)
    entry = {"manager": manager, "subresource": "scale", "time": "2025-12-31T23:59:00Z"}
    resource["metadata"]["managedFields"] = [entry]
    assert await looked_at_again(resource, new(1)) == later


def test_transition_time_is_kept_while_the_status_stays() -> None:
    first = report((new(1), new(2, **STARTING)))
    obj = isvc_object(replicas=2)
    obj["status"] = {
        "conditions": [
            {
                "type": each.type,
                "status": each.status,
                "reason": "x",
                "lastTransitionTime": "2020-01-01T00:00:00Z",
            }
            for each in first.conditions
        ]
    }
    service = parse(obj)
    observed = Observation(deployment=live_deployment(), pods=(new(1), new(2)), routers=ALIVE)
    made = status(service, observed, plan_children(service, observed, CONFIG), config=CONFIG, now=NOW)
    times = {each.type: each.last_transition_time for each in made.conditions}
    assert times["Degraded"] == "2020-01-01T00:00:00Z"
    assert times["Ready"] == NOW


@pytest.mark.parametrize(
    ("called", "reason"),
    [
        ("OutOfnvidia.com/gpu", "OutOfnvidia_com_gpu"),
        ("OutOfephemeral-storage", "OutOfephemeral_storage"),
        ("no word: ", "no_word:_"),
        ("", "Reason"),
        ("42", "Reason_42"),
        ("x" * 2000, "x" * 1024),
    ],
)
def test_whatever_a_kubelet_calls_a_failure_the_status_can_be_written(called: str, reason: str) -> None:
    failed = new(1, is_finished=True, problem=Problem(called, "m" * 40_000))
    made = report((failed, new(2)))
    conditions = {each.type: each for each in made.conditions}
    assert (conditions["Degraded"].status, conditions["Degraded"].reason) == ("True", reason)
    assert convert(to_builtins(made), InferenceServiceStatus) == made, "within the bounds of the CRD"


def test_same_inputs_give_the_same_status() -> None:
    assert report((new(1), new(2))) == report((new(1), new(2)))


def test_unreadable_resource() -> None:
    made = invalid_status(isvc_object(), "field x", now=NOW)
    assert {each["reason"] for each in made["conditions"]} == {"InvalidSpec"}
    states = {each["type"]: each["status"] for each in made["conditions"]}
    assert states == {"Ready": "False", "Degraded": "True", "Reconciling": "False", "Stalled": "True"}


WAITING = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}}
OOM = {"terminated": {"reason": "OOMKilled", "exitCode": 137}}


@pytest.mark.parametrize(
    ("name", "container", "reason", "message"),
    [
        ("creating", {"state": {"waiting": {"reason": "ContainerCreating"}}}, None, ""),
        ("running", {"state": {"running": {}}, "ready": True}, None, ""),
        ("pull", {"state": {"waiting": {"reason": "ErrImagePull", "message": "no"}}}, "ImagePullBackOff", "no"),
        ("crash loop", {"state": WAITING, "lastState": {"terminated": {"reason": "Error", "exitCode": 3}}},
         "CrashLoopBackOff", "back-off (last exit: Error, code 3)"),
        ("out of memory", {"state": WAITING, "lastState": OOM}, "OOMKilled",
         "back-off (last exit: OOMKilled, code 137)"),
        ("restarted, not yet ready", {"state": {"running": {}}, "ready": False, "lastState": OOM}, "OOMKilled",
         "last exit: OOMKilled, code 137"),
        ("crash loop with last words", {"state": WAITING, "lastState": {"terminated": {
            "reason": "Error", "exitCode": 2, "message": "loading\nargosy serve: no config.json\n \n"}}},
         "CrashLoopBackOff", "back-off (last exit: Error, code 2: argosy serve: no config.json)"),
        ("last words about a flag", {"ready": False, "state": {"terminated": {
            "reason": "Error", "exitCode": 2, "message": "argosy serve: --max-model-len 9 exceeds 4"}}},
         "ContainerExited", "last exit: Error, code 2: argosy serve: --max-model-len 9 exceeds 4; in the manifest "
         "--max-model-len is spec.engine.maxModelLen"),
        ("last words that would move a terminal's cursor", {"ready": False, "state": {"terminated": {
            "reason": "Error", "exitCode": 2, "message": "a\x1b[2Jb" + "x" * 9999}}},
         "ContainerExited", "last exit: Error, code 2: a [2Jb" + "x" * 1018),
        ("restarted long ago", {"state": {"running": {}}, "ready": True, "lastState": OOM}, None, ""),
    ],
)  # fmt: skip
def test_problem_of_a_pod(name: str, container: dict[str, Any], reason: str | None, message: str) -> None:
    found = read_pod(pod_object("p", containerStatuses=[{"name": "engine", **container}])).problem
    assert (found.reason if found else None, found.message if found else "") == (reason, message), name


@pytest.mark.parametrize(
    ("name", "ready", "gate", "is_lost"),
    [
        ("serves", ("True", "00:00:09Z"), ("True", "00:00:08Z"), False),
        ("gate has just opened", ("False", "00:00:01Z"), ("True", "00:00:08Z"), False),
        ("node controller took it out", ("False", "00:01:00Z"), ("True", "00:00:08Z"), True),
        ("drains", ("False", "00:01:00Z"), ("False", "00:01:00Z"), False),
    ],
)
def test_a_pod_on_a_dead_node(
    name: str, ready: tuple[str, str], gate: tuple[str, str], is_lost: bool
) -> None:
    conditions = [
        {"type": "ContainersReady", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"},
        {"type": "Ready", "status": ready[0], "lastTransitionTime": f"2026-01-01T{ready[1]}"},
        {**gate_condition(gate[0]), "lastTransitionTime": f"2026-01-01T{gate[1]}"},
    ]
    found = read_pod(pod_object("p", conditions=conditions))
    assert found.is_lost is is_lost, name
    assert found.is_routable is (name == "serves")


def test_reading_a_pod() -> None:
    obj = pod_object(
        "p",
        labels={"inference.argosy.dev/revision": "r"},
        conditions=[
            {"type": "ContainersReady", "status": "True"},
            {"type": "Ready", "status": "True"},
            gate_condition("True"),
        ],
    )
    read = read_pod(obj)
    assert (read.revision, read.node, read.is_routable) == ("r", "node-a", True)
    obj["metadata"]["deletionTimestamp"] = NOW
    assert not read_pod(obj).is_routable


@pytest.mark.parametrize(
    ("cause", "has_remedy"), [(NO_HOST_PATH, True), (QUOTA, False)], ids=["hostPath", "quota"]
)
def test_a_namespace_that_refuses_the_node_cache_is_told_of_with_the_remedy(
    cause: dict[str, str], has_remedy: bool
) -> None:
    made = report((), deployment=live_deployment(conditions=(cause,)))
    message = next(each.message for each in made.conditions if each.type == "Degraded")
    assert cause["message"] in message
    assert ("set spec.model.cache.type to claim" in message) is has_remedy
    assert message.endswith("this was refused first: the ReplicaSet's Events have what is refused now")
