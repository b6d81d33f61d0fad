"""Rotation of the fleet key: whatever sees the new key first, no request is lost, and both keys are valid meanwhile."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from argosy_protocol.fleet import FleetDocument
from argosy_protocol.headers import internal_key
from argosy_protocol.reports import ADMIN_KEY_UID, REPORT_PATH
from argosy_router import server
from argosy_router.config import ConfigError
from argosy_router.fleet import fleet as fleet_module
from argosy_router.fleet.replica import ReplicaKey, ServiceKeys

from .fake_engine import Connection, FakeEngine, Received
from .harness import DEADLINE_S, Rig, rig, service, until
from .rotation_load import Mount, load

OLD, NEW, NEWER = b"o" * 32, b"n" * 32, b"w" * 32
UID = "uid-1"
OLD_KEY, NEW_KEY = internal_key(OLD, UID), internal_key(NEW, UID)


@pytest.fixture
def mount(tmp_path: Path) -> Mount:
    made = Mount(tmp_path)
    made.write(OLD)
    return made


def engines(*keys: str, number: int = 2, **fields: Any) -> list[FakeEngine]:
    return [FakeEngine(keys=frozenset(keys), **fields) for _ in range(number)]


async def admin_status(r: Rig, key: bytes) -> int:
    headers = {"authorization": f"Bearer {internal_key(key, ADMIN_KEY_UID)}"}
    return (await r.http.get(f"{r.router.admin_url}{REPORT_PATH}", headers=headers)).status_code


@pytest.mark.parametrize("order", list(itertools.permutations(("router", "r0", "r1"))), ids=" ".join)
@pytest.mark.parametrize("has_telemetry", [True, False], ids=["argosy", "foreign"])
async def test_no_request_is_lost_in_whichever_order_the_key_arrives(
    mount: Mount, order: tuple[str, ...], has_telemetry: bool
) -> None:
    """An engine accepts the old key for a while after it has the new one; the router remembers the old one as well."""
    replicas = engines(OLD_KEY, has_telemetry=has_telemetry)
    async with rig(replicas, fleet_key_dir=mount.path) as r, load(r) as running:
        for place in order:
            if place == "router":
                mount.write(NEW)
            else:
                replicas[int(place[1:])].keys = frozenset((OLD_KEY, NEW_KEY))
            await r.router.key_rotation.step()
            await running.more()
        assert [r.replica(number).key.current for number in range(2)] == [NEW_KEY, NEW_KEY]
        for number in range(2):  # the old key lapses at the engines, which costs nothing any more
            refused = replicas[number].refused
            replicas[number].keys = frozenset((NEW_KEY,))
            replicas[number].cut_telemetry()
            await running.more()
            assert replicas[number].refused == refused
        assert r.metric("retries_total") == 0


@pytest.mark.parametrize("has_telemetry", [True, False], ids=["argosy", "foreign"])
async def test_an_engine_that_changes_its_key_at_once_loses_no_request(
    mount: Mount, has_telemetry: bool
) -> None:
    """A replica that was restarted has the newest key only, and the router has not asked it since."""
    replicas = engines(OLD_KEY, has_telemetry=has_telemetry)
    async with rig(replicas, fleet_key_dir=mount.path) as r:
        mount.write(NEW)
        await r.router.key_rotation.step()
        assert r.replica(0).key.current == OLD_KEY, "it has not accepted the new one"
        async with load(r) as running:
            replicas[0].keys = frozenset((NEW_KEY,))
            await running.more()
            replicas[1].keys = frozenset((NEW_KEY,))
            await until(lambda: all(replica.key.current == NEW_KEY for replica in r.router.fleet.replicas()))
            await running.more()
        assert not any(replica.health.is_ejected for replica in r.router.fleet.replicas())
        assert r.metric("retries_total") == 0, "a refused key is no failed attempt"


async def test_a_rotation_can_be_taken_back(mount: Mount) -> None:
    replicas = engines(OLD_KEY, NEW_KEY)
    async with rig(replicas, fleet_key_dir=mount.path) as r, load(r) as running:
        for key, expected in ((NEW, NEW_KEY), (OLD, OLD_KEY), (NEW, NEW_KEY)):
            mount.write(key)
            await r.router.key_rotation.step()
            assert {replica.key.current for replica in r.router.fleet.replicas()} == {expected}
            await running.more()


async def test_a_rotation_interrupts_no_stream_and_forgets_no_cache(mount: Mount) -> None:
    replicas = engines(OLD_KEY, NEW_KEY)
    async with rig(replicas, fleet_key_dir=mount.path) as r:
        (service,) = r.router.fleet.services.values()
        before = list(r.router.fleet.replicas())
        mount.write(NEW)
        await r.router.key_rotation.step()
        assert list(r.router.fleet.services.values()) == [service]
        assert list(r.router.fleet.replicas()) == before
        assert [replica.syncs for replica in before] == [1, 1], "telemetry goes on"


async def test_an_engine_that_has_only_an_older_key_is_served_with_that(mount: Mount) -> None:
    """vLLM takes its key when it starts."""
    mount.write(NEW, previous=OLD)
    replicas = [FakeEngine(key=OLD_KEY, has_telemetry=False), FakeEngine(key=NEW_KEY, has_telemetry=False)]
    async with rig(replicas, fleet_key_dir=mount.path) as r:
        async with load(r):
            pass
        await r.router.key_rotation.step()
        assert all(engine.requests for engine in replicas)
        assert r.replica(0).key.current == OLD_KEY
        assert r.replica(1).key.current == NEW_KEY


async def test_at_rest_no_engine_is_asked(mount: Mount) -> None:
    replicas = engines(OLD_KEY)
    async with rig(replicas, fleet_key_dir=mount.path) as r:
        before = [engine.connections for engine in replicas]
        for _ in range(3):
            await r.router.key_rotation.step()
        assert [engine.connections for engine in replicas] == before


async def test_a_wrong_key_is_refused_once_and_ends(mount: Mount) -> None:
    """Without a key that the engines accept a request fails as before, and is not sent for ever."""
    replicas = engines(OLD_KEY)
    async with rig(replicas, fleet_key_dir=mount.path) as r:
        mount.write(NEW)
        await r.router.key_rotation.step()
        for engine in replicas:
            engine.keys = frozenset(("another",))
        response = await r.chat()
        assert response.status_code == 502
        assert sum(engine.refused for engine in replicas) <= 2 * 2 + 2 + 2  # attempts, probes, telemetry


async def test_the_admin_port_accepts_both_keys(mount: Mount) -> None:
    async with rig([], fleet_key_dir=mount.path, admin_port=0) as r:
        assert (await admin_status(r, OLD), await admin_status(r, NEW)) == (200, 401)
        mount.write(NEW)
        await r.router.key_rotation.step()
        assert (await admin_status(r, OLD), await admin_status(r, NEW)) == (200, 200)
        for file in mount.path.iterdir():
            file.unlink()
        await r.router.key_rotation.step()
        assert (await admin_status(r, OLD), await admin_status(r, NEW)) == (200, 200)
        assert await admin_status(r, b"x" * 32) == 401


async def test_a_replica_that_hangs_delays_no_look_at_the_keys(
    mount: Mount, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked whether it accepts the new key, and says nothing; the key after that one counts all the same."""
    asked = asyncio.Event()

    class Hanging(FakeEngine):
        async def handle(self, connection: Connection, request: Received) -> None:
            if request.path == server.KEY_PROBE_PATH:
                asked.set()
                await connection.gone()
                raise ConnectionResetError
            await super().handle(connection, request)

    monkeypatch.setattr(server, "KEY_PROBE_TIMEOUT_S", 600.0)
    replica = Hanging(keys=frozenset((OLD_KEY,)))
    async with rig([replica], fleet_key_dir=mount.path, admin_port=0) as r:
        mount.write(NEW)
        await asyncio.wait_for(asked.wait(), DEADLINE_S)
        mount.write(NEWER, previous=NEW)
        await until(lambda: r.replica(0).key.newest == internal_key(NEWER, UID))
        assert await admin_status(r, NEWER) == 200


async def test_a_new_router_is_not_ready_while_every_engine_refuses_its_key(mount: Mount) -> None:
    """It was started with the new key alone, which no engine has yet; routers with the old one answer."""
    mount.write(NEW)
    replicas = engines(OLD_KEY)
    async with rig(replicas, fleet_key_dir=mount.path, wait=False) as r:
        await until(lambda: all(replica.key.is_refused for replica in r.router.fleet.replicas()))
        assert (await r.http.get("/ready")).status_code == 503
        replicas[0].keys = frozenset((OLD_KEY, NEW_KEY))
        await r.until_state(0, "synced")
        assert (await r.http.get("/ready")).status_code == 200
        replicas[0].keys = frozenset((OLD_KEY,))
        replicas[0].cut_telemetry()
        await until(lambda: r.replica(0).key.is_refused)
        assert (await r.http.get("/ready")).status_code == 200, "it has answered, and stays"


async def test_one_refusal_is_enough_while_others_may_be_about_to(mount: Mount) -> None:
    """Or a new router whose key is wrong would get requests until the last engine has said so."""

    class Starting(FakeEngine):
        """Fails its first request for telemetry."""

        has_failed = False

        async def handle(self, connection: Connection, request: Received) -> None:
            if request.path == "/internal/telemetry" and not self.has_failed:
                self.has_failed = True
                connection.answer(503, b"{}")
                return
            await super().handle(connection, request)

    mount.write(NEW)
    starting = Starting(keys=frozenset((OLD_KEY,)))
    async with rig([*engines(OLD_KEY, number=1), starting], fleet_key_dir=mount.path, wait=False) as r:
        while not (r.replica(0).key.is_refused and r.replica(1).key.is_refused):
            assert (await r.http.get("/ready")).status_code == 503
        assert (await r.http.get("/ready")).status_code == 503


async def test_a_replica_that_leaves_makes_no_key_right(
    mount: Mount, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_module, "FIRST_ANSWER_S", 0.0)
    mount.write(NEW)
    replicas = engines(OLD_KEY)
    async with rig(replicas, fleet_key_dir=mount.path, wait=False) as r:
        await replicas[1].stop()
        leaving = [replace(each, draining=each.name == "r1") for each in service(replicas).endpoints]
        r.discovery.set(FleetDocument(services=(service(replicas, endpoints=tuple(leaving)),)))
        await r.until(lambda: r.replica(0).key.is_refused)
        assert (await r.http.get("/ready")).status_code == 503


async def test_an_engine_without_room_for_telemetry_has_accepted_the_key(mount: Mount) -> None:
    class Full(FakeEngine):
        async def handle(self, connection: Connection, request: Received) -> None:
            if request.path == "/internal/telemetry" and NEW_KEY in self.keys:
                connection.answer(429, b"{}")
                return
            await super().handle(connection, request)

    mount.write(NEW)
    engine = Full(keys=frozenset((OLD_KEY,)))
    async with rig([engine], fleet_key_dir=mount.path, wait=False) as r:
        await r.until(lambda: r.replica(0).key.is_refused)
        assert (await r.http.get("/ready")).status_code == 503
        engine.keys = frozenset((OLD_KEY, NEW_KEY))
        await r.until_state(0, "stale")
        assert (await r.http.get("/ready")).status_code == 200
        assert (await r.chat()).status_code == 200


async def test_engines_that_do_not_answer_keep_no_router_from_getting_ready(mount: Mount) -> None:
    async with rig(engines(OLD_KEY), fleet_key_dir=mount.path) as r:
        for engine in r.engines:
            await engine.stop()
        await r.until_state(0, "connecting")
        assert (await r.http.get("/ready")).status_code == 200


async def test_a_router_does_not_start_without_the_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ARGOSY_FLEET_KEY_DIR"):
        async with rig([], fleet_key_dir=tmp_path):
            pass


def test_each_key_is_tried_once() -> None:
    service = ServiceKeys("c", "b", "a")
    key, tried = ReplicaKey(service), list[str]()
    while True:
        tried.append(key.current)
        if not key.refused(key.current, tried):
            break
    assert tried == ["c", "b", "a"]


def test_requests_that_are_refused_together_do_not_skip_a_key() -> None:
    key = ReplicaKey(ServiceKeys("new", "old"))
    assert key.refused("new", ["new"])
    assert key.refused("new", ["new"]), "another request has moved it on"
    assert key.current == "old"


def test_a_key_in_use_outlives_its_service_s() -> None:
    service = ServiceKeys("old")
    key = ReplicaKey(service)
    service.replace(("new",))
    assert key.current == "old"
    assert key.refused("old", ["old"])
    assert key.current == "new"
    assert not ReplicaKey(ServiceKeys()).refused("", [""])
