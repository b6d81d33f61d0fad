"""`/explain` and `/decisions` explain every choice (AIBrix#2334, llm-d#2274)."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from argosy.commands.admin import route as route_command
from argosy.errors import CommandError, UsageError
from argosy_protocol.headers import internal_key
from argosy_protocol.reports import ADMIN_KEY_UID
from argosy_protocol.telemetry import Draining, Load

from .announced_chunks import LONG, chain
from .fake_engine import MODEL, FakeEngine, completion
from .harness import Rig, chat, rig


async def explain(rig: Rig, content: str = "hi", **headers: str) -> dict[str, Any]:
    answer = await rig.http.post(rig.router.admin_url + "/explain", json=chat(content), headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_the_explanation_is_what_the_next_request_gets() -> None:
    for policy in ("cost", "random", "round-robin", "power-of-two", "prefix-hash", "session", "least-load"):
        async with rig([FakeEngine() for _ in range(4)], fields={"policy": policy}, admin_port=0) as r:
            for number in range(6):
                told = await explain(r, f"question {number}")
                assert told == await explain(r, f"question {number}"), "asking changes nothing"
                answer = await r.chat(f"question {number}")
                assert answer.headers["x-argosy-replica"] == told["replica"], policy
                assert answer.headers["x-argosy-route"] == told["reason"]


async def test_terms_add_up_and_the_lowest_cost_is_chosen() -> None:
    async with rig([FakeEngine() for _ in range(3)], admin_port=0) as r:
        r.engines[1].store(chain(LONG))
        r.engines[2].announce(Load(core_step_age_s=0.0, num_running=30, queued_uncached_tokens=5000))
        await r.until(lambda: r.replica(2).load.queued_tokens == 5000 and r.metric("index_chunks") > 0)
        told = await explain(r, LONG)
        rows = {row["replica"]: row for row in told["candidates"]}
        assert told["replica"] == "r1"
        assert told["reason"] == "cached"
        assert rows["r1"]["hit_source"] == "announced"
        assert rows["r1"]["hit_tokens"] == told["predicted_cached_tokens"] > 400
        assert rows["r0"]["hit_source"] == "none"
        assert rows["r2"]["queued_tokens"] == 5000
        assert min(rows, key=lambda name: rows[name]["cost_s"]) == "r1"
        for row in rows.values():
            assert sum(row["terms"].values()) == pytest.approx(row["cost_s"])


async def test_a_prefix_that_was_sent_but_not_announced_says_so() -> None:
    async with rig([FakeEngine(), FakeEngine()], admin_port=0) as r:
        first = (await r.chat(LONG)).headers["x-argosy-replica"]
        told = await explain(r, LONG)
        assert (told["replica"], told["reason"]) == (first, "predicted")
        assert {row["hit_source"] for row in told["candidates"] if row["replica"] == first} == {"expected"}


async def test_replicas_that_are_left_out_have_a_reason() -> None:
    async with rig([FakeEngine(), FakeEngine()], admin_port=0) as r:
        r.engines[0].announce(Draining())
        await r.until_state(0, "draining")
        told = await explain(r)
        assert told["replica"] == "r1"
        assert [(row["replica"], row["reason"]) for row in told["excluded"]] == [("r0", "it is draining")]
        r.engines[1].announce(Draining())
        await r.until_state(1, "draining")
        told = await explain(r)
        assert told["replica"] is None
        assert "no replica" in told["reason"]
        assert len(told["excluded"]) == 2


async def test_sessions_are_read_from_header_and_body() -> None:
    async with rig([FakeEngine() for _ in range(8)], fields={"policy": "session"}, admin_port=0) as r:
        homes = {(await explain(r, **{"x-session-id": f"s{number}"}))["replica"] for number in range(40)}
        assert len(homes) > 3
        for number in range(8):
            by_header = (await explain(r, **{"x-session-id": f"s{number}"}))["replica"]
            answers = [
                await r.http.post(
                    "/v1/chat/completions", json=chat("hi"), headers={"x-session-id": f"s{number}"}
                ),
                await r.chat("something else", prompt_cache_key=f"s{number}"),
                await r.chat("and another", session_id=f"s{number}"),
            ]
            assert {answer.headers["x-argosy-replica"] for answer in answers} == {by_header}
            assert {answer.headers["x-argosy-route"] for answer in answers} == {"session"}


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"[]", 400),
        (b'{"messages": [{"role": "user"}]}', 400),
        (b'{"model": "tiny", "messages": []}', 400),
        (b'{"model": "other", "prompt": "x"}', 404),
        (b'{"model": "tiny", "prompt": "x"}', 200),
    ],
)
async def test_bad_requests_are_refused_as_on_the_main_port(body: bytes, status: int) -> None:
    async with rig([FakeEngine()], admin_port=0) as r:
        answer = await r.http.post(r.router.admin_url + "/explain", content=body)
        assert answer.status_code == status
        assert status == 200 or answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/explain", 400),
        ("GET", f"/explain?model=tiny&session={'s' * 513}", 400),
        ("GET", "/decisions?limit=0", 400),
        ("GET", "/decisions?limit=many", 400),
        ("GET", "/internal/load?wait=nan", 400),
        ("GET", "/internal/load?wait=61", 400),
        ("GET", "/internal/load?after=-2", 400),
        ("GET", "/internal/load?other=1", 200),
        ("GET", "/nothing", 404),
        ("PUT", "/explain", 405),
    ],
)
async def test_the_admin_port_refuses_what_is_out_of_bounds(method: str, path: str, status: int) -> None:
    async with rig([FakeEngine()], admin_port=0) as r:
        answer = await r.http.request(method, r.router.admin_url + path)
        assert answer.status_code == status
        assert status == 200 or answer.json()["error"]["message"]
        assert ("allow" in answer.headers) == (status == 405)


async def test_decisions_are_kept_newest_first_with_what_became_of_them() -> None:
    async def script(connection: Any, request: Any) -> None:
        connection.answer(200, completion(prompt_tokens=40, cached=16))

    async with rig([FakeEngine(script=script)], admin_port=0) as r:
        for number in range(5):
            await r.http.post(
                "/v1/chat/completions", json=chat("hi"), headers={"x-request-id": f"request-{number}"}
            )
        answer = await r.http.get(r.router.admin_url + "/decisions", params={"limit": 3})
        records = answer.json()
        assert [record["request_id"] for record in records] == ["request-4", "request-3", "request-2"]
        for record in records:
            assert (record["replica"], record["reason"], record["status"]) == ("r0", "only", 200)
            assert (record["prompt_tokens"], record["cached_tokens"]) == (40, 16)
        other = await r.http.get(r.router.admin_url + "/decisions", params={"model": "another"})
        assert other.json() == []


async def test_predictions_are_compared_with_usage_per_replica() -> None:
    async with rig([FakeEngine()], admin_port=0) as r:
        async with r.http.stream("POST", "/v1/chat/completions", json=chat("hi", stream=True)) as answer:
            await answer.aread()
        for name in ("predicted_ttft_seconds_total", "actual_ttft_seconds_total", "ttft_error_seconds_count"):
            assert r.metric(name + '{model="tiny",replica="r0"}') > 0
        (record,) = (await r.http.get(r.router.admin_url + "/decisions")).json()
        assert record["ttft_s"] == pytest.approx(
            r.metric('actual_ttft_seconds_total{model="tiny",replica="r0"}')
        )


async def test_the_admin_key_guards_explanations() -> None:
    fleet_key = b"0123456789abcdef"
    async with rig([], fleet_key=fleet_key, admin_port=0, wait=False) as r:
        for path in ("/explain?model=tiny", "/decisions"):
            assert (await r.http.get(r.router.admin_url + path)).status_code == 401
        key = internal_key(fleet_key, ADMIN_KEY_UID)
        answer = await r.http.get(
            r.router.admin_url + "/explain?model=tiny&prompt=hi", headers={"authorization": f"Bearer {key}"}
        )
        assert answer.status_code == 200
        assert answer.json()["replica"] is None


async def test_argosy_route_prints_the_choice(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    async with rig([FakeEngine(), FakeEngine()], admin_port=0) as r:

        async def route(*arguments: str) -> str:
            assert (
                await asyncio.to_thread(route_command, [*arguments, "--admin-url", r.router.admin_url]) == 0
            )
            return capsys.readouterr().out

        home = (await r.chat(LONG)).headers["x-argosy-replica"]
        first, _, header, *rows = (await route(MODEL, LONG)).splitlines()
        assert first.startswith(f"{home}  predicted, policy cost")
        assert header.split() == [
            *("REPLICA", "STATE", "HIT", "FROM", "QUEUE", "DECODE", "KV", "PREFILL", "STICKINESS", "COST"),
        ]
        assert [row.split()[0] for row in rows].count("*") == 1
        assert json.loads(await route(MODEL, LONG, "-o", "json"))["replica"] == home
        body = tmp_path / "body.json"
        body.write_text(json.dumps({"model": MODEL, "prompt": "x" * 1000}))
        assert "load, policy cost" in await route("--body", str(body))
        assert home in await route("--recent", "5")
        with pytest.raises(CommandError, match="404 the model `other` does not exist"):
            await route("other", "hi")
        with pytest.raises(UsageError):
            await route(MODEL)
