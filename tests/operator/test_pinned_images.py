"""A new default image reaches a service with its next edit, or by itself if the upgrade policy says so."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
from builders import CONFIG, isvc, isvc_object, pod
from fake_kubernetes import FakeKubernetes, pod_key
from harness import Operator, condition, deployment, edit_engine, living_pods, new_cluster
from virtual_time import virtual_time

from argosy_operator.config import OperatorConfig
from argosy_operator.desired.children import Plan, plan_children
from argosy_operator.names import HELD_IMAGES_ANNOTATION, WARM_UP_ANNOTATION
from argosy_operator.observation import Observation, template_revision
from argosy_operator.pod import Pod, Problem
from argosy_operator.status.report import status

OLD = dataclasses.replace(CONFIG, engine_upgrade_policy="OnSpecChange", engine_image="engine:1")
NEW = dataclasses.replace(OLD, engine_image="engine:2")
REMOTE = {"source": "hf://org/name"}
BROKEN = Problem("ImagePullBackOff", "no such image")


def upgraded(
    before: dict[str, Any], after: dict[str, Any] | None = None, pods: tuple[Pod, ...] | None = None
) -> Plan:
    """The plan after the default changed, and the spec from `before` to `after`, by default not at all. `pods`: by
    default one that serves."""
    first = plan_children(isvc(**before), Observation(), OLD)
    observed = Observation(
        deployment=first.deployment, pods=(pod("a", first.revision),) if pods is None else pods
    )
    return plan_children(isvc(**(before if after is None else after)), observed, NEW)


def images(made: Plan) -> dict[str, str]:
    spec = made.deployment["spec"]["template"]["spec"]
    containers = [*spec["containers"], *spec.get("initContainers", [])]
    return {container["name"]: container["image"] for container in containers}


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({}, None, {"engine": "engine:1"}),
        ({"model": REMOTE}, None, {"engine": "engine:1", "fetch-model": "engine:1"}),
        ({"model": REMOTE, "engine": {"image": "mine:1"}}, None, {"engine": "mine:1", "fetch-model": "engine:1"}),
        ({}, {"replicas": 3}, {"engine": "engine:1"}),
        ({}, {"router": {"policy": "random"}}, {"engine": "engine:1"}),
        ({}, {"engine": {"upgradePolicy": "OnSpecChange"}}, {"engine": "engine:1"}),
        ({}, {"engine": {"upgradePolicy": "Automatic"}}, {"engine": "engine:2"}),
        ({}, {"engine": {"threads": 2}}, {"engine": "engine:2"}),
        ({}, {"placement": {"nodeSelector": {"a": "b"}}}, {"engine": "engine:2"}),
        ({"engine": {"image": "mine:1"}}, {}, {"engine": "engine:2"}),
        ({"model": REMOTE}, {"model": REMOTE, "rollout": {"drainSeconds": 9}},
         {"engine": "engine:2", "fetch-model": "engine:2"}),
    ],
    ids=str,
)  # fmt: skip
def test_an_image_stays_until_the_spec_changes(
    before: dict[str, Any], after: dict[str, Any] | None, expected: dict[str, str]
) -> None:
    assert images(upgraded(before, after)) == expected


def test_an_upgrade_alone_changes_no_template() -> None:
    first = plan_children(isvc(model=REMOTE), Observation(), OLD)
    assert upgraded({"model": REMOTE}).deployment["spec"] == first.deployment["spec"]


def test_a_deployment_of_an_older_operator_tells_its_images_by_its_containers() -> None:
    service = isvc(model=REMOTE)
    first = plan_children(service, Observation(), OLD)
    annotations = first.deployment["metadata"]["annotations"]
    kept = {name: value for name, value in annotations.items() if "default-" not in name}
    assert len(kept) == len(annotations) - 2
    live = {**first.deployment, "metadata": {**first.deployment["metadata"], "annotations": kept}}
    observed = Observation(deployment=live, pods=(pod("a", first.revision),))
    made = plan_children(service, observed, NEW)
    assert made.revision == first.revision
    assert made.deployment["spec"] == first.deployment["spec"]


def variables(made: Plan) -> list[str]:
    (engine,) = made.deployment["spec"]["template"]["spec"]["containers"]
    return [variable["name"] for variable in engine["env"]]


def without_warm_up(made: Plan) -> dict[str, Any]:
    """The Deployment that an operator makes whose engines do not warm up."""
    live: dict[str, Any] = copy.deepcopy(made.deployment)
    del live["metadata"]["annotations"][WARM_UP_ANNOTATION]
    (engine,) = live["spec"]["template"]["spec"]["containers"]
    engine["env"] = [each for each in engine["env"] if each["name"] != "ARGOSY_WARM_UP_FROM"]
    return live


@pytest.mark.parametrize(
    ("before", "after", "config", "warms_up"),
    [
        ({}, {}, NEW, False),
        ({}, {"replicas": 3}, NEW, False),
        ({}, {"engine": {"threads": 2}}, NEW, True),
        ({}, {}, dataclasses.replace(NEW, engine_upgrade_policy="Automatic"), True),
        ({}, {}, dataclasses.replace(OLD, engine_upgrade_policy="Automatic"), False),
        ({"engine": {"image": "mine:1"}}, {"engine": {"image": "mine:1"}}, NEW, False),
        ({"engine": {"image": "mine:1"}}, {"engine": {"image": "mine:2"}}, NEW, True),
    ],
    ids=str,
)
def test_the_warm_up_comes_with_an_image_that_is_chosen_anew(
    before: dict[str, Any], after: dict[str, Any], config: OperatorConfig, warms_up: bool
) -> None:
    first = plan_children(isvc(**before), Observation(), OLD)
    assert "ARGOSY_WARM_UP_FROM" in variables(first), "a new service"
    live = without_warm_up(first)
    revision = template_revision(live)
    made = plan_children(isvc(**after), Observation(deployment=live, pods=(pod("a", revision),)), config)
    assert ("ARGOSY_WARM_UP_FROM" in variables(made)) is warms_up
    assert (WARM_UP_ANNOTATION in made.deployment["metadata"]["annotations"]) is warms_up
    again = plan_children(
        isvc(**after), Observation(deployment=made.deployment, pods=(pod("a", made.revision),)), config
    )
    assert again.revision == made.revision


@pytest.mark.parametrize(
    ("serves", "kept"), [(False, False), (True, True)], ids=["none serves", "another one serves"]
)
def test_an_image_that_never_served_is_not_kept(serves: bool, kept: bool) -> None:
    first = plan_children(isvc(), Observation(), OLD)
    failed = pod("a", first.revision, ready=False, gate="", problem=BROKEN)
    others = (pod("b", first.revision),) if serves else (pod("old", "other"),)
    made = upgraded({}, pods=(failed, *others))
    assert images(made) == {"engine": "engine:1" if kept else "engine:2"}


def test_an_image_that_served_is_kept_when_its_only_replica_fails() -> None:
    first = plan_children(isvc(), Observation(), OLD)
    failed = pod("a", first.revision, ready=False, gate="", problem=BROKEN)
    live = first.deployment
    for pods in ((pod("a", first.revision),), (failed,), (failed,)):
        made = plan_children(isvc(), Observation(deployment=live, pods=pods), NEW)
        assert images(made) == {"engine": "engine:1"}
        live = made.deployment


@pytest.mark.parametrize("pods", [(), (pod("a", "?", ready=False, gate=""),)], ids=["no pod", "a new pod"])
def test_an_image_that_has_not_failed_is_kept(pods: tuple[Pod, ...]) -> None:
    assert images(upgraded({}, pods=pods)) == {"engine": "engine:1"}


@pytest.mark.parametrize(
    ("spec", "image", "available"),
    [
        ({}, "engine:1", "engine:2"),
        ({"engine": {"image": "mine:1"}}, "mine:1", ""),
        ({"engine": {"upgradePolicy": "Automatic"}}, "engine:2", ""),
    ],
)
def test_the_status_shows_the_image_and_the_one_that_waits(
    spec: dict[str, Any], image: str, available: str
) -> None:
    reported = status(isvc(**spec), Observation(), upgraded(spec), config=NEW, now="")
    assert (reported.image, reported.available_image) == (image, available)


def running(cluster: FakeKubernetes) -> list[str]:
    return [pod["spec"]["containers"][0]["image"] for pod in living_pods(cluster)]


@virtual_time
async def test_an_upgrade_of_the_chart_replaces_no_pod() -> None:
    cluster = new_cluster()
    async with Operator(cluster, engine_upgrade_policy="OnSpecChange") as operator:
        cluster.create(isvc_object(replicas=2))
        await operator.settle()
    names = sorted(pod["metadata"]["name"] for pod in living_pods(cluster))
    async with Operator(cluster, engine_image="new:2", engine_upgrade_policy="OnSpecChange") as operator:
        await operator.settle()
        assert sorted(pod["metadata"]["name"] for pod in living_pods(cluster)) == names
        assert condition(cluster, "Ready") == ("True", "ReplicasRoutable")
        cluster.edit("tiny", lambda spec: spec.update(replicas=3))
        await operator.settle()
        assert running(cluster) == ["argosy-engine:test"] * 3
        edit_engine(cluster, threads=2)
        await operator.settle()
        assert running(cluster) == ["new:2"] * 3


def crash(cluster: FakeKubernetes) -> None:
    """Have the engine of one replica be killed and started again."""
    failed = copy.deepcopy(living_pods(cluster)[0])
    for each in failed["status"]["conditions"]:
        if each["type"] in ("ContainersReady", "Ready"):
            each["status"] = "False"
    failed["status"]["containerStatuses"] = [
        {
            "name": "engine",
            "ready": False,
            "restartCount": 1,
            "state": {"running": {}},
            "lastState": {"terminated": {"reason": "OOMKilled", "exitCode": 137}},
        }
    ]
    cluster.overwrite(pod_key(failed), failed)


@virtual_time
async def test_a_crash_is_no_reason_for_a_new_default() -> None:
    cluster = new_cluster()
    async with Operator(cluster, engine_upgrade_policy="OnSpecChange") as operator:
        cluster.create(isvc_object())
        await operator.settle()
    async with Operator(cluster, engine_image="new:2", engine_upgrade_policy="OnSpecChange") as operator:
        await operator.settle()
        before = len(cluster.writes)
        crash(cluster)
        await operator.settle()
        assert len(cluster.writes) > before, "the operator saw it"
        assert running(cluster) == ["argosy-engine:test"]


@virtual_time
async def test_a_better_default_reaches_a_service_that_is_stuck() -> None:
    cluster = new_cluster()
    cluster.broken_images.add("broken:1")
    async with Operator(cluster, engine_image="broken:1", engine_upgrade_policy="OnSpecChange") as operator:
        cluster.create(isvc_object())
        await operator.settle()
        assert running(cluster) == ["broken:1"]
    async with Operator(cluster, engine_image="good:2", engine_upgrade_policy="OnSpecChange") as operator:
        await operator.settle()
        assert running(cluster) == ["good:2"]
        assert condition(cluster, "Ready") == ("True", "ReplicasRoutable")


@virtual_time
async def test_an_edit_back_from_a_halted_rollout_finds_the_image_of_the_old_replicas() -> None:
    """A default that does not work comes with the next edit; the previous manifest must be the way back."""
    cluster = new_cluster()
    policy: dict[str, Any] = {"engine_upgrade_policy": "OnSpecChange"}
    async with Operator(cluster, engine_image="old:1", **policy) as operator:
        cluster.create(isvc_object(replicas=2))
        await operator.settle()
    names = {pod["metadata"]["name"] for pod in living_pods(cluster)}
    cluster.broken_images.add("broken:2")
    async with Operator(cluster, engine_image="broken:2", **policy) as operator:
        for threads in (2, 3):
            edit_engine(cluster, threads=threads)
            await operator.settle()
            assert condition(cluster, "Progressing") == ("False", "RolloutHalted")
        cluster.edit("tiny", lambda spec: spec["engine"].pop("threads"))
        await operator.settle()
        assert condition(cluster, "Ready") == ("True", "ReplicasRoutable")
        assert {pod["metadata"]["name"] for pod in living_pods(cluster)} == names, "none was replaced"
        assert cluster.isvc()["status"]["image"] == "old:1"
        assert HELD_IMAGES_ANNOTATION not in deployment(cluster)["metadata"]["annotations"]
