"""Children that others delete, change or own already."""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from builders import CONFIG, isvc, isvc_object
from fake_kubernetes import FakeKubernetes, Object, pod_key
from harness import (
    ROUTER_POD,
    Operator,
    deployment,
    edit_engine,
    is_ready,
    new_cluster,
    settled,
)
from virtual_time import virtual_time

from argosy_operator.cluster.api import ApiError
from argosy_operator.cluster.store import Store
from argosy_operator.desired.children import plan_children
from argosy_operator.desired.diff import ChildChange, clashes, with_applied_hash
from argosy_operator.names import (
    CONFIGMAPS,
    DEPLOYMENTS,
    FIELD_MANAGER,
    INFERENCE_SERVICES,
    SECRETS,
    SERVICES,
    Kind,
    kind_of,
    object_name,
)
from argosy_operator.observation import Observation
from argosy_operator.reconcile.child_writer import MAX_REPAIRS, REPAIR_WINDOW_S, ChildWriter
from argosy_operator.reconcile.metrics import OperatorMetrics


@pytest.mark.parametrize("kind", [SERVICES, DEPLOYMENTS], ids=lambda kind: kind.name)
@virtual_time
async def test_an_object_of_another_owner_is_not_taken_over(kind: Any) -> None:
    cluster = new_cluster()
    foreign = {
        "apiVersion": kind.api_version,
        "kind": kind.name,
        "metadata": {"name": "tiny-engine", "namespace": "team"},
        "spec": {
            "replicas": 0,
            "template": {},
            "strategy": {"rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
        },
    }
    cluster.create(foreign)
    async with Operator(cluster):
        cluster.create(isvc_object())
        await asyncio.sleep(5)
        assert cluster.condition("Ready")["reason"] == "ChildNotOwned"
        assert cluster.objects[kind, "team", "tiny-engine"]["spec"] == foreign["spec"]
        cluster.remove((kind, "team", "tiny-engine"))
        await asyncio.sleep(120)
    assert cluster.condition("Degraded")["status"] == "False"


@pytest.mark.parametrize("kind", [SERVICES, DEPLOYMENTS, CONFIGMAPS], ids=lambda kind: kind.name)
@virtual_time
async def test_a_child_deleted_by_hand_is_restored(kind: Any) -> None:
    async with settled(isvc_object()) as (cluster, operator):
        key = next(key for key in cluster.objects if key[0] is kind)
        cluster.remove(key)
        await asyncio.sleep(400 if kind is CONFIGMAPS else 1)  # the fleet document is not watched
        await operator.settle()
    assert key in cluster.objects
    assert is_ready(cluster)


@virtual_time
async def test_a_key_secret_that_is_gone_comes_back_when_a_pod_misses_it() -> None:
    async with settled(isvc_object()) as (cluster, _):
        key = (SECRETS, "team", "tiny-engine-key")
        cluster.remove(key)
        (pod,) = cluster.pods()
        waiting = {
            "reason": "CreateContainerConfigError",
            "message": 'secret "tiny-engine-key" not found',
        }
        changed = {
            **pod,
            "status": {"containerStatuses": [{"name": "engine", "state": {"waiting": waiting}}]},
        }
        cluster.overwrite(pod_key(pod), changed)
        await asyncio.sleep(1)
    assert key in cluster.objects


@virtual_time
async def test_what_a_namespace_that_is_deleted_takes_along_is_neither_restored_nor_complained_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with settled(isvc_object()) as (cluster, operator):
        message = "unable to create new content in namespace team because it is being terminated"

        async def refused(manifest: Object) -> Object:
            metadata = manifest["metadata"]
            if (kind_of(manifest), metadata["namespace"], metadata["name"]) in cluster.objects:
                return await FakeKubernetes.apply(cluster, manifest)
            raise ApiError("PATCH", 403, f"it is forbidden: {message}")

        cluster.apply = cluster.create_only = refused  # type: ignore[method-assign]
        caplog.clear()
        cluster.writes.clear()
        for key in (SECRETS, "team", "tiny-engine-key"), (DEPLOYMENTS, "team", "tiny-engine"):
            cluster.remove(key)
        await operator.settle()
        assert cluster.condition("Degraded")["status"] == "False"
        cluster.remove((INFERENCE_SERVICES, "team", "tiny"))
        await operator.settle()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


@virtual_time
async def test_drift_is_undone_once() -> None:
    async with settled(isvc_object()) as (cluster, operator):
        cluster.writes.clear()
        changed = {**deployment(cluster), "spec": {**deployment(cluster)["spec"], "replicas": 7}}
        cluster.overwrite((DEPLOYMENTS, "team", "tiny-engine"), changed)
        await operator.settle()
    assert deployment(cluster)["spec"]["replicas"] == 1
    assert [write for write in cluster.writes if write[:2] == ("apply", "Deployment")] == [
        ("apply", "Deployment", "tiny-engine")
    ]


@virtual_time
async def test_what_others_add_to_a_pod_template_is_removed() -> None:
    async with settled(isvc_object()) as (cluster, operator):
        before = deployment(cluster)["spec"]
        changed = copy.deepcopy(deployment(cluster))
        pod = changed["spec"]["template"]["spec"]
        pod["containers"][0]["env"].insert(0, {"name": "FOO", "value": "bar"})
        pod["containers"].insert(0, {"name": "sidecar", "image": "proxy"})
        pod["tolerations"] = [{"operator": "Exists"}]
        changed["spec"]["template"]["metadata"].setdefault("annotations", {})["kubectl/restartedAt"] = "now"
        cluster.writes.clear()
        cluster.overwrite((DEPLOYMENTS, "team", "tiny-engine"), changed)
        await operator.settle()
        after = copy.deepcopy(deployment(cluster)["spec"])
        assert after["template"]["metadata"]["annotations"].pop("kubectl/restartedAt") == "now", (
            "it restarts pods"
        )
        assert after["template"]["spec"] == before["template"]["spec"]
        written = [write for write in cluster.writes if write[1] == "Deployment"]
        assert written == [("apply", "Deployment", "tiny-engine"), ("patch", "Deployment", "tiny-engine")]
        cluster.writes.clear()
        await asyncio.sleep(3600)
        assert cluster.writes == []


@virtual_time
async def test_an_addition_that_changes_before_it_is_removed_is_looked_at_again() -> None:
    async with settled(isvc_object()) as (cluster, operator):
        key = (DEPLOYMENTS, "team", "tiny-engine")

        def add(value: str) -> None:
            changed = copy.deepcopy(deployment(cluster))
            env = changed["spec"]["template"]["spec"]["containers"][0]["env"]
            env[:] = [*(each for each in env if each["name"] != "FOO"), {"name": "FOO", "value": value}]
            cluster.overwrite(key, changed)

        async def late(*args: Any) -> Object:
            del cluster.patch_by_steps
            add("second")
            return await cluster.patch_by_steps(*args)

        cluster.patch_by_steps = late  # type: ignore[method-assign]
        add("first")
        await operator.settle()
    container = deployment(cluster)["spec"]["template"]["spec"]["containers"][0]
    assert "FOO" not in [each["name"] for each in container["env"]]


@virtual_time
async def test_a_controller_that_adds_something_again_and_again_is_not_fought_for_ever() -> None:
    """Each repair, and each change, replaces replicas."""
    async with settled(isvc_object()) as (cluster, operator):
        key = (DEPLOYMENTS, "team", "tiny-engine")
        added = 0

        async def keep_adding() -> None:
            nonlocal added
            while True:
                await asyncio.sleep(30)
                pod = deployment(cluster)["spec"]["template"]["spec"]
                if "tolerations" not in pod:
                    changed = copy.deepcopy(deployment(cluster))
                    changed["spec"]["template"]["spec"]["tolerations"] = [{"operator": "Exists"}]
                    cluster.overwrite(key, changed)
                    added += 1

        other = asyncio.create_task(keep_adding())
        await asyncio.sleep(3000)
        assert added == MAX_REPAIRS + 1
        cluster.writes.clear()
        await asyncio.sleep(REPAIR_WINDOW_S)
        assert cluster.writes == []
        cluster.edit("tiny", lambda spec: spec.update(replicas=2))
        await operator.settle()
        assert deployment(cluster)["spec"]["replicas"] == 2, (
            "what the service asks for is applied all the same"
        )
        other.cancel()


@virtual_time
async def test_repairs_far_apart_are_all_made() -> None:
    async with settled(isvc_object()) as (cluster, operator):
        for _ in range(2 * MAX_REPAIRS):
            changed = copy.deepcopy(deployment(cluster))
            changed["spec"]["template"]["spec"]["hostNetwork"] = True
            cluster.overwrite((DEPLOYMENTS, "team", "tiny-engine"), changed)
            await operator.settle()
            assert "hostNetwork" not in deployment(cluster)["spec"]["template"]["spec"]
            await asyncio.sleep(REPAIR_WINDOW_S + 1)


@virtual_time
async def test_a_removal_that_fails_is_tried_again() -> None:
    async with settled(isvc_object()) as (cluster, operator):
        attempts = 0

        async def failing(*args: Any) -> Object:
            nonlocal attempts
            attempts += 1
            if attempts > 2 * MAX_REPAIRS:
                del cluster.patch_by_steps
            raise ApiError("PATCH", 500, "etcdserver: request timed out")

        cluster.patch_by_steps = failing  # type: ignore[assignment, method-assign]
        changed = copy.deepcopy(deployment(cluster))
        changed["spec"]["template"]["spec"]["hostNetwork"] = True
        cluster.overwrite((DEPLOYMENTS, "team", "tiny-engine"), changed)
        await asyncio.sleep(900)
        await operator.settle()
        assert attempts > 2 * MAX_REPAIRS
        assert "hostNetwork" not in deployment(cluster)["spec"]["template"]["spec"]


def merge_strictly(cluster: FakeKubernetes) -> None:
    """Refuse, as the API server does, to apply a source of a variable that has a value of somebody else's. A patch is
    noted as a write of its own, whose fields applying does not remove."""
    applied = {"manager": FIELD_MANAGER, "operation": "Apply"}
    others = {"manager": "kubectl-edit", "operation": "Update"}
    patched = {"manager": FIELD_MANAGER, "operation": "Update"}
    status = {**patched, "subresource": "status"}

    async def strictly(manifest: Object) -> Object:
        key = (kind_of(manifest), manifest["metadata"]["namespace"], manifest["metadata"]["name"])
        live = cluster.objects.get(key)
        if live is not None and clashes(live, manifest):
            cluster.writes.append(("refused", key[0].name, key[2]))
            live["metadata"]["managedFields"] = [patched, applied, others, patched, status]
            raise ApiError("PATCH", 422, "valueFrom: may not be specified when `value` is not empty")
        return await FakeKubernetes.apply(cluster, manifest)

    cluster.apply = strictly  # type: ignore[method-assign]


@virtual_time
async def test_a_variable_that_has_a_value_instead_of_its_source_is_mended() -> None:
    """`kubectl set env` does that. No apply is accepted then, whatever it is to change."""
    async with settled(isvc_object()) as (cluster, operator):
        merge_strictly(cluster)
        before = deployment(cluster)["spec"]
        changed = copy.deepcopy(deployment(cluster))
        env = changed["spec"]["template"]["spec"]["containers"][0]["env"]
        assert "valueFrom" in env[0]
        env[0] = {"name": env[0]["name"], "value": "mine"}
        changed["metadata"]["annotations"]["example.com/theirs"] = "kept"
        cluster.writes.clear()
        cluster.overwrite((DEPLOYMENTS, "team", "tiny-engine"), changed)
        await operator.settle()
        assert deployment(cluster)["spec"] == before
        assert deployment(cluster)["metadata"]["annotations"]["example.com/theirs"] == "kept"
        written = [write[0] for write in cluster.writes if write[1] == "Deployment"]
        assert written == ["refused", "patch", "apply", "patch"]
        owners = [
            (each["manager"], each["operation"]) for each in deployment(cluster)["metadata"]["managedFields"]
        ]
        assert owners == [(FIELD_MANAGER, "Apply"), ("kubectl-edit", "Update"), (FIELD_MANAGER, "Update")]
        assert is_ready(cluster)


@virtual_time
async def test_a_manifest_that_is_refused_for_another_reason_is_told_so() -> None:
    async with settled(isvc_object()) as (cluster, operator):
        merge_strictly(cluster)

        async def refused(*args: Any) -> Object:
            raise ApiError("PATCH", 422, "nodeSelector: it is invalid")

        cluster.patch_by_steps = refused  # type: ignore[assignment, method-assign]
        changed = copy.deepcopy(deployment(cluster))
        env = changed["spec"]["template"]["spec"]["containers"][0]["env"]
        env[0] = {"name": env[0]["name"], "value": "mine"}
        cluster.overwrite((DEPLOYMENTS, "team", "tiny-engine"), changed)
        await operator.settle()
        assert cluster.condition("Degraded")["status"] == "True"
        assert "when `value` is not empty" in cluster.condition("Degraded")["message"]


def add_mutating_webhook(cluster: FakeKubernetes) -> None:
    """Add a container to every Deployment that is written."""

    async def mutated(manifest: Object) -> Object:
        if manifest["kind"] == "Deployment":
            template = manifest["spec"]["template"]
            sidecar = {"name": "mesh", "image": "mesh"}
            pod = {**template["spec"], "containers": [*template["spec"]["containers"], sidecar]}
            manifest = {**manifest, "spec": {**manifest["spec"], "template": {**template, "spec": pod}}}
        return await FakeKubernetes.apply(cluster, manifest)

    async def restored(kind: Kind, namespace: str, name: str, steps: Sequence[Object]) -> Object:
        """The container is added again to what is left."""
        cluster.writes.append(("patch", kind.name, name))
        return cluster.objects[kind, namespace, name]

    cluster.apply = mutated  # type: ignore[method-assign]
    cluster.patch_by_steps = restored  # type: ignore[method-assign]


@virtual_time
async def test_a_mutating_webhook_is_not_fought() -> None:
    cluster = new_cluster()
    add_mutating_webhook(cluster)
    async with Operator(cluster) as operator:
        cluster.create(isvc_object())
        await operator.settle()
        cluster.writes.clear()
        await asyncio.sleep(3600)
        assert cluster.writes == []
        cluster.edit("tiny", lambda spec: spec.update(replicas=2))
        await operator.settle()
    assert deployment(cluster)["spec"]["replicas"] == 2


@virtual_time
async def test_a_service_that_a_webhook_changed_is_repaired_when_a_user_changes_it() -> None:
    """Services have no generation."""
    cluster, store, key = new_cluster(), Store(), (SERVICES, "team", "tiny-engine")

    async def mutated(manifest: Object) -> Object:
        ports = [{**port, "targetPort": 9999} for port in manifest["spec"]["ports"]]
        return await FakeKubernetes.apply(cluster, {**manifest, "spec": {**manifest["spec"], "ports": ports}})

    cluster.apply = mutated  # type: ignore[method-assign]
    writer = ChildWriter(cluster, store, OperatorMetrics())
    wanted = with_applied_hash(plan_children(isvc(), Observation(), CONFIG).service)

    def live() -> Object:
        stored = cluster.objects[key]
        return {**stored, "metadata": {**stored["metadata"], "generation": 0}}

    assert await writer.apply(ChildChange(wanted=wanted, live=None)) is not None
    assert await writer.apply(ChildChange(wanted=wanted, live=live())) is None, "it is not fought"
    changed = {**cluster.objects[key], "spec": {**cluster.objects[key]["spec"], "selector": {"a": "b"}}}
    cluster.overwrite(key, changed)
    assert await writer.apply(ChildChange(wanted=wanted, live=live())) is not None
    assert wanted["spec"]["selector"].items() <= cluster.objects[key]["spec"]["selector"].items()
    assert await writer.apply(ChildChange(wanted=wanted, live=live())) is None


@virtual_time
async def test_contested_children_of_deleted_services_are_forgotten() -> None:
    cluster, store = new_cluster(), Store()
    add_mutating_webhook(cluster)
    writer = ChildWriter(cluster, store, OperatorMetrics())
    for number in range(20):
        wanted = plan_children(isvc(name=f"tiny-{number}"), Observation(), CONFIG).deployment
        wanted = with_applied_hash(wanted)
        stored = await writer.apply(ChildChange(wanted=wanted, live=None))
        assert stored is not None
        assert await writer.apply(ChildChange(wanted=wanted, live=stored)) is None, "it is not fought"
        assert writer.num_contested == 1
        store.remove(DEPLOYMENTS, stored)
        cluster.remove((DEPLOYMENTS, "team", f"tiny-{number}-engine"))


class ContestedDeployments(FakeKubernetes):
    """A webhook changes each Deployment that is applied."""

    change: Callable[[Object], None] = staticmethod(lambda spec: None)

    async def apply(self, manifest: Object) -> Object:
        stored = await super().apply(manifest)
        if manifest["kind"] != "Deployment":
            return stored
        self.change(stored["spec"])
        self.overwrite((DEPLOYMENTS, *object_name(stored)), stored)
        return copy.deepcopy(self.objects[DEPLOYMENTS, *object_name(stored)])


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda spec: spec.update(replicas=3), id="number"),
        pytest.param(lambda spec: spec.update(paused=True), id="paused"),
    ],
)
@virtual_time
async def test_a_child_that_is_left_as_others_change_it_is_told_and_is_no_progress(
    change: Callable[[Object], None],
) -> None:
    cluster = ContestedDeployments()
    cluster.create(ROUTER_POD)
    cluster.change = change
    async with Operator(cluster) as operator:
        cluster.create(isvc_object(replicas=2))
        await operator.settle()
        for kind, status in (
            ("Ready", "False"),
            ("Progressing", "False"),
            ("Degraded", "True"),
            ("Stalled", "True"),
        ):
            found = cluster.condition(kind)
            assert (found["status"], found["reason"]) == (status, "ChildContested")
            assert "changes Deployment tiny-engine" in found["message"]
        assert cluster.condition("Reconciling")["status"] == "False"
        cluster.writes.clear()
        await asyncio.sleep(3600)
        assert cluster.writes == []
        cluster.change = lambda spec: None
        edit_engine(cluster, maxNumSeqs=5)
        await operator.settle()
    assert is_ready(cluster)


@virtual_time
async def test_a_webhook_that_changes_images_keeps_no_service_from_being_ready() -> None:
    cluster = ContestedDeployments()
    cluster.create(ROUTER_POD)
    cluster.change = lambda spec: spec["template"]["spec"]["containers"][0].update(image="mirror/engine:test")
    async with Operator(cluster) as operator:
        cluster.create(isvc_object(replicas=2))
        reasons = set()
        for _ in range(60):
            await asyncio.sleep(1)
            cluster.step()
            reasons.add(cluster.condition("Progressing")["reason"])
        assert is_ready(cluster)
        assert operator.controller.queue.is_idle
    assert "ChildContested" not in reasons
