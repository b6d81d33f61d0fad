"""Fleet snapshots replaced under traffic, and the report for operators."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from argosy_protocol.fleet import Endpoint, FleetDocument, ServiceLimits
from argosy_protocol.headers import internal_key
from argosy_protocol.reports import ADMIN_KEY_UID, REPORT_PATH, RoutableReport, with_changes
from argosy_protocol.telemetry import Load
from argosy_router.admin.app import PAGE
from argosy_router.config import FlowControlLimits
from argosy_router.fleet import fleet
from argosy_router.fleet.replica import MIN_SAMPLE_TOKENS, ReplicaLoad
from argosy_router.policy import PRIOR

from .fake_engine import DONE, Connection, FakeEngine, Received, event
from .harness import Rig, rig, service

FLEET_KEY = b"0123456789abcdef"


def draining(document: FleetDocument, *names: str) -> FleetDocument:
    (only,) = document.services
    endpoints = tuple(
        Endpoint(name=endpoint.name, url=endpoint.url, draining=endpoint.name in names)
        for endpoint in only.endpoints
    )
    return FleetDocument(services=(msgspec.structs.replace(only, endpoints=endpoints),))


async def test_streams_survive_the_departure_of_their_replica_from_the_document() -> None:
    go_on = asyncio.Event()

    async def stream(connection: Connection, _: Received) -> None:
        connection.begin_stream()
        connection.chunk(event("a"))
        await go_on.wait()
        connection.chunk(event("b") + DONE)
        connection.end_stream()

    async with rig([FakeEngine(script=stream), FakeEngine(script=stream)]) as r:
        before = FleetDocument(services=(service(r.engines),))
        task = asyncio.create_task(r.chat(stream=True))
        await r.until(lambda: sum(replica.load.inflight for replica in r.router.fleet.replicas()) == 1)
        r.discovery.set(draining(before, "r0", "r1"))
        assert (await r.chat()).status_code == 503, "nothing new for draining replicas"
        r.discovery.set(FleetDocument())
        assert (await r.chat()).status_code == 404
        go_on.set()
        assert (await task).content == event("a") + event("b") + DONE
        assert r.router.requests.inflight == 0


async def test_a_replica_with_a_new_address_starts_afresh() -> None:
    async with rig([FakeEngine()]) as r, FakeEngine() as other:
        old = r.replica(0)
        document = FleetDocument(services=(service([other]),))
        r.discovery.set(document)
        assert r.replica(0) is not old
        await r.until_state(0, "synced")
        assert (await r.chat()).status_code == 200
        assert len(other.requests) == 1
        kept = r.replica(0)
        r.discovery.set(FleetDocument(services=(service([other], aliases=("x",), policy="round-robin"),)))
        assert r.replica(0) is kept, "an edit of the service keeps what is known"
        assert (await r.chat(model="x")).status_code == 200


async def test_inflight_limits_are_kept() -> None:
    release = asyncio.Event()

    async def hold(connection: Connection, _: Received) -> None:
        await release.wait()
        connection.answer(200, b"{}")

    limits = ServiceLimits(max_inflight_per_replica=1)
    engines = [FakeEngine(script=hold), FakeEngine(script=hold)]
    no_queue = FlowControlLimits(max_queued_requests=0)
    async with rig(engines, fields={"limits": limits}, flow_control=no_queue) as r:
        tasks = [asyncio.create_task(r.chat()) for _ in range(2)]
        await r.until(lambda: all(engine.requests for engine in r.engines))
        refused = await r.chat()
        assert refused.status_code == 429
        assert refused.headers["retry-after-ms"] == "1000"
        release.set()
        assert [(await task).status_code for task in tasks] == [200, 200]


# the admin port


async def report(r: Rig, after: int = -1, wait: float = 0, epoch: str = "") -> RoutableReport:
    response = await r.http.get(
        f"{r.router.admin_url}{REPORT_PATH}?after={after}&wait={wait}&epoch={epoch}",
        headers={"authorization": f"Bearer {internal_key(FLEET_KEY, ADMIN_KEY_UID)}"},
    )
    assert response.status_code == 200
    return msgspec.json.decode(response.content, type=RoutableReport)


async def test_the_report_is_a_long_poll() -> None:
    key = internal_key(FLEET_KEY, "uid-1")
    async with rig([FakeEngine(key=key), FakeEngine(key=key)], fleet_key=FLEET_KEY, admin_port=0) as r:
        first = await report(r)
        assert [(replica.name, replica.state, replica.routable) for replica in first.replicas] == [
            ("r0", "synced", True),
            ("r1", "synced", True),
        ]
        assert first.replicas[0].service == "default/svc"
        assert first.replicas[0].epoch
        assert len(first.fleet_revision) == 16
        waiting = asyncio.create_task(report(r, first.revision, 30))
        await r.engines[0].stop()
        second = await waiting
        assert second.revision > first.revision
        while second.replicas[0].routable:
            second = await report(r, second.revision, 30)
        assert second.replicas[0].state == "connecting"
        await r.engines[0].start()
        while not second.replicas[0].routable:
            second = await report(r, second.revision, 30)
        assert second.replicas[0].epoch != first.replicas[0].epoch
        assert (await report(r, second.revision, 0.01)).revision == second.revision


async def test_a_reader_that_knows_the_epoch_gets_what_has_changed() -> None:
    async with rig([FakeEngine(), FakeEngine()], fleet_key=FLEET_KEY, admin_port=0) as r:
        engines = r.engines
        r.discovery.set(
            FleetDocument(
                services=tuple(
                    service([engine], name=name, model=name, uid=f"uid-{name}")
                    for engine, name in zip(engines, ("a", "b"), strict=True)
                )
            )
        )
        await r.until(lambda: all(replica.is_available for replica in r.router.fleet.replicas()))
        first = await report(r)
        assert (first.base, len(first.replicas), len(first.epoch)) == (None, 2, 16)
        still = await report(r, first.revision, epoch=first.epoch)
        assert (still.base, still.services, still.replicas) == (first.revision, (), ())
        waiting = asyncio.create_task(report(r, first.revision, 30, first.epoch))
        await engines[0].stop()
        changes = await waiting
        while changes.replicas[0].routable:
            changes = await report(r, changes.revision, 30, first.epoch)
        assert (changes.services, {each.service for each in changes.replicas}) == (
            ("default/a",),
            {"default/a"},
        )
        all_since = await report(r, first.revision, epoch=first.epoch)
        whole = await report(r)
        assert with_changes(first, all_since) is not None
        assert {each.url: each.routable for each in with_changes(first, all_since).replicas} == {  # type: ignore[union-attr]
            each.url: each.routable for each in whole.replicas
        }
        for after, epoch in (
            (first.revision, ""),
            (first.revision, "0" * 16),
            (10**6, first.epoch),
            (-1, first.epoch),
        ):
            found = await report(r, after, epoch=epoch)
            assert (found.base, len(found.replicas)) == (None, 2), (
                "an operator of the release before gives no epoch"
            )
        r.router.fleet.changed()
        assert (await report(r, first.revision, epoch=first.epoch)).base is None, "all has changed"


async def test_a_new_document_touches_only_what_it_changes() -> None:
    def document(engines: list[FakeEngine], *names: str, **more: Any) -> FleetDocument:
        entries = zip(engines, names, strict=False)
        return FleetDocument(
            services=tuple(
                service([engine], name=name, model=name, uid=f"uid-{name}", **more)
                for engine, name in entries
            )
        )

    async with rig([FakeEngine(), FakeEngine()], fleet_key=FLEET_KEY, admin_port=0) as r:
        r.discovery.set(document(r.engines, "a", "b"))
        await r.until(lambda: all(replica.is_available for replica in r.router.fleet.replicas()))
        first = await report(r)
        r.discovery.set(document(r.engines, "a"))
        await r.until(lambda: "default/b" not in r.router.fleet.services)
        changes = await report(r, first.revision, epoch=first.epoch)
        assert (changes.base, changes.services, changes.replicas) == (first.revision, ("default/b",), ())
        merged = with_changes(first, changes)
        assert merged is not None
        assert [each.service for each in merged.replicas] == ["default/a"]
        r.discovery.set(document(r.engines, "a", limits=ServiceLimits(max_inflight_per_replica=1)))
        await r.until(lambda: r.router.fleet.services["default/a"].spec.limits.max_inflight_per_replica == 1)
        again = await report(r, changes.revision, epoch=first.epoch)
        assert (again.services, len(again.replicas)) == (("default/a",), 1)


async def test_services_that_have_left_are_not_remembered_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "MAX_NOTED_GONE", 3)
    async with rig([], document=FleetDocument(), fleet_key=FLEET_KEY, admin_port=0) as r:
        first = await report(r)
        for number in range(5):
            r.discovery.set(FleetDocument(services=(service([], name=f"s{number}", uid=f"u{number}"),)))
            await r.until(lambda name=f"default/s{number}": name in r.router.fleet.services)  # type: ignore[misc]
        assert (await report(r, first.revision, epoch=first.epoch)).base is None


OPEN_BY_DESIGN = {"/health", "/ready", "/metrics", *PAGE}
"""Probes, Prometheus and browsers have no admin key; nothing there is secret."""


async def test_admin_routes_need_the_admin_key() -> None:
    async with rig([], document=FleetDocument(), fleet_key=FLEET_KEY, admin_port=0) as r:
        wrong = {"authorization": f"Bearer {internal_key(FLEET_KEY, 'uid-1')}"}
        assert r.router.admin is not None
        app = r.router.admin.config.app
        routes = {(method, route.path) for route in app.routes for method in route.methods}
        assert {path for _, path in routes} >= OPEN_BY_DESIGN | {REPORT_PATH, "/explain", "/overview"}
        for method, path in routes:
            for headers in ({}, wrong):
                answer = await r.http.request(method, r.router.admin_url + path, headers=headers)
                assert (answer.status_code == 200) == (path in OPEN_BY_DESIGN), (method, path)
                assert answer.status_code in (200, 401), (method, path)
        assert (await r.http.get(r.router.admin_url + "/openapi.json")).status_code == 404


# rates


async def test_who_tells_its_rates_tells_them_for_its_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "MAINTENANCE_S", 3600.0)
    async with rig([FakeEngine(), FakeEngine()]) as r, FakeEngine() as third:
        other = r.replica(1).load
        assert other.prefill_tokens_per_s == PRIOR.prefill_tokens_per_s
        r.engines[0].announce(Load(core_step_age_s=0.0, prefill_tokens_per_s=500.0))
        await r.until(lambda: r.replica(0).load.prefill_tokens_per_s == 500.0)
        assert (other.prefill_tokens_per_s, other.decode_step_s) == (500.0, PRIOR.decode_step_s)
        r.engines[0].announce(Load(core_step_age_s=0.0, prefill_tokens_per_s=500.0, decode_step_s=0.5))
        await r.until(lambda: r.replica(0).load.decode_step_s == 0.5)
        assert other.decode_step_s == 0.5
        r.discovery.set(FleetDocument(services=(service([*r.engines, third]),)))
        newcomer = r.replica(2).load
        assert (newcomer.prefill_tokens_per_s, newcomer.decode_step_s) == (500.0, 0.5), "from the start"


def test_a_frame_without_a_new_rate_causes_no_recomputation() -> None:
    events: list[str] = []
    load = ReplicaLoad("r", lambda: events.append("measured"))
    load.report(requests=1, tokens=10)
    assert not events
    load.learn(MIN_SAMPLE_TOKENS, 1.0)
    assert len(events) == 1, "answers tell, too"
    for rate in (100.0, 200.0, 0.0):
        load.report(requests=1, tokens=10, prefill_tokens_per_s=rate)
    assert len(events) == 1
    load.report(requests=1, tokens=10, decode_step_s=0.1)
    load.report(requests=1, tokens=10, prefill_tokens_per_s=300.0, decode_step_s=0.2)
    assert len(events) == 2


async def test_contested_names_are_logged_once_and_in_small_numbers(caplog: pytest.LogCaptureFixture) -> None:
    names = tuple(f"name-{number}" for number in range(100))
    async with rig([FakeEngine()], fields={"aliases": names, "created": "2026-01-01T00:00:00Z"}) as r:
        other = service(r.engines, name="other", uid="uid-2", aliases=names, created="2026-02-01T00:00:00Z")
        before = r.router.fleet.revision
        for number in range(3):
            later = msgspec.structs.replace(other, port=9000 + number)
            r.discovery.set(
                FleetDocument(
                    services=(service(r.engines, aliases=names, created="2026-01-01T00:00:00Z"), later)
                )
            )
            await r.until(lambda before=before: r.router.fleet.revision > before)
            before = r.router.fleet.revision
        assert len(r.router.fleet.names.conflicts) >= 100
    logged = [record for record in caplog.records if "wins over" in record.message]
    assert len(logged) <= fleet.MAX_LOGGED_CONFLICTS
    assert any("contested" in record.message for record in caplog.records)
