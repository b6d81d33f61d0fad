"""Secrets and claims of the installation, which no service may have its pods get."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from builders import CONFIG, isvc, isvc_object
from harness import Operator, condition, edit_engine, new_cluster
from virtual_time import virtual_time

from argosy_operator.config import OperatorConfig
from argosy_operator.desired.deployment_problem import deployment_problem
from argosy_operator.kinds import DEPLOYMENTS
from argosy_operator.names import FIELD_MANAGER, MANAGED_BY_LABEL
from argosy_resource.types import parse

HOME = CONFIG.namespace
INSTALLED: OperatorConfig = dataclasses.replace(
    CONFIG,
    fleet_key_secret="fleet",
    router_keys_secret="clients",
    reserved_secrets=("tls", "bucket"),
    reserved_claims=("files",),
)


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
