"""The operator's own changes reach few services at once: healthy ones, and those that wait next are told."""

from __future__ import annotations

import asyncio
import datetime
import gc
import logging
from typing import Any

import pytest
from builders import isvc_object
from fake_kubernetes import FakeKubernetes, Object
from harness import Operator, condition, living_pods, new_cluster, num_routable
from virtual_time import virtual_time

from argosy_operator.cluster.api import ApiError
from argosy_operator.config import RolloutShare
from argosy_operator.names import DEPLOYMENTS, INFERENCE_SERVICES, TURN_ANNOTATION, Kind
from argosy_operator.reconcile.reconciler import MAX_TURN_S
from argosy_resource.types import KIND

DEADLINE = 60
"""Seconds without progress after which a turn has taken too long, in these tests."""
OWN = RolloutShare(1, is_percent=False)


def now() -> str:
    begin = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    passed = datetime.timedelta(seconds=asyncio.get_running_loop().time())
    return (begin + passed).strftime("%Y-%m-%dT%H:%M:%SZ")


async def services(cluster: FakeKubernetes, number: int, **spec: Any) -> list[str]:
    """Create so many services, and have them serve."""
    names = [f"s{each:02}" for each in range(number)]
    async with Operator(cluster, now=now) as operator:
        for name in names:
            rollout = {"progressDeadlineSeconds": DEADLINE}
            cluster.create(isvc_object(name, rollout=rollout, **spec))
        await operator.settle()
    assert all(num_routable(cluster, name) for name in names)
    return names


def upgraded(cluster: FakeKubernetes, image: str, share: RolloutShare = OWN) -> Operator:
    return Operator(cluster, now=now, engine_image=image, max_concurrent_rollouts=share)


async def pass_time(cluster: FakeKubernetes, seconds: int) -> None:
    for _ in range(seconds):
        await asyncio.sleep(1)
        cluster.step()


def with_image(cluster: FakeKubernetes, names: list[str], image: str) -> list[str]:
    """The services of which some replica has this image."""
    return [
        name
        for name in names
        if any(pod["spec"]["containers"][0]["image"] == image for pod in living_pods(cluster, name))
    ]


@pytest.mark.parametrize(
    ("amount", "is_percent", "services", "number"),
    [(5, True, 3, 1), (5, True, 39, 1), (5, True, 1000, 50), (100, True, 7, 7), (3, False, 1000, 3), (3, False, 0, 3)],
)  # fmt: skip
def test_a_share_of_services_is_at_least_one(
    amount: int, is_percent: bool, services: int, number: int
) -> None:
    assert RolloutShare(amount, is_percent=is_percent).of(services) == number


@pytest.mark.parametrize(
    ("share", "at_once"), [(RolloutShare(25, is_percent=True), 3), (RolloutShare(5, is_percent=False), 5)]
)
@virtual_time
async def test_a_share_of_the_services_rolls_out_at_once(share: RolloutShare, at_once: int) -> None:
    cluster = new_cluster()
    names = await services(cluster, 12)
    rolling: list[int] = []

    def note(kind: Any, event: str, obj: Object) -> None:
        rolling.append(sum(len(living_pods(cluster, name)) != 1 for name in names))

    cluster.listeners.append(note)
    async with upgraded(cluster, "good:2", share) as operator:
        await operator.settle()
    assert max(rolling) == at_once
    assert with_image(cluster, names, "good:2") == names


@virtual_time
async def test_a_service_that_waits_is_reconciled_when_it_is_next() -> None:
    async def reconciles(number: int) -> float:
        cluster = new_cluster()
        await services(cluster, number)
        async with upgraded(cluster, "good:2") as operator:
            await operator.settle()
            registry = operator.controller.metrics.registry
            return (
                registry.get_sample_value("argosy_operator_reconcile_seconds_count", {"outcome": "ok"}) or 0
            )

    few, many = await reconciles(5), await reconciles(20)
    assert many < 4.5 * few, "each release would have all of them reconciled"


@virtual_time
async def test_a_service_that_is_not_healthy_is_left_alone_and_holds_up_no_other_one() -> None:
    cluster = new_cluster()
    names = await services(cluster, 4, replicas=2)
    ill = living_pods(cluster, names[0])[0]["metadata"]["name"]
    cluster.is_unready = lambda pod: pod["metadata"]["name"] == ill
    await pass_time(cluster, 2)
    before = {pod["metadata"]["uid"] for pod in living_pods(cluster, names[0])}
    async with upgraded(cluster, "good:2") as operator:
        await pass_time(cluster, 2 * DEADLINE)
        assert with_image(cluster, names, "good:2") == names[1:]
        assert {pod["metadata"]["uid"] for pod in living_pods(cluster, names[0])} == before
        assert condition(cluster, "Progressing", names[0]) == ("False", "WaitingForTurn")
        message = cluster.condition("Progressing", names[0])["message"]
        assert "healthy ones only: 1 of 2 replicas are not routable" in message
        cluster.is_unready = lambda pod: False
        await operator.settle()
        assert with_image(cluster, names, "good:2") == names
        assert condition(cluster, "Progressing", names[0]) == ("False", "Complete")


@pytest.mark.parametrize("edit", ["arguments", "a template that is too large for workers"])
@virtual_time
async def test_a_service_that_is_refused_while_it_has_the_turn_holds_up_no_other_one(edit: str) -> None:
    cluster = new_cluster()
    names = await services(cluster, 3, parallelism={"nodes": 2, "tensor": 2})
    cluster.is_unready = lambda pod: pod["spec"]["containers"][0]["image"] == "good:2"
    async with upgraded(cluster, "good:2") as operator:
        await pass_time(cluster, 5)
        deployments = {name: cluster.objects[DEPLOYMENTS, "team", f"{name}-engine"] for name in names}
        (holder,) = (
            name for name in names if TURN_ANNOTATION in deployments[name]["metadata"]["annotations"]
        )
        if edit == "arguments":
            cluster.edit(holder, lambda spec: spec["engine"].update(args=["--max-num-seqs=0"]))
        else:
            env = [{"name": f"V{number}", "value": "x" * 30_000} for number in range(5)]
            cluster.edit(holder, lambda spec: spec["engine"].update(env=env))
        cluster.is_unready = lambda pod: False
        await pass_time(cluster, 60)
        await operator.settle()
        others = [name for name in names if name != holder]
        assert with_image(cluster, others, "good:2") == others
        assert condition(cluster, "Degraded", holder)[0] == "True"


@virtual_time
async def test_a_service_in_which_the_change_fails_gives_its_turn_back_after_its_deadline() -> None:
    cluster = new_cluster()
    names = await services(cluster, 4)
    old = {pod["metadata"]["uid"] for pod in living_pods(cluster, names[1])}
    cluster.has_image = lambda pod: not pod.startswith(names[1])
    async with upgraded(cluster, "good:2") as operator:
        await pass_time(cluster, 8 * DEADLINE)
        assert with_image(cluster, names, "good:2") == names
        assert condition(cluster, "Progressing", names[1]) == ("False", "RolloutHalted")
        assert num_routable(cluster, names[1]) == 1
        assert old <= {pod["metadata"]["uid"] for pod in living_pods(cluster, names[1])}
        annotations = cluster.objects[DEPLOYMENTS, "team", f"{names[1]}-engine"]["metadata"]["annotations"]
        assert annotations[TURN_ANNOTATION].endswith(" failed")
        cluster.has_image = lambda pod: True
        await operator.settle()
        annotations = cluster.objects[DEPLOYMENTS, "team", f"{names[1]}-engine"]["metadata"]["annotations"]
        assert TURN_ANNOTATION not in annotations


@pytest.mark.parametrize("at_once", [1, 2])
@virtual_time
async def test_a_change_that_fails_everywhere_stops(at_once: int) -> None:
    cluster = new_cluster()
    names = await services(cluster, 8)
    cluster.broken_images.add("broken:1")
    async with upgraded(cluster, "broken:1", RolloutShare(at_once, is_percent=False)):
        await pass_time(cluster, 10 * DEADLINE)
        assert len(with_image(cluster, names, "broken:1")) == 2 * at_once
        assert all(num_routable(cluster, name) == 1 for name in names)


@virtual_time
async def test_services_without_room_for_a_surge_hold_up_no_other_one() -> None:
    cluster = new_cluster(gpus=3)
    names = await services(cluster, 3, resources={"gpu": {}})
    rest = isvc_object("t00", rollout={"progressDeadlineSeconds": DEADLINE})
    async with Operator(cluster, now=now) as operator:
        cluster.create(rest)
        await operator.settle()
    async with upgraded(cluster, "good:2"):
        await pass_time(cluster, 6 * DEADLINE)
        assert with_image(cluster, ["t00"], "good:2") == ["t00"]
        assert all(num_routable(cluster, name) == 1 for name in names)


@virtual_time
async def test_a_turn_that_an_earlier_operator_has_given_has_a_deadline_too() -> None:
    cluster = new_cluster()
    names = await services(cluster, 3)
    cluster.has_image = lambda pod: not pod.startswith(names[0])
    async with upgraded(cluster, "good:2"):
        await pass_time(cluster, DEADLINE // 2)
    key = (DEPLOYMENTS, "team", f"{names[0]}-engine")
    live = cluster.objects[key]
    annotations = {**live["metadata"]["annotations"], TURN_ANNOTATION: "true"}
    cluster.overwrite(key, {**live, "metadata": {**live["metadata"], "annotations": annotations}})
    async with upgraded(cluster, "good:2"):
        await pass_time(cluster, DEADLINE // 2)
        assert with_image(cluster, names, "good:2") == names[:1]
        await pass_time(cluster, 2 * DEADLINE)
        assert with_image(cluster, names, "good:2") == names


@virtual_time
async def test_a_service_that_is_deleted_while_it_is_next_holds_up_no_other_one() -> None:
    cluster = new_cluster()
    names = await services(cluster, 4)
    async with upgraded(cluster, "good:2") as operator:
        await pass_time(cluster, 4)
        waiting = [name for name in names if condition(cluster, "Progressing", name)[1] == "WaitingForTurn"]
        assert len(waiting) == 3
        cluster.remove((INFERENCE_SERVICES, "team", waiting[0]))
        await operator.settle()
    assert with_image(cluster, names, "good:2") == [name for name in names if name != waiting[0]]


@pytest.mark.parametrize("how", ["paused", "refused", "invalid"])
@virtual_time
async def test_a_turn_ends_for_others_although_nothing_is_written_of_its_service_any_more(how: str) -> None:
    cluster = new_cluster()
    names = await services(cluster, 4)
    first = names[0]
    cluster.has_image = lambda pod: not pod.startswith(first)
    async with upgraded(cluster, "good:2") as operator:
        await pass_time(cluster, 10)
        assert with_image(cluster, names, "good:2") == [first]
        if how == "paused":
            cluster.edit(first, lambda spec: spec.update(paused=True))
        elif how == "refused":
            cluster.is_refused = lambda obj: obj["kind"] == "Deployment" and "no-such-thing" in str(obj)
            cluster.edit(
                first, lambda spec: spec.update(engine={"env": [{"name": "no-such-thing", "value": "1"}]})
            )
        else:
            large = {f"a{number}": "x" * 16000 for number in range(20)}
            cluster.edit(first, lambda spec: spec.update(podTemplate={"metadata": {"annotations": large}}))
        await operator.settle()
        await asyncio.sleep(MAX_TURN_S / 2)
        assert with_image(cluster, names, "good:2") == [first]
        await asyncio.sleep(MAX_TURN_S / 2 + 600)
        await operator.settle()
        assert with_image(cluster, names, "good:2") == names


@virtual_time
async def test_a_turn_that_a_clock_ahead_has_noted_ends_like_others() -> None:
    cluster = new_cluster()
    names = await services(cluster, 3)
    cluster.has_image = lambda pod: not pod.startswith(names[0])
    async with Operator(
        cluster, now=lambda: "2026-02-01T00:00:00Z", engine_image="good:2", max_concurrent_rollouts=OWN
    ):
        await pass_time(cluster, 5)
    async with upgraded(cluster, "good:2") as operator:
        await pass_time(cluster, 3 * DEADLINE)
        await operator.settle()
        assert with_image(cluster, names, "good:2") == names


@virtual_time
async def test_services_that_run_nothing_make_no_share_larger() -> None:
    cluster = new_cluster()
    names = await services(cluster, 4)
    async with Operator(cluster, now=now) as operator:
        for number in range(60):
            cluster.create(isvc_object(f"empty-{number}", replicas=0))
        await operator.settle()
    cluster.has_image = lambda pod: "s0" not in pod
    async with upgraded(cluster, "good:2", RolloutShare(5, is_percent=True)) as operator:
        await pass_time(cluster, DEADLINE // 2)
        assert len(with_image(cluster, names, "good:2")) == 1


@pytest.mark.parametrize("kind", ["refused by quota", "without an image", "labelled as children"])
@virtual_time
async def test_what_serves_nothing_makes_no_share_larger(kind: str) -> None:
    cluster = new_cluster()
    names = await services(cluster, 4)
    cluster.has_quota = lambda name: kind != "refused by quota"
    cluster.has_image = lambda pod: False
    async with Operator(cluster, now=now):
        for number in range(40):
            if kind == "labelled as children":
                live = cluster.objects[DEPLOYMENTS, "team", f"{names[0]}-engine"]
                metadata = {"namespace": "other", "name": f"x{number}", "labels": live["metadata"]["labels"]}
                spec = {**live["spec"], "replicas": 0}
                cluster.create(
                    {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec}
                )
            else:
                cluster.create(isvc_object(f"x{number}"))
        await pass_time(cluster, 10)
    cluster.has_quota = lambda name: True
    async with upgraded(cluster, "good:2", RolloutShare(5, is_percent=True)):
        await pass_time(cluster, DEADLINE // 4)
        assert len(with_image(cluster, names, "good:2")) == 1


@pytest.mark.parametrize("replicas", [1, 3])
@virtual_time
async def test_a_moment_without_a_routable_replica_brings_no_service_a_change_that_waits(
    replicas: int,
) -> None:
    cluster = new_cluster()
    names = await services(cluster, 6, replicas=replicas)
    cluster.broken_images.add("bad:2")
    async with upgraded(cluster, "bad:2") as operator:
        await pass_time(cluster, 10)
        before = with_image(cluster, names, "bad:2")
        assert len(before) == 1
        cluster.is_unready = lambda pod: True
        await pass_time(cluster, 5)
        cluster.is_unready = lambda pod: False
        await pass_time(cluster, 10)
        assert with_image(cluster, names, "bad:2") == before
        await operator.settle()
        assert all(num_routable(cluster, name) for name in names)


@virtual_time
async def test_a_replica_that_moves_to_another_node_keeps_its_image_while_a_change_waits() -> None:
    """Its replacement finds no room for a moment, as after a drain of a full node."""
    cluster = new_cluster()
    names = await services(cluster, 4)
    cluster.broken_images.add("bad:2")
    async with upgraded(cluster, "bad:2") as operator:
        await pass_time(cluster, 10)
        moved = next(name for name in reversed(names) if name not in with_image(cluster, names, "bad:2"))
        cluster.lacks = lambda pod: "nvidia.com/gpu" if pod["metadata"]["name"].startswith(moved) else ""
        (pod,) = living_pods(cluster, moved)
        cluster.evict(pod)
        await pass_time(cluster, 20)
        assert not num_routable(cluster, moved)
        cluster.lacks = lambda _: ""
        await pass_time(cluster, 10)
        await operator.settle()
        assert moved not in with_image(cluster, names, "bad:2")
        assert num_routable(cluster, moved)


@virtual_time
async def test_of_a_service_that_was_deleted_during_its_turn_nothing_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever creates and deletes services would fill the memory: each may take half a megabyte. pytest keeps what is
    logged, with an error's frames and what they hold."""
    monkeypatch.setattr(logging.getLogger("argosy_operator"), "propagate", False)
    cluster = new_cluster()
    mark = {"name": "MARK", "value": "deleted"}
    names = await services(cluster, 4, engine={"env": [mark]})
    cluster.broken_images.add("bad:2")

    def kept() -> list[Object]:
        gc.collect()
        services = [each for each in gc.get_objects() if type(each) is dict and each.get("kind") == KIND]
        return [
            each for each in services if "status" in each and mark in each["spec"]["engine"].get("env", ())
        ]

    def holders(held: list[Object]) -> list[Any]:
        gc.unfreeze()  # what is frozen is no referrer
        return [each for each in gc.get_referrers(*held) if each is not held]

    async with upgraded(cluster, "bad:2") as operator:
        await pass_time(cluster, 10)
        assert with_image(cluster, names, "bad:2")
        assert kept(), "they are seen while they are held"
        for name in names:
            cluster.remove((INFERENCE_SERVICES, "team", name))
        await operator.settle()
        left = kept()
        assert not left, f"held by {holders(left)}"[:4000]


@pytest.mark.parametrize("is_written", [True, False])
@virtual_time
async def test_a_missing_answer_gives_no_other_service_a_turn(is_written: bool) -> None:
    """The watch lags behind meanwhile."""
    cluster = new_cluster()
    names = await services(cluster, 4)
    apply, get = cluster.apply, cluster.get
    losses: list[str] = []
    async with upgraded(cluster, "good:2") as operator:
        handle = operator.controller.handle
        late: list[tuple[Kind, str | None, Object]] = []

        def handle_late(kind: Kind, event: str | None, obj: Object) -> None:
            late.append((kind, event, obj))

        def catch_up() -> None:
            operator.controller.handle = handle  # type: ignore[method-assign]
            for event in late:
                handle(*event)

        async def apply_and_lose(manifest: Object) -> Object:
            if losses or TURN_ANNOTATION not in manifest["metadata"].get("annotations", {}):
                return await apply(manifest)
            losses.append(manifest["metadata"]["name"])
            operator.controller.handle = handle_late  # type: ignore[method-assign]
            asyncio.get_running_loop().call_later(5.0, catch_up)
            if is_written:
                await apply(manifest)
                cluster.step()
            raise ApiError("apply", 0, "no answer")

        async def get_late(kind: Kind, namespace: str, name: str) -> Object | None:
            if kind is DEPLOYMENTS and losses:
                losses.append(name)
                if len(losses) < 4:
                    raise ApiError("get", 503, "away")
            return await get(kind, namespace, name)

        cluster.apply, cluster.get = apply_and_lose, get_late  # type: ignore[method-assign]
        cluster.has_image = lambda pod: False
        await pass_time(cluster, DEADLINE // 2)
        assert len(with_image(cluster, names, "good:2")) == 1
        assert len(losses) >= 4, "it was read until there was an answer"
        cluster.has_image = lambda pod: True
        await operator.settle()
    assert with_image(cluster, names, "good:2") == names
