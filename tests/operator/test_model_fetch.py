"""A pod's model fetch: how it is read, and the pod's condition about it."""

from __future__ import annotations

from typing import Any

import pytest
from builders import NOW, pod_object
from fetching import (
    BACK_OFF,
    GATED,
    LAST_LINE,
    RUNNING,
    cached_condition,
    ended,
    fetching_pod,
    report,
    so_far,
)

from argosy_operator.desired.diff import cached_change, cached_patch
from argosy_operator.pod import ModelFetch, Problem, read_pod
from argosy_protocol.reports import ModelProgress

FAILED = cached_condition("False", "FetchFailed", GATED)
PULL = {"waiting": {"reason": "ErrImagePull", "message": "not found"}}


def fetch_of(obj: dict[str, Any]) -> ModelFetch:
    fetch = read_pod(obj).fetch
    assert fetch is not None
    return fetch


@pytest.mark.parametrize(
    ("name", "container", "condition", "state", "problem"),
    [
        ("not reported", {}, None, "pending", None),
        ("starts", {"state": {"waiting": {"reason": "PodInitializing"}}}, None, "pending", None),
        ("image cannot be pulled", {"state": PULL}, None, "pending", Problem("ImagePullBackOff", "not found")),
        ("runs", {"state": RUNNING}, None, "running", None),
        ("has succeeded", {"state": ended(0, LAST_LINE), "ready": True}, None, "succeeded", None),
        ("has failed", {"state": ended(1, f"fetching\n{GATED}\n")}, None, "failed",
         Problem("ModelFetchFailed", GATED)),
        ("waits for its next attempt", {"state": BACK_OFF, "lastState": ended(1, GATED)}, None, "failed",
         Problem("ModelFetchFailed", GATED)),
        ("has failed without a word", {"state": ended(137)}, None, "failed",
         Problem("ModelFetchFailed", "Error, code 137")),
        ("next attempt has just begun", {"state": RUNNING, "lastState": ended(1, GATED)}, FAILED, "running",
         Problem("ModelFetchFailed", GATED)),
        ("next attempt moves", {"state": RUNNING, "lastState": ended(1, GATED)},
         cached_condition("False", "Fetching", "3 % 1/2 GiB"), "running", None),
        ("next attempt of a pod whose failure was never noted", {"state": RUNNING, "lastState": ended(1)}, None,
         "running", None),
        ("runs again after a restart of the sandbox", {"state": RUNNING, "lastState": ended(0)},
         cached_condition("True", "Cached"), "running", None),
        ("waits after a restart of the sandbox",
         {"state": {"waiting": {"reason": "PodInitializing"}}, "lastState": ended(0)}, None, "pending", None),
    ],
)  # fmt: skip
def test_reading_a_fetch(
    name: str,
    container: dict[str, Any],
    condition: dict[str, str] | None,
    state: str,
    problem: Problem | None,
) -> None:
    obj = fetching_pod("p", condition=condition, **container)
    assert fetch_of(obj).state == state, name
    assert read_pod(obj).problem == problem, name


def test_a_pod_without_the_init_container_fetches_nothing() -> None:
    obj = pod_object("p")
    obj["spec"]["initContainers"] = [{"name": "sidecar"}]
    assert read_pod(obj).fetch is None
    assert read_pod(pod_object("p")).fetch is None


def test_an_engine_that_crashes_after_its_fetch_is_the_problem() -> None:
    obj = fetching_pod("p", state=ended(0, LAST_LINE))
    obj["status"]["containerStatuses"] = [{"name": "engine", "state": ended(2, "no config.json")}]
    assert read_pod(obj).problem == Problem("ContainerExited", "last exit: Error, code 2: no config.json")


HALF = "50 % 14.0/28.0 GiB"
WAITS = "waiting for another pod that fetches it"


@pytest.mark.parametrize(
    ("name", "container", "condition", "progress", "expected"),
    [
        ("not begun", {}, None, None, None),
        ("begun, no report", {"state": RUNNING}, None, None, None),
        ("first report", {"state": RUNNING}, None, so_far(50), ("False", "Fetching", HALF)),
        ("same text", {"state": RUNNING}, cached_condition("False", "Fetching", HALF), so_far(50, revision="1a"), None),
        ("new text", {"state": RUNNING}, cached_condition("False", "Fetching", "9 %"), so_far(50),
         ("False", "Fetching", HALF)),
        ("succeeded", {"state": ended(0, LAST_LINE)}, cached_condition("False", "Fetching", HALF), None,
         ("True", "Cached", LAST_LINE)),
        ("succeeded, and a report is left over", {"state": ended(0, LAST_LINE)}, None, so_far(50),
         ("True", "Cached", LAST_LINE)),
        ("succeeded without a word", {"state": ended(0)}, None, None, ("True", "Cached", "the model is stored")),
        ("noted", {"state": ended(0, LAST_LINE)}, cached_condition("True", "Cached", LAST_LINE), None, None),
        ("failed", {"state": ended(1, GATED)}, cached_condition("False", "Fetching", HALF), so_far(50),
         ("False", "FetchFailed", GATED)),
        ("failure noted", {"state": BACK_OFF, "lastState": ended(1, GATED)}, FAILED, None, None),
        ("next attempt is at its start", {"state": RUNNING}, FAILED, report("resolving"), None),
        ("next attempt waits", {"state": RUNNING}, FAILED, report("waiting"), None),
        ("waits", {"state": RUNNING}, None, report("waiting"), ("False", "Fetching", WAITS)),
        ("next attempt moves", {"state": RUNNING}, FAILED, so_far(50), ("False", "Fetching", HALF)),
        ("runs again after a restart of the sandbox", {"state": RUNNING}, cached_condition("True", "Cached", LAST_LINE),
         report("resolving"), ("False", "Fetching", "resolving the revision")),
    ],
)  # fmt: skip
def test_the_pods_condition(
    name: str,
    container: dict[str, Any],
    condition: dict[str, str] | None,
    progress: ModelProgress | None,
    expected: tuple[str, str, str] | None,
) -> None:
    obj = fetching_pod("p", condition=condition, **container)
    change = cached_change(read_pod(obj), progress)
    assert (None if change is None else (change.status, change.reason, change.message)) == expected, name
    obj["metadata"]["deletionTimestamp"] = NOW
    assert cached_change(read_pod(obj), progress) is None, "a pod that ends is left alone"


def test_the_patch_keeps_the_transition_time_while_the_status_stays() -> None:
    before = cached_condition("False", "Fetching", "9 %")
    change = cached_change(read_pod(fetching_pod("p", condition=before, state=RUNNING)), so_far(50))
    assert change is not None
    assert cached_patch(change, now=NOW) == {
        "metadata": {"uid": "uid-p"},
        "status": {"conditions": [cached_condition("False", "Fetching", HALF, lastProbeTime=NOW)]},
    }
    change = cached_change(read_pod(fetching_pod("p", condition=before, state=ended(0, LAST_LINE))), None)
    assert change is not None
    (condition,) = cached_patch(change, now=NOW)["status"]["conditions"]
    assert condition["lastTransitionTime"] == NOW
