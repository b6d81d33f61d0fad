"""Canary rollouts on a cluster: who serves, what routers are told, and what the status says."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from builders import CONFIG, isvc_object
from fake_kubernetes import FakeKubernetes, Object
from harness import (
    FakeRouter,
    Operator,
    condition,
    edit_engine,
    first_writes,
    living_pods,
    new_cluster,
    watch_routable,
)
from virtual_time import run, virtual_time

from argosy_operator.names import CANARY_ANNOTATION, DEPLOYMENTS, EVENTS, REVISION_LABEL
from argosy_operator.observation import has_the_turn
from argosy_protocol.fleet import RevisionSplit, decode_fleet
from argosy_protocol.reports import SideReport

START = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
STEPS: dict[str, Any] = {
    "steps": [{"weight": 20}, {"weight": 60}],
    "analysis": {"maxErrorRate": 0.01, "minRequests": 10, "windowSeconds": 60},
}
GOOD = SideReport(attempts=100)
BAD = SideReport(attempts=100, failures=30)


def now() -> str:
    time = START + datetime.timedelta(seconds=asyncio.get_running_loop().time())
    return time.strftime("%Y-%m-%dT%H:%M:%SZ")


def split(cluster: FakeKubernetes) -> RevisionSplit | None:
    (service,) = decode_fleet(cluster.fleet()).services
    return service.split


def deployments(cluster: FakeKubernetes) -> list[str]:
    return sorted(name for kind, where, name in cluster.objects if kind is DEPLOYMENTS and where == "team")


def revisions(cluster: FakeKubernetes) -> list[str]:
    return sorted(pod["metadata"]["labels"][REVISION_LABEL] for pod in living_pods(cluster))


def rollout(cluster: FakeKubernetes) -> Object:
    found: Object = cluster.isvc()["status"].get("rollout") or {}
    return found


async def pass_time(cluster: FakeKubernetes, seconds: int) -> None:
    for _ in range(seconds):
        await asyncio.sleep(1)
        cluster.step()


async def until_phase(cluster: FakeKubernetes, phase: str, *, step: int = 1) -> None:
    for _ in range(200):
        if (rollout(cluster).get("phase"), rollout(cluster).get("step")) == (phase, step):
            return
        await pass_time(cluster, 1)
    raise AssertionError(f"the rollout stays {rollout(cluster)}")


@contextlib.asynccontextmanager
async def edited(
    canary: dict[str, Any] = STEPS, *, replicas: int = 5, side: SideReport = GOOD, **spec: Any
) -> AsyncIterator[tuple[FakeKubernetes, Operator]]:
    """A service that is ready and whose engine is then edited, in front of a router with these figures."""
    cluster = new_cluster()
    async with Operator(cluster, now=now) as operator:
        cluster.create(isvc_object(replicas=replicas, rollout={"canary": canary}, **spec))
        await operator.settle()
        assert condition(cluster, "Ready") == ("True", "ReplicasRoutable")
        assert operator.router.asked_for_load == 0, "nobody needs the figures yet"
        operator.router.canary = side
        operator.router.stable = GOOD
        edit_engine(cluster, threads=2)
        yield cluster, operator


@virtual_time
async def test_a_good_change_goes_step_by_step_to_every_replica() -> None:
    async with edited() as (cluster, operator):
        (old,) = set(revisions(cluster))
        lowest = watch_routable(cluster)
        await until_phase(cluster, "Analyzing")
        new = rollout(cluster)["revision"]
        assert revisions(cluster).count(old) == 5, "the canary is an additional replica"
        assert revisions(cluster).count(new) == 1
        assert len(deployments(cluster)) == 2
        await pass_time(cluster, 2)
        found = split(cluster)
        assert found is not None
        assert (found.canary, found.stable, found.weight, found.window_s) == (new, old, 20, 60)
        assert condition(cluster, "Progressing") == ("True", "CanaryAnalyzing")
        assert condition(cluster, "Ready") == ("False", "CanaryAnalyzing")
        assert condition(cluster, "Degraded")[0] == "False"
        await pass_time(cluster, 40)
        assert rollout(cluster)["step"] == 1
        assert rollout(cluster)["canary"] == {
            "requests": 100, "errorRate": 0.0, "clientErrorRate": 0.0, "ttftP90Seconds": None, "itlP90Seconds": None,
            "cachedShare": None, "hitRatio": None,
        }  # fmt: skip
        await until_phase(cluster, "Analyzing", step=2)
        assert revisions(cluster).count(new) == 5, "beside five old ones, with the same load"
        await pass_time(cluster, 2)
        assert (found := split(cluster)) is not None
        assert found.weight == 60
        await until_phase(cluster, "Promoting", step=2)
        await pass_time(cluster, 2)
        assert split(cluster) is None, "all replicas share while the rest are replaced"
        await operator.settle()
        assert revisions(cluster) == [new] * 5
        assert deployments(cluster) == ["tiny-engine"]
        assert condition(cluster, "Ready") == ("True", "ReplicasRoutable")
        assert rollout(cluster) == {}
        assert min(lowest) >= 5
        before = len(cluster.writes)
        await pass_time(cluster, 700)
        assert len(cluster.writes) == before, "at rest nothing is written"


@virtual_time
async def test_a_bad_canary_is_taken_back_and_stays_away() -> None:
    async with edited(side=BAD) as (cluster, operator):
        old = revisions(cluster)
        names = {pod["metadata"]["name"] for pod in living_pods(cluster)}
        await until_phase(cluster, "Failed")
        await operator.settle()
        assert revisions(cluster) == old
        assert {pod["metadata"]["name"] for pod in living_pods(cluster)} == names, "none was replaced"
        assert deployments(cluster) == ["tiny-engine"]
        assert (found := split(cluster)) is not None
        assert found.weight == 0
        for kind in ("Degraded", "Stalled"):
            assert condition(cluster, kind) == ("True", "CanaryFailed")
            assert "error rate 30 %, at most 1 %" in cluster.condition(kind)["message"]
        assert condition(cluster, "Ready") == ("False", "CanaryFailed")
        events = [obj for (kind, _, _), obj in cluster.objects.items() if kind is EVENTS]
        (event,) = [each for each in events if each["reason"] == "CanaryFailed"]
        assert event["type"] == "Warning"
        assert "error rate" in event["message"]
        before = len(cluster.writes)
        await pass_time(cluster, 700)
        assert len(cluster.writes) == before
        failed_with = rollout(cluster)
    operator.router.canary = GOOD
    async with Operator(cluster, FakeRouter(cluster), now=now) as restarted:
        await restarted.settle()
        assert rollout(cluster) == failed_with, "another operator knows it as well"
        cluster.edit("tiny", lambda spec: spec["engine"].pop("threads"))
        await restarted.settle()
        assert condition(cluster, "Ready") == ("True", "ReplicasRoutable")
        assert {pod["metadata"]["name"] for pod in living_pods(cluster)} == names
        assert split(cluster) is None


@virtual_time
async def test_without_requests_it_waits_until_a_person_promotes_it() -> None:
    async with edited(side=SideReport()) as (cluster, operator):
        await until_phase(cluster, "Analyzing")
        await pass_time(cluster, 60)
        before = len(cluster.writes)
        await pass_time(cluster, 700)
        assert (rollout(cluster)["phase"], rollout(cluster)["step"]) == ("Analyzing", 1)
        assert rollout(cluster)["message"] == "0 of 10 requests within 60 s"
        assert len(cluster.writes) == before, "waiting writes nothing"
        revision = rollout(cluster)["revision"]
        action = {"type": "Promote", "revision": revision}
        cluster.edit("tiny", lambda spec: spec["rollout"]["canary"].update(action=action))
        await operator.settle()
        assert set(revisions(cluster)) == {revision}
        assert condition(cluster, "Ready") == ("True", "ReplicasRoutable")


@virtual_time
async def test_another_operator_goes_on_at_the_step_of_the_last() -> None:
    async with edited() as (cluster, operator):
        await until_phase(cluster, "Analyzing", step=2)
        reached = rollout(cluster)
        router = operator.router
    async with Operator(cluster, router, now=now):
        await pass_time(cluster, 20)
        assert (rollout(cluster)["step"], rollout(cluster)["since"]) == (2, reached["since"])
        await until_phase(cluster, "Promoting", step=2)


@virtual_time
async def test_a_further_edit_replaces_the_canary_and_an_edit_back_ends_it() -> None:
    async with edited() as (cluster, operator):
        await until_phase(cluster, "Analyzing", step=2)
        (first, old) = rollout(cluster)["revision"], rollout(cluster)["stableRevision"]
        edit_engine(cluster, threads=3)
        await until_phase(cluster, "Analyzing", step=1)
        assert rollout(cluster)["revision"] != first
        assert first not in revisions(cluster)
        assert revisions(cluster).count(old) == 5
        cluster.edit("tiny", lambda spec: spec["engine"].pop("threads"))
        await operator.settle()
        assert revisions(cluster) == [old] * 5
        assert (rollout(cluster), split(cluster)) == ({}, None)
        assert deployments(cluster) == ["tiny-engine"]


@virtual_time
async def test_an_abort_during_the_promotion_is_told_to_come_too_late() -> None:
    async with edited() as (cluster, operator):
        await until_phase(cluster, "Promoting", step=2)
        new = rollout(cluster)["revision"]
        assert rollout(cluster)["message"] == ""
        action = {"type": "Abort", "revision": new}
        cluster.edit("tiny", lambda spec: spec["rollout"]["canary"].update(action=action))
        await pass_time(cluster, 2)
        late = "action Abort comes too late, after the last step: apply the previous manifest to go back"
        assert (rollout(cluster)["phase"], rollout(cluster)["message"]) == ("Promoting", late)
        assert condition(cluster, "Progressing") == ("True", "CanaryPromoting")
        assert cluster.condition("Progressing")["message"].endswith(f"; {late}")
        await operator.settle()
        assert (set(revisions(cluster)), rollout(cluster)) == ({new}, {})
        assert condition(cluster, "Ready") == ("True", "ReplicasRoutable")


@virtual_time
async def test_an_edit_back_during_the_promotion_is_no_canary() -> None:
    async with edited() as (cluster, operator):
        (old,) = set(revisions(cluster))
        await until_phase(cluster, "Promoting", step=2)
        await pass_time(cluster, 3)
        assert len(set(revisions(cluster))) == 2
        lowest = watch_routable(cluster)
        cluster.edit("tiny", lambda spec: spec["engine"].pop("threads"))
        await pass_time(cluster, 2)
        assert (rollout(cluster), split(cluster)) == ({}, None)
        await operator.settle()
        assert revisions(cluster) == [old] * 5
        assert deployments(cluster) == ["tiny-engine"]
        assert min(lowest) >= 5


@virtual_time
async def test_a_new_service_and_a_new_number_of_replicas_need_no_canary() -> None:
    cluster = new_cluster()
    async with Operator(cluster, now=now) as operator:
        cluster.create(isvc_object(replicas=1, rollout={"canary": STEPS}))
        await operator.settle()
        cluster.edit("tiny", lambda spec: spec.update(replicas=3))
        await operator.settle()
        assert (len(revisions(cluster)), rollout(cluster)) == (3, {})


@virtual_time
async def test_a_paused_service_keeps_its_step() -> None:
    async with edited() as (cluster, _operator):
        await until_phase(cluster, "Analyzing")
        cluster.edit("tiny", lambda spec: spec.update(paused=True))
        await pass_time(cluster, 10)
        kept, before = rollout(cluster), len(cluster.writes)
        await pass_time(cluster, 300)
        assert (rollout(cluster), len(cluster.writes)) == (kept, before)
        cluster.edit("tiny", lambda spec: spec.update(paused=False))
        await until_phase(cluster, "Promoting", step=2)


@virtual_time
async def test_blue_green_switches_back_at_once() -> None:
    blue_green = {**STEPS, "steps": [{"weight": 100}]}
    async with edited(blue_green, replicas=2) as (cluster, operator):
        old = revisions(cluster)
        await until_phase(cluster, "Analyzing")
        await pass_time(cluster, 2)
        assert len(revisions(cluster)) == 4, "a whole second set"
        assert (found := split(cluster)) is not None
        assert found.weight == 100
        operator.router.canary = BAD
        await until_phase(cluster, "Failed")
        await pass_time(cluster, 1)
        assert (found := split(cluster)) is not None
        assert found.weight == 0
        await operator.settle()
        assert revisions(cluster) == old


@virtual_time
async def test_a_canary_whose_replica_never_comes_up_fails_after_the_deadline() -> None:
    cluster = new_cluster()
    cluster.broken_images.add("broken:1")
    async with Operator(cluster, now=now) as operator:
        spec = {"canary": STEPS, "progressDeadlineSeconds": 120}
        cluster.create(isvc_object(replicas=2, rollout=spec))
        await operator.settle()
        old = revisions(cluster)
        edit_engine(cluster, image="broken:1")
        await pass_time(cluster, 60)
        assert rollout(cluster)["phase"] == "Starting"
        assert split(cluster) == msgspec.structs.replace(
            split(cluster) or RevisionSplit(canary="x"), weight=0
        )
        await until_phase(cluster, "Failed")
        await operator.settle()
        assert revisions(cluster) == old
        message = cluster.condition("Degraded")["message"]
        assert "0 of 1 canary replicas routable after 120 s; pod tiny-canary-" in message
        assert ": ImagePullBackOff: not found; the old replicas serve" in message


@virtual_time
async def test_a_canary_whose_replica_fails_is_halted_at_once_and_goes_on_when_it_is_mended() -> None:
    cluster = new_cluster()
    cluster.failing_images.add("failing:1")
    async with Operator(cluster, now=now) as operator:
        cluster.create(isvc_object(replicas=2, rollout={"canary": STEPS}))
        await operator.settle()
        old = revisions(cluster)
        operator.router.canary = operator.router.stable = GOOD
        edit_engine(cluster, image="failing:1")
        await pass_time(cluster, 20)
        for kind, status in (
            ("Ready", "False"),
            ("Progressing", "False"),
            ("Reconciling", "False"),
            ("Stalled", "True"),
        ):
            assert condition(cluster, kind) == (status, "RolloutHalted")
        assert condition(cluster, "Degraded") == ("True", "CrashLoopBackOff")
        message = cluster.condition("Stalled")["message"]
        assert message.startswith("pod tiny-canary-")
        assert "no further replica is replaced until it is ready or the spec changes" in message
        assert (rollout(cluster)["phase"], len(events(cluster, "RolloutHalted"))) == ("Starting", 1)
        act(cluster, "Continue", "another")
        await pass_time(cluster, 40)
        assert "Continue is for revision another" in cluster.condition("Progressing")["message"]
        before = len(cluster.writes)
        await pass_time(cluster, 60)
        assert (len(cluster.writes), set(old) < set(revisions(cluster))) == (before, True)
        cluster.failing_images.clear()
        await until_phase(cluster, "Analyzing")
        await pass_time(cluster, 5)
        assert condition(cluster, "Progressing") == ("True", "CanaryAnalyzing")
        assert condition(cluster, "Stalled") == ("False", "AsExpected")


@virtual_time
async def test_a_halted_canary_makes_room_for_the_next_edit() -> None:
    cluster = new_cluster()
    cluster.failing_images.add("failing:1")
    async with Operator(cluster, now=now) as operator:
        cluster.create(isvc_object(replicas=2, rollout={"canary": STEPS}))
        await operator.settle()
        operator.router.canary = operator.router.stable = GOOD
        edit_engine(cluster, image="failing:1")
        await pass_time(cluster, 20)
        assert condition(cluster, "Stalled") == ("True", "RolloutHalted")
        edit_engine(cluster, image="good:1")
        await until_phase(cluster, "Analyzing")
        await pass_time(cluster, 2)
        assert condition(cluster, "Stalled") == ("False", "AsExpected")


def events(cluster: FakeKubernetes, reason: str) -> list[str]:
    return [
        obj["message"]
        for (kind, *_), obj in cluster.objects.items()
        if kind is EVENTS and obj["reason"] == reason
    ]


def act(cluster: FakeKubernetes, kind: str, revision: str) -> None:
    action = {"type": kind, "revision": revision}
    cluster.edit("tiny", lambda spec: spec["rollout"]["canary"].update(action=action))


HELD: dict[str, Any] = {"steps": [{"weight": 20}, {"weight": 60, "hold": True}]}


@virtual_time
async def test_a_promotion_by_a_person_is_told_and_counts_the_services_own_replicas() -> None:
    async with edited(HELD) as (cluster, operator):
        await until_phase(cluster, "Held", step=2)
        assert cluster.condition("Progressing")["message"].endswith(
            "spec.rollout.canary.steps[1].hold is set"
        )
        act(cluster, "Promote", rollout(cluster)["revision"])
        await until_phase(cluster, "Promoting", step=2)
        await operator.settle()
        (told,) = events(cluster, "CanaryPromoting")
        assert told == "promoted by spec.rollout.canary.action: 1/5 replicas updated, 0 ready, 5 routable"


@virtual_time
async def test_an_abort_is_told_to_be_a_persons() -> None:
    async with edited(HELD) as (cluster, operator):
        await until_phase(cluster, "Held", step=2)
        revision = rollout(cluster)["revision"]
        act(cluster, "Abort", revision)
        await until_phase(cluster, "Failed", step=2)
        await operator.settle()
        for told in (cluster.condition("Degraded")["message"], *events(cluster, "CanaryFailed")):
            assert told.startswith(
                f"revision {revision} was taken back: aborted by spec.rollout.canary.action; "
            )


@virtual_time
async def test_an_action_for_another_revision_is_told_to_have_no_effect() -> None:
    async with edited(HELD) as (cluster, operator):
        await until_phase(cluster, "Held", step=2)
        revision, before = rollout(cluster)["revision"], len(events(cluster, "CanaryHeld"))
        act(cluster, "Promote", "other")
        await operator.settle()
        assert (rollout(cluster)["phase"], len(events(cluster, "CanaryHeld"))) == ("Held", before)
        told = f"has no effect: Promote is for revision other, and this one is {revision}"
        assert cluster.condition("Ready")["message"].endswith(told)
        cluster.edit("tiny", lambda spec: spec["rollout"]["canary"].pop("action"))
        await operator.settle()
        assert "no effect" not in cluster.condition("Ready")["message"]


@virtual_time
async def test_a_service_with_a_canary_does_not_scale_to_zero() -> None:
    scaling = {"minReplicas": 0, "maxReplicas": 1, "idleSeconds": 10}
    cluster = new_cluster()
    async with Operator(cluster, now=now) as operator:
        cluster.create(isvc_object(replicas=1, rollout={"canary": STEPS}, scaling=scaling))
        operator.router.load = msgspec.structs.replace(operator.router.load, idle_s=0.0)
        await operator.settle()
        edit_engine(cluster, threads=2)
        await until_phase(cluster, "Analyzing")
        operator.router.load = msgspec.structs.replace(operator.router.load, idle_s=1000.0)
        await pass_time(cluster, 120)
        assert len(revisions(cluster)) == 2
        assert rollout(cluster)["phase"] == "Analyzing"


async def _taken_back(fatal: int) -> list[tuple[str, str, str]]:
    """Run a bad canary to its end, with an operator that dies at a write of it; return the writes."""
    async with edited({**STEPS, "steps": [{"weight": 60}]}, replicas=2, side=BAD) as (cluster, operator):
        before, names = len(cluster.writes), {pod["metadata"]["name"] for pod in living_pods(cluster)}
        first, crashed = operator.router, asyncio.Event()

        def kill(number: int) -> None:
            if crashed.is_set() or len(cluster.writes) - before == fatal:
                crashed.set()
                raise asyncio.CancelledError

        cluster.before_write = kill
        for _ in range(60):
            await pass_time(cluster, 1)
            if crashed.is_set():
                break
        await operator.__aexit__(None, None, None)
        cluster.before_write = lambda number: None
        async with Operator(cluster, first, now=now) as successor:
            await until_phase(cluster, "Failed")
            await successor.settle()
        assert deployments(cluster) == ["tiny-engine"], f"killed before write {fatal}"
        assert {pod["metadata"]["name"] for pod in living_pods(cluster)} == names
        assert condition(cluster, "Degraded") == ("True", "CanaryFailed")
        assert (found := split(cluster)) is not None
        assert found.weight == 0
        assert set(revisions(cluster)) == {found.stable}
        return cluster.writes[before:]


@pytest.mark.parametrize("is_any", [False, pytest.param(True, marks=pytest.mark.full)])
def test_killed_at_any_write_of_a_bad_canary_it_is_taken_back_all_the_same(is_any: bool) -> None:
    writes = run(_taken_back(-1))
    assert len(writes) > 8
    for fatal in range(len(writes)) if is_any else first_writes(writes):
        run(_taken_back(fatal))


async def _two_services(cluster: FakeKubernetes, **other: Any) -> FakeRouter:
    """`tiny`, which has a canary, and `other`, which has none; both ready. Returns their router."""
    async with Operator(cluster, now=now) as operator:
        cluster.create(isvc_object(replicas=2, rollout={"canary": STEPS}))
        await operator.settle()
        cluster.create(isvc_object("other", replicas=2, **other))
        await operator.settle()
        operator.router.stable = GOOD
        return operator.router


def images(cluster: FakeKubernetes, name: str) -> set[str]:
    return {pod["spec"]["containers"][0]["image"] for pod in living_pods(cluster, name)}


@virtual_time
async def test_a_canary_of_the_operators_change_holds_up_no_other_service() -> None:
    cluster = new_cluster()
    router = await _two_services(cluster)
    old = images(cluster, "tiny")
    async with Operator(cluster, router, now=now, engine_image="new:2") as operator:
        await pass_time(cluster, 300)
        assert rollout(cluster)["phase"] == "Analyzing", "without requests it waits"
        assert images(cluster, "other") == {"new:2"}
        router.canary = BAD
        await until_phase(cluster, "Failed")
        await operator.settle()
        assert images(cluster, "tiny") == old
    async with Operator(cluster, router, now=now, engine_image="new:3") as operator:
        await pass_time(cluster, 300)
        assert rollout(cluster)["phase"] == "Failed"
        assert images(cluster, "other") == {"new:3"}


@virtual_time
async def test_a_canary_of_the_operators_change_is_promoted_when_no_other_service_is_rolled_out() -> None:
    cluster = new_cluster()
    router = await _two_services(cluster, engine={"type": "vllm"}, model={"source": "pvc://claim/model"})
    old = images(cluster, "tiny")
    router.canary = GOOD
    cluster.broken_images.add("vllm:2")
    async with Operator(cluster, router, now=now, engine_image="new:2", vllm_image="vllm:2") as operator:
        await pass_time(cluster, 300)
        assert has_the_turn(cluster.objects[DEPLOYMENTS, "team", "other-engine"])
        assert images(cluster, "tiny") == {"new:2", *old}
        assert (rollout(cluster)["phase"], rollout(cluster)["step"]) == ("Analyzing", 2)
        assert rollout(cluster)["message"] == "team/other is rolled out first"
        cluster.edit("other", lambda spec: spec["engine"].update(image="vllm:3"))
        await until_phase(cluster, "Promoting", step=2)
        assert has_the_turn(cluster.objects[DEPLOYMENTS, "team", "tiny-engine"])
        await operator.settle()
        assert images(cluster, "tiny") == {"new:2"}
        assert not has_the_turn(cluster.objects[DEPLOYMENTS, "team", "tiny-engine"])


@virtual_time
async def test_a_canary_has_replicas_only_when_routers_divide_the_service() -> None:
    async with edited(replicas=1) as (cluster, _operator):
        found: list[RevisionSplit | None] = []

        def look(number: int) -> None:
            if len(deployments(cluster)) == 2:
                found.append(split(cluster))

        cluster.before_write = look
        await until_phase(cluster, "Analyzing")
        assert found
        assert all(each is not None and each.canary == rollout(cluster)["revision"] for each in found)
        assert (found[0] and found[0].weight) == 0


@virtual_time
async def test_an_edit_back_finds_the_images_of_the_old_replicas() -> None:
    cluster = new_cluster()
    policy: dict[str, Any] = {"engine_upgrade_policy": "OnSpecChange"}
    async with Operator(cluster, now=now, engine_image="old:1", **policy) as operator:
        cluster.create(isvc_object(replicas=2, rollout={"canary": STEPS}))
        await operator.settle()
        router = operator.router
    router.canary, router.stable = BAD, GOOD
    names = {pod["metadata"]["name"] for pod in living_pods(cluster)}
    async with Operator(cluster, router, now=now, engine_image="new:2", **policy) as operator:
        await operator.settle()
        for threads in (2, 3):
            edit_engine(cluster, threads=threads)
            await until_phase(cluster, "Failed")
            await operator.settle()
            assert "new:2" in str(cluster.objects[DEPLOYMENTS, "team", "tiny-engine"]["spec"]["template"])
        cluster.edit("tiny", lambda spec: spec["engine"].pop("threads"))
        await pass_time(cluster, 300)
        assert (rollout(cluster), condition(cluster, "Ready")) == ({}, ("True", "ReplicasRoutable"))
        assert {pod["metadata"]["name"] for pod in living_pods(cluster)} == names, "none was replaced"
        edit_engine(cluster, threads=4)
        await until_phase(cluster, "Analyzing")
        assert images(cluster, "tiny") == {"old:1", "new:2"}


@virtual_time
async def test_a_key_that_lapses_rolls_out_no_canary_that_failed() -> None:
    """vLLM reads its key when it starts, so a lapsed key replaces every replica, but not with what was found bad."""
    old, new = CONFIG.fleet_key, b"n" * 32
    bad = {"type": "vllm", "args": ["--bad"]}

    def tried() -> int:
        return sum("--bad" in str(pod["spec"]["containers"]) for pod in living_pods(cluster))

    cluster = new_cluster()
    async with Operator(cluster, now=now) as operator:
        model = {"source": "pvc://models/qwen", "servedName": "org/Qwen"}
        spec = {"replicas": 5, "rollout": {"canary": STEPS}, "engine": {"type": "vllm"}, "model": model}
        cluster.create(isvc_object(**spec))
        await operator.settle()
        operator.router.canary, operator.router.stable = BAD, GOOD
        cluster.edit("tiny", lambda spec: spec.update(engine=bad))
        await pass_time(cluster, 300)
        assert (rollout(cluster)["phase"], tried()) == ("Failed", 0)
        operator.controller.use_fleet_keys((new, old))
        await pass_time(cluster, 60)
        operator.controller.use_fleet_keys((new,))
        await pass_time(cluster, 400)
        assert (rollout(cluster)["phase"], tried()) == ("Failed", 0)
        before = {pod["metadata"]["uid"] for pod in living_pods(cluster)}
        cluster.edit("tiny", lambda spec: spec.update(engine={"type": "vllm"}))
        await pass_time(cluster, 400)
        assert (rollout(cluster), tried(), len(living_pods(cluster))) == ({}, 0, 5)
        assert not before & {pod["metadata"]["uid"] for pod in living_pods(cluster)}, "they have the new key"


@pytest.mark.parametrize(
    "garbled", [{"step": -1}, {"step": 16}, {"weight": 101}, {"size": -1}, {"revision": "r" * 64}]
)
@virtual_time
async def test_a_canary_annotation_that_somebody_edited_stops_no_reconcile(garbled: Object) -> None:
    async with edited() as (cluster, _):
        await until_phase(cluster, "Analyzing", step=2)
        key = (DEPLOYMENTS, "team", "tiny-engine")
        live = msgspec.json.decode(msgspec.json.encode(cluster.objects[key]))
        state = msgspec.json.decode(live["metadata"]["annotations"][CANARY_ANNOTATION])
        live["metadata"]["annotations"][CANARY_ANNOTATION] = msgspec.json.encode(state | garbled).decode()
        cluster.overwrite(key, live)
        await pass_time(cluster, 2)
        assert (rollout(cluster)["revision"], rollout(cluster)["step"]) == (state["revision"], 1)
        await until_phase(cluster, "Analyzing", step=2)


@virtual_time
async def test_an_edit_that_is_refused_leaves_a_canary_as_it_is() -> None:
    held = {**STEPS, "steps": [{"weight": 20}, {"weight": 60}, {"weight": 100, "hold": True}]}
    async with edited(held) as (cluster, _):
        await until_phase(cluster, "Analyzing", step=2)
        await pass_time(cluster, 5)
        before = revisions(cluster), deployments(cluster), split(cluster)
        cluster.edit("tiny", lambda spec: spec["engine"].update(args=["--max-num-seqs=0"]))
        await pass_time(cluster, 20)
        assert condition(cluster, "Degraded") == ("True", "InvalidEngineArgs")
        assert (revisions(cluster), deployments(cluster), split(cluster)) == before
