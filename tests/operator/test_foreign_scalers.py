"""Services with spec.scaling that a HorizontalPodAutoscaler scales as well: it decides until it is removed."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from autoscalers import (
    AT_A_BOUND,
    AT_TARGET,
    DISABLED,
    KEY,
    LIMITED,
    NO_METRICS,
    NO_SCALE,
    SCALING,
    SYNCED,
    Counting,
    replicas,
    set_sequences,
    sync,
)
from builders import autoscaler, isvc_object
from fake_kubernetes import Object
from harness import Operator, condition, living_pods, new_cluster
from virtual_time import virtual_time

from argosy_operator.cluster.api import ApiError
from argosy_operator.names import EVENTS, INFERENCE_SERVICES, Kind, deployment_name
from argosy_operator.observation import Scaler, read_scaler

SERVICE = (INFERENCE_SERVICES, "team", "tiny")


@virtual_time
async def test_an_autoscaler_decides_from_its_first_number_until_it_is_removed() -> None:
    cluster = new_cluster()
    async with Operator(cluster) as operator:
        set_sequences(operator, 16)
        cluster.create(isvc_object(scaling=SCALING))
        await operator.settle()
        await asyncio.sleep(30)
        await operator.settle()
        assert replicas(cluster) == 4
        cluster.create(autoscaler())
        await operator.settle()
        await asyncio.sleep(600)
        assert replicas(cluster) == 4, "spec.replicas is still the number to start with"
        assert condition(cluster, "Degraded") == ("True", "ScaledTwice")
        message = cluster.condition("Degraded")["message"]
        assert "HorizontalPodAutoscaler hpa" in message
        assert "remove" in message
        sync(cluster, 6)
        await operator.settle()
        assert (replicas(cluster), len(living_pods(cluster))) == (6, 6), "beyond spec.scaling.maxReplicas"
        assert condition(cluster, "Ready") == ("True", "ReplicasRoutable")
        status = cluster.isvc()["status"]["scaling"]
        assert (status["wanted"], status["reason"]) == (6, "HorizontalPodAutoscaler")
        before = len(cluster.writes)
        for sequences in (1, 90, 0):
            set_sequences(operator, sequences)
            await asyncio.sleep(900)
        assert cluster.writes[before:] == [], "its load is not ours to answer"
        events = [obj["reason"] for (kind, _, _), obj in cluster.objects.items() if kind is EVENTS]
        assert events.count("ScaledTwice") == 1
        set_sequences(operator, 7)
        cluster.remove(KEY)
        await operator.settle()
        assert condition(cluster, "Degraded") == ("False", "AsExpected")
        assert replicas(cluster) == 4, "the bound of spec.scaling holds again"
        assert cluster.isvc()["status"]["scaling"]["reason"] == "MaxReplicas"
        set_sequences(operator, 1)
        await asyncio.sleep(900)
        await operator.settle()
        assert replicas(cluster) == 1
        assert cluster.isvc()["status"]["scaling"]["reason"] == "MinReplicas"


@pytest.mark.parametrize(
    ("written", "status"),
    [
        (1, NO_METRICS),
        (1, NO_SCALE),
        (1, AT_TARGET),
        (2, AT_A_BOUND),
        (2, LIMITED),
        (0, DISABLED),
    ],
    ids=[
        "no metrics",
        "no scale",
        "at its target",
        "at a bound",
        "wants more than it may write",
        "zero before",
    ],
)
@virtual_time
async def test_an_autoscaler_that_has_chosen_no_number_costs_no_replica(
    written: int, status: dict[str, Any]
) -> None:
    """And spec.scaling goes on deciding, until the autoscaler does."""
    cluster = new_cluster()
    async with Operator(cluster) as operator:
        set_sequences(operator, 16)
        cluster.create(isvc_object(scaling=SCALING, replicas=0 if written == 0 else 1))
        await operator.settle()
        await asyncio.sleep(60)
        await operator.settle()
        assert replicas(cluster) == 4
        cluster.create(autoscaler())
        await operator.settle()
        if written:
            cluster.edit("tiny", lambda spec: spec.update(replicas=written))
        numbers: list[int] = []
        cluster.listeners.append(lambda kind, event, obj: numbers.append(replicas(cluster)))
        cluster.overwrite(KEY, {**cluster.objects[KEY], "status": status})
        await operator.settle()
        await asyncio.sleep(60)
        await operator.settle()
        assert min(numbers) == 4
        assert cluster.isvc()["status"]["scaling"]["reason"] != "HorizontalPodAutoscaler"
        assert "spec.scaling decides until then" in cluster.condition("Degraded")["message"]
        set_sequences(operator, 1)
        await asyncio.sleep(1800)
        await operator.settle()
        # The load is spec.scaling's to answer, until an autoscaler with metrics has written as many as there are.
        assert replicas(cluster) == (2 if status is LIMITED else 1)
        cluster.edit("tiny", lambda spec: spec.update(replicas=3))
        cluster.overwrite(KEY, {**cluster.objects[KEY], "status": SYNCED})
        await operator.settle()
        assert replicas(cluster) == 3
        cluster.overwrite(KEY, {**cluster.objects[KEY], "status": NO_METRICS})
        await asyncio.sleep(900)
        await operator.settle()
        assert replicas(cluster) == 3, "it decides, also while it has no metrics"


@virtual_time
async def test_an_autoscaler_at_its_target_takes_over_where_spec_replicas_is_the_present_number() -> None:
    cluster = new_cluster()
    async with Operator(cluster) as operator:
        set_sequences(operator, 16)
        cluster.create(isvc_object(scaling=SCALING, replicas=1))
        await operator.settle()
        await asyncio.sleep(60)
        await operator.settle()
        cluster.edit("tiny", lambda spec: spec.update(replicas=4))
        cluster.create(autoscaler(AT_TARGET))
        await operator.settle()
        assert cluster.isvc()["status"]["scaling"]["reason"] == "HorizontalPodAutoscaler"
        set_sequences(operator, 1)
        await asyncio.sleep(900)
        assert replicas(cluster) == 4


@virtual_time
async def test_kedas_zero_counts_before_its_autoscaler_has_looked() -> None:
    cluster = new_cluster()
    async with Operator(cluster) as operator:
        set_sequences(operator, 16)
        cluster.create(isvc_object(scaling=SCALING, replicas=1))
        await operator.settle()
        await asyncio.sleep(60)
        await operator.settle()
        cluster.create(autoscaler(is_kedas=True))
        cluster.edit("tiny", lambda spec: spec.update(replicas=0))
        cluster.overwrite(KEY, {**cluster.objects[KEY], "status": DISABLED})
        await operator.settle()
        assert replicas(cluster) == 0
    async with Operator(cluster) as operator:
        await operator.settle()
        await asyncio.sleep(900)
        await operator.settle()
        assert replicas(cluster) == 0


@virtual_time
async def test_a_new_operator_does_not_fight_the_autoscaler() -> None:
    cluster = new_cluster()
    cluster.create(isvc_object(scaling=SCALING))
    cluster.create(autoscaler())
    async with Operator(cluster) as operator:
        await operator.settle()
        sync(cluster, 6)
        await operator.settle()
        assert replicas(cluster) == 6
    before = len(cluster.writes)
    async with Operator(cluster) as operator:
        set_sequences(operator, 1)
        await operator.settle()
        await asyncio.sleep(900)
    assert cluster.writes[before:] == []
    assert replicas(cluster) == 6


@virtual_time
async def test_zero_is_the_autoscalers_too() -> None:
    """KEDA scales to zero and from it by the scale subresource, and keeps its autoscaler."""
    cluster = new_cluster()
    async with Operator(cluster) as operator:
        cluster.create(isvc_object(scaling={**SCALING, "minReplicas": 0, "idleSeconds": 60}))
        cluster.create(autoscaler())
        await operator.settle()
        sync(cluster, 1)
        await operator.settle()
        cluster.edit("tiny", lambda spec: spec.update(replicas=0))
        await operator.settle()
        assert living_pods(cluster) == []
        assert condition(cluster, "Ready") == ("True", "ScaledToZero")
        assert cluster.condition("Ready")["message"] == "spec.replicas is 0"
        operator.router.hold(1)
        await asyncio.sleep(30)
        await operator.settle()
        assert replicas(cluster) == 0
        cluster.edit("tiny", lambda spec: spec.update(replicas=1))
        await operator.settle()
        assert len(living_pods(cluster)) == 1


@virtual_time
async def test_the_number_that_an_autoscaler_wrote_is_read_before_it_counts() -> None:
    """The watches of services and of autoscalers say nothing about each other's order."""
    cluster = new_cluster()
    async with Operator(cluster) as operator:
        set_sequences(operator, 16)
        cluster.create(isvc_object(scaling=SCALING))
        cluster.create(autoscaler())
        await operator.settle()
        cluster.remove(KEY)
        await asyncio.sleep(30)
        await operator.settle()
        assert replicas(cluster) == 4
        cluster.create(autoscaler())
        await operator.settle()
        numbers: list[int] = []
        cluster.listeners.append(lambda kind, event, obj: numbers.append(replicas(cluster)))
        listeners, cluster.listeners = cluster.listeners, []
        cluster.edit("tiny", lambda spec: spec.update(replicas=5))  # whose event is late
        cluster.listeners = listeners
        cluster.overwrite(KEY, {**cluster.objects[KEY], "status": SYNCED})
        await operator.settle()
        assert replicas(cluster) == 5
        assert min(numbers) == 4


@pytest.mark.parametrize("refusal", [403, 404, 500])
@virtual_time
async def test_where_autoscalers_cannot_be_listed_spec_scaling_decides(refusal: int) -> None:
    cluster = Counting()
    cluster.refusal = refusal
    async with Operator(cluster) as operator:
        cluster.create(isvc_object(scaling=SCALING))
        cluster.create(autoscaler(SYNCED))
        set_sequences(operator, 16)
        await operator.settle()
        await asyncio.sleep(60)
        await operator.settle()
        assert replicas(cluster) == 4
        assert condition(cluster, "Degraded") == ("False", "AsExpected")
        before = cluster.lists
        await asyncio.sleep(3600)
        assert cluster.lists - before <= (12 if refusal != 500 else 720)
        cluster.refusal = 0
        await asyncio.sleep(330)
        await operator.settle()
        assert condition(cluster, "Degraded") == ("True", "ScaledTwice")
        assert replicas(cluster) == 1


@virtual_time
async def test_without_a_service_autoscalers_are_not_listed() -> None:
    cluster = Counting()
    async with Operator(cluster) as operator:
        cluster.create(autoscaler(SYNCED))
        await operator.settle()
        await asyncio.sleep(3600)
        assert cluster.lists == 0
        cluster.create(isvc_object(replicas=2))
        await operator.settle()
        await asyncio.sleep(10)
        assert (cluster.lists, condition(cluster, "Degraded")) == (1, ("False", "AsExpected"))
        cluster.edit("tiny", lambda spec: spec.update(scaling={**SCALING}))
        await operator.settle()
        await asyncio.sleep(10)
        assert (cluster.lists, condition(cluster, "Degraded")[1]) == (1, "ScaledTwice")
        cluster.edit("tiny", lambda spec: spec.pop("scaling"))
        await operator.settle()
        assert condition(cluster, "Degraded") == ("False", "AsExpected")


@pytest.mark.parametrize("name", ["tiny", "a" * 63])
@pytest.mark.parametrize("is_first", [True, False])
@virtual_time
async def test_an_autoscaler_of_the_deployment_is_named_with_the_remedy(name: str, is_first: bool) -> None:
    cluster = new_cluster()
    scaler = autoscaler(SYNCED, kind="Deployment", apiVersion="apps/v1", name=deployment_name(name))
    cluster.create(isvc_object("other"))
    async with Operator(cluster) as operator:
        for each in (scaler, isvc_object(name)) if is_first else (isvc_object(name), scaler):
            cluster.create(each)
            await operator.settle()
            await asyncio.sleep(10)
        assert condition(cluster, "Degraded", name) == ("True", "DeploymentScaled")
        message = cluster.condition("Degraded", name)["message"]
        assert f"hpa scales the Deployment {deployment_name(name)}" in message
        assert f"kind: InferenceService, name: {name}" in message
        assert condition(cluster, "Degraded", "other") == ("False", "AsExpected")
        assert cluster.condition("Ready", name)["status"] == "True"
        right = autoscaler(SYNCED, name=name)
        cluster.overwrite(KEY, {**cluster.objects[KEY], "spec": right["spec"]})
        await operator.settle()
        await asyncio.sleep(10)
        assert condition(cluster, "Degraded", name) == ("False", "AsExpected")
        cluster.overwrite(KEY, {**cluster.objects[KEY], "spec": scaler["spec"]})
        await operator.settle()
        assert condition(cluster, "Degraded", name)[1] == "DeploymentScaled"
        cluster.remove(KEY)
        await operator.settle()
        await asyncio.sleep(10)
        assert condition(cluster, "Degraded", name) == ("False", "AsExpected")


class Expiring(Counting):
    """Ends its watches at once, as if the version was too old."""

    is_expiring = True

    async def watch(
        self, kind: Kind, *, namespace: str | None, version: str
    ) -> AsyncGenerator[tuple[str, Object], None]:
        if self.is_expiring:
            raise ApiError("WATCH", 410, "too old")
        async for change in super().watch(kind, namespace=namespace, version=version):
            yield change


@virtual_time
async def test_an_expired_watch_lists_again_without_haste() -> None:
    cluster = Expiring()
    async with Operator(cluster) as operator:
        cluster.create(isvc_object(scaling=SCALING))
        await operator.settle()
        before = cluster.lists
        await asyncio.sleep(600)
        assert cluster.lists - before <= 600 / 5
        cluster.create(autoscaler())
        await asyncio.sleep(10)
        await operator.settle()
        assert condition(cluster, "Degraded") == ("True", "ScaledTwice")


@virtual_time
async def test_who_wrote_through_the_scale_subresource_counts_where_it_is_noted() -> None:
    cluster = new_cluster()
    async with Operator(cluster, now=lambda: "2026-01-01T00:10:00Z") as operator:
        cluster.create(isvc_object(scaling=SCALING))
        for manager, time, reason in (
            ("k9s", "2026-01-01T00:05:00Z", "ScaledTwice"),
            ("k9s", "2025-12-31T23:00:00Z", "AsExpected"),
            ("kube-controller-manager", "2026-01-01T00:05:00Z", "AsExpected"),  # its autoscaler is gone
        ):
            changed = copy.deepcopy(cluster.isvc())
            entry = {"manager": manager, "operation": "Update", "subresource": "scale", "time": time}
            changed["metadata"]["managedFields"] = [entry]
            cluster.overwrite(SERVICE, changed)
            await operator.settle()
            assert condition(cluster, "Degraded")[1] == reason, manager


@pytest.mark.parametrize(
    ("target", "is_ours"),
    [
        ({}, True),
        ({"apiVersion": "inference.argosy.dev/v1"}, True),
        ({"kind": "Deployment", "apiVersion": "apps/v1"}, False),
        ({"kind": "Deployment", "apiVersion": "apps/v1", "name": "engines"}, False),
        ({"kind": "StatefulSet", "apiVersion": "apps/v1", "name": "tiny-engine"}, False),
        ({"apiVersion": "example.com/v1alpha1"}, False),
        ({"apiVersion": ""}, False),
        ({"name": "x" * 1_000_000}, False),  # which no object can have, and which would be kept
        ({"kind": "Deployment", "apiVersion": "apps/v1", "name": f"{'x' * 1_000_000}-engine"}, False),
    ],
)
def test_an_autoscaler_is_read_by_its_target(target: dict[str, str], is_ours: bool) -> None:
    found = read_scaler(autoscaler(**target))
    expected = Scaler(name="hpa", service=("team", "tiny"))
    assert found == (expected if is_ours else None)


def test_an_autoscaler_without_a_target_is_nobodys() -> None:
    assert read_scaler({"metadata": {"name": "hpa", "namespace": "team"}}) is None
