"""The cache of the cluster: versions, children by service."""

from __future__ import annotations

from typing import Any

from argosy_operator.cluster.store import Store
from argosy_operator.kinds import DEPLOYMENTS, PODS
from argosy_resource.engine_address import SERVICE_LABEL


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
