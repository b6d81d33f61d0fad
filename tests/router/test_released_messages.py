"""Routers of this release beside engines and operators of the one before (tests/protocol/released)."""

from __future__ import annotations

import json
from typing import Any

import jsonschema

from argosy_protocol.fleet import decode_fleet
from argosy_protocol.headers import internal_key
from argosy_protocol.reports import ADMIN_KEY_UID, LOAD_PATH, REPORT_PATH
from released_formats import released

from .fake_engine import Connection, FakeEngine
from .harness import rig

FLEET_KEY = b"0123456789abcdef"
MESSAGES = released("messages.json")["messages"]
HELLO, _, *REST = released("telemetry.json")
"""Without the second hello, whose every field has an unusual value: it excludes readers of its time, too."""


def recorded(*types: str) -> bytes:
    frames = [HELLO, *REST]
    return b"".join(bytes.fromhex(each["bytes"]) for each in frames if each["fields"]["type"] in types)


class ReleasedEngine(FakeEngine):
    """An engine that sends recorded telemetry."""

    async def stream_telemetry(self, connection: Connection) -> None:
        connection.send(b"HTTP/1.1 200 OK\r\ncontent-type: application/vnd.argosy.telemetry\r\n\r\n")
        connection.send(recorded("hello", "snapshot", "load"))
        self.telemetry.append(connection.writer)
        await connection.gone()
        raise ConnectionResetError


def refused(message: str, document: object) -> list[str]:
    """What a reader of the release finds wrong with a message."""
    errors = jsonschema.Draft202012Validator(MESSAGES[message]["schema"]).iter_errors(document)
    return [f"{error.json_path}: {error.message}" for error in errors]


def fleet_of(engine: FakeEngine) -> bytes:
    """The recorded fleet document, whose service has all fields, with this engine as the replica."""
    document: dict[str, Any] = json.loads(json.dumps(MESSAGES["FleetDocument"]["filled"]))
    document["services"][0]["endpoints"] = [{"name": "r0", "url": engine.url}]
    return json.dumps(document).encode()


async def test_a_router_serves_a_fleet_of_the_release() -> None:
    async with ReleasedEngine(key="words") as engine:
        document = decode_fleet(fleet_of(engine))
        async with rig([engine], document=document, fleet_key=FLEET_KEY, admin_port=0) as r:
            await r.until_state(0, "synced")
            load = MESSAGES["Load"]["filled"]
            waiting_and_running = load["num_running"] + load["num_waiting"]
            await r.until(lambda: r.replica(0).load.reported_requests == waiting_and_running)
            answer = await r.chat(model="words")
            assert answer.status_code == 200
            assert [request.json["model"] for request in engine.requests] == ["words"]
            for path, message in ((REPORT_PATH, "RoutableReport"), (LOAD_PATH, "LoadReport")):
                headers = {"authorization": f"Bearer {internal_key(FLEET_KEY, ADMIN_KEY_UID)}"}
                report = (await r.http.get(r.router.admin_url + path, headers=headers)).json()
                assert refused(message, report) == []
            for types in (("stored", "removed"), ("cleared",), ("draining",)):
                engine.announce_raw(recorded(*types))
            await r.until_state(0, "draining")
            assert r.router.fleet.skipped_frames() == 0
