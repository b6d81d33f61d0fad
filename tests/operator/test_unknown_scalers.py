"""Services with spec.scaling while it is not known whether a HorizontalPodAutoscaler scales them as well."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from autoscalers import (
    AT_TARGET,
    KEY,
    NO_SCALE,
    SCALING,
    SYNCED,
    Counting,
    replicas,
    set_sequences,
    sync,
)
from builders import autoscaler, isvc_object
from fake_kubernetes import FakeKubernetes
from harness import ROUTER_POD, Operator, condition, is_ready, living_pods, new_cluster
from virtual_time import virtual_time

from argosy_operator.cluster.api import RETRY, ObjectList
from argosy_operator.cluster.store import Store
from argosy_operator.names import AUTOSCALERS, DEPLOYMENTS, INFERENCE_SERVICES, Kind
from argosy_operator.observation import Scalers
from argosy_operator.reconcile.autoscaler import Autoscaler
from argosy_resource.types import parse


class Ending(Counting):
    """Ends the watch of autoscalers with its next event while `ends` is set."""

    ends = False

    async def watch(
        self, kind: Kind, *, namespace: str | None, version: str
    ) -> AsyncGenerator[tuple[str, dict[str, Any]]]:
        async for change in super().watch(kind, namespace=namespace, version=version):
            if kind is AUTOSCALERS and self.ends:
                return
            yield change


class Hanging(FakeKubernetes):
    """Answers no list of autoscalers."""

    def __init__(self) -> None:
        super().__init__()
        self.create(ROUTER_POD)

    async def list(self, kind: Kind, *, namespace: str | None, labels: str = "") -> ObjectList:
        if kind is AUTOSCALERS:
            await asyncio.Event().wait()
        return await super().list(kind, namespace=namespace, labels=labels)


@pytest.mark.parametrize("refusal", [401, 403, 404, 500])
@virtual_time
async def test_a_list_that_is_refused_for_a_moment_takes_no_replica(refusal: int) -> None:
    """An API server refuses what it should not until it has read its roles."""
    cluster = Ending()
    async with Operator(cluster) as operator:
        set_sequences(operator, 16)
        cluster.create(isvc_object(scaling=SCALING))
        cluster.create(autoscaler())
        await operator.settle()
        sync(cluster, 9)
        await operator.settle()
        assert replicas(cluster) == 9
        numbers: list[int] = []
        cluster.listeners.append(lambda kind, event, obj: numbers.append(replicas(cluster)))
        cluster.ends, cluster.refusal, before = True, refusal, cluster.lists
        cluster.overwrite(KEY, {**cluster.objects[KEY], "status": {**SYNCED, "currentReplicas": 9}})
        await asyncio.sleep(RETRY + 1)  # a watch that ended soon is not begun again at once
        refused = cluster.lists
        assert refused > before
        cluster.ends, cluster.refusal = False, 0
        await asyncio.sleep(3 * RETRY)
        await operator.settle()
        assert cluster.lists > refused, "it is asked again soon"
        assert min(numbers, default=9) == replicas(cluster) == 9
        cluster.remove(KEY)
        await operator.settle()
        assert replicas(cluster) == 4, "the watch goes on"


@pytest.mark.parametrize("refusal", [403, 500])
@virtual_time
async def test_a_new_operator_that_cannot_ask_takes_no_replica(refusal: int) -> None:
    cluster = Counting()
    async with Operator(cluster) as operator:
        cluster.create(isvc_object(scaling=SCALING))
        cluster.create(autoscaler())
        await operator.settle()
        sync(cluster, 9)
        await operator.settle()
    cluster.refusal = refusal
    async with Operator(cluster) as operator:
        set_sequences(operator, 16)
        await operator.settle()
        await asyncio.sleep(900)
        await operator.settle()
        assert replicas(cluster) == 9
        assert cluster.isvc()["status"]["scaling"]["reason"] == "HorizontalPodAutoscaler"


@virtual_time
async def test_spec_scaling_that_comes_to_an_autoscaler_takes_no_replica() -> None:
    """Nobody has looked for autoscalers before: this is the first service with spec.scaling."""
    cluster = new_cluster()
    async with Operator(cluster) as operator:
        set_sequences(operator, 16)
        cluster.create(isvc_object(replicas=9))
        cluster.create(autoscaler(AT_TARGET))
        await operator.settle()
        numbers: list[int] = []
        cluster.listeners.append(lambda kind, event, obj: numbers.append(replicas(cluster)))
        cluster.edit("tiny", lambda spec: spec.update(scaling=SCALING))
        await asyncio.sleep(60)
        await operator.settle()
        assert (min(numbers), len(living_pods(cluster))) == (9, 9)
        assert condition(cluster, "Degraded") == ("True", "ScaledTwice")


@virtual_time
async def test_a_zero_that_keda_did_not_write_is_woken_by_spec_scaling() -> None:
    """At zero any other autoscaler stops, so somebody has to decide."""
    cluster = new_cluster()
    async with Operator(cluster) as operator:
        set_sequences(operator, 16)
        cluster.create(isvc_object(scaling=SCALING, replicas=1))
        cluster.create(autoscaler(NO_SCALE))
        await operator.settle()
        await asyncio.sleep(60)
        await operator.settle()
        cluster.edit("tiny", lambda spec: spec.update(replicas=0))
        operator.router.hold(3)
        await asyncio.sleep(60)
        await operator.settle()
        assert replicas(cluster) >= 1


@virtual_time
async def test_a_list_that_hangs_stops_no_service() -> None:
    cluster = Hanging()
    async with Operator(cluster) as operator:
        cluster.create(isvc_object("scaled", scaling=SCALING))
        cluster.create(isvc_object("plain"))
        await operator.settle()
        assert is_ready(cluster, "scaled")
        assert is_ready(cluster, "plain")
    async with Operator(cluster) as operator:  # begins with services that have spec.scaling
        cluster.create(isvc_object("later"))
        await operator.settle()
        assert is_ready(cluster, "later")


def test_nothing_is_kept_of_services_that_are_gone() -> None:
    store = Store({DEPLOYMENTS: lambda _: False})
    scaler = Autoscaler(
        store,
        loads=dict,
        scalers=lambda _: Scalers(is_known=True),
        now=lambda: 0.0,
        wall=lambda: datetime.datetime.now(datetime.UTC),
        on_change=lambda _: None,
    )
    for number, fields in enumerate(({"scaling": SCALING}, {"scaling": SCALING, "paused": True}, {})):
        obj = isvc_object(f"s{number}", **fields)
        obj["metadata"]["resourceVersion"] = str(2 * number + 1)
        store.put(INFERENCE_SERVICES, obj)
        scaler.scaled(parse(obj))
        list(scaler.evaluate())
        store.remove(
            INFERENCE_SERVICES,
            {**obj, "metadata": {**obj["metadata"], "resourceVersion": str(2 * number + 2)}},
        )
    list(scaler.evaluate())
    assert scaler.names == set()
