"""A rollout never removes the last routable replica unless the spec allows it, and stops when a replacement fails."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any

import pytest
from builders import isvc, isvc_object
from fake_kubernetes import FakeKubernetes, Object, is_pod_ready
from harness import (
    Operator,
    condition,
    edit_engine,
    living_pods,
    new_cluster,
    num_routable,
    settled,
    watch_routable,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from virtual_time import virtual_time

from argosy_operator.cluster.api import ApiError
from argosy_operator.desired.upgrades import input_digest
from argosy_operator.names import DEPLOYMENTS, INFERENCE_SERVICES, TURN_ANNOTATION
from argosy_resource.engine_command import SERVICE_LABEL

GPU: dict[str, Any] = {"resources": {"gpu": {}}}
DEFAULT_IMAGE = "argosy-engine:test"


def images(cluster: FakeKubernetes, name: str = "tiny") -> list[str]:
    return sorted(pod["spec"]["containers"][0]["image"] for pod in living_pods(cluster, name))


@pytest.mark.parametrize(
    ("replicas", "rollout", "why"),
    [
        (1, {"maxUnavailable": 0, "maxSurge": 1}, "maxUnavailable is 0"),
        (3, {"maxUnavailable": 0}, "maxUnavailable is 0"),
        (1, {}, "the only one"),
    ],
)
@virtual_time
async def test_without_a_gpu_for_the_surge_a_rollout_waits_and_says_so(
    replicas: int, rollout: dict[str, int], why: str
) -> None:
    async with settled(isvc_object(replicas=replicas, rollout=rollout, **GPU), gpus=replicas) as (
        cluster,
        operator,
    ):
        lowest = watch_routable(cluster)
        edit_engine(cluster, threads=2)
        await operator.settle()
        assert min(lowest) == replicas
        assert condition(cluster, "Progressing") == ("True", "WaitingForCapacity")
        assert why in cluster.condition("Progressing")["message"]
        cluster.gpus += 1
        await operator.settle()
    assert min(lowest) == replicas
    assert condition(cluster, "Ready") == ("True", "ReplicasRoutable")


@pytest.mark.parametrize(
    "rollout", [{"maxUnavailable": 1}, {"maxSurge": 0}, {"maxSurge": 1, "maxUnavailable": 1}]
)
@virtual_time
async def test_a_spec_that_allows_it_has_its_only_replica_replaced_in_place(rollout: dict[str, int]) -> None:
    async with settled(isvc_object(rollout=rollout, **GPU), gpus=1) as (cluster, operator):
        edit_engine(cluster, threads=2)
        await operator.settle()
    assert condition(cluster, "Ready") == ("True", "ReplicasRoutable")
    assert condition(cluster, "Progressing") == ("False", "Complete")


@virtual_time
async def test_scaling_down_to_one_during_a_replacement_in_place_keeps_that_one() -> None:
    cluster = new_cluster(gpus=2)
    cluster.broken_images.add("broken:1")
    async with Operator(cluster) as operator:
        cluster.create(isvc_object(replicas=2, **GPU))
        await operator.settle()
        lowest = watch_routable(cluster)
        edit_engine(cluster, image="broken:1")
        await operator.settle()
        cluster.edit("tiny", lambda spec: spec.update(replicas=1))
        await operator.settle()
    assert min(lowest) == 1
    assert DEFAULT_IMAGE in images(cluster)


@pytest.mark.parametrize("gpus", [4, 5], ids=["in place", "with a surge"])
@pytest.mark.parametrize(
    "rollout", [{}, {"maxUnavailable": 3, "maxSurge": 2}, {"maxUnavailable": 4}], ids=str
)
@pytest.mark.parametrize("fault", ["broken", "crashing"])
@virtual_time
async def test_one_failed_replacement_stops_the_rollout(
    gpus: int, rollout: dict[str, int], fault: str
) -> None:
    cluster = new_cluster(gpus=gpus)
    faulty = cluster.broken_images if fault == "broken" else cluster.crashing_images
    faulty.add("bad:1")
    taken: list[str] = []
    async with Operator(cluster) as operator:
        cluster.create(isvc_object(replicas=4, rollout=rollout, **GPU))
        await operator.settle()
        cluster.on_replaced = lambda deployment, pod: taken.append(pod["metadata"]["name"])
        edit_engine(cluster, image="bad:1")
        seen = set()
        for _ in range(60):  # a crashing replica never comes to rest
            await asyncio.sleep(1)
            cluster.step()
            seen.add(condition(cluster, "Progressing"))
        assert len(taken) <= 1
        assert images(cluster).count(DEFAULT_IMAGE) >= 3
        assert ("False", "RolloutHalted") in seen
        assert cluster.condition("Ready")["status"] == "False"
        faulty.clear()  # somebody pushed the image
        await operator.settle()
        assert images(cluster) == ["bad:1"] * 4
    assert condition(cluster, "Ready") == ("True", "ReplicasRoutable")
    assert condition(cluster, "Progressing") == ("False", "Complete")


@pytest.mark.parametrize("fault", ["unpullable", "failing", "unschedulable"])
@pytest.mark.parametrize("rollout", [{}, {"maxUnavailable": 0}], ids=["default", "maxUnavailable 0"])
@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("resource", ["gpu", "cpu"])
@virtual_time
async def test_a_first_manifest_that_fails_does_not_block_its_correction(
    resource: str, replicas: int, rollout: dict[str, int], fault: str
) -> None:
    cluster = new_cluster(gpus=replicas)
    if resource == "cpu":
        cluster.room = replicas
    {"unpullable": cluster.broken_images, "failing": cluster.failing_images}.get(fault, set()).add("bad:1")
    resources = {"resources": {"gpu": {}}} if resource == "gpu" else {}
    seen = set()

    def note(kind: Any, event: str, obj: Object) -> None:
        if kind is INFERENCE_SERVICES:
            seen.add(cluster.condition("Progressing").get("reason"))

    async with Operator(cluster) as operator:
        if fault == "unschedulable":
            cluster.gpus = cluster.room = 0
        cluster.create(
            isvc_object(engine={"image": "bad:1"}, replicas=replicas, rollout=rollout, **resources)
        )
        await operator.settle()
        cluster.gpus = cluster.room = replicas
        cluster.listeners.append(note)
        edit_engine(cluster, image="good:2")
        await operator.settle()
    assert images(cluster) == ["good:2"] * replicas
    assert condition(cluster, "Ready") == ("True", "ReplicasRoutable")
    assert not seen & {"WaitingForCapacity", "NoGPUForSurge"}


@virtual_time
async def test_an_old_replica_that_never_started_leaves_and_those_that_serve_stay() -> None:
    cluster = new_cluster()
    cluster.room = 3
    async with Operator(cluster) as operator:
        cluster.create(isvc_object(replicas=2))
        await operator.settle()
        before = {pod["metadata"]["name"] for pod in living_pods(cluster)}
        cluster.has_image = lambda name: name in before
        cluster.edit("tiny", lambda spec: spec.update(replicas=3))
        await operator.settle()
        (stuck,) = {pod["metadata"]["name"] for pod in living_pods(cluster)} - before
        assert condition(cluster, "Degraded") == ("True", "ImagePullBackOff")
        lowest = watch_routable(cluster)
        cluster.has_image = lambda name: name != stuck
        edit_engine(cluster, image="good:2")
        await operator.settle()
        assert stuck not in {pod["metadata"]["name"] for pod in living_pods(cluster)}
        assert num_routable(cluster) == 3
        cluster.room = 4  # the others are replaced with a surge, as ever
        await operator.settle()
    assert min(lowest) == 2
    assert images(cluster) == ["good:2"] * 3


@virtual_time
async def test_a_replica_that_merely_starts_is_not_removed_for_its_successor() -> None:
    cluster = new_cluster(gpus=1)
    async with Operator(cluster) as operator:
        cluster.create(isvc_object(**GPU))
        while not living_pods(cluster) or "nodeName" not in living_pods(cluster)[0]["spec"]:
            await asyncio.sleep(1)
            cluster.step()
        (before,) = living_pods(cluster)
        edit_engine(cluster, threads=2)
        await asyncio.sleep(1)
        cluster.step()
        await asyncio.sleep(1)
        assert condition(cluster, "Progressing") == ("True", "WaitingForCapacity")
        assert "no starting replica is stopped" in cluster.condition("Progressing")["message"]
        await operator.settle()
        assert before["metadata"]["uid"] in {pod["metadata"]["uid"] for pod in living_pods(cluster)}
        assert num_routable(cluster) == 1


@virtual_time
async def test_a_replica_that_served_and_now_crash_loops_leaves_when_no_node_takes_its_successor() -> None:
    cluster = new_cluster()
    async with Operator(cluster) as operator:
        cluster.create(isvc_object())
        await operator.settle()
        cluster.failing_images.add(DEFAULT_IMAGE)
        await operator.settle()
        (before,) = living_pods(cluster)
        edit_engine(cluster, image="bad:1")
        cluster.broken_images.add("bad:1")
        await operator.settle()
        kept = {pod["metadata"]["uid"] for pod in living_pods(cluster)}
        assert before["metadata"]["uid"] in kept, "there is room for both, and it may recover"
        cluster.room = 1
        edit_engine(cluster, image="good:2")
        await operator.settle()
    assert images(cluster) == ["good:2"]
    assert condition(cluster, "Ready") == ("True", "ReplicasRoutable")


@virtual_time
async def test_a_halted_rollout_continues_with_the_next_edit() -> None:
    cluster = new_cluster(gpus=2)
    cluster.broken_images.add("broken:1")
    async with Operator(cluster) as operator:
        cluster.create(isvc_object(replicas=2, **GPU))
        await operator.settle()
        lowest = watch_routable(cluster)
        edit_engine(cluster, image="broken:1")
        await operator.settle()
        assert condition(cluster, "Progressing") == ("False", "RolloutHalted")
        edit_engine(cluster, image="good:2")
        await operator.settle()
        assert images(cluster) == ["good:2"] * 2
        assert min(lowest) >= 1
    assert condition(cluster, "Ready") == ("True", "ReplicasRoutable")


@pytest.mark.parametrize(
    ("spec", "is_same"),
    [
        ({"replicas": 5}, True),
        ({"router": {"policy": "least-load"}}, True),
        ({"engine": {"device": "auto"}, "placement": {"nodeSelector": {}}, "podTemplate": {}}, True),
        ({"model": {"source": "builtin://tiny", "servedName": "x", "aliases": ["y"]}}, True),
        ({"rollout": {"maxUnavailable": 1}}, True),
        ({"model": {"source": "builtin://tiny", "cache": {}}}, True),
        ({"model": {"source": "builtin://tiny", "cache": {"type": "node"}}}, False),
        ({"model": {"source": "builtin://tiny", "secretRef": {"name": "a"}}}, False),
        ({"rollout": {"drainSeconds": 1}}, False),
        ({"engine": {"threads": 2}}, False),
        ({"placement": {"nodeSelector": {"a": "b"}}}, False),
        ({"podTemplate": {"metadata": {"labels": {"a": "b"}}}}, False),
    ],
    ids=str,
)
def test_the_users_input_is_told_from_defaults_and_from_what_pods_do_not_depend_on(
    spec: dict[str, Any], is_same: bool
) -> None:
    assert (input_digest(isvc(**spec)) == input_digest(isvc())) is is_same


async def upgrade(cluster: FakeKubernetes, image: str) -> Operator:
    """The chart's upgrade: a new operator process with another default image."""
    operator = Operator(cluster, engine_image=image)
    await operator.__aenter__()
    return operator


NAMES = ("a", "b", "c")


async def three_services(cluster: FakeKubernetes) -> None:
    async with Operator(cluster) as operator:
        for name in NAMES:
            cluster.create(isvc_object(name, **GPU))
        await operator.settle()


@pytest.mark.parametrize("gpus", [3, 4], ids=["no spare GPU", "one spare GPU"])
@virtual_time
async def test_a_wrong_default_image_takes_no_service_down(gpus: int) -> None:
    cluster = new_cluster(gpus=gpus)
    await three_services(cluster)
    lowest = {name: watch_routable(cluster, name) for name in NAMES}
    cluster.broken_images.add("broken:1")
    operator = await upgrade(cluster, "broken:1")
    await operator.settle()
    await operator.__aexit__(None, None, None)
    assert [min(lowest[name]) for name in NAMES] == [1, 1, 1]
    touched = [name for name in NAMES if "broken:1" in images(cluster, name)]
    assert len(touched) == 1
    for name in NAMES:
        if name in touched:
            assert cluster.condition("Ready", name)["status"] == "False"
        else:
            assert condition(cluster, "Ready", name) == ("True", "ReplicasRoutable")
            assert condition(cluster, "Progressing", name) == ("False", "WaitingForTurn")
            assert f"team/{touched[0]}" in cluster.condition("Progressing", name)["message"]
    cluster.gpus = 4
    operator = await upgrade(cluster, "good:2")
    await operator.settle()
    await operator.__aexit__(None, None, None)
    assert [min(lowest[name]) for name in NAMES] == [1, 1, 1]
    assert all(images(cluster, name) == ["good:2"] for name in NAMES)
    assert all(condition(cluster, "Progressing", name) == ("False", "Complete") for name in NAMES)


@virtual_time
async def test_a_new_default_image_reaches_one_service_at_a_time() -> None:
    cluster = new_cluster()
    await three_services(cluster)
    most: list[int] = []

    def note(kind: Any, event: str, obj: Object) -> None:
        rolling = [
            name for name in NAMES if len(living_pods(cluster, name)) != 1 or not num_routable(cluster, name)
        ]
        most.append(len(rolling))

    cluster.listeners.append(note)
    operator = await upgrade(cluster, "good:2")
    await operator.settle()
    await operator.__aexit__(None, None, None)
    assert max(most) == 1
    assert all(images(cluster, name) == ["good:2"] for name in NAMES)


@virtual_time
async def test_a_service_that_waits_for_its_turn_can_be_scaled_edited_and_brought_back() -> None:
    cluster = new_cluster()
    await three_services(cluster)
    cluster.broken_images.add("broken:1")
    operator = await upgrade(cluster, "broken:1")
    await operator.settle()
    held = [name for name in NAMES if condition(cluster, "Progressing", name)[1] == "WaitingForTurn"]
    assert len(held) == 2
    cluster.edit(held[0], lambda spec: spec.update(replicas=3))
    cluster.edit(held[1], lambda spec: spec["engine"].update(image="mine:1"))
    await operator.settle()
    assert images(cluster, held[0]) == [DEFAULT_IMAGE] * 3
    assert condition(cluster, "Ready", held[0]) == ("True", "ReplicasRoutable")
    assert images(cluster, held[1]) == ["mine:1"], "the user's own edit does not wait"
    await operator.__aexit__(None, None, None)
    operator = await upgrade(cluster, DEFAULT_IMAGE)
    before = {pod["metadata"]["uid"] for pod in living_pods(cluster, held[0])}
    await operator.settle()
    await operator.__aexit__(None, None, None)
    assert {pod["metadata"]["uid"] for pod in living_pods(cluster, held[0])} == before
    assert condition(cluster, "Progressing", held[0]) == ("False", "Complete")


@virtual_time
async def test_a_service_that_cannot_be_written_does_not_keep_its_turn() -> None:
    cluster = new_cluster()
    await three_services(cluster)

    async def refused(manifest: Object) -> Object:
        if manifest["kind"] == "Deployment" and manifest["metadata"]["name"].startswith("a-"):
            raise ApiError("PATCH", 500, "etcd is busy")
        return await FakeKubernetes.apply(cluster, manifest)

    cluster.apply = refused  # type: ignore[method-assign]
    operator = await upgrade(cluster, "good:2")
    for _ in range(60):
        await asyncio.sleep(1)
        cluster.step()
    assert [images(cluster, name) for name in NAMES] == [[DEFAULT_IMAGE], ["good:2"], ["good:2"]]
    cluster.apply = functools.partial(FakeKubernetes.apply, cluster)  # type: ignore[method-assign]
    await asyncio.sleep(120)
    await operator.settle()
    await operator.__aexit__(None, None, None)
    assert images(cluster, "a") == ["good:2"]


@virtual_time
async def test_the_next_service_has_its_turn_when_the_one_before_is_deleted() -> None:
    cluster = new_cluster()
    await three_services(cluster)
    cluster.broken_images.add("broken:1")
    operator = await upgrade(cluster, "broken:1")
    await operator.settle()
    (stuck,) = [name for name in NAMES if "broken:1" in images(cluster, name)]
    cluster.remove(next(key for key in cluster.objects if key[2] == stuck))
    await operator.settle()
    await operator.__aexit__(None, None, None)
    rest = [name for name in NAMES if name != stuck]
    assert sum("broken:1" in images(cluster, name) for name in rest) == 1
    assert all(num_routable(cluster, name) == 1 for name in rest)


@virtual_time
async def test_a_deployment_that_is_no_services_has_no_turn() -> None:
    """As `kubectl delete --cascade=orphan` leaves it, and as a backup may restore it."""
    cluster = new_cluster()
    await three_services(cluster)
    cluster.broken_images.add("broken:1")
    operator = await upgrade(cluster, "broken:1")
    await operator.settle()
    (stuck,) = [name for name in NAMES if "broken:1" in images(cluster, name)]
    left = cluster.objects[DEPLOYMENTS, "team", f"{stuck}-engine"]
    metadata = {name: value for name, value in left["metadata"].items() if name != "ownerReferences"}
    cluster.overwrite((DEPLOYMENTS, "team", f"{stuck}-engine"), {**left, "metadata": metadata})
    cluster.remove((INFERENCE_SERVICES, "team", stuck))
    await asyncio.sleep(10)
    assert (DEPLOYMENTS, "team", f"{stuck}-engine") in cluster.objects
    rest = [name for name in NAMES if name != stuck]
    waiting = [name for name in rest if condition(cluster, "Progressing", name)[1] == "WaitingForTurn"]
    assert len(waiting) == 1, "the other one has the turn"
    await operator.__aexit__(None, None, None)


def mark(cluster: FakeKubernetes, name: str) -> None:
    """`kubectl annotate`: a field of another manager, which an apply of the operator's does not remove."""
    key = (DEPLOYMENTS, "team", f"{name}-engine")
    live = cluster.objects[key]
    annotations = {**live["metadata"]["annotations"], TURN_ANNOTATION: "true"}
    cluster.overwrite(key, {**live, "metadata": {**live["metadata"], "annotations": annotations}})


@virtual_time
async def test_a_turn_that_somebody_notes_by_hand_holds_up_no_other_service() -> None:
    cluster = new_cluster()
    await three_services(cluster)
    async with Operator(cluster, engine_image="good:1") as operator:
        await operator.settle()
        mark(cluster, "b")
        await operator.settle()
        assert (
            TURN_ANNOTATION not in cluster.objects[DEPLOYMENTS, "team", "b-engine"]["metadata"]["annotations"]
        )
    cluster.edit("c", lambda spec: spec.update(paused=True))
    mark(cluster, "c")
    operator = await upgrade(cluster, "good:2")
    await operator.settle()
    await operator.__aexit__(None, None, None)
    assert [images(cluster, name) for name in NAMES] == [["good:2"], ["good:2"], ["good:1"]]


@virtual_time
async def test_another_deployment_that_claims_a_paused_service_has_no_turn() -> None:
    cluster = new_cluster()
    await three_services(cluster)
    cluster.edit("c", lambda spec: spec.update(paused=True))
    live = cluster.objects[DEPLOYMENTS, "team", "c-engine"]
    metadata = {
        **live["metadata"],
        "name": "forged",
        "uid": "forged",
        "annotations": {TURN_ANNOTATION: "true"},
    }
    cluster.overwrite((DEPLOYMENTS, "team", "forged"), {**live, "metadata": metadata})
    operator = await upgrade(cluster, "good:2")
    await operator.settle()
    await operator.__aexit__(None, None, None)
    assert [sorted({*images(cluster, name)}) for name in NAMES] == [
        ["good:2"],
        ["good:2"],
        ["argosy-engine:test"],
    ]


@virtual_time
async def test_a_service_that_is_paused_during_its_turn_ends_it_when_it_is_healthy() -> None:
    cluster = new_cluster()
    await three_services(cluster)
    operator = await upgrade(cluster, "good:2")
    for _ in range(60):
        await asyncio.sleep(1)
        cluster.step()
        if rolling := [name for name in NAMES if "good:2" in images(cluster, name)]:
            break
    (first,) = rolling
    cluster.edit(first, lambda spec: spec.update(paused=True))
    await operator.settle()
    await operator.__aexit__(None, None, None)
    assert all(images(cluster, name) == ["good:2"] for name in NAMES)


ROLLOUTS: list[dict[str, int]] = [
    {},
    {"maxUnavailable": 0},
    {"maxUnavailable": 1},
    {"maxSurge": 0},
    {"maxSurge": 2, "maxUnavailable": 2},
]
ACTIONS = st.one_of(
    st.tuples(st.just("image"), st.sampled_from(["good:1", "good:2", "broken:1", "crashing:1", "failing:1"])),
    st.tuples(st.just("replicas"), st.integers(1, 3)),
    st.tuples(st.just("rollout"), st.sampled_from(ROLLOUTS)),
    st.tuples(st.just("gpus"), st.integers(2, 5)),
    st.tuples(st.just("evict"), st.integers(0, 3)),
    st.tuples(st.just("restart"), st.sampled_from(["default:1", "default:2", "broken:1"])),
    st.tuples(st.just("steps"), st.integers(1, 12)),
)


def is_asked(deployment: Object, spec: Object) -> bool:
    """Whether the user's rollout allows that no replica is left."""
    rollout = spec.get("rollout", {})
    unavailable = rollout.get("maxUnavailable", 1 if rollout.get("maxSurge") == 0 else 0)
    return bool(unavailable >= deployment["spec"]["replicas"])


@pytest.mark.timeout(900)  # computes for half a minute on a machine that does nothing else
@pytest.mark.parametrize("examples", [15, pytest.param(40, marks=pytest.mark.full)])
def test_whatever_happens_a_rollout_leaves_a_routable_replica(examples: int) -> None:
    drawn = given(st.lists(ACTIONS, max_size=25))(_rolls_out_safely)
    settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))(drawn)()


@virtual_time
async def _rolls_out_safely(actions: list[tuple[str, Any]]) -> None:
    cluster = new_cluster(gpus=4)
    cluster.broken_images.add("broken:1")
    cluster.crashing_images.add("crashing:1")
    cluster.failing_images.add("failing:1")
    faults: list[str] = []

    def check(deployment: Object, pod: Object) -> None:
        name = deployment["metadata"]["labels"][SERVICE_LABEL]
        spec = cluster.isvc(name)["spec"]
        if is_pod_ready(pod) and num_routable(cluster, name) == 1 and not is_asked(deployment, spec):
            faults.append(f"{name} lost its last routable replica: {deployment['spec']['strategy']}")

    cluster.on_replaced = check
    image = "default:1"
    operator = Operator(cluster, engine_image=image)
    await operator.__aenter__()
    for name in ("tiny", "other"):
        cluster.create(isvc_object(name, **GPU))
    do: dict[str, Callable[[Any], None]] = {
        "image": lambda image: edit_engine(cluster, image=image),
        "replicas": lambda count: cluster.edit("tiny", lambda spec: spec.update(replicas=count)),
        "rollout": lambda rollout: cluster.edit("tiny", lambda spec: spec.update(rollout=rollout)),
        "gpus": lambda count: setattr(cluster, "gpus", count),
        "evict": lambda number: _evict(cluster, number),
        "steps": lambda count: None,
    }
    try:
        for verb, value in actions:
            if verb == "restart":
                await operator.__aexit__(None, None, None)
                operator = Operator(cluster, engine_image=value)
                await operator.__aenter__()
            else:
                do[verb](value)
            for _ in range(value if verb == "steps" else 3):
                await asyncio.sleep(1)
                cluster.step()
            assert not faults, faults[0]
        # Afterwards a good image and enough GPUs repair everything.
        await operator.__aexit__(None, None, None)
        cluster.gpus = 20
        cluster.edit("tiny", lambda spec: spec.update(engine={"image": "good:3"}, rollout={}))
        operator = Operator(cluster, engine_image="default:3")
        await operator.__aenter__()
        await operator.settle()
        assert condition(cluster, "Ready") == ("True", "ReplicasRoutable")
        assert condition(cluster, "Ready", "other") == ("True", "ReplicasRoutable")
        assert set(images(cluster, "other")) == {"default:3"}
        assert not faults, faults[0]
    finally:
        await operator.__aexit__(None, None, None)
    assert not [
        obj for key, obj in cluster.objects.items() if key[0] is DEPLOYMENTS and obj["spec"]["paused"]
    ]


def _evict(cluster: FakeKubernetes, number: int) -> None:
    pods = living_pods(cluster)
    if number < len(pods):
        cluster.remove(next(key for key, obj in cluster.objects.items() if obj is pods[number]))
