"""Static, file and Kubernetes discovery."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given
from kubernetes.aio import client as kubernetes_client
from kubernetes.aio.config import ConfigException

from argosy_protocol.errors import ApiError
from argosy_protocol.fleet import Endpoint, FleetDocument, FleetService, encode_fleet
from argosy_protocol.json_limits import TOKENS_PER_STEP
from argosy_protocol.program.list_watch import decoded_in_turns
from argosy_router.config import UpstreamLimits
from argosy_router.discovery import kubernetes, reflector, sources
from argosy_router.discovery.kubernetes import KubernetesDiscovery, Pod, PodMembers, members_of, pod_selectors
from argosy_router.discovery.sources import (
    GATHER_S,
    MAX_ADDRESSES,
    MISSES,
    Discovery,
    DnsDiscovery,
    FileDiscovery,
    ModelDiscovery,
    StaticDiscovery,
    revision_of,
)
from argosy_router.fleet.fleet import Fleet, FleetSnapshot
from argosy_router.fleet.replica import Member
from argosy_router.http.deadlines import TimerWheel
from argosy_router.http.upstream import UpstreamTls
from argosy_router.proxy.call import find_service

from .fake_api_server import DEEP, FakeApiServer
from .fake_engine import Connection, FakeEngine, Received
from .harness import until


class Published(list[FleetSnapshot]):
    """Snapshots in order."""

    @property
    def members(self) -> dict[str, list[str]]:
        """Service -> names of its members, draining ones marked."""
        if not self:
            return {}
        return {
            key: [member.name + ("!" if member.is_draining else "") for member in members]
            for key, members in self[-1].members.items()
        }


@contextlib.asynccontextmanager
async def following(discovery: Discovery) -> AsyncIterator[Published]:
    published = Published()
    task = asyncio.create_task(discovery.run(published.append))
    try:
        yield published
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


# models that may yet appear


def test_a_name_is_unknown_only_once_all_replicas_have_told_theirs() -> None:
    loop = asyncio.new_event_loop()
    fleet = Fleet(TimerWheel(loop), UpstreamLimits())

    def refusal(snapshot: FleetSnapshot | None) -> ApiError:
        if snapshot is not None:
            fleet.apply(snapshot)
        with pytest.raises(ApiError) as caught:
            find_service(fleet, "tiny")
        return caught.value

    for snapshot in (None, FleetSnapshot(unheard=1)):
        error = refusal(snapshot)
        assert (error.http_status, error.param, error.retry_after_s) == (503, "model", 1.0)
    assert refusal(FleetSnapshot()).http_status == 404
    loop.close()


# static


@contextlib.asynccontextmanager
async def static(*engines: FakeEngine, key: str = "") -> AsyncIterator[Published]:
    wheel = TimerWheel(asyncio.get_running_loop())
    urls = [engine.url for engine in engines]
    async with following(StaticDiscovery(urls, key, wheel, UpstreamTls())) as published:
        yield published
    wheel.close()


async def test_static_replicas_tell_their_models_when_they_are_up() -> None:
    async with (
        FakeEngine(aliases=("small",)) as first,
        FakeEngine() as second,
        FakeEngine(model="other") as late,
    ):
        await late.stop()
        async with static(first, second, late) as published:
            await until(lambda: len(published.members.get("static/tiny", ())) == 2)
            assert published[-1].document.services[0].aliases == ("small",)
            assert published[-1].unheard == 1
            await late.start()
            await until(lambda: "static/other" in published.members)
            assert published[-1].unheard == 0


async def test_a_static_replica_may_come_back_with_another_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "RECHECK_S", 0.005)
    async with (
        FakeEngine() as engine,
        static(engine) as published,
    ):
        await until(lambda: "static/tiny" in published.members)
        engine.model, engine.key = "other", "secret"
        asked = engine.connections
        await until(lambda: engine.connections > asked + 2)
        assert "static/tiny" in published.members, "who does not tell keeps its model"
        engine.key = ""
        await until(lambda: "static/other" in published.members)
        assert "static/tiny" not in published.members


async def test_a_static_replica_that_is_away_is_asked_again_soon(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sources, "RECHECK_S", 0.005)
    async with (
        FakeEngine() as engine,
        static(engine) as published,
    ):
        await until(lambda: "static/tiny" in published.members)
        await engine.stop()
        await until(lambda: "cannot be read" in caplog.text)
        monkeypatch.setattr(sources, "RECHECK_S", 60.0)
        engine.model = "other"
        await engine.start()
        await until(lambda: "static/other" in published.members)


def test_dead_addresses_are_asked_less_often_but_once_a_second() -> None:
    pauses = [sources.retry_pause_s(failures, random.Random(failures)) for failures in range(1, 60)]
    assert pauses[0] <= 0.25
    assert all(0.5 <= pause <= 1.0 for pause in pauses[3:])
    assert len(set(pauses[3:])) > 1, "not all dead addresses at the same moment"


async def test_a_static_replica_that_does_not_tell_its_models_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sources, "MAX_RETRY_S", 0.005)
    caplog.set_level("INFO", logger=sources.__name__)
    async with (
        FakeEngine(key="secret") as engine,
        static(engine, key="wrong") as published,
    ):
        await until(lambda: engine.connections > 3)
        assert len(caplog.messages) == 1
        assert engine.url in caplog.text
        assert "status 401; pass the replica's key by --replica-key" in caplog.text
        engine.key = "wrong"
        await until(lambda: "static/tiny" in published.members)
        assert ["serves tiny" in message for message in caplog.messages] == [False, True]


async def test_a_replica_whose_list_of_models_is_no_text_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Garbled(FakeEngine):
        is_garbled = True

        async def handle(self, connection: Connection, request: Received) -> None:
            if request.path == "/v1/models" and self.is_garbled:
                connection.answer(200, b'{"data":[{"id":"\xff"}]}')
                return
            await super().handle(connection, request)

    monkeypatch.setattr(sources, "MAX_RETRY_S", 0.005)
    async with (
        Garbled() as engine,
        static(engine) as published,
    ):
        await until(lambda: "cannot be read" in caplog.text)
        engine.is_garbled = False
        await until(lambda: "static/tiny" in published.members)


@pytest.mark.parametrize(
    "url", ["ftp://a:1", "a:1", "http://", "http://a:1/v1", "http://u:p@a:1", "http://a:99999"]
)
async def test_replica_urls_are_checked(url: str) -> None:
    with pytest.raises(ValueError):
        StaticDiscovery([url], "", TimerWheel(asyncio.get_running_loop()), UpstreamTls())


# DNS


class Zone:
    """What a name server answers, and how often it was asked."""

    def __init__(self, *answer: str) -> None:
        self.answer: list[str] | OSError = list(answer)
        self.asked = 0

    async def resolve(self, host: str, port: int) -> list[str]:
        self.asked += 1
        if isinstance(self.answer, OSError):
            raise self.answer
        return self.answer

    async def until_asked(self, more: int) -> None:
        goal = self.asked + more
        await until(lambda: self.asked > goal)


@contextlib.asynccontextmanager
async def resolving(zone: Zone, port: int, host: str = "engines") -> AsyncIterator[Published]:
    wheel = TimerWheel(asyncio.get_running_loop())
    url = f"http://{host}:{port}"
    discovery = DnsDiscovery([url], "", wheel, UpstreamTls(), resolve=zone.resolve, resolve_s=0.001)
    async with following(discovery) as published:
        yield published
    wheel.close()


async def test_every_address_of_a_name_is_a_replica() -> None:
    async with FakeEngine() as engine:
        zone = Zone("127.0.0.1", "127.0.0.1")
        async with resolving(zone, engine.port) as published:
            await until(lambda: bool(published.members.get("dns/tiny")))
            (member,) = published[-1].members["dns/tiny"]
            assert member == Member(f"127.0.0.1:{engine.port}", "", engine.url, hostname="engines")


async def test_addresses_are_kept_while_a_name_does_not_resolve() -> None:
    async with FakeEngine() as engine:
        zone = Zone("127.0.0.1")
        async with resolving(zone, engine.port) as published:
            await until(lambda: bool(published.members.get("dns/tiny")))
            for failure in (socket.gaierror("no such name"), TimeoutError(), []):
                zone.answer = failure
                await zone.until_asked(2 * MISSES)
                assert published.members["dns/tiny"] == [f"127.0.0.1:{engine.port}"]


async def test_an_address_leaves_once_several_answers_were_without_it() -> None:
    name = sources.ResolvedName(False, "engines", 80)
    name.answered(["10.0.0.1", "10.0.0.2"])
    for _ in range(MISSES - 1):
        name.answered(["10.0.0.2"])
        assert len(name.members()) == 2, "an answer may have been partial"
    name.answered(["10.0.0.1"])
    for _ in range(MISSES):
        assert len(name.members()) == 2
        name.answered(["10.0.0.2"])
    assert [member.name for member in name.members()] == ["10.0.0.2:80"]


async def test_addresses_of_both_families_and_their_bound() -> None:
    name = sources.ResolvedName(True, "engines", 443)
    name.answered(["fd00::1", "10.0.0.1"])
    assert [member.url for member in name.members()] == ["https://10.0.0.1:443", "https://[fd00::1]:443"]
    for start in range(0, 3 * MAX_ADDRESSES, 700):
        name.answered([f"10.1.{number >> 8}.{number & 255}" for number in range(start, start + 2000)])
        assert len(name.members()) == MAX_ADDRESSES


@pytest.mark.parametrize("resolves", [True, False])
async def test_a_name_that_is_still_being_looked_up_may_have_other_models(resolves: bool) -> None:
    is_found = asyncio.Event()
    wheel = TimerWheel(asyncio.get_running_loop())
    fleet = Fleet(wheel, UpstreamLimits())
    async with FakeEngine() as engine, FakeEngine(model="other") as slow:

        async def resolve(host: str, port: int) -> list[str]:
            if host == "slow":
                await is_found.wait()
                if not resolves:
                    raise socket.gaierror("no such name")
            return ["127.0.0.1"]

        urls = [f"http://fast:{engine.port}", f"http://slow:{slow.port}"]
        task = asyncio.create_task(
            DnsDiscovery(urls, "", wheel, UpstreamTls(), resolve=resolve).run(fleet.apply)
        )
        try:
            await until(lambda: fleet.service_of("tiny") is not None)
            assert not fleet.knows_all_models
            is_found.set()
            await until(lambda: fleet.knows_all_models)
            assert (fleet.service_of("other") is not None) == resolves
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await fleet.close()
    wheel.close()


async def test_nothing_is_known_before_a_name_has_resolved() -> None:
    zone = Zone()
    async with resolving(zone, 80) as published:
        await zone.until_asked(2)
        assert not published, "a router that knows nothing is not ready"


async def test_a_name_that_resolves_late_is_known_within_two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def noted(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0.001)

    monkeypatch.setattr(sources.asyncio, "sleep", noted)
    zone = Zone()
    wheel = TimerWheel(asyncio.get_running_loop())
    async with FakeEngine() as engine:
        discovery = DnsDiscovery(
            [f"http://engines:{engine.port}"], "", wheel, UpstreamTls(), resolve=zone.resolve
        )
        async with following(discovery) as published:
            await until(lambda: zone.asked >= 1)
            zone.answer = ["127.0.0.1"]
            await until(lambda: "dns/tiny" in published.members)
    assert 2.0 in pauses
    wheel.close()


async def test_the_system_resolves() -> None:
    assert set(await sources.system_resolver("localhost", 80)) & {"127.0.0.1", "::1"}


# file


def document(*names: str, **fields: Any) -> FleetDocument:
    endpoints = tuple(Endpoint(name=name, url=f"http://127.0.0.1:{9000 + n}") for n, name in enumerate(names))
    service = FleetService(
        namespace="default", name="svc", uid="u", model="tiny", endpoints=endpoints, **fields
    )
    return FleetDocument(services=(service,))


def replace(path: Path, data: bytes) -> None:
    """As a careful writer does."""
    temporary = path.with_suffix(".new")
    temporary.write_bytes(data)
    os.replace(temporary, path)


async def test_a_file_is_followed_and_broken_ones_are_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One that nests deeper than the decoder takes ended the router."""
    path = tmp_path / "fleet.json"
    async with following(FileDiscovery(path, poll_s=0.005)) as published:
        await asyncio.sleep(0)
        assert not published, "nothing is known before the file exists"
        replace(path, encode_fleet(document("a")))
        await until(lambda: published.members == {"default/svc": ["a"]})
        assert published[-1].revision == revision_of(path.read_bytes())
        count = len(published)
        deep = b"[" * 100_000 + b"]" * 100_000
        broken_ones = (b"{", b'{"services":[{"name":1}]}', b"\xff\xff", b'{"x":%b,"services":1}' % deep)
        for number, broken in enumerate(broken_ones, 1):
            replace(path, broken)
            await until(lambda number=number: len(caplog.records) == number)  # type: ignore[misc]
        path.unlink()
        replace(path, encode_fleet(document("a", "b")))
        await until(lambda: published.members == {"default/svc": ["a", "b"]})
        assert all(snapshot.document.services for snapshot in published[count:])
        replace(path, encode_fleet(document("c")).replace(b"{", b'{"later":%b,' % deep, 1))
        await until(lambda: published.members == {"default/svc": ["c"]})


async def test_documents_of_a_newer_operator_are_read(tmp_path: Path) -> None:
    path = tmp_path / "fleet.json"
    path.write_text(
        '{"version": 9, "moon": 1, "services": [{"namespace": "n", "name": "s", "uid": "u", "model": "m", '
        '"shadow": {"share": 10}, "endpoints": [{"name": "a", "url": "http://h:1", "zone": "z"}]}]}'
    )
    async with following(FileDiscovery(path, poll_s=0.005)) as published:
        await until(lambda: published.members == {"n/s": ["a"]})


# Kubernetes

SELECTOR = {"component": "engine", "service": "svc"}


def pod_fields(
    ip: str = "10.0.0.1", *, containers_ready: bool = True, ready: bool = False, **metadata: Any
) -> Any:
    return {
        "metadata": {"labels": {**SELECTOR, "extra": "x"}, **metadata},
        "status": {
            "podIP": ip,
            "conditions": [
                {"type": "Ready", "status": str(ready)},
                {"type": "ContainersReady", "status": str(containers_ready)},
            ],
        },
    }


def publish_document(api: FakeApiServer, *services: FleetService) -> None:
    data = encode_fleet(FleetDocument(services=services)).decode()
    api.put("configmaps", "argosy", "argosy-fleet", data={"fleet.json": data})


SERVICE = FleetService(namespace="default", name="svc", uid="u", model="tiny", selector=SELECTOR, port=8000)


@contextlib.asynccontextmanager
async def cluster(
    relist_s: float = 30.0, second_s: float = 1.0
) -> AsyncIterator[tuple[FakeApiServer, Published]]:
    """`second_s` is how long a second of a watch takes."""
    async with FakeApiServer() as api:
        api.second_s = second_s
        publish_document(api, SERVICE)
        configuration = kubernetes_client.Configuration()
        configuration.host = api.url
        client = kubernetes_client.ApiClient(configuration)
        discovery = KubernetesDiscovery("argosy", "argosy-fleet", client=client, relist_s=relist_s)
        async with following(discovery) as published:
            await until(lambda: bool(published))
            yield api, published


async def test_pods_are_used_by_their_containers_not_by_readiness() -> None:
    async with cluster() as (api, published):
        assert published.members == {"default/svc": []}
        api.put("pods", "default", "a", **pod_fields(containers_ready=False))
        api.put("pods", "default", "b", **pod_fields("10.0.0.2", ready=False))
        api.put("pods", "default", "c", **pod_fields("", ready=True))
        api.put("pods", "default", "d", metadata={"labels": {"component": "engine", "service": "other"}})
        api.put("pods", "elsewhere", "e", **pod_fields())
        await until(lambda: published.members == {"default/svc": ["b"]})
        assert published[-1].members["default/svc"] == (Member("b", "uid-b", "http://10.0.0.2:8000"),)
        api.put("pods", "default", "a", **pod_fields("fd00::1"))
        await until(lambda: published.members == {"default/svc": ["a", "b"]})
        assert published[-1].members["default/svc"][0].url == "http://[fd00::1]:8000"
        api.put("pods", "default", "b", **pod_fields("10.0.0.2", deletionTimestamp="2026-01-01T00:00:00Z"))
        await until(lambda: published.members == {"default/svc": ["a", "b!"]})
        api.delete("pods", "default", "b")
        await until(lambda: published.members == {"default/svc": ["a"]})


def owner(name: str, **other: Any) -> dict[str, Any]:
    return {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": name, "controller": True, **other}


async def test_pods_with_copied_labels_are_no_replicas_and_get_no_key() -> None:
    owned = msgspec.structs.replace(SERVICE, owners=("svc-engine-", "svc-canary-"))
    async with cluster() as (api, published):
        publish_document(api, owned)
        copies: list[list[dict[str, Any]]] = [
            [],
            [owner("other-engine-5f7")],
            [owner("svc-engine-5f7", controller=False)],
            [owner("svc-engine-5f7", kind="Job", apiVersion="batch/v1")],
            [owner("svc-engine-5f7", apiVersion="example.com/v1")],
            [owner("node-a", kind="Node", apiVersion="v1"), owner("mine", kind="StatefulSet")],
        ]
        for number, references in enumerate(copies):
            api.put(
                "pods", "default", f"z{number}", **pod_fields(f"10.9.9.{number}", ownerReferences=references)
            )
        api.put("pods", "tenant", "b", **pod_fields(ownerReferences=[owner("svc-engine-5f7")]))
        api.put("pods", "default", "a", **pod_fields(ownerReferences=[owner("svc-engine-5f7")]))
        api.put(
            "pods", "default", "c", **pod_fields("10.0.0.2", ownerReferences=[owner("svc-canary-0123-4f")])
        )
        await until(lambda: published.members == {"default/svc": ["a", "c"]})
        settled = len(published)
        publish_document(api, owned, msgspec.structs.replace(SERVICE, name="any", uid="v"))
        await until(lambda: len(published) > settled and len(published.members) == 2)
        assert published.members["default/svc"] == ["a", "c"]
        assert len(published.members["default/any"]) == 8, "a document of an older operator names no owners"


async def test_a_pod_that_is_too_deep_for_the_decoder_keeps_no_other_from_being_served() -> None:
    """Whoever creates a pod may set its managedFields, of which the API server takes 10,000 levels."""
    async with cluster() as (api, published):
        api.put("pods", "default", "a", **pod_fields(managedFields=[{"fieldsV1": DEEP}]))
        await until(lambda: published.members == {"default/svc": ["a"]})
        api.put("pods", "default", "b", **pod_fields("10.0.0.2"))
        await until(lambda: published.members == {"default/svc": ["a", "b"]})
        lists = len(api.lists)
        api.expire_watches()
        await until(lambda: len(api.lists) >= lists + 2)
        api.put("pods", "default", "c", **pod_fields("10.0.0.3"))
        await until(lambda: published.members == {"default/svc": ["a", "b", "c"]})


class Found(msgspec.Struct):
    name: str


async def test_others_have_their_turn_while_a_deep_object_is_cut() -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    deep = "[" * 10_000 + "]" * 10_000 + ",[]" * (6 * TOKENS_PER_STEP)
    counting = asyncio.create_task(count())
    found = await decoded_in_turns(msgspec.json.Decoder(Found), f'{{"deep":[{deep}],"name":"a"}}'.encode())
    counting.cancel()
    assert (found.name, turns >= 12) == ("a", True)
    with pytest.raises(msgspec.DecodeError):
        await decoded_in_turns(msgspec.json.Decoder(Found), f'{{"deep":[{deep}],"name":"a"'.encode())


async def test_pods_that_change_all_the_time_are_looked_at_now_and_then() -> None:
    """Each change had all pods of the service looked at, which takes milliseconds for a thousand."""
    async with cluster() as (api, published):
        now = asyncio.get_running_loop().time
        began, before, last = now(), len(published), ""
        for number in range(100):
            last = f"10.0.1.{number}"
            api.put("pods", "default", "a", **pod_fields(last))
            for _ in range(20):
                await asyncio.sleep(0)
        await until(lambda: any(last in each.url for each in published[-1].members["default/svc"]))
        assert len(published) - before <= 2 + 20 * (now() - began)


async def test_pages_of_large_pods_are_small_and_what_they_have_is_not_kept() -> None:
    """A page of 500 was read whole: a tenant's pods, of 1.5 MB each, took a router's memory and held its event loop."""
    async with cluster() as (api, published):
        for number in range(60):
            api.put(
                "pods", "default", f"a{number}", **pod_fields(f"10.0.1.{number}"), spec={"x": "y" * 200_000}
            )
        labels = {**SELECTOR, **{f"label-{number}": "x" for number in range(10_000)}}
        api.put("pods", "default", "b", **pod_fields("10.0.0.9", labels=labels))
        lists = len(api.lists)
        api.forget_history()
        api.cut_watches()
        await until(lambda: len(published.members.get("default/svc", ())) == 60)
        assert "b" not in published.members["default/svc"]
        await until(lambda: "limit" in api.lists[-1] and len(api.lists) >= lists + 6)
        of_pods = [parse_qs(urlsplit(each).query) for each in api.lists[lists:] if "/default/pods" in each]
        limits = [int(query["limit"][0]) for query in of_pods]
        assert (limits[0], max(limits[1:])) == (reflector.FIRST_PAGE, reflector.SMALL_PAGE)
        api.delete("pods", "default", "a1")
        await until(lambda: len(published.members["default/svc"]) == 59)


async def test_a_document_that_cannot_be_used_is_told_of_once_and_stops_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One that nests deeper than the decoder takes ended the router."""
    async with cluster() as (api, published):
        api.put("pods", "default", "a", **pod_fields())
        await until(lambda: published.members == {"default/svc": ["a"]})
        deep = "[" * 100_000 + "]" * 100_000
        api.put("configmaps", "argosy", "argosy-fleet", data={"fleet.json": f'{{"x":{deep},"services":1}}'})
        for number, name in enumerate(("b", "c"), 2):
            api.put("pods", "default", name, **pod_fields(f"10.0.0.{number}"))
            await until(lambda name=name: name in published.members["default/svc"])  # type: ignore[misc]
        assert sum("fleet document is not usable" in each.message for each in caplog.records) == 1
        publish_document(api, msgspec.structs.replace(SERVICE, name="later"))
        await until(lambda: "default/later" in published.members)


async def test_the_document_is_followed() -> None:
    async with cluster() as (api, published):
        api.put("pods", "default", "a", **pod_fields())
        other_pod = pod_fields("10.9.9.9", labels={"component": "engine", "service": "other"})
        api.put("pods", "default", "o", **other_pod)
        await until(lambda: published.members == {"default/svc": ["a"]})
        second = FleetService(
            namespace="default", name="other", uid="u2", model="m", selector={**SELECTOR, "service": "other"}
        )
        publish_document(api, SERVICE, second)
        await until(lambda: published.members == {"default/svc": ["a"], "default/other": ["o"]})
        api.put("configmaps", "argosy", "argosy-fleet", data={"fleet.json": "{broken"})
        api.put("pods", "default", "b", **pod_fields("10.0.0.3"))
        await until(lambda: published.members.get("default/svc") == ["a", "b"])
        api.delete("configmaps", "argosy", "argosy-fleet")
        api.delete("pods", "default", "b")
        await until(lambda: published.members == {"default/svc": ["a"], "default/other": ["o"]})


async def test_the_last_good_state_survives_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reflector, "BACKOFF_BASE_S", 0.005)
    async with cluster() as (api, published):
        api.put("pods", "default", "a", **pod_fields())
        await until(lambda: published.members == {"default/svc": ["a"]})
        count = len(published)
        api.status = 503
        api.cut_watches()
        api.put("pods", "default", "b", **pod_fields("10.0.0.2"))
        lists = len(api.lists)
        # The second refusal of each comes after whatever the first one led to.
        await until(lambda: all(api.refused.count(kind) >= 2 for kind in ("configmaps", "pods")))
        assert published.members == {"default/svc": ["a"]}
        api.status = 200
        await until(lambda: published.members == {"default/svc": ["a", "b"]})
        assert len(api.lists) == lists, "watches go on where they were cut"
        assert all(snapshot.members["default/svc"] for snapshot in published[count:])


@pytest.mark.parametrize("answer", [b'{"kind":"Status","metadata":{}}', b'{"metadata":{},"items":[]}', b"{}"])
async def test_what_is_no_list_takes_no_replica(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway, or an API server that is out of order, may answer anything with 200."""
    monkeypatch.setattr(reflector, "BACKOFF_BASE_S", 0.005)
    async with cluster() as (api, published):
        api.put("pods", "default", "a", **pod_fields())
        await until(lambda: published.members == {"default/svc": ["a"]})
        count, lists = len(published), len(api.lists)
        api.list_answer = answer
        api.put("pods", "elsewhere", "z", **pod_fields())
        api.forget_history()
        api.cut_watches()
        await until(lambda: sum("/default/pods" in each for each in api.lists[lists:]) >= 2)
        assert all(snapshot.members["default/svc"] for snapshot in published[count:])
        api.list_answer = b""
        api.put("pods", "default", "b", **pod_fields("10.0.0.2"))
        await until(lambda: published.members == {"default/svc": ["a", "b"]})


@pytest.mark.parametrize("status", [403, 410, 500])
async def test_pods_that_cannot_be_listed_in_one_namespace_keep_no_other_from_being_served(
    status: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reflector, "BACKOFF_CAP_S", 0.1)
    monkeypatch.setattr(reflector, "BACKOFF_BASE_S", 0.005)
    monkeypatch.setattr(reflector, "WATCH_S", 1.0)  # by which the others show that the API server is there
    monkeypatch.setattr(kubernetes, "SETTLE_AFTER_S", 0.05, raising=False)
    caplog.set_level(logging.INFO)
    other = msgspec.structs.replace(SERVICE, namespace="other", uid="v", model="m")
    async with cluster(second_s=0.2) as (api, published):
        api.forbidden, api.forbidden_status = {("pods", "other")}, status
        api.put("pods", "default", "a", **pod_fields())
        publish_document(api, SERVICE, other)
        await until(lambda: published.members == {"default/svc": ["a"], "other/svc": []})
        api.refused.clear()
        await until(lambda: api.refused.count("pods") >= 3)
        told = [each.getMessage() for each in caplog.records if "/namespaces/other/pods" in each.getMessage()]
        assert len(told) == 1, "an answer is told once, not every time"
        api.put("pods", "other", "b", **pod_fields("10.0.0.2"))
        api.forbidden = set()
        await until(lambda: published.members == {"default/svc": ["a"], "other/svc": ["b"]})


@pytest.mark.parametrize("status", [403, 500])
async def test_replicas_stay_while_their_namespace_cannot_be_listed_for_one_service_more(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A further service changes by what the namespace's pods are selected."""
    monkeypatch.setattr(reflector, "BACKOFF_CAP_S", 0.1)
    monkeypatch.setattr(reflector, "BACKOFF_BASE_S", 0.005)
    monkeypatch.setattr(reflector, "WATCH_S", 1.0)
    monkeypatch.setattr(kubernetes, "SETTLE_AFTER_S", 0.01)
    more = msgspec.structs.replace(SERVICE, name="more", uid="v", model="m", selector={"app": "more"})
    async with cluster(second_s=0.2) as (api, published):
        api.put("pods", "default", "a", **pod_fields())
        publish_document(api, SERVICE)
        await until(lambda: published.members == {"default/svc": ["a"]})
        api.forbidden, api.forbidden_status = {("pods", "default")}, status
        publish_document(api, SERVICE, more)
        await until(lambda: "default/more" in published.members)
        assert published.members == {"default/svc": ["a"], "default/more": []}
        api.delete("pods", "default", "a")
        api.put("pods", "default", "b", **pod_fields("10.0.0.2"))
        api.forbidden = set()
        await until(lambda: published.members == {"default/svc": ["b"], "default/more": []})
        assert all(snapshot.members["default/svc"] for snapshot in published[1:])


async def test_a_namespace_that_is_listed_anew_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """As often as its owner likes: each service with another label changes by what its pods are selected."""
    monkeypatch.setattr(kubernetes, "SETTLE_AFTER_S", 600.0)
    other = msgspec.structs.replace(SERVICE, namespace="other", uid="v", model="m")
    more = msgspec.structs.replace(other, name="more", uid="w", model="n", selector={"app": "more"})
    async with cluster() as (api, published):
        api.put("pods", "default", "a", **pod_fields())
        api.put("pods", "other", "b", **pod_fields("10.0.0.2"))
        publish_document(api, SERVICE, other)
        await until(lambda: published.members == {"default/svc": ["a"], "other/svc": ["b"]})
        with api.holding("pods", "other"):
            publish_document(api, SERVICE, other, more)
            api.put("pods", "default", "c", **pod_fields("10.0.0.3"))
            await until(lambda: published.members.get("default/svc") == ["a", "c"])
            assert published.members["other/svc"] == ["b"]
        more_pod = pod_fields("10.0.0.4", labels={"app": "more"})
        api.put("pods", "other", "d", **more_pod)
        await until(lambda: published.members["other/more"] == ["d"])


async def test_a_failure_that_nobody_expects_ends_no_watch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The client refreshes its token, and may find an empty file."""
    monkeypatch.setattr(reflector, "BACKOFF_CAP_S", 0.1)
    monkeypatch.setattr(reflector, "BACKOFF_BASE_S", 0.005)
    failures = iter(range(5))

    class Client(kubernetes_client.ApiClient):
        async def param_serialize(self, method: str, path: str, **given: Any) -> Any:
            if "/default/pods" in path and next(failures, None) is not None:
                raise ConfigException("Token file exists but empty.")
            return await super().param_serialize(method, path, **given)

    async with FakeApiServer() as api:
        configuration = kubernetes_client.Configuration()
        configuration.host = api.url
        publish_document(api, SERVICE)
        api.put("pods", "default", "a", **pod_fields())
        discovery = KubernetesDiscovery("argosy", "argosy-fleet", client=Client(configuration))
        async with following(discovery) as published:
            await until(lambda: published.members == {"default/svc": ["a"]})
    assert sum("Token file" in (each.exc_text or "") for each in caplog.records) == 1


async def test_nothing_is_known_while_no_pods_can_be_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a router that starts during an outage would answer for services without replicas."""
    monkeypatch.setattr(reflector, "BACKOFF_CAP_S", 0.1)
    monkeypatch.setattr(reflector, "BACKOFF_BASE_S", 0.005)
    monkeypatch.setattr(kubernetes, "SETTLE_AFTER_S", 0.01, raising=False)
    async with FakeApiServer(
        forbidden={("pods", "default"), ("pods", "argosy")}, forbidden_status=500
    ) as api:
        publish_document(api, SERVICE)
        configuration = kubernetes_client.Configuration()
        configuration.host = api.url
        client = kubernetes_client.ApiClient(configuration)
        async with following(KubernetesDiscovery("argosy", "argosy-fleet", client=client)) as published:
            await until(lambda: api.refused.count("pods") >= 20)
            assert not published
            api.forbidden = set()
            await until(lambda: published.members == {"default/svc": []})


async def test_nothing_is_listed_again_while_watches_can_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bookmarks tell how far a watch has come that has nothing to tell."""
    monkeypatch.setattr(reflector, "WATCH_S", 1.0)
    monkeypatch.setattr(reflector, "BACKOFF_BASE_S", 0.005)
    async with cluster(second_s=0.2) as (api, published):
        lists = len(api.lists)
        for number in range(3):
            api.put("pods", "default", "a", **pod_fields(f"10.0.0.{number}"))
            await until(
                lambda number=number: (
                    published.members == {"default/svc": ["a"]}
                    and published[-1].members["default/svc"][0].url == f"http://10.0.0.{number}:8000"
                )
            )
            versions = len(api.watched)
            await until(lambda versions=versions: len(api.watched) >= versions + 3)
        api.put("pods", "elsewhere", "z", **pod_fields())
        api.bookmark()
        api.forget_history()
        versions = len(api.watched)
        await until(lambda: len(api.watched) >= versions + 3)
        api.delete("pods", "default", "a")
        await until(lambda: published.members == {"default/svc": []})
        assert len(api.lists) == lists


@pytest.mark.parametrize("how", ["lost events", "expired watch"])
async def test_lists_are_the_truth(how: str) -> None:
    async with cluster(relist_s=1.0 if how == "lost events" else 1800.0) as (api, published):
        api.put("pods", "default", "a", **pod_fields())
        await until(lambda: published.members == {"default/svc": ["a"]})
        api.drops_events = True
        api.delete("pods", "default", "a")
        api.put("pods", "default", "b", **pod_fields("10.0.0.2"))
        if how == "expired watch":
            api.expire_watches()
        await until(lambda: published.members == {"default/svc": ["b"]})


EXPIRED_EVENT = b'{"type":"ERROR","object":{"kind":"Status","code":410}}\n'


class Draws(random.Random):
    """Notes the random numbers that a reflector draws: of the period of a watch, and of a pause."""

    def __init__(self) -> None:
        super().__init__(1)
        self.count = 0

    def uniform(self, a: float, b: float) -> float:
        self.count += 1
        return super().uniform(a, b)


@pytest.mark.parametrize(
    "watch_answer",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(EXPIRED_EVENT), EXPIRED_EVENT),
        b"HTTP/1.1 410 Gone\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
    ],
    ids=["error event", "gone", "ends at once"],
)
async def test_a_pause_precedes_the_list_after_a_watch_that_fails(
    watch_answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reflector, "BACKOFF_BASE_S", 3600.0)
    monkeypatch.setattr(reflector, "BACKOFF_CAP_S", 3600.0)
    draws = Draws()
    async with FakeApiServer(watch_answer=watch_answer) as api:
        configuration = kubernetes_client.Configuration()
        configuration.host = api.url
        async with kubernetes_client.ApiClient(configuration) as client:
            watcher = reflector.Reflector(
                client, "/api/v1/namespaces/argosy/pods", Pod, lambda: None, rng=draws
            )
            task = asyncio.create_task(watcher.run())
            await until(lambda: draws.count >= 2)
            assert len(api.lists) == 1
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


SERVICES = [
    FleetService(
        namespace=namespace,
        name=name,
        uid="u",
        model="m",
        port=port,
        selector={"component": "engine", "service": name, **more},
    )
    for namespace in ("a", "b")
    for name, more in (("x", {}), ("y", {}), ("z", {"zone": "1"}))
    for port in (8000, 9000)
]
PODS = st.tuples(
    st.sampled_from(["a", "b"]),
    st.integers(0, 5),
    st.none()
    | st.builds(
        lambda service, zone, is_ready: {
            "labels": {"component": "engine", "service": service, "zone": zone},
            "is_ready": is_ready,
        },
        st.sampled_from(["x", "y", "z", "w"]),
        st.sampled_from(["1", "2"]),
        st.booleans(),
    ),
)
DOCUMENTS = st.lists(st.sampled_from(SERVICES), unique_by=lambda service: service.qualified_name)


@given(st.lists(DOCUMENTS | PODS, max_size=40))
def test_members_that_are_kept_pod_by_pod_are_those_determined_anew(
    steps: list[list[FleetService] | tuple[str, int, dict[str, Any] | None]],
) -> None:
    kept, services = PodMembers(), []
    pods: dict[str, dict[str, Pod]] = {"a": {}, "b": {}}
    for step in steps:
        if isinstance(step, list):
            services = step
            kept.set_services(services, {namespace: [known] for namespace, known in pods.items()})
        else:
            namespace, number, fields = step
            key, before, now = f"uid-{number}", pods[namespace].pop(f"uid-{number}", None), None
            if fields is not None:
                raw = pod_fields(f"10.0.0.{number}", containers_ready=fields["is_ready"])
                raw["metadata"] = {"name": key, "uid": key, "labels": fields["labels"]}
                now = pods[namespace][key] = msgspec.convert(raw, Pod)
            kept.change(namespace, key, before, now)
        anew = {
            service.qualified_name: tuple(members_of(service, pods[service.namespace].values()))
            for service in services
        }
        assert kept.settle() == anew


def test_a_pod_s_change_leaves_the_members_of_other_services_as_they_are() -> None:
    """So that what follows them need not look at each replica of the fleet."""
    kept = PodMembers()
    services = [service for service in SERVICES if service.port == 8000]

    def pod(name: str, ip: str) -> Pod:
        raw = pod_fields(ip)
        raw["metadata"] = {"name": name, "labels": {"component": "engine", "service": name, "zone": "1"}}
        return msgspec.convert(raw, Pod)

    pods = {name: pod(name, "10.0.0.1") for name in ("x", "y", "z")}
    kept.set_services(services, {"a": [pods], "b": [pods]})
    before = kept.settle()
    kept.change("a", "x", pods["x"], pod("x", "10.0.0.2"))
    after = kept.settle()
    assert [name for name in after if after[name] is not before[name]] == ["a/x"]
    kept.change("a", "x", pod("x", "10.0.0.2"), pod("x", "10.0.0.2"))
    assert all(members is after[name] for name, members in kept.settle().items())


def test_one_selector_covers_a_namespace() -> None:
    def named(namespace: str, **selector: str) -> FleetService:
        return FleetService(namespace=namespace, name="x", uid="u", model="m", selector=selector)

    services = (
        named("a", c="engine", s="1"),
        named("a", c="engine", s="2"),
        named("b", c="engine", s="3"),
        named("c"),
    )
    assert pod_selectors(services) == {"a": "c=engine", "b": "c=engine,s=3"}


async def test_what_many_replicas_tell_at_once_is_published_a_few_times() -> None:
    num_replicas = 300
    published: list[FleetSnapshot] = []
    loop = asyncio.get_running_loop()
    started = loop.time()
    async with FakeEngine() as engine:
        wheel = TimerWheel(loop)
        discovery = ModelDiscovery("static", "", wheel, UpstreamTls(), published.append)
        discovery.set_members([Member(f"r{number}", "", engine.url) for number in range(num_replicas)])
        await until(lambda: not published[-1].unasked, 60.0)
        passed = loop.time() - started
        assert sum(map(len, published[-1].members.values())) == num_replicas
        assert len(published) <= 2 + passed / GATHER_S
        await discovery.close()
        wheel.close()
