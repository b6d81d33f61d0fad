"""What tenants, and an API server that is out of order, cost the operator and other tenants."""

from __future__ import annotations

import asyncio
import copy

from builders import isvc_object
from fake_kubernetes import FakeKubernetes, Object
from harness import ROUTER_POD, Operator, deployment, new_cluster, num_routable
from virtual_time import virtual_time

from argosy_operator.cluster.api import ApiError
from argosy_operator.names import CONFIGMAPS, INFERENCE_SERVICES, SERVICES, Kind
from argosy_protocol.fleet import decode_fleet


@virtual_time
async def test_children_that_finalizers_hold_are_deleted_once_and_keep_no_other_one() -> None:
    """Who may create Services can make any number that never go: a worker did nothing but delete the first of them."""
    cluster = new_cluster()
    deleted: list[tuple[str, str]] = []

    async def delete_in_vain(kind: Kind, namespace: str, name: str, *, uid: str) -> None:
        await asyncio.sleep(0.1)
        deleted.append((kind.name, name))
        obj = copy.deepcopy(cluster.objects[kind, namespace, name])
        obj["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        cluster.overwrite((kind, namespace, name), obj)

    async with Operator(cluster) as operator:
        cluster.create(isvc_object())
        await operator.settle()
        cluster.delete = delete_in_vain  # type: ignore[method-assign]
        service = cluster.objects[SERVICES, "team", "tiny-engine"]
        old = copy.deepcopy(deployment(cluster))
        for number in range(40):
            metadata = {**service["metadata"], "name": f"a-{number:02}", "uid": f"a-{number}"}
            cluster.create({**service, "metadata": {**metadata, "finalizers": ["a.tenant/own"]}})
        old["metadata"] |= {"name": "tiny-canary-0123456789", "uid": "old", "annotations": {}}
        cluster.create(old)
        await asyncio.sleep(60)
    assert deleted[0] == ("Deployment", "tiny-canary-0123456789")
    assert {name for kind, name in deleted if kind == "Service"} == {f"a-{number:02}" for number in range(40)}
    assert len(deleted) < 50, "but for one whose event was still under way"


@virtual_time
async def test_an_api_server_that_lags_behind_is_not_asked_without_a_pause() -> None:
    """As one whose etcd was restored: each service with a change asked for itself, a hundred times a second."""
    cluster = new_cluster()
    asked = 0
    async with Operator(cluster) as operator:
        cluster.create(isvc_object())
        await operator.settle()
        earlier, get = copy.deepcopy(cluster.isvc()), cluster.get

        async def get_an_earlier_one(kind: Kind, namespace: str, name: str) -> Object | None:
            nonlocal asked
            if kind is not INFERENCE_SERVICES:
                return await get(kind, namespace, name)
            asked += 1
            await asyncio.sleep(0.01)
            return copy.deepcopy(earlier)

        cluster.get = get_an_earlier_one  # type: ignore[method-assign]
        cluster.edit("tiny", lambda spec: spec.update(replicas=2))
        await asyncio.sleep(20)
        assert asked < 40
        cluster.get = get  # type: ignore[method-assign]
        await operator.settle()
        assert num_routable(cluster) == 2


@virtual_time
async def test_a_service_that_becomes_unreadable_while_the_document_is_made_is_in_it_once() -> None:
    """Whoever asks for the metrics has all services read."""
    cluster = new_cluster()
    get = cluster.get
    async with Operator(cluster) as operator:
        cluster.create(isvc_object())
        await operator.settle()

        async def get_and_change(kind: Kind, namespace: str, name: str) -> Object | None:
            found = await get(kind, namespace, name)
            if kind is CONFIGMAPS:
                cluster.get = get  # type: ignore[method-assign]
                cluster.edit("tiny", lambda spec: spec.update(replicas="many"))
                await asyncio.sleep(0)
                operator.controller.count_services()
            return found

        cluster.get = get_and_change  # type: ignore[method-assign]
        documents: list[list[str]] = []
        cluster.listeners.append(
            lambda kind, event, obj: (
                documents.append(
                    [each.qualified_name for each in decode_fleet(obj["data"]["fleet.json"]).services]
                )
                if kind is CONFIGMAPS
                else None
            )
        )
        cluster.create(isvc_object("other"))
        await operator.settle()
    assert documents
    assert {tuple(each) for each in documents} == {("team/other", "team/tiny")}


class SlowNamespaces(FakeKubernetes):
    """A webhook of the namespaces whose names begin with `slow` does not answer: each change there is refused with 500
    after its deadline."""

    async def apply(self, manifest: Object) -> Object:
        if manifest["metadata"]["namespace"].startswith("slow"):
            await asyncio.sleep(10)
            raise ApiError("PATCH", 500, "failed calling webhook: context deadline exceeded")
        return await super().apply(manifest)


@virtual_time
async def test_routers_are_told_of_a_service_though_every_worker_waits_for_other_namespaces() -> None:
    cluster = SlowNamespaces()
    cluster.create(ROUTER_POD)
    async with Operator(cluster):
        for number in range(80):
            cluster.create(isvc_object(f"slow-{number}", namespace=f"slow-{number % 8}"))
        for number in range(5):
            await asyncio.sleep(17)
            cluster.create(isvc_object(f"new-{number}"))
            await asyncio.sleep(2)
            names = [each.qualified_name for each in decode_fleet(cluster.fleet()).services]
            assert f"team/new-{number}" in names


@virtual_time
async def test_a_service_without_a_spec_ends_nothing() -> None:
    cluster = new_cluster()
    async with Operator(cluster) as operator:
        cluster.create(isvc_object())
        await operator.settle()
        bare = {name: value for name, value in cluster.isvc().items() if name != "spec"}
        cluster.overwrite((INFERENCE_SERVICES, "team", "tiny"), bare)
        await asyncio.sleep(30)
        cluster.create(isvc_object("other"))
        await operator.settle()
    assert cluster.condition("Ready", "tiny")["reason"] == "InvalidSpec"
    assert num_routable(cluster, "other") == 1
