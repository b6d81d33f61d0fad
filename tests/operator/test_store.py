"""The cache of the cluster: versions, children by service."""

from __future__ import annotations

import json
from typing import Any

import pytest
from builders import CONFIG, isvc

from argosy_operator.cluster.fetch_watch import read_fetching_pod
from argosy_operator.cluster.router_watch import read_router_pod
from argosy_operator.cluster.store import Store, kept_fields, oversize_problem
from argosy_operator.desired.children import plan_children
from argosy_operator.desired.diff import with_applied_hash
from argosy_operator.names import (
    BUDGETS,
    DEPLOYMENTS,
    FIELD_MANAGER,
    INFERENCE_SERVICES,
    MANAGED_BY_LABEL,
    NODE_TEMPLATE_ANNOTATION,
    PODS,
    REVISION_LABEL,
    SERVICES,
    STATEFUL_SETS,
    TURN_ANNOTATION,
    Kind,
    kind_of,
)
from argosy_operator.observation import Observation
from argosy_operator.pod import DELETION_COST_ANNOTATION, NODE_TEMPLATE_HASH_ENV, digest, read_pod
from argosy_resource.engine_command import SERVICE_LABEL
from argosy_resource.types import GROUP


def version(number: int, *, uid: str = "u", service: str = "tiny") -> dict[str, Any]:
    labels = {"inference.argosy.dev/service": service}
    return {
        "metadata": {
            "name": "p",
            "namespace": "team",
            "uid": uid,
            "resourceVersion": str(number),
            "labels": labels,
        }
    }


def test_store_keeps_the_newest() -> None:
    store = Store()
    assert store.put(PODS, version(9))
    assert not store.put(PODS, version(9)), "the event of one's own write is nothing new"
    assert not store.put(PODS, version(8))
    assert store.put(PODS, version(10))
    assert store.put(PODS, version(3, uid="v")), "another UID is another object"
    assert not store.remove(PODS, version(10)), "its predecessor's deletion does not concern it"
    assert store.remove(PODS, version(3, uid="v"))
    assert list(store.all(PODS)) == []


def test_store_indexes_children_by_service() -> None:
    store = Store()
    store.put(PODS, version(1))
    assert [obj["metadata"]["name"] for obj in store.children(PODS, ("team", "tiny"))] == ["p"]
    store.put(PODS, version(2, service="other"))
    assert store.children(PODS, ("team", "tiny")) == []
    assert len(store.children(PODS, ("team", "other"))) == 1
    with store.listing(PODS, "elsewhere") as listing:
        assert store.adopt(listing, [], "9") == []
    with store.listing(PODS, None) as listing:
        assert len(store.adopt(listing, [], "9")) == 1
    assert store.children(PODS, ("team", "other")) == []
    assert list(store.all(DEPLOYMENTS)) == []


def test_of_a_list_that_was_cut_already_nothing_is_cut_again() -> None:
    """Cutting five thousand pods twice held the loop for 160 ms."""
    kept, store = kept_fields(PODS, version(1)), Store()
    with store.listing(PODS, None) as listing:
        store.adopt(listing, [kept], "7", are_kept=True)
    assert store.get(PODS, "team", "p") is kept
    with store.listing(PODS, None) as listing:
        store.adopt(listing, [version(8)], "9")
    assert store.get(PODS, "team", "p") == kept_fields(PODS, version(8))


@pytest.mark.parametrize("kind", [PODS, DEPLOYMENTS], ids=lambda kind: kind.name)
def test_an_object_that_was_too_large_leaves_nothing_of_it_to_its_service(kind: Kind) -> None:
    """Its labels are not kept, and whoever may create a pod can give it as many as these."""
    labels = {SERVICE_LABEL: "tiny", **{f"{GROUP}/{number}": "" for number in range(9000)}}
    metadata = {"name": "large", "namespace": "team", "uid": "u", "labels": labels}
    store = Store()
    store.put(kind, {"metadata": {**metadata, "resourceVersion": "1"}, "spec": {}, "status": {}})
    store.remove(kind, {"metadata": {**metadata, "resourceVersion": "2"}, "spec": {}, "status": {}})
    assert store.children(kind, ("team", "tiny")) == []


def test_store_keeps_marked_objects_apart() -> None:
    store = Store({PODS: lambda obj: obj["metadata"]["labels"][SERVICE_LABEL] == "tiny"})
    assert store.marked(PODS) == []
    store.put(PODS, version(1))
    assert [obj["metadata"]["resourceVersion"] for obj in store.marked(PODS)] == ["1"]
    store.put(PODS, version(2))
    assert [obj["metadata"]["resourceVersion"] for obj in store.marked(PODS)] == ["2"]
    store.put(PODS, version(3, service="other"))
    assert store.marked(PODS) == [], "it has lost its mark"
    store.put(PODS, version(4))
    assert store.remove(PODS, version(5))
    assert store.marked(PODS) == []
    with store.listing(PODS, None) as listing:
        assert len(store.adopt(listing, [version(6)], "7")) == 1
    assert len(store.marked(PODS)) == 1
    with store.listing(PODS, None) as listing:
        store.adopt(listing, [], "9")
    assert store.marked(PODS) == []


def test_store_tallies_objects() -> None:
    store = Store(tallied={PODS: lambda obj: obj["metadata"]["labels"][SERVICE_LABEL] == "tiny"})
    assert store.tally(PODS) == 0
    store.put(PODS, version(1))
    store.put(PODS, version(2))
    assert store.tally(PODS) == 1
    store.put(PODS, version(3, service="other"))
    assert store.tally(PODS) == 0
    store.put(PODS, version(4))
    assert store.remove(PODS, version(5))
    assert store.tally(PODS) == 0


def test_of_a_pod_only_what_is_read_is_kept() -> None:
    """A tenant chooses how many pods there are, and what is in their specs: up to 1.5 MiB in each."""
    text = '{"workers":1}'
    replica = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": "p",
            "namespace": "team",
            "uid": "u",
            "resourceVersion": "7",
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "labels": {
                SERVICE_LABEL: "tiny",
                "app.kubernetes.io/component": "engine",
                REVISION_LABEL: "r1",
                "mine": "x" * 63,
            },
            "annotations": {
                NODE_TEMPLATE_ANNOTATION: text,
                DELETION_COST_ANNOTATION: "-1",
                "mine": "x" * 100_000,
            },
            "ownerReferences": [
                {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "s", "uid": "o", "controller": True}
            ],
        },
        "spec": {
            "nodeName": "node-a",
            "volumes": [{"name": f"v{number}", "emptyDir": {}} for number in range(32)],
            "initContainers": [{"name": "fetch-model", "env": [{"name": "A", "value": "x" * 32_768}]}],
            "containers": [
                {
                    "name": "engine",
                    "env": [
                        {"name": NODE_TEMPLATE_HASH_ENV, "value": digest(text)},
                        *({"name": f"E{number}", "value": "x" * 32_768} for number in range(20)),
                    ],
                }
            ],
        },
        "status": {
            "phase": "Running",
            "podIP": "10.0.0.1",
            "conditions": [
                {"type": "Ready", "status": "True"},
                {"type": "ContainersReady", "status": "True"},
            ],
        },
    }
    store = Store()
    store.put(PODS, replica)
    kept = store.get(PODS, "team", "p")
    assert kept is not None
    assert read_pod(kept) == read_pod(replica)
    assert read_pod(kept).node_template == text
    assert read_fetching_pod(kept) == read_fetching_pod(replica)
    assert read_router_pod(kept) == read_router_pod(replica)
    assert len(json.dumps(kept)) < 2000
    assert [pod["metadata"]["name"] for pod in store.children(PODS, ("team", "tiny"))] == ["p"]


def test_of_the_largest_service_little_is_kept() -> None:
    """etcd takes 1.5 MiB."""
    stored = version(1)
    stored["metadata"]["annotations"] = {
        "kubectl.kubernetes.io/last-applied-configuration": "x" * 200_000,
        "a": "b",
    }
    stored["metadata"]["managedFields"] = [{"manager": "kubectl", "fieldsV1": {"f:spec": "x" * 100_000}}]
    stored["spec"] = {"engine": {"env": [{"name": "A", "value": "x" * 1_200_000}]}}
    store = Store()
    store.put(INFERENCE_SERVICES, stored)
    (kept,) = store.all(INFERENCE_SERVICES)
    assert len(json.dumps(stored)) > 1_400_000
    assert len(json.dumps(kept)) < 1000
    assert kept["metadata"]["annotations"] == {"a": "b"}
    assert "1200" in oversize_problem(kept)
    assert kept_fields(INFERENCE_SERVICES, kept) == kept
    stored["spec"]["engine"]["env"][0]["value"] = "x" * 260_000
    store.put(INFERENCE_SERVICES, {**stored, "metadata": {**stored["metadata"], "resourceVersion": "2"}})
    (kept,) = store.all(INFERENCE_SERVICES)
    assert kept["spec"] == stored["spec"]
    assert not oversize_problem(kept)


@pytest.mark.parametrize("kind", [DEPLOYMENTS, STATEFUL_SETS, SERVICES, BUDGETS], ids=lambda kind: kind.name)
def test_of_what_only_has_a_childs_labels_little_is_kept(kind: Kind) -> None:
    """Whoever may create Deployments can give them the labels by which the operator lists children."""
    labels = {MANAGED_BY_LABEL: FIELD_MANAGER, SERVICE_LABEL: "tiny"}
    foreign = {
        "apiVersion": kind.api_version,
        "kind": kind.name,
        "metadata": {
            "name": "d",
            "namespace": "team",
            "uid": "u",
            "resourceVersion": "7",
            "labels": {**labels, **{f"mine{number}": "x" * 63 for number in range(1000)}},
            "annotations": {TURN_ANNOTATION: "true", "mine": "x" * 200_000},
        },
        "spec": {"template": {"spec": {"containers": [{"env": [{"value": "x" * 1_000_000}]}]}}},
        "status": {"conditions": [{"message": "x" * 100_000}]},
    }
    store = Store()
    store.put(kind, foreign)
    (kept,) = store.children(kind, ("team", "tiny"))
    assert len(json.dumps(kept)) < 1000
    assert kept["metadata"]["labels"] == labels
    assert kept["metadata"]["annotations"] == {TURN_ANNOTATION: "true"}
    assert kept_fields(kind, kept) == kept


def items(number: int) -> list[dict[str, str]]:
    return [{"key": "k", "path": f"p{each}"} for each in range(number)]


def owner(number: int = 1) -> list[dict[str, Any]]:
    first = {"apiVersion": f"{GROUP}/v1alpha1", "kind": "InferenceService", "name": "s", "uid": "o"}
    return [{**first, "controller": True}, *({**first, "uid": f"o{each}"} for each in range(1, number))]


@pytest.mark.parametrize(
    ("kind", "metadata", "more"),
    [
        (INFERENCE_SERVICES, {}, {"spec": {"podTemplate": items(9_000)}}),
        (INFERENCE_SERVICES, {"labels": {f"a/{each}": "" for each in range(60_000)}}, {"spec": {}}),
        (DEPLOYMENTS, {"ownerReferences": owner()}, {"spec": {"template": items(30_000)}}),
        (DEPLOYMENTS, {"annotations": {f"{GROUP}/{each}": "" for each in range(9_000)}}, {}),
        (SERVICES, {"labels": {f"{GROUP}/{each}": "" for each in range(20_000)}}, {}),
        (STATEFUL_SETS, {"ownerReferences": owner(9_000)}, {}),
        (DEPLOYMENTS, {"ownerReferences": owner()}, {"spec": {"template": "x" * 300_000 + "\U0001f600"}}),
        (INFERENCE_SERVICES, {"annotations": {"a": "x" * 150_000 + "\U0001f600"}}, {"spec": {}}),
        (PODS, {"labels": {f"{GROUP}/{each}": "" for each in range(20_000)}}, {"status": {}}),
        (PODS, {}, {"spec": {"containers": [{"name": f"c{each}"} for each in range(30_000)]}, "status": {}}),
    ],
)  # fmt: skip
def test_what_takes_much_memory_is_not_kept(
    kind: Kind, metadata: dict[str, Any], more: dict[str, Any]
) -> None:
    """Many small values take ten times the memory of their JSON, and a text with one emoji four times its own."""
    labels = {SERVICE_LABEL: "tiny", **metadata.get("labels", {})}
    obj = {
        "metadata": {
            "name": "x",
            "namespace": "team",
            "uid": "u",
            "resourceVersion": "7",
            **metadata,
            "labels": labels,
        }
    }
    obj |= {"apiVersion": kind.api_version, "kind": kind.name, **more}
    assert len(json.dumps(obj)) < 1_500_000
    kept = kept_fields(kind, obj)
    assert len(json.dumps(kept)) < 500
    assert kept["metadata"]["uid"] == "u"
    assert kept_fields(kind, kept) == kept
    if kind is INFERENCE_SERVICES:
        assert "too many values" in oversize_problem(kept)


def test_text_of_another_script_is_kept() -> None:
    """Its characters count as what they take, which is less than in JSON: eighty thousand of two bytes each."""
    spec = {"engine": {"env": [{"name": f"V{number}", "value": "\u4f60" * 20_000} for number in range(4)]}}
    obj = {"metadata": {"name": "x", "namespace": "team", "uid": "u"}, "spec": spec}
    kept = kept_fields(INFERENCE_SERVICES, obj)
    assert kept["spec"] == spec
    assert kept_fields(INFERENCE_SERVICES, kept) == kept


def test_of_a_child_all_is_kept_that_is_compared() -> None:
    service = isvc()
    plan = plan_children(service, Observation(), CONFIG)
    for wanted in map(with_applied_hash, (plan.service, plan.budget, plan.deployment)):
        metadata = {**wanted["metadata"], "uid": "u", "resourceVersion": "7", "generation": 3}
        kept = kept_fields(kind_of(wanted), {**wanted, "metadata": metadata, "status": {"replicas": 1}})
        assert kept == {**wanted, "metadata": metadata, "status": {"replicas": 1}}
