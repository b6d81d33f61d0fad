"""A fleet document that does not fit into a ConfigMap, and one that is edited all the time."""

from __future__ import annotations

import asyncio

import pytest
from builders import CONFIG, isvc_object
from fake_kubernetes import FakeKubernetes
from harness import Operator, condition, is_ready, new_cluster
from hypothesis import given
from hypothesis import strategies as st
from virtual_time import virtual_time

from argosy_operator.cluster.store import Store
from argosy_operator.names import INFERENCE_SERVICES
from argosy_operator.reconcile import fleet_publisher
from argosy_operator.reconcile.controller import PUBLISH_BURST, PUBLISH_INTERVAL
from argosy_operator.reconcile.fleet_publisher import FleetPublisher
from argosy_operator.reconcile.metrics import OperatorMetrics
from argosy_protocol.fleet import FleetDocument, FleetService, decode_fleet, encode_fleet
from argosy_resource.fleet_document import within


def service(namespace: str, number: int, size: int = 0) -> FleetService:
    return FleetService(
        namespace=namespace,
        name=f"s{number}",
        uid=f"{namespace}-{number}",
        created=f"2026-01-01T00:{number // 60 % 60:02}:{number % 60:02}Z",
        model=f"m{number}",
        aliases=("x" * size,) if size else (),
    )


def document(*services: FleetService) -> FleetDocument:
    return FleetDocument(services=tuple(sorted(services, key=lambda each: each.qualified_name)))


def names_of(found: FleetDocument, namespace: str) -> list[str]:
    return [each.name for each in found.services if each.namespace == namespace]


def test_what_fits_stays_as_it_is() -> None:
    whole = document(*(service("team", number) for number in range(5)))
    assert within(whole, len(encode_fleet(whole))) == whole


def test_only_the_namespace_that_takes_most_loses_its_newest_services() -> None:
    greedy = [service("greedy", number, 200) for number in range(100)]
    modest = [service("modest", number) for number in range(10)]
    whole = document(*greedy, *modest)
    limit = len(encode_fleet(whole)) // 2
    found = within(whole, limit)
    assert len(encode_fleet(found)) <= limit
    assert len(names_of(found, "modest")) == 10
    kept = names_of(found, "greedy")
    assert 30 < len(kept) < 60
    assert set(kept) == {f"s{number}" for number in range(len(kept))}, "the oldest stay"


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 30), st.integers(0, 250)), max_size=40),
    st.integers(200, 8000),
)
def test_a_document_is_within_its_limit_and_a_namespace_within_its_share_is_whole(
    given_services: list[tuple[str, int, int]], limit: int
) -> None:
    unique = {(namespace, number): size for namespace, number, size in given_services}
    whole = document(*(service(*name, size) for name, size in unique.items()))
    found = within(whole, limit)
    assert len(encode_fleet(found)) <= limit
    assert within(whole, limit) == found
    for namespace in {name for name, _ in unique}:
        alone = document(*(each for each in whole.services if each.namespace == namespace))
        if len(encode_fleet(alone)) <= (limit - 700) // 3:
            assert len(names_of(found, namespace)) == len(alone.services)


def published(cluster: FakeKubernetes) -> set[str]:
    return {each.qualified_name for each in decode_fleet(cluster.fleet() or "{}").services}


@virtual_time
async def test_a_tenant_with_many_aliases_keeps_no_other_one_out_and_is_told_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fleet_publisher, "MAX_DOCUMENT", 8000)
    cluster = new_cluster()
    async with Operator(cluster) as operator:
        for number in range(6):
            aliases = [f"{number}-{each}-{'x' * 200}" for each in range(8)]
            model = {"source": "builtin://tiny", "aliases": aliases}
            cluster.create(isvc_object(f"greedy{number}", namespace="greedy", replicas=0, model=model))
        await operator.settle()
        cluster.create(isvc_object())
        await operator.settle()
        assert "team/tiny" in published(cluster)
        assert is_ready(cluster)
        left = [number for number in range(6) if f"greedy/greedy{number}" not in published(cluster)]
        assert left
        name = f"greedy{left[0]}"
        found = cluster.isvc(name, namespace="greedy")["status"]["conditions"]
        reasons = {each["type"]: (each["status"], each["reason"]) for each in found}
        assert reasons["Ready"] == ("False", "FleetDocumentFull")
        assert reasons["Degraded"] == ("True", "FleetDocumentFull")
        before = len(cluster.writes)
        await asyncio.sleep(600)
        assert cluster.writes[before:] == []
        for number in range(6):
            if number not in left:
                cluster.remove((INFERENCE_SERVICES, "greedy", f"greedy{number}"))
        await operator.settle()
        assert f"greedy/{name}" in published(cluster)
        found = cluster.isvc(name, namespace="greedy")["status"]["conditions"]
        assert {each["type"]: each["reason"] for each in found}["Ready"] == "Stopped"


@virtual_time
async def test_whoever_edits_a_service_all_the_time_has_the_document_written_once_a_second() -> None:
    cluster = new_cluster()
    async with Operator(cluster) as operator:
        cluster.create(isvc_object())
        await operator.settle()
        await asyncio.sleep(60)
        before = len(cluster.writes)
        seconds = 30
        for number in range(10 * seconds):
            cluster.edit(
                "tiny", lambda spec, number=number: spec["model"].update(aliases=[f"alias-{number}"])
            )
            await asyncio.sleep(0.1)
        await operator.settle()
        documents = [write for write in cluster.writes[before:] if "ConfigMap" in str(write)]
        assert 2 <= len(documents) <= PUBLISH_BURST + seconds / PUBLISH_INTERVAL + 3
        (only,) = decode_fleet(cluster.fleet() or "{}").services
        assert only.aliases == (f"alias-{10 * seconds - 1}",)
        assert condition(cluster, "Ready") == ("True", "ReplicasRoutable")


@virtual_time
async def test_others_have_their_turn_while_names_are_decided() -> None:
    """Decided in one go, ten thousand names held the loop for 50 ms."""
    cluster = new_cluster()
    cluster.create(isvc_object())
    publisher = FleetPublisher(
        cluster,
        Store(),
        CONFIG,
        OperatorMetrics(),
        has_listed=lambda namespace: True,
        namespaces=frozenset[str],
        now=lambda: "2026-01-01T00:00:00Z",
    )
    publishing = asyncio.create_task(publisher.publish())
    turns = 0
    while not publishing.done():
        turns += 1
        await asyncio.sleep(0)
    assert turns >= 3, "the fake answers at once"
