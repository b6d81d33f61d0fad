"""Secrets and claims of the installation, which no service may have its pods get."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
from collections.abc import Callable
from typing import Any

import pytest
from builders import CONFIG, isvc, isvc_object
from fake_kubernetes import FakeKubernetes, Object
from harness import Operator, condition, deployment, edit_engine, new_cluster
from virtual_time import virtual_time

from argosy_operator.config import OperatorConfig
from argosy_operator.desired.children import deployment_problem
from argosy_operator.names import DEPLOYMENTS, FIELD_MANAGER, MANAGED_BY_LABEL, Kind
from argosy_resource.types import parse

HOME = CONFIG.namespace
INSTALLED: OperatorConfig = dataclasses.replace(
    CONFIG,
    fleet_key_secret="fleet",
    router_keys_secret="clients",
    reserved_secrets=("tls", "bucket"),
    reserved_claims=("files",),
)


def now() -> str:
    passed = datetime.timedelta(seconds=asyncio.get_running_loop().time())
    return (datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC) + passed).strftime("%Y-%m-%dT%H:%M:%SZ")


def secret_volume(name: str) -> dict[str, Any]:
    return {"podTemplate": {"spec": {"volumes": [{"name": "a", "secret": {"secretName": name}}]}}}


def claim_volume(name: str) -> dict[str, Any]:
    claim = {"persistentVolumeClaim": {"claimName": name}}
    return {"podTemplate": {"spec": {"volumes": [{"name": "a", **claim}]}}}


def variable(name: str) -> dict[str, Any]:
    value = {"secretKeyRef": {"name": name, "key": "key"}}
    containers = [{"name": "engine", "env": [{"name": "A", "valueFrom": value}]}]
    return {"podTemplate": {"spec": {"containers": containers}}}


def projected(name: str) -> dict[str, Any]:
    sources = [{"configMap": {"name": name}}, {"secret": {"name": name}}]
    return {"podTemplate": {"spec": {"volumes": [{"name": "a", "projected": {"sources": sources}}]}}}


HUB = {"source": "hf://a/b"}


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        (secret_volume("fleet"), "the Secret fleet"),
        (variable("clients"), "the Secret clients"),
        (projected("tls"), "the Secret tls"),
        (secret_volume("sh.helm.release.v1.argosy.v3"), "the Secret sh.helm.release.v1.argosy.v3"),
        ({"model": {**HUB, "secretRef": {"name": "bucket"}}}, "the Secret bucket"),
        ({"podTemplate": {"spec": {"imagePullSecrets": [{"name": "fleet"}]}}}, "the Secret fleet"),
        (claim_volume("files"), "the claim files"),
        ({"model": {"source": "pvc://files/a"}}, "the claim files"),
        ({"model": {**HUB, "cache": {"type": "claim", "claimName": "files"}}}, "the claim files"),
    ],
)
def test_objects_of_the_installation_are_refused_in_its_namespace(spec: dict[str, Any], named: str) -> None:
    problem = deployment_problem(parse(isvc_object(namespace=HOME, **spec)), INSTALLED)
    assert problem is not None
    assert problem.reason == "ObjectReserved"
    assert problem.message.startswith(f"{named}: ")
    assert deployment_problem(isvc(**spec), INSTALLED) is None, "another namespace's own object"


@pytest.mark.parametrize("name", ["tiny-engine-key", "other-engine-key", "argosy-fleet-key"])
def test_names_of_key_secrets_are_refused_everywhere(name: str) -> None:
    """Those that were stored before the CustomResourceDefinition refused them."""
    for spec in secret_volume(name), variable(name), projected(name):
        problem = deployment_problem(isvc(**spec), CONFIG)
        assert problem is not None
        assert f"the Secret {name}" in problem.message


@pytest.mark.parametrize("place", [secret_volume, variable, projected])
@pytest.mark.parametrize("namespace", [HOME, "team"])
def test_credentials_for_the_registry_may_pull_and_are_read_by_no_engine(
    place: Callable[[str], dict[str, Any]], namespace: str
) -> None:
    """The administrator puts them into each namespace with services, whose authors choose the engine's image."""
    config = dataclasses.replace(INSTALLED, image_pull_secrets=("registry",))
    problem = deployment_problem(parse(isvc_object(namespace=namespace, **place("registry"))), config)
    assert problem is not None
    assert problem.reason == "ObjectReserved"
    assert problem.message.startswith("the Secret registry: ")
    for pulls in (
        {"podTemplate": {"spec": {"imagePullSecrets": [{"name": "registry"}]}}},
        {"model": {"source": "oci://a/b:1", "secretRef": {"name": "registry"}}},
        place("other"),
    ):
        assert deployment_problem(parse(isvc_object(namespace=namespace, **pulls)), config) is None


@virtual_time
async def test_a_secret_that_an_operator_has_made_is_refused_by_its_label() -> None:
    cluster = new_cluster()
    for name, labels in (("made", {MANAGED_BY_LABEL: FIELD_MANAGER}), ("mine", {})):
        metadata = {"name": name, "namespace": "team", "labels": labels}
        cluster.create({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": {}})
    async with Operator(cluster) as operator:
        cluster.create(isvc_object(**variable("made")))
        await operator.settle(rounds=1000)
        assert (DEPLOYMENTS, "team", "tiny-engine") not in cluster.objects
        assert condition(cluster, "Degraded") == ("True", "ObjectReserved")
        assert "the Secret made: " in cluster.condition("Degraded")["message"]
        cluster.edit("tiny", lambda spec: spec.update(variable("mine")))
        await operator.settle()
        assert condition(cluster, "Ready")[0] == "True"
        cluster.edit("tiny", lambda spec: spec.update(secret_volume("made")))
        await operator.settle(rounds=1000)
        volumes = cluster.objects[DEPLOYMENTS, "team", "tiny-engine"]["spec"]["template"]["spec"]["volumes"]
        assert "a" not in [volume["name"] for volume in volumes]
        assert condition(cluster, "Degraded") == ("True", "ObjectReserved")


@virtual_time
async def test_at_rest_the_labels_of_secrets_are_not_read() -> None:
    cluster = new_cluster()
    cluster.create(
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "mine", "namespace": "team"}, "data": {}}
    )
    async with Operator(cluster) as operator:
        cluster.create(isvc_object(**variable("mine")))
        await operator.settle()
        read = sum(name == "mine" for _, _, name in cluster.metadata_reads)
        operator.controller.queue.add(("team", "tiny"))
        await operator.settle()
        assert sum(name == "mine" for _, _, name in cluster.metadata_reads) == read
        edit_engine(cluster, maxNumSeqs=7)
        await operator.settle()
        assert sum(name == "mine" for _, _, name in cluster.metadata_reads) > read


def many(number: int, *further: str) -> dict[str, Any]:
    """So many Secrets, and these."""
    names = [*(f"secret-{each:03}" for each in range(number)), *further]
    sources = [{"secret": {"name": name, "optional": True}} for name in names]
    volumes = [
        {"name": f"a{first}", "projected": {"sources": sources[first : first + 16]}}
        for first in range(0, len(sources), 16)
    ]
    return {"podTemplate": {"spec": {"volumes": volumes}}}


def answer_slowly(cluster: FakeKubernetes, seconds: float) -> None:
    """Have each dry run take so long."""
    at_once: Callable[[Kind, str, str], Any] = cluster.read_metadata

    async def read_metadata(kind: Kind, namespace: str, name: str) -> Object | None:
        await asyncio.sleep(seconds)
        found: Object | None = await at_once(kind, namespace, name)
        return found

    cluster.read_metadata = read_metadata  # type: ignore[method-assign]


@virtual_time
async def test_services_that_name_many_secrets_hold_up_no_other_one() -> None:
    cluster = new_cluster()
    async with Operator(cluster) as operator:
        cluster.create(isvc_object())
        await operator.settle()
        answer_slowly(cluster, 0.1)
        for number in range(12):
            cluster.create(isvc_object(f"many-{number}", namespace="other", **many(256)))
        await asyncio.sleep(1)
        edit_engine(cluster, maxNumSeqs=77)
        await asyncio.sleep(3)
        assert "'77'" in str(deployment(cluster)["spec"]["template"]["spec"]["containers"])
        assert (DEPLOYMENTS, "other", "many-0-engine") not in cluster.objects
        await asyncio.sleep(120)
        assert all((DEPLOYMENTS, "other", f"many-{number}-engine") in cluster.objects for number in range(12))


@virtual_time
async def test_every_one_of_many_secrets_is_looked_at_before_pods_get_them() -> None:
    cluster = new_cluster()
    metadata = {"name": "zz-made", "namespace": "team", "labels": {MANAGED_BY_LABEL: FIELD_MANAGER}}
    cluster.create({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": {}})
    async with Operator(cluster) as operator:
        cluster.create(isvc_object(**many(100, "zz-made")))
        await operator.settle(rounds=1000)
        assert (DEPLOYMENTS, "team", "tiny-engine") not in cluster.objects
        assert "the Secret zz-made: " in cluster.condition("Degraded")["message"]


@virtual_time
async def test_pods_that_are_asked_for_again_cost_no_further_look_at_secrets() -> None:
    cluster = new_cluster()
    cluster.has_quota = lambda name: False
    cluster.now = now
    metadata = {"name": "mine", "namespace": "team"}
    cluster.create({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": {}})
    async with Operator(cluster, now=now, resync_seconds=3600.0):
        cluster.create(isvc_object(**many(40, "mine")))
        for _ in range(30):
            await asyncio.sleep(1)
            cluster.step()
        read, written = sum(name == "mine" for *_, name in cluster.metadata_reads), len(cluster.writes)
        for _ in range(120):
            await asyncio.sleep(1)
            cluster.step()
        assert len(cluster.writes) >= written + 5, "it is asked again"
        assert sum(name == "mine" for *_, name in cluster.metadata_reads) == read > 0
