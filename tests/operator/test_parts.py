"""The small parts: drift, store, queue, fleet document, configuration, quantities."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from builders import CONFIG, isvc, isvc_object
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from virtual_time import run

from argosy_operator.cluster.store import Store
from argosy_operator.config import ConfigError, OperatorConfig
from argosy_operator.desired.drift import contains, must_apply, with_applied_hash
from argosy_operator.desired.fleet_document import fleet_document, fleet_service, name_conflicts
from argosy_operator.desired.plan import desired
from argosy_operator.kinds import DEPLOYMENTS, PODS
from argosy_operator.names import selector, shorten
from argosy_operator.observed.observation import Observation
from argosy_operator.reconcile.workqueue import BACKOFF_MAX, WorkQueue
from argosy_operator.resource.schema_types import quantity_bytes
from argosy_operator.resource.types import parse
from argosy_protocol.fleet import (
    Canary,
    Endpoint,
    ServiceLimits,
    decode_fleet,
    encode_fleet,
    resolve_names,
)


@pytest.mark.parametrize(
    ("live", "wanted", "same"),
    [
        ({"a": 1, "server": "default"}, {"a": 1}, True),
        ({"a": 1}, {"a": 2}, False),
        ({}, {"a": 1}, False),
        ({}, {"value": ""}, True),
        ({}, {"readOnly": False}, True),
        ({}, {"list": []}, True),
        ({}, {"emptyDir": {}}, False),
        ({"list": [{"name": "a", "default": 1}]}, {"list": [{"name": "a"}]}, True),
        ({"list": [{"name": "a"}, {"name": "sidecar"}]}, {"list": [{"name": "a"}]}, False),
        ({"limits": {"memory": "1Gi"}}, {"limits": {"memory": "1024Mi"}}, True),
        ({"requests": {"cpu": "1"}}, {"requests": {"cpu": "1000m"}}, True),
        ({"requests": {"cpu": "1"}}, {"requests": {"cpu": "1001m"}}, False),
        ({"labels": {"a": "1"}}, {"labels": {"a": "1000m"}}, False),
        ({"emptyDir": {"sizeLimit": "1Gi"}}, {"emptyDir": {"sizeLimit": "1024Mi"}}, True),
    ],
)
def test_contains(live: Any, wanted: Any, same: bool) -> None:
    assert contains(live, wanted) is same


JSON = st.recursive(
    st.integers() | st.text(max_size=4) | st.booleans(),
    lambda nested: st.lists(nested, max_size=3) | st.dictionaries(st.text(max_size=3), nested, max_size=3),
    max_leaves=8,
)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.dictionaries(st.text(max_size=3), JSON, max_size=4))
def test_an_object_contains_itself(obj: dict[str, Any]) -> None:
    assert contains(obj, obj)
    assert contains({**obj, "more": 1}, {key: value for key, value in obj.items() if key != "more"})


def test_the_applied_hash_shows_every_change() -> None:
    wanted = with_applied_hash(desired(isvc(), Observation(), CONFIG).deployment)
    assert not must_apply(wanted, wanted)
    assert must_apply(wanted, None)
    dropped = with_applied_hash(
        desired(isvc(placement={"nodeSelector": {"a": "b"}}), Observation(), CONFIG).deployment
    )
    assert contains(dropped["spec"]["selector"], wanted["spec"]["selector"])
    assert must_apply(wanted, dropped), "a field that is no longer wanted must go"


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
    assert not store.put(PODS, version(9)), "the echo of a write is not news"
    assert not store.put(PODS, version(8))
    assert store.put(PODS, version(10))
    assert store.put(PODS, version(3, uid="v")), "a namesake is another object"
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


def test_queue_works_on_a_key_once_at_a_time() -> None:
    async def scenario() -> None:
        queue: WorkQueue[str] = WorkQueue()
        queue.add("a")
        queue.add("a")
        assert await queue.get() == "a"
        queue.add("a")
        queue.add("b")
        assert await queue.get() == "b", "a is being worked on"
        queue.done("a")
        assert await queue.get() == "a", "it was marked meanwhile"
        queue.done("a")
        queue.done("b")
        assert queue.is_idle

    run(scenario())


def test_queue_backs_off_and_forgives() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        queue: WorkQueue[str] = WorkQueue()
        queue.add("a")
        waits = []
        for _ in range(12):
            since = loop.time()
            await queue.get()
            waits.append(loop.time() - since)
            queue.done("a", failed=True)
        assert waits[0] == 0
        assert waits[1:5] == pytest.approx([0.25, 0.5, 1, 2])
        assert waits[-1] == pytest.approx(BACKOFF_MAX)
        queue.add("a")
        await queue.get()
        queue.done("a")
        queue.add("a")
        await queue.get()
        queue.done("a", failed=True)
        since = loop.time()
        await queue.get()
        assert loop.time() - since <= 0.25, "success ends the back-off"
        queue.close()

    run(scenario())


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
    assert (entry.key, entry.uid, entry.model, entry.aliases) == (
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
    (conflict,) = name_conflicts(services, services[0])
    assert (conflict.name, conflict.winner) == ("chat", "team/older")
    assert name_conflicts(services, services[1]) == ()
    assert resolve_names(fleet_document(services)).names["team/younger"].name == "younger"


ENV = {"POD_NAMESPACE": "n", "ARGOSY_FLEET_KEY": "0123456789abcdef", "ARGOSY_ENGINE_IMAGE": "i"}


def test_config_from_the_environment() -> None:
    config = OperatorConfig.from_env(
        {**ENV, "ARGOSY_WATCH_NAMESPACES": "a, b,", "ARGOSY_ROUTER_URL": "http://r/"}
    )
    assert (config.namespace, config.fleet_key, config.engine_image) == ("n", b"0123456789abcdef", "i")
    assert (config.watch_namespaces, config.router_url) == (("a", "b"), "http://r")
    assert not config.router_speaks_tls
    assert OperatorConfig.from_env({**ENV, "ARGOSY_ROUTER_URL": "https://r"}).router_speaks_tls


def test_no_fleet_key_is_needed_where_the_operator_is_to_make_it() -> None:
    config = OperatorConfig.from_env(
        {
            **ENV,
            "ARGOSY_FLEET_KEY": "",
            "ARGOSY_FLEET_KEY_SECRET": "argosy-fleet-key",
            "ARGOSY_ROUTER_KEYS_SECRET": "argosy-router-keys",
            "ARGOSY_IMAGE_PULL_SECRETS": "registry,other",
        }
    )
    assert (config.fleet_key, config.fleet_key_secret) == (b"", "argosy-fleet-key")
    assert config.router_keys_secret == "argosy-router-keys"
    assert config.image_pull_secrets == ("registry", "other")


@pytest.mark.parametrize(
    ("change", "variable"),
    [
        ({"POD_NAMESPACE": ""}, "POD_NAMESPACE"),
        ({"ARGOSY_FLEET_KEY": ""}, "ARGOSY_FLEET_KEY"),
        ({"ARGOSY_FLEET_KEY": "short", "ARGOSY_FLEET_KEY_SECRET": "s"}, "ARGOSY_FLEET_KEY"),
        ({"ARGOSY_FLEET_KEY": "short"}, "ARGOSY_FLEET_KEY"),
        ({"ARGOSY_ENGINE_IMAGE": ""}, "ARGOSY_ENGINE_IMAGE"),
        ({"ARGOSY_IMAGE_PULL_POLICY": "Sometimes"}, "ARGOSY_IMAGE_PULL_POLICY"),
    ],
)
def test_wrong_settings_are_named(change: dict[str, str], variable: str) -> None:
    with pytest.raises(ConfigError, match=variable):
        OperatorConfig.from_env({**ENV, **change})


@pytest.mark.parametrize(
    ("text", "count"), [("1", 1), ("64Mi", 2**26), ("2G", 2 * 10**9), ("3Ti", 3 * 2**40)]
)
def test_quantity_bytes(text: str, count: int) -> None:
    assert quantity_bytes(text) == count


@pytest.mark.parametrize("text", ["", "Mi", "1Xi", "-1", "1.5Gi"])
def test_not_a_quantity_of_bytes(text: str) -> None:
    with pytest.raises(ValueError, match="not a quantity"):
        quantity_bytes(text)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.text("abc-", min_size=1, max_size=90).filter(lambda name: name[0] != "-"), st.integers(12, 63))
def test_shortened_names_fit(name: str, limit: int) -> None:
    short = shorten(name, limit)
    assert len(short) <= limit
    assert short == name or len(name) > limit
    assert short.startswith(name[:1])
