"""Why a request was refused, in the access log and on the admin port."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from argosy_batch.config import BatchConfig
from argosy_protocol.errors import NO_REASON
from argosy_protocol.headers import internal_key
from argosy_protocol.reports import ADMIN_KEY_UID
from argosy_router.observability.lines import LineWriter
from argosy_router.proxy.accounting import RefusalLog, RefusedRequest

from .fake_engine import Connection, FakeEngine, Received, event
from .harness import DEADLINE_S, FLEET_KEY, Rig, chat, is_settled, rig
from .scripted_envoy import envoy

FORMATS = pytest.mark.parametrize("line_format", ["text", "json"])
HOSTILE = (
    *("it is <b>bold</b>", "two words", "x\nstatus=200 error_code=y", "\x1b[2J", "sk-secret-key"),
    *("a" * 5000, {"a": "b"}, 400),
)
PROMPT = "the text of the prompt"


class Log:
    """The access log of a router; `lines` are complete once the router has stopped."""

    def __init__(self) -> None:
        self.text = ""
        self.lines: list[dict[str, str]] = []

    def reason(self, request_id: str) -> tuple[str, str, str, str]:
        (line,) = [line for line in self.lines if line["request"] == request_id]
        names = ("status", "error_type", "error_code", "error_param")
        status, *reason = (str(line.get(name, "-")) for name in names)
        return (status, *reason)  # type: ignore[return-value]


@asynccontextmanager
async def logged(line_format: str, engine: FakeEngine, **options: Any) -> AsyncIterator[tuple[Rig, Log]]:
    reader, writer = os.pipe()
    log = Log()
    with os.fdopen(reader) as lines:
        written_by = LineWriter(writer)
        log_options = {"access_log": True, "access_log_format": line_format, "stderr": written_by}
        async with rig([engine], admin_port=0, **log_options, **options) as r:
            yield r, log
        written_by.close(DEADLINE_S)
        os.close(writer)
        log.text = lines.read()
    for line in log.text.splitlines():
        if line_format == "json":
            log.lines.append(json.loads(line))
        else:
            log.lines.append(dict(field.split("=", 1) for field in line.split(" ")))


def refusing(status: int, **error: object) -> FakeEngine:
    """An engine that refuses all requests."""

    async def script(connection: Connection, request: Received) -> None:
        connection.answer(status, json.dumps({"error": {"message": PROMPT, **error}}).encode())

    return FakeEngine(script=script)


async def post(r: Rig, request_id: str, body: Any, path: str = "/v1/chat/completions") -> int:
    return (await r.http.post(path, json=body, headers={"x-request-id": request_id})).status_code


async def shown(r: Rig, path: str) -> list[dict[str, Any]]:
    key = internal_key(FLEET_KEY, ADMIN_KEY_UID)
    answer = await r.http.get(r.router.admin_url + path, headers={"authorization": f"Bearer {key}"})
    assert answer.status_code == 200, answer.text
    return answer.json()


@FORMATS
async def test_a_refusal_of_the_router_has_its_reason_in_the_access_log(line_format: str) -> None:
    async with logged(line_format, FakeEngine()) as (r, log):
        assert await post(r, "range", {**chat(PROMPT), "max_tokens": -1}) == 400
        assert await post(r, "model", {**chat(PROMPT), "model": PROMPT}) == 404
        assert await post(r, "route", {}, "/v1/nothing") == 404
        assert await post(r, "field", {"model": "tiny", "max_tokens": 1}, "/v1/messages") == 400
        assert await post(r, "fine", chat(PROMPT)) == 200
        await r.engines[0].stop()
        assert await post(r, "dead", chat(PROMPT)) == 503
    assert log.reason("range") == ("400", "invalid_request_error", "greater_than_equal", "max_tokens")
    assert log.reason("model") == ("404", "not_found_error", "model_not_found", "model")
    assert log.reason("route") == ("404", "not_found_error", "-", "-")
    assert log.reason("field") == ("400", "invalid_request_error", "-", "messages")
    assert log.reason("fine") == ("200", "-", "-", "-")
    assert log.reason("dead")[:2] == ("503", "service_unavailable")
    assert PROMPT not in log.text


@FORMATS
@pytest.mark.parametrize("status", [400, 403, 404, 413, 422, 500])
async def test_a_refusal_of_a_replica_has_its_reason_in_the_access_log(status: int, line_format: str) -> None:
    engine = refusing(status, type="invalid_request_error", code="unsupported", param="messages[0].content")
    async with logged(line_format, engine) as (r, log):
        answered = await post(r, "one", chat(PROMPT))
    if status == 403:  # of the router's own key, which is no matter of the client's
        assert answered == 502
        assert log.reason("one") == ("502", "upstream_error", "-", "-")
    else:
        assert answered == status
        expected = (str(status), "invalid_request_error", "unsupported", "messages[0].content")
        assert log.reason("one") == expected
    assert PROMPT not in log.text


@FORMATS
async def test_a_stream_that_breaks_has_its_reason_in_the_access_log(line_format: str) -> None:
    async def script(connection: Connection, request: Received) -> None:
        connection.begin_stream()
        connection.chunk(event("a"))
        connection.close()

    async with logged(line_format, FakeEngine(script=script)) as (r, log):
        assert await post(r, "one", chat(PROMPT, stream=True)) == 200
    assert log.reason("one") == ("200", "upstream_error", "-", "-")


@FORMATS
@pytest.mark.parametrize("value", HOSTILE)
async def test_an_engine_cannot_write_what_it_likes_into_log_and_page(
    value: object, line_format: str
) -> None:
    engine = refusing(400, type=value, code=value, param=value)
    async with logged(line_format, engine) as (r, log):
        assert await post(r, "one", chat(PROMPT)) == 400
        await r.until(lambda: is_settled(r))
        (decision,) = await shown(r, "/decisions")
    assert (decision["error_type"], decision["error_code"], decision["error_param"]) == ("", "", "")
    assert len(log.lines) == 1
    assert log.reason("one") == ("400", "-", "-", "-")
    assert len(log.text) < 1000


@pytest.mark.parametrize("field", ["sk-secret-key", "two words", "<b>", "x\ny", "\x1b[2J", "a" * 60])
async def test_a_client_cannot_write_what_it_likes_into_log_and_page(field: str, tmp_path: Path) -> None:
    """An unknown field of a batch is named in `param`."""
    storage = BatchConfig(storage=str(tmp_path))
    async with logged("text", FakeEngine(), storage=storage) as (r, log):
        answer = await r.http.post("/v1/batches", json={field: 1}, headers={"x-request-id": "one"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
        (refused,) = await shown(r, "/refusals")
    assert log.reason("one") == ("400", "invalid_request_error", "-", "-")
    assert (refused["error_type"], refused["error_param"]) == ("invalid_request_error", "")
    assert field not in log.text


async def test_the_body_of_a_long_error_is_passed_on_and_not_read() -> None:
    async def script(connection: Connection, request: Received) -> None:
        connection.answer(400, body)

    body = json.dumps({"error": {"message": "m" * 3_000_000, "type": "t", "code": "c"}}).encode()
    async with logged("json", FakeEngine(script=script)) as (r, log):
        answer = await r.http.post("/v1/chat/completions", json=chat(), headers={"x-request-id": "one"})
        assert answer.content == body
    assert log.reason("one") == ("400", "-", "-", "-")


async def test_decisions_have_the_reason_of_those_that_failed() -> None:
    async with rig([refusing(400, type="t", code="unsupported", param="tools[0]")], admin_port=0) as r:
        await r.chat()
        await r.until(lambda: is_settled(r))
        (decision,) = await shown(r, "/decisions")
        assert (decision["status"], decision["error_type"]) == (400, "t")
        assert (decision["error_code"], decision["error_param"]) == ("unsupported", "tools[0]")
        assert await shown(r, "/refusals") == [], "it was sent to a replica"


async def test_the_admin_port_lists_refusals_newest_first_within_bounds() -> None:
    async with rig([FakeEngine()], admin_port=0, api_keys=("sk-client",)) as r:
        headers = {"authorization": "Bearer sk-client"}
        for number in range(3):
            body = {**chat(), "max_tokens": -1}
            named = {**headers, "x-request-id": f"request-{number}"}
            await r.http.post("/v1/chat/completions", json=body, headers=named)
        assert (await r.http.post("/v1/chat/completions", json=chat())).status_code == 401
        newest = await shown(r, "/refusals?limit=2")
        assert [refused["request_id"] for refused in newest] == ["request-2", "request-1"]
        assert {
            name: newest[0][name] for name in newest[0] if name not in ("time", "request_id", "model")
        } == {
            "status": 400,
            "error_type": "invalid_request_error",
            "error_code": "greater_than_equal",
            "error_param": "max_tokens",
        }
        assert len(await shown(r, "/refusals")) == 3, "a request without a key takes no place of another"
        assert (await r.http.get(r.router.admin_url + "/refusals?limit=1001")).status_code == 400


def test_the_list_of_refusals_is_bounded() -> None:
    refusals = RefusalLog(2)
    for number in range(5):
        refusals.add(RefusedRequest(0.0, str(number), "", 400, NO_REASON))
    assert [refused.request_id for refused in refusals.latest(9)] == ["4", "3"]


async def test_the_admin_key_guards_refusals() -> None:
    async with rig([], fleet_key=b"0123456789abcdef", admin_port=0, wait=False) as r:
        assert (await r.http.get(r.router.admin_url + "/refusals")).status_code == 401


async def test_what_a_gateway_forwards_has_its_reason_in_the_access_log() -> None:
    engine = refusing(400, type="t", code="unsupported", param="tools[0]")
    async with logged("json", engine, ext_proc_port=0) as (r, log), envoy(r) as gateway:
        answer = await gateway.request(chat(PROMPT))
        assert answer.status == 400
        assert (await gateway.request({**chat(PROMPT), "max_tokens": -1})).status == 400
        await r.until(lambda: is_settled(r))
    reasons = {log.reason(line["request"]) for line in log.lines}
    assert reasons == {
        ("400", "t", "unsupported", "tools[0]"),
        ("400", "invalid_request_error", "greater_than_equal", "max_tokens"),
    }
