"""The service's condition ModelCached, its column and events, and what a fetch means for the other conditions."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from builders import CONFIG, NOW, isvc_object, pod
from fetching import GATED, LAST_LINE

from argosy_operator.desired.children import Plan, plan_children
from argosy_operator.observation import Observation, Routers
from argosy_operator.pod import ModelFetch, Pod, Problem
from argosy_operator.status.conditions import seconds_until_stuck
from argosy_operator.status.report import events_between, status
from argosy_protocol.reports import WAITING
from argosy_resource.pod_fields import FETCH_CONTAINER
from argosy_resource.types import InferenceService, InferenceServiceStatus, parse

REVISION = plan_children(parse(isvc_object()), Observation(), CONFIG).revision
DEADLINE = {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}
LATELY, LONG_AGO = "2025-12-31T23:59:00Z", "2025-12-31T23:00:00Z"
"""A minute and an hour before NOW; a rollout may go half an hour without progress."""


def fetch(state: str, message: str = "", *, reason: str = "", at: str = LATELY) -> ModelFetch:
    exit_message = "" if state == "running" else message
    reasons = {"running": "Fetching", "succeeded": "Cached", "failed": "FetchFailed"}
    return msgspec.convert(
        {
            "state": state,
            "exit_message": exit_message,
            "condition_reason": reason or reasons.get(state, ""),
            "condition_message": message,
            "last_probe_time": at,
        },
        ModelFetch,
    )


def replica(name: str, found: ModelFetch | None, *, revision: str = REVISION, **state: Any) -> Pod:
    up = {"ready": True, "gate": "True"} if state.pop("up", False) else {"ready": False, "gate": ""}
    problem = Problem("ModelFetchFailed", found.failure) if found is not None and found.has_failed else None
    return pod(name, revision, **up, fetch=found, problem=problem, **state)


def with_fetch(plan: Plan) -> Plan:
    """The plan with pods that fetch their model."""
    template = plan.deployment["spec"]["template"]
    template["spec"]["initContainers"] = [{"name": FETCH_CONTAINER}]
    return plan


def report(
    *pods: Pod,
    is_fetched: bool = True,
    is_overdue: bool = False,
    unpolled: Iterable[str] = (),
    **spec: Any,
) -> InferenceServiceStatus:
    service: InferenceService = parse(isvc_object(replicas=spec.pop("replicas", 2), **spec))
    wanted = plan_children(service, Observation(), CONFIG).deployment
    deployment = {
        **wanted,
        "metadata": {**wanted["metadata"], "generation": 2},
        "status": {"observedGeneration": 2, "conditions": [DEADLINE] if is_overdue else []},
    }
    observed = Observation(
        deployment=deployment,
        pods=pods,
        routers=Routers(known=True, alive=1),
        unpolled_fetches=frozenset(unpolled),
    )
    plan = plan_children(service, observed, CONFIG)
    return status(service, observed, with_fetch(plan) if is_fetched else plan, config=CONFIG, now=NOW)


def found(made: InferenceServiceStatus, kind: str) -> tuple[str, str, str]:
    return next((each.status, each.reason, each.message) for each in made.conditions if each.type == kind)


DONE = fetch("succeeded", LAST_LINE)
AT_9 = fetch("running", "9 % 2.5/28.0 GiB, eta 9 min")
AT_43 = fetch("running", "43 % 12.1/28.0 GiB, eta 70 s")
AT_100 = fetch("running", "unpacking, 100 % 28.0/28.0 GiB")
WAITS = fetch("running", WAITING)
STARTED = fetch("running", "")
NOT_BEGUN = fetch("pending")
FAILED = fetch("failed", GATED)
TRIES_AGAIN = fetch("running", GATED, reason="FetchFailed")
NOTED = fetch("running", "5 % 1.4/28.0 GiB; " + "503 " * 100)


@pytest.mark.parametrize(
    ("name", "made", "condition", "column"),
    [
        ("builtin", report(replica("a", None, up=True), is_fetched=False),
         ("True", "LocalSource", "nothing has to be fetched: the model is part of the engine"), ""),
        ("no pod", report(), ("Unknown", "Pending", "no pod has begun to fetch the model"), ""),
        ("no node", report(replica("a", NOT_BEGUN)), ("Unknown", "Pending", "no pod has begun to fetch the model"), ""),
        ("has not reported", report(replica("a", STARTED)), ("False", "Fetching", "pod a: fetching"), "fetching"),
        ("fetches", report(replica("a", AT_43)), ("False", "Fetching", "pod a: 43 % 12.1/28.0 GiB, eta 70 s"),
         "43 % 12.1/28.0 GiB, eta 70 s"),
        ("two fetch: the slower one", report(replica("a", AT_43), replica("b", AT_9), replica("c", AT_100)),
         ("False", "Fetching", "pod b: 9 % 2.5/28.0 GiB, eta 9 min"), "9 % 2.5/28.0 GiB, eta 9 min"),
        ("one waits for the other", report(replica("a", WAITS), replica("b", AT_43), replica("c", STARTED)),
         ("False", "Fetching", "pod b: 43 % 12.1/28.0 GiB, eta 70 s"), "43 % 12.1/28.0 GiB, eta 70 s"),
        ("both wait for another service's", report(replica("b", WAITS), replica("a", WAITS)),
         ("False", "Fetching", f"pod a: {WAITING}"), WAITING),
        ("a long note", report(replica("a", NOTED)), ("False", "Fetching", f"pod a: {NOTED.summary}"),
         "5 % 1.4/28.0 GiB; retrying"),
        ("one has it, one fetches", report(replica("a", DONE, up=True), replica("b", AT_9)),
         ("False", "Fetching", "pod b: 9 % 2.5/28.0 GiB, eta 9 min"), "9 % 2.5/28.0 GiB, eta 9 min"),
        ("one has it, one has no node", report(replica("b", DONE, up=True), replica("a", NOT_BEGUN)),
         ("True", "Cached", LAST_LINE), "cached"),
        ("failed", report(replica("a", AT_43), replica("b", FAILED)), ("False", "FetchFailed", f"pod b: {GATED}"),
         "failed"),
        ("tries again", report(replica("b", TRIES_AGAIN)), ("False", "FetchFailed", f"pod b: {GATED}"), "failed"),
        ("cached", report(replica("a", DONE, up=True), replica("b", DONE, up=True)), ("True", "Cached", LAST_LINE),
         "cached"),
        ("a failed pod that is deleted", report(replica("a", FAILED, is_terminating=True), replica("b", DONE)),
         ("True", "Cached", LAST_LINE), "cached"),
        ("old replicas have another model", report(replica("a", DONE, revision="old", up=True), replica("b", AT_9)),
         ("False", "Fetching", "pod b: 9 % 2.5/28.0 GiB, eta 9 min"), "9 % 2.5/28.0 GiB, eta 9 min"),
        ("only old replicas so far", report(replica("a", DONE, revision="old", up=True)),
         ("True", "Cached", LAST_LINE), "cached"),
    ],
)  # fmt: skip
def test_model_cached(
    name: str, made: InferenceServiceStatus, condition: tuple[str, str, str], column: str
) -> None:
    assert found(made, "ModelCached") == condition, name
    assert made.model_cache == column, name


NO_CLAIM = '0/2 nodes are available: persistentvolumeclaim "nope" not found. preemption: not helpful.'
NO_DIRECTORY = (
    "back-off 10s (last exit: Error, code 2: argosy serve: model '{0}': {0} is no directory; give one)"
)


@pytest.mark.parametrize(
    ("source", "state", "expected"),
    [
        ("pvc://nope/x", {}, ("True", "LocalSource", "read the model from a volume")),
        ("pvc://nope/x", {"unschedulable": NO_CLAIM}, ("False", "ClaimNotFound", 'pod a: 0/2 nodes are')),
        ("pvc://other/x", {"unschedulable": NO_CLAIM}, ("True", "LocalSource", "nothing has to be fetched")),
        ("pvc://nope/x", {"unschedulable": "0/2 nodes are available"}, ("True", "LocalSource", "nothing has")),
        (
            "pvc://nope/x",
            {"problem": NO_DIRECTORY.format("/model/x")},
            ("False", "SourceNotFound", "/model is the root of the PersistentVolumeClaim nope"),
        ),
        ("file:///nope/", {"problem": NO_DIRECTORY.format("/nope")}, ("False", "SourceNotFound", "/nope is no dir")),
        ("file:///nope", {"problem": "code 2: /nope has no config.json"}, ("False", "SourceNotFound", "pod a: code 2")),
        ("file:///x", {"problem": "code 2: /adapters/x is no directory"}, ("True", "LocalSource", "nothing has")),
        ("file:///x", {"problem": NO_DIRECTORY.format("/nope")}, ("True", "LocalSource", "or from their image")),
        ("builtin://tiny", {"problem": "code 1"}, ("True", "LocalSource", "part of the engine")),
    ],
)  # fmt: skip
def test_a_local_source_is_not_said_to_be_there(
    source: str, state: dict[str, str], expected: tuple[str, str, str]
) -> None:
    model = {"source": source}
    revision = plan_children(parse(isvc_object(model=model)), Observation(), CONFIG).revision
    problem = Problem("CrashLoopBackOff", state["problem"]) if "problem" in state else None
    new = pod(
        "a", revision, ready=False, gate="", problem=problem, unschedulable=state.get("unschedulable", "")
    )
    old = pod("b", "old", ready=True, gate="True")
    for others in ((), (old,)):
        status, reason, message = found(report(new, *others, is_fetched=False, model=model), "ModelCached")
        assert (status, reason) == expected[:2]
        assert expected[2] in message


def test_a_fetch_is_what_the_replicas_wait_for() -> None:
    made = report(replica("a", AT_43), replica("b", DONE, up=True))
    told = "fetching the model: pod a: 43 % 12.1/28.0 GiB, eta 70 s"
    assert found(made, "WorkloadReady") == ("False", "FetchingModel", f"1/2 updated replicas ready; {told}")
    assert found(made, "Progressing")[:2] == ("True", "FetchingModel")
    assert found(made, "Ready")[:2] == ("False", "FetchingModel")
    assert found(made, "Degraded")[:2] == ("False", "AsExpected")
    assert told in found(made, "Progressing")[2]


def test_a_failed_fetch_is_a_replicas_problem() -> None:
    made = report(replica("a", FAILED), replica("b", AT_43))
    assert found(made, "WorkloadReady") == (
        "False", "ModelFetchFailed", f"0/2 updated replicas ready; pod a: {GATED}"
    )  # fmt: skip
    assert found(made, "Degraded") == ("True", "ModelFetchFailed", f"pod a: {GATED}")
    assert found(made, "Stalled")[:2] == ("False", "AsExpected")


TOO_LARGE = 'Usage of EmptyDir volume "argosy-models" exceeds the limit "1Gi". '


def evicted(name: str, minute: int, message: str = TOO_LARGE, **state: Any) -> Pod:
    failed = {"is_finished": True, "created": f"2025-12-31T23:{minute}:00Z", **state}
    return msgspec.structs.replace(replica(name, AT_43), problem=Problem("Evicted", message), **failed)


def test_a_replica_that_somebody_deletes_is_no_problem() -> None:
    exited = Problem("ContainerExited", "last exit: Completed, code 0")
    deleted = evicted("b", 50, is_terminating=True)
    made = report(msgspec.structs.replace(deleted, problem=exited), replica("e", AT_9), replicas=1)
    assert found(made, "Degraded") == ("False", "AsExpected", "")
    assert found(made, "Ready")[1] == "FetchingModel"


def test_pods_that_are_evicted_during_their_fetch_are_a_problem() -> None:
    gone = (evicted("c", 10, "old news"), evicted("b", 50), evicted("a", 40, "old news"))
    elsewhere = evicted("d", 55, "of an older revision", revision="old")
    made = report(*gone, elsewhere, replica("e", AT_9), replicas=1)
    message = f"pod b: {TOO_LARGE.rstrip('. ')}; the model is larger than spec.model.cache.sizeLimit"
    assert found(made, "Ready") == ("False", "Evicted", f"0/1 updated replicas ready; {message}")
    assert found(made, "Degraded") == ("True", "Evicted", message)
    assert found(made, "Progressing")[:2] == ("True", "FetchingModel")
    overdue = report(*gone, replica("e", AT_9), replicas=1, is_overdue=True)
    assert found(overdue, "Progressing")[:2] == ("False", "ProgressDeadlineExceeded")
    assert found(overdue, "Stalled")[:2] == ("True", "ProgressDeadlineExceeded")
    recovered = report(*gone, replica("e", DONE, up=True), replicas=1)
    assert found(recovered, "Degraded")[0] == "False"
    assert found(recovered, "Ready")[0] == "True"


def test_a_failed_fetch_halts_a_rollout() -> None:
    made = report(replica("new", FAILED), replica("a", DONE, revision="old", up=True))
    assert found(made, "Progressing")[:2] == ("False", "RolloutHalted")
    assert found(made, "Stalled")[:2] == ("True", "RolloutHalted")
    assert GATED in found(made, "Stalled")[2]


STUCK = fetch("running", "43 % 12.1/28.0 GiB; 503 from the hub", at=LONG_AGO)
SILENT = fetch("running", "", at="")
WAITS_LONG = fetch("running", WAITING, at=LONG_AGO)
OVERDUE, UNDER_WAY = ("False", "ProgressDeadlineExceeded"), ("True", "FetchingModel")


@pytest.mark.parametrize(
    ("name", "pods", "progress"),
    [
        ("moves", (replica("a", AT_43),), UNDER_WAY),
        ("does not move", (replica("a", STUCK),), OVERDUE),
        ("one of two moves", (replica("a", STUCK), replica("b", AT_43)), UNDER_WAY),
        ("has never reported", (replica("a", SILENT),), OVERDUE),
        ("waits for another service's, however long", (replica("a", WAITS_LONG),), UNDER_WAY),
        ("has failed", (replica("a", FAILED),), OVERDUE),
        ("fails again and again", (replica("a", TRIES_AGAIN),), OVERDUE),
        ("is done, and the engine loads", (replica("a", DONE),), ("True", "WaitingForReplicas")),
        ("was done long ago", (replica("a", fetch("succeeded", LAST_LINE, at=LONG_AGO)),), OVERDUE),
        ("was done lately by a replica that serves", (replica("a", DONE, up=True), replica("b", STUCK)), OVERDUE),
        ("fetches nothing", (replica("a", None),), OVERDUE),
        ("has no node", (replica("a", fetch("pending", at="")),), OVERDUE),
    ],
)  # fmt: skip
def test_a_fetch_that_moves_is_progress(name: str, pods: tuple[Pod, ...], progress: tuple[str, str]) -> None:
    made = report(*pods, is_overdue=True, replicas=len(pods))
    assert found(made, "Progressing")[:2] == progress, name
    is_stalled = found(made, "Stalled")[:2] == ("True", "ProgressDeadlineExceeded")
    is_degraded = found(made, "Degraded")[0] == "True"
    assert is_stalled == (progress == OVERDUE), name
    assert is_degraded == (progress == OVERDUE), name


def test_a_fetch_that_was_not_asked_yet_does_not_stand_still() -> None:
    unknown = report(replica("a", STUCK), is_overdue=True, replicas=1, unpolled={"uid-a"})
    assert found(unknown, "Progressing")[:2] == UNDER_WAY
    assert found(unknown, "Stalled")[:2] == ("False", "AsExpected")
    asked = report(replica("a", STUCK), is_overdue=True, replicas=1, unpolled={"uid-of-another"})
    assert found(asked, "Stalled")[:2] == ("True", "ProgressDeadlineExceeded")


HOLDER = (
    "a process that calls itself pod-7 (process 1) holds the lock of hf://Qwen/Qwen3-8B in the store, "
    "and has made no progress for 10 min"
)
BLOCKED = fetch("running", HOLDER, reason="StoreLocked")


def test_a_lock_that_is_held_without_progress_is_told_with_its_holder() -> None:
    made = report(replica("b", BLOCKED), replica("a", WAITS))
    status, reason, message = found(made, "ModelCached")
    assert (status, reason) == ("False", "StoreLocked")
    assert message.startswith(f"pod b: {HOLDER}; look at the pods that use the volume: ")
    assert "delete" not in message, "whoever can write to a shared volume can write another's name"
    assert made.model_cache == "locked"
    for kind in ("Stalled", "Degraded"):
        assert found(made, kind) == ("True", "ModelStoreLocked", message), kind
    assert found(made, "Ready")[:2] == ("False", "ModelStoreLocked")
    assert found(made, "Reconciling")[0] == "False"
    assert found(report(replica("b", BLOCKED), is_overdue=True), "Progressing")[:2] == OVERDUE
    released = report(replica("b", AT_9), replica("a", WAITS))
    assert found(released, "Stalled")[:2] == ("False", "AsExpected")
    told = events_between(released.conditions, made.conditions)
    assert [(each.type, each.reason, each.message) for each in told] == [
        ("Warning", "ModelStoreLocked", message)
    ]
    assert [each.reason for each in events_between(made.conditions, released.conditions)] == ["ModelFetching"]


def test_when_to_look_again_at_a_fetch() -> None:
    assert seconds_until_stuck(replica("a", AT_43), NOW, 1800) == 1740
    assert seconds_until_stuck(replica("a", STUCK), NOW, 1800) == -1800
    assert seconds_until_stuck(replica("a", WAITS), NOW, 1800) == 1800
    assert seconds_until_stuck(replica("a", FAILED), NOW, 1800) == 0
    assert seconds_until_stuck(replica("a", BLOCKED), NOW, 1800) == 0
    assert seconds_until_stuck(replica("a", fetch("running", at="yesterday")), NOW, 1800) == 0


def test_events_of_a_fetch() -> None:
    states = [
        report(),
        report(replica("a", STARTED)),
        report(replica("a", AT_9)),
        report(replica("a", FAILED)),
        report(replica("a", AT_43)),
        report(replica("a", DONE)),
    ]
    events = [
        [
            (event.type, event.reason, event.message)
            for event in events_between(before.conditions, after.conditions)
        ]
        for before, after in itertools.pairwise(states)
    ]
    assert events == [
        [("Normal", "ModelFetching", "pod a: fetching")],
        [],
        [("Warning", "ModelFetchFailed", f"pod a: {GATED}")],
        [("Normal", "ModelFetching", "pod a: 43 % 12.1/28.0 GiB, eta 70 s")],
        [("Normal", "ModelCached", LAST_LINE)],
    ]


def test_a_local_source_is_no_event() -> None:
    made = report(replica("a", None, up=True), replica("b", None, up=True), is_fetched=False)
    assert [event.reason for event in events_between((), made.conditions)] == ["ReplicasRoutable"]
