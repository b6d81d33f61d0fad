"""`argosy why`: which link of the chain fails, and what is said about it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from why_cases import CASES
from why_objects import (
    CRASHING,
    CREATING,
    EXITED,
    NO_GPU,
    NOT_LOADED,
    NOT_READY,
    Object,
    condition,
    failed_fetch,
    pod,
    scaled,
    service,
    unscheduled,
)

from argosy.cluster_chain import cluster_diagnosis, suspect
from argosy.diagnosis import (
    MAX_LINES,
    MAX_WIDTH,
    REMEDIES,
    Diagnosis,
    Link,
    load_step,
    render,
    render_json,
    until_first_problem,
)

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("case", CASES)
def test_the_first_link_that_is_not_done_is_told(case: str) -> None:
    resource, pods, name, state, words = CASES[case]
    found = cluster_diagnosis(resource, pods, log=["a line", "the last line of the log"])
    text = render(found)
    assert (found.links[-1].name, found.links[-1].state) == (name, state), text
    assert [link for link in found.links[:-1] if link.state != "done"] == []
    assert all(word in text for word in words), text
    assert text.startswith("team/qwen\n")


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


def test_what_a_canary_waits_for_is_told() -> None:
    resource = service(
        condition("Ready", "False", "CanaryAnalyzing", "step 1 of 1: revision new answers 0 %")
    )
    resource["status"]["rollout"] = {"step": 1, "revision": "new", "message": "too few requests"}
    (link,) = cluster_diagnosis(resource, [pod()]).links[-1:]
    assert link.detail.endswith("answers 0 %; too few requests")
    assert "minRequests" in link.remedy
