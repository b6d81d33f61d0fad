"""The Secret with the engines' internal key: never taken over, and repaired without being read."""

from __future__ import annotations

import asyncio
import base64
import datetime

import pytest
from builders import CONFIG, isvc_object
from fake_kubernetes import FakeKubernetes, Object, pod_key
from harness import Operator, new_cluster
from virtual_time import virtual_time

from argosy_operator.names import DEPLOYMENTS, INFERENCE_SERVICES, SECRETS
from argosy_protocol.headers import internal_key
from argosy_resource.engine_command import API_KEY_ENV, API_KEYS_FIELD

SECRET = (SECRETS, "team", "tiny-engine-key")
DEPLOYMENT = (DEPLOYMENTS, "team", "tiny-engine")
RESYNC = 400
"""Longer than a resync period with its jitter."""


def users_secret(**more: object) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "tiny-engine-key", "namespace": "team", **more},
        "type": "Opaque",
        "data": {"password": "aHVudGVy", API_KEY_ENV: "b3du"},
    }


def replace_data(cluster: FakeKubernetes, data: Object) -> None:
    """`kubectl edit` of the Secret's data."""
    cluster.overwrite(SECRET, {**cluster.objects[SECRET], "data": data})


def secret_writes(cluster: FakeKubernetes) -> list[str]:
    return [verb for verb, kind, _ in cluster.writes if kind == "Secret"]


@pytest.mark.parametrize(
    "owners",
    [[], [{"apiVersion": "v1", "kind": "ConfigMap", "name": "x", "uid": "uid-x", "controller": True}]],
    ids=["without an owner", "of another owner"],
)
@virtual_time
async def test_a_users_secret_of_that_name_is_never_written(owners: list[Object]) -> None:
    cluster = new_cluster()
    cluster.create(users_secret(ownerReferences=owners))
    before = cluster.objects[SECRET]
    async with Operator(cluster):
        cluster.create(isvc_object())
        await asyncio.sleep(RESYNC)
        ready = cluster.condition("Ready")
        assert (ready["status"], ready["reason"]) == ("False", "ChildNotOwned")
        assert "Secret 'tiny-engine-key'" in cluster.condition("Degraded")["message"]
        assert (DEPLOYMENTS, "team", "tiny-engine") not in cluster.objects, "engines would get its key"
        cluster.remove((INFERENCE_SERVICES, "team", "tiny"))
        await asyncio.sleep(RESYNC)
    assert cluster.objects[SECRET] == before


@virtual_time
async def test_when_the_users_secret_is_gone_the_service_starts() -> None:
    cluster = new_cluster()
    cluster.create(users_secret())
    async with Operator(cluster) as operator:
        cluster.create(isvc_object())
        await asyncio.sleep(10)
        cluster.remove(SECRET)
        await asyncio.sleep(120)
        await operator.settle()
    assert cluster.condition("Ready")["status"] == "True"
    assert list(cluster.objects[SECRET]["data"]) == [API_KEY_ENV, API_KEYS_FIELD]


@virtual_time
async def test_a_users_secret_in_the_place_of_ours_is_left_alone() -> None:
    cluster = new_cluster()
    async with Operator(cluster) as operator:
        cluster.create(isvc_object())
        await operator.settle()
        cluster.remove(SECRET)
        cluster.create(users_secret())
        before = cluster.objects[SECRET]
        await asyncio.sleep(RESYNC)
        assert cluster.condition("Degraded")["reason"] == "ChildNotOwned"
        assert cluster.objects[SECRET] == before


@virtual_time
async def test_a_secret_made_between_the_check_and_the_creation_is_left_alone() -> None:
    cluster = new_cluster()

    def interpose(number: int) -> None:
        if SECRET not in cluster.objects:
            cluster.create(users_secret())

    cluster.before_write = interpose
    async with Operator(cluster):
        cluster.create(isvc_object())
        await asyncio.sleep(10)
    assert cluster.objects[SECRET]["data"] == users_secret()["data"]
    assert cluster.condition("Ready")["reason"] == "ChildNotOwned"


@pytest.mark.parametrize(
    "tampered",
    [{API_KEY_ENV: "c3RvbGVu"}, {}, {"other": "c3RvbGVu"}],
    ids=["changed", "emptied", "renamed"],
)
@virtual_time
async def test_a_tampered_key_is_healed_by_the_resync(tampered: Object) -> None:
    cluster = new_cluster()
    async with Operator(cluster) as operator:
        cluster.create(isvc_object())
        await operator.settle()
        right = dict(cluster.objects[SECRET]["data"])
        replace_data(cluster, tampered)
        await asyncio.sleep(RESYNC)
    assert cluster.objects[SECRET]["data"][API_KEY_ENV] == right[API_KEY_ENV]
    assert cluster.condition("Ready")["status"] == "True"


@virtual_time
async def test_a_deleted_key_is_made_anew_by_the_resync() -> None:
    cluster = new_cluster()
    async with Operator(cluster) as operator:
        cluster.create(isvc_object())
        await operator.settle()
        data = cluster.objects[SECRET]["data"]
        cluster.remove(SECRET)
        await asyncio.sleep(RESYNC)
    assert cluster.objects[SECRET]["data"] == data


@virtual_time
async def test_a_deleted_key_is_made_anew_by_an_edit_before_its_pods_start() -> None:
    cluster = new_cluster()
    async with Operator(cluster) as operator:
        cluster.create(isvc_object())
        await operator.settle()
        data = cluster.objects[SECRET]["data"]
        cluster.remove(SECRET)
        cluster.writes.clear()
        cluster.edit("tiny", lambda spec: spec.update(replicas=3))
        await asyncio.sleep(1)
        assert cluster.objects[SECRET]["data"] == data
        kinds = [kind for _, kind, _ in cluster.writes if kind in ("Secret", "Deployment")]
        assert kinds == ["Secret", "Deployment"], "no pod starts without it"


@virtual_time
async def test_a_deleted_key_is_made_anew_when_a_pod_cannot_mount_it() -> None:
    """A pod that was evicted, say: nobody edits the service."""
    cluster = new_cluster()
    async with Operator(cluster, resync_seconds=3600.0) as operator:
        cluster.create(isvc_object())
        await operator.settle()
        data = cluster.objects[SECRET]["data"]
        cluster.remove(SECRET)
        cluster.remove(pod_key(cluster.pods()[0]))
        await operator.settle()
    assert cluster.objects[SECRET]["data"] == data
    assert cluster.condition("Ready")["status"] == "True"


@virtual_time
async def test_a_pod_that_is_not_mounted_for_another_reason_takes_one_check_and_another_later() -> None:
    cluster, start = new_cluster(), datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)

    def now() -> str:
        passed = datetime.timedelta(seconds=asyncio.get_running_loop().time())
        return (start + passed).strftime("%Y-%m-%dT%H:%M:%SZ")

    async with Operator(cluster, now=now, resync_seconds=1e6) as operator:
        cluster.create(isvc_object())
        await operator.settle()
        (pod,) = cluster.pods()
        since = now()
        scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": since}
        waiting = {"type": "PodReadyToStartContainers", "status": "False"}
        cluster.metadata_reads.clear()
        for number in range(20):
            message = {**waiting, "message": f"attempt {number}"}
            status = {"phase": "Pending", "conditions": [scheduled, message]}
            cluster.overwrite(pod_key(pod), {**pod, "status": status})
            await asyncio.sleep(10)
    assert len(cluster.metadata_reads) == 2
    assert secret_writes(cluster) == ["create"]


@virtual_time
async def test_an_intact_key_takes_one_dry_run_a_resync_and_no_write() -> None:
    cluster = new_cluster()
    async with Operator(cluster, resync_seconds=300.0) as operator:
        cluster.create(isvc_object())
        await operator.settle()
        cluster.writes.clear()
        cluster.metadata_reads.clear()
        await asyncio.sleep(3600)
    assert secret_writes(cluster) == []
    assert 10 <= len(cluster.metadata_reads) <= 14, "12 periods, each up to a tenth longer or shorter"


@virtual_time
async def test_another_fleet_key_reaches_the_secret() -> None:
    cluster = new_cluster()
    async with Operator(cluster) as operator:
        cluster.create(isvc_object())
        await operator.settle()
        before = cluster.objects[SECRET]["data"]
    async with Operator(cluster, fleet_key=b"another-fleet-key") as operator:
        await operator.settle()
    assert cluster.objects[SECRET]["data"] != before


def internal_keys(cluster: FakeKubernetes) -> list[str]:
    """The keys that engines accept, by the mounted file."""
    return base64.b64decode(cluster.objects[SECRET]["data"][API_KEYS_FIELD]).decode().split()


def derived(cluster: FakeKubernetes, *fleet_keys: bytes) -> list[str]:
    uid = cluster.objects[INFERENCE_SERVICES, "team", "tiny"]["metadata"]["uid"]
    return [internal_key(key, uid) for key in fleet_keys]


@virtual_time
async def test_a_rotation_reaches_the_secret_at_once_and_replaces_no_pod() -> None:
    old, new = CONFIG.fleet_key, b"n" * 32
    cluster = new_cluster()
    async with Operator(cluster) as operator:
        cluster.create(isvc_object())
        await operator.settle()
        uid = cluster.objects[SECRET]["metadata"]["uid"]
        pods, generation = cluster.pods(), cluster.objects[DEPLOYMENT]["metadata"]["generation"]
        assert internal_keys(cluster) == derived(cluster, old)
        cluster.writes.clear()
        operator.controller.use_fleet_keys((new, old))
        await operator.settle()
        assert internal_keys(cluster) == derived(cluster, new, old), "both are valid"
        assert (
            base64.b64decode(cluster.objects[SECRET]["data"][API_KEY_ENV]).decode()
            == derived(cluster, new)[0]
        )
        operator.controller.use_fleet_keys((new,), lingering=(old,))
        await operator.settle()
        assert internal_keys(cluster) == derived(cluster, new), "engines let the old one linger themselves"
        operator.controller.use_fleet_keys((new,))
        await operator.settle()
        assert secret_writes(cluster) == ["apply", "apply"]
        assert {kind for _, kind, _ in cluster.writes} == {"Secret"}
        assert cluster.objects[SECRET]["metadata"]["uid"] == uid
        assert cluster.objects[DEPLOYMENT]["metadata"]["generation"] == generation
        assert [pod["metadata"]["uid"] for pod in cluster.pods()] == [pod["metadata"]["uid"] for pod in pods]


@virtual_time
async def test_a_rotation_reaches_a_service_that_is_paused() -> None:
    """Its engines run, and routers send them the fleet's keys."""
    old, new = CONFIG.fleet_key, b"n" * 32
    cluster = new_cluster()
    async with Operator(cluster) as operator:
        cluster.create(isvc_object())
        await operator.settle()
        cluster.edit("tiny", lambda spec: spec.update(paused=True))
        await operator.settle()
        cluster.writes.clear()
        operator.controller.use_fleet_keys((new, old))
        await operator.settle()
        assert internal_keys(cluster) == derived(cluster, new, old)
        operator.controller.use_fleet_keys((new,))
        await operator.settle()
        assert internal_keys(cluster) == derived(cluster, new)
        assert {kind for _, kind, _ in cluster.writes} == {"Secret"}


@virtual_time
async def test_a_rotation_during_a_check_is_not_missed() -> None:
    """The check that is under way wrote what was wanted before."""
    old, new = CONFIG.fleet_key, b"n" * 32
    cluster = new_cluster()
    async with Operator(cluster) as operator:

        def rotate(number: int) -> None:
            cluster.before_write = lambda number: None
            operator.controller.use_fleet_keys((new, old))

        cluster.before_write = rotate
        cluster.create(isvc_object())
        await operator.settle()
        assert internal_keys(cluster) == derived(cluster, new, old)


@virtual_time
async def test_engines_that_read_their_key_at_their_start_are_replaced_when_it_lapses() -> None:
    """vLLM and SGLang; while both keys are valid, routers reach them with the old one."""
    old, new = CONFIG.fleet_key, b"n" * 32
    cluster = new_cluster()
    async with Operator(cluster) as operator:
        cluster.create(isvc_object(model={"source": "pvc://claim/model"}, engine={"type": "vllm"}))
        await operator.settle()

        def template() -> Object:
            return cluster.objects[DEPLOYMENT]["spec"]["template"]

        before = template()
        operator.controller.use_fleet_keys((new, old))
        await operator.settle()
        assert template() == before
        operator.controller.use_fleet_keys((new,), lingering=(old,))
        await operator.settle()
        assert template() == before
        operator.controller.use_fleet_keys((new,))
        await operator.settle()
        assert template() != before


@virtual_time
async def test_a_namesake_that_took_a_childs_place_unseen_is_not_taken_over() -> None:
    """The store may lag behind: an object that it holds as ours may have another owner by now."""
    cluster = new_cluster()
    async with Operator(cluster) as operator:
        cluster.create(isvc_object())
        await operator.settle()
        listeners, cluster.listeners = cluster.listeners, []  # no event arrives
        key = (DEPLOYMENTS, "team", "tiny-engine")
        users = {**cluster.objects[key], "metadata": {"name": "tiny-engine", "namespace": "team"}}
        cluster.remove(key)
        cluster.create(users)
        before = cluster.objects[key]
        cluster.listeners = listeners
        cluster.edit("tiny", lambda spec: spec.update(replicas=3))
        await asyncio.sleep(10)
    assert cluster.objects[key]["spec"] == before["spec"]
    assert "ownerReferences" not in cluster.objects[key]["metadata"]
