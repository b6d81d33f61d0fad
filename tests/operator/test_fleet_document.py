"""How resources appear in the fleet document."""

from __future__ import annotations

import pytest
from builders import isvc, isvc_object
from harness import settled
from virtual_time import virtual_time

from argosy_protocol.fleet import (
    Canary,
    Endpoint,
    ModelFetchState,
    ServiceLimits,
    decode_fleet,
    encode_fleet,
    resolve_names,
)
from argosy_resource.engine_command import selector
from argosy_resource.fleet_document import fleet_document, fleet_service
from argosy_resource.types import parse


def test_fleet_service() -> None:
    service = isvc(
        model={"source": "builtin://tiny", "servedName": "org/Tiny", "aliases": ["t"]},
        router={
            "policy": "least-load",
            "limits": {
                "maxInflightPerReplica": 1,
                "maxQueuedRequests": 2,
                "queueTimeoutSeconds": 3,
                "holdTimeoutSeconds": 4,
                "requestTimeoutSeconds": 5,
            },
            "hedgeAfter": 6,
        },
    )
    entry = fleet_service(service)
    assert (entry.qualified_name, entry.uid, entry.model, entry.aliases) == (
        "team/tiny",
        "uid-team-tiny",
        "org/Tiny",
        ("t",),
    )
    assert entry.engine_model == "tiny", "whatever clients call it"
    assert (entry.policy, entry.port, entry.internal_key) == ("least-load", 8000, "")
    assert entry.limits == ServiceLimits(
        max_inflight_per_replica=1,
        max_queued_requests=2,
        queue_timeout_s=3,
        hold_timeout_s=4,
        request_timeout_s=5,
    )
    assert fleet_service(isvc(model={"source": "builtin://tiny"})).limits == ServiceLimits()
    assert entry.hedge_after == 6
    assert fleet_service(isvc(model={"source": "builtin://tiny"})).hedge_after is None, "the router decides"
    assert fleet_service(isvc(router={"hedgeAfter": 0})).hedge_after == 0.0, "which it must not"
    assert entry.canary is None
    assert fleet_service(isvc(router={"canary": {"service": "next", "weight": 7}})).canary == Canary(
        service="next", weight=7
    )
    assert entry.selector == selector(service)
    local = fleet_service(
        service, endpoints=(Endpoint(name="e", url="http://127.0.0.1:1"),), internal_key="k"
    )
    assert (local.selector, local.internal_key) == ({}, "k")


@pytest.mark.parametrize(
    ("source", "column", "shown", "state"),
    [
        ("hf://org/name@main", "", "hf://org/name@main", ""),
        ("hf://org/name", "43 % 12.0/28.0 GiB, eta 70 s", "hf://org/name", "fetching 40 %"),
        ("hf://org/name", "49 % 13.8/28.0 GiB; 503 from the hub", "hf://org/name", "fetching 40 %"),
        ("hf://org/name", "unpacking, 100 % 28.0/28.0 GiB", "hf://org/name", "unpacking"),
        ("hf://org/name", "resolving the revision", "hf://org/name", "fetching"),
        ("hf://org/name", "waiting for another pod that fetches it", "hf://org/name", "waiting"),
        ("hf://org/name", "cached", "hf://org/name", "cached"),
        ("hf://org/name", "failed", "hf://org/name", "failed"),
        ("hf://org/name", "locked", "hf://org/name", "locked"),
        ("https://h/m.tar?signature=secret#sha256=" + "a" * 64, "failed", "https://h/m.tar", "failed"),
        ("https://h/" + "x" * 999 + ".tar", "cached", "https://h/" + "x" * 246, "cached"),
    ],
)
def test_the_stage_of_a_fetch_is_shown(source: str, column: str, shown: str, state: str) -> None:
    obj = isvc_object(model={"source": source})
    obj["status"] = {"modelCache": column}
    document = fleet_document([parse(obj)])
    assert decode_fleet(encode_fleet(document)) == document, "the router accepts it"
    assert document.services[0].fetch == ModelFetchState(source=shown, state=state)


def test_a_model_that_is_not_fetched_has_no_stage() -> None:
    assert fleet_service(isvc(model={"source": "builtin://tiny"})).fetch is None
    local = fleet_service(
        isvc(model={"source": "hf://org/name"}), endpoints=(Endpoint(name="e", url="http://127.0.0.1:1"),)
    )
    assert local.fetch is None, "`argosy up` fetches before it starts a replica"


def test_fleet_document_is_the_same_in_any_order() -> None:
    services = [isvc("b"), isvc("a"), isvc("c")]
    text = encode_fleet(fleet_document(services))
    assert encode_fleet(fleet_document(reversed(services))) == text
    assert [entry.name for entry in decode_fleet(text).services] == ["a", "b", "c"]


def test_deleted_services_are_left_out() -> None:
    obj = isvc_object()
    obj["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert fleet_document([parse(obj)]).services == ()


def test_the_older_service_wins_a_name() -> None:
    older, younger = isvc_object("older"), isvc_object("younger")
    for obj, year in ((older, 2024), (younger, 2025)):
        obj["metadata"]["creationTimestamp"] = f"{year}-01-01T00:00:00Z"
        obj["spec"]["model"]["servedName"] = "chat"
    services = [parse(younger), parse(older)]
    table = resolve_names(fleet_document(services))
    (conflict,) = table.conflicts
    assert (conflict.name, conflict.winner, conflict.loser) == ("chat", "team/older", "team/younger")
    assert table.names["team/younger"].name == "younger"


@virtual_time
async def test_the_document_of_a_cluster_says_whose_pods_are_replicas() -> None:
    async with settled(isvc_object()) as (cluster, _):
        (entry,) = decode_fleet(cluster.fleet()).services
    assert entry.owners == ("tiny-engine-", "tiny-canary-")
