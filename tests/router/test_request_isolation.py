"""What of a client's request reaches an engine: ids, headers and fields."""

from __future__ import annotations

import re
from typing import Any

import pytest

from argosy_protocol.headers import RESPONSE_ID, TENANT
from argosy_router.proxy.attempt import UpstreamIds

from .fake_engine import Connection, FakeEngine, Received, answer_normally, completion
from .harness import chat, rig

OURS, FOREIGN = True, False
INTERNAL: dict[str, Any] = {
    "kv_transfer_params": {"do_remote_prefill": True, "remote_host": "10.0.0.1"},
    "ec_transfer_params": {"remote_host": "10.0.0.1"},
    "bootstrap_host": "10.0.0.1",
    "bootstrap_port": 8998,
    "bootstrap_room": 7,
    "lora_path": "/etc/passwd",
    "data_parallel_rank": 1,
    "routed_dp_rank": 1,
    "disagg_prefill_dp_rank": 1,
    "custom_logit_processor": "gASV",
    "session_params": {"id": "another tenant's"},
}


def ids(engine: FakeEngine) -> list[str]:
    return [request.headers["x-request-id"] for request in engine.requests]


async def test_engines_hear_whose_a_request_is_by_its_key_alone() -> None:
    async with rig([FakeEngine()], api_keys=("k1", "k2")) as r:
        for key, salt in (("k1", "a"), ("k1", "b"), ("k2", "b")):
            sent = {"authorization": f"Bearer {key}", TENANT: "another's"}
            answer = await r.http.post("/v1/chat/completions", json=chat(cache_salt=salt), headers=sent)
            assert answer.status_code == 200
        first, again, other = (request.headers[TENANT] for request in r.engines[0].requests)
        assert first == again
        assert other not in (first, "another's")


@pytest.mark.parametrize(
    ("engine", "keys"), [(FakeEngine(has_telemetry=FOREIGN), ("k1",)), (FakeEngine(), ())]
)
async def test_no_tenant_without_keys_and_none_for_foreign_engines(
    engine: FakeEngine, keys: tuple[str, ...]
) -> None:
    async with rig([engine], api_keys=keys) as r:
        sent = {"authorization": "Bearer k1", TENANT: "another's"}
        assert (await r.http.post("/v1/chat/completions", json=chat(), headers=sent)).status_code == 200
        assert TENANT not in engine.requests[0].headers


# request ids


@pytest.mark.parametrize("has_telemetry", [OURS, FOREIGN])
async def test_engines_get_an_unguessable_id_and_clients_their_own(has_telemetry: bool) -> None:
    async with rig([FakeEngine(has_telemetry=has_telemetry)]) as r:
        for _ in range(3):  # three tenants, one id
            answer = await r.http.post("/v1/chat/completions", json=chat(), headers={"x-request-id": "job-1"})
            assert answer.headers["x-request-id"] == "job-1"
        sent = ids(r.engines[0])
        assert len(set(sent)) == 3
        assert all(re.fullmatch("[0-9a-f]{32}", one) for one in sent)


async def test_only_our_engines_hear_of_the_client_s_id() -> None:
    for has_telemetry in (OURS, FOREIGN):
        async with rig([FakeEngine(has_telemetry=has_telemetry)]) as r:
            await r.http.post("/v1/chat/completions", json=chat(), headers={"x-request-id": "job-1"})
            (request,) = r.engines[0].requests
            assert request.headers.get(RESPONSE_ID) == ("job-1" if has_telemetry else None)
            assert ("job-1" in str(request.headers)) == has_telemetry


@pytest.mark.parametrize("has_telemetry", [OURS, FOREIGN])
async def test_ids_in_bodies_do_not_reach_engines_as_theirs(has_telemetry: bool) -> None:
    async with rig([FakeEngine(has_telemetry=has_telemetry)]) as r:
        answer = await r.chat(rid="job-1", request_id="job-1")
        assert answer.status_code == 200
        (request,) = r.engines[0].requests
        assert request.headers["x-request-id"] != "job-1"
        if not has_telemetry:
            assert not {"rid", "request_id"} & request.json.keys()


async def test_each_attempt_has_its_own_id_and_all_one_response_id() -> None:
    async def refuse(connection: Connection, _: Received) -> None:
        connection.answer(503, b"{}")

    async with rig([FakeEngine(script=refuse), FakeEngine()], admin_port=0, policy="round-robin") as r:
        for _ in range(2):
            answer = await r.http.post("/v1/chat/completions", json=chat(), headers={"x-request-id": "job-1"})
            assert (answer.status_code, answer.headers["x-argosy-replica"]) == (200, "r1")
        requests = [request for engine in r.engines for request in engine.requests]
        assert len({request.headers["x-request-id"] for request in requests}) == len(requests) > 2
        assert {request.headers[RESPONSE_ID] for request in requests} == {"job-1"}
        records = (await r.http.get(r.router.admin_url + "/decisions")).json()
        assert {record["request_id"] for record in records} == {"job-1"}
        assert {record["upstream_id"] for record in records} == set(ids(r.engines[0]) + ids(r.engines[1]))


async def test_a_retry_on_a_connection_that_went_stale_has_a_new_id() -> None:
    async def die_when_reused(connection: Connection, request: Received) -> None:
        if len(connection.engine.requests) == 2:
            connection.die()
        else:
            await answer_normally(connection, request)

    async with rig([FakeEngine(script=die_when_reused)]) as r:
        assert (await r.chat()).status_code == 200
        assert (await r.chat()).status_code == 200
        first, lost, repeated = ids(r.engines[0])
        assert len({first, lost, repeated}) == 3


# fields


@pytest.mark.parametrize("has_telemetry", [OURS, FOREIGN])
@pytest.mark.parametrize("field", INTERNAL)
async def test_fields_between_engines_are_refused(field: str, has_telemetry: bool) -> None:
    async with rig([FakeEngine(has_telemetry=has_telemetry)]) as r:
        for path, body in (
            ("/v1/chat/completions", chat()),
            ("/v1/completions", {"model": "tiny", "prompt": "x"}),
            ("/v1/embeddings", {"model": "tiny", "input": "x"}),
            ("/tokenize", {"model": "tiny", "prompt": "x"}),
        ):
            refused = await r.http.post(path, json={**body, field: INTERNAL[field]})
            assert refused.status_code == 400, path
            assert refused.json()["error"]["param"] == field
            assert field in refused.json()["error"]["message"]
            assert (await r.http.post(path, json={**body, field: None})).status_code == 200
        assert len(r.engines[0].requests) == 4


async def test_reserved_fields_are_refused_inside_of_extra_arguments_too() -> None:
    async with rig([FakeEngine(has_telemetry=FOREIGN)]) as r:
        refused = await r.chat(vllm_xargs={"kv_transfer_params": "x"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "vllm_xargs")
        assert (await r.chat(vllm_xargs={"mine": 1})).status_code == 200
        (request,) = r.engines[0].requests
        assert request.json["vllm_xargs"] == {"mine": 1}


async def test_fields_that_shape_the_prompt_reach_the_engine() -> None:
    fields = {"truncate_prompt_tokens": 5, "truncation_side": "right", "chat_template": "{{ messages }}"}
    async with rig([FakeEngine()]) as r:
        assert (await r.chat(**fields)).status_code == 200
        assert (await r.chat(truncate_prompt_tokens=-2)).status_code == 400
        (request,) = r.engines[0].requests
        assert fields.items() <= request.json.items()


async def test_foreign_engines_get_known_fields_only() -> None:
    known = {
        "temperature": 0.5,
        "top_k": 3,
        "min_p": 0.1,
        "structured_outputs": {"regex": "a+"},
        "chat_template_kwargs": {"enable_thinking": False},
        "truncate_prompt_tokens": 5,
        "return_token_ids": True,
        "regex": "a+",
        "separate_reasoning": False,
        "metadata": {"a": "b"},
    }
    unknown = {"rid": "1", "extra_key": "e", "input_ids": [1], "prompt_embeds": "x", "what_is_this": 1}
    async with rig([FakeEngine(has_telemetry=FOREIGN)]) as r:
        assert (await r.chat(**known, **unknown)).status_code == 200
        (request,) = r.engines[0].requests
        assert request.json == chat(**known)


async def test_bodies_of_known_fields_keep_their_bytes() -> None:
    body = b'{ "model":"tiny",\t"top_k" : 3, "messages":[{"role":"user","content":"\\u00fc"}]}'
    async with rig([FakeEngine(has_telemetry=FOREIGN)]) as r:
        await r.http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
        assert r.engines[0].requests[0].body == body


async def test_the_filter_s_field_names_are_read_as_engines_read_them() -> None:
    escaped = (
        b'{"model":"tiny","messages":[{"role":"user","content":"x"}],"input_\\u0069ds":[1],"input_ids":[2]}'
    )
    async with rig([FakeEngine(has_telemetry=FOREIGN)]) as r:
        await r.http.post(
            "/v1/chat/completions", content=escaped, headers={"content-type": "application/json"}
        )
        assert r.engines[0].requests[0].json.keys() == {"model", "messages"}


async def test_a_replica_that_turns_out_foreign_is_treated_as_such() -> None:
    """At the address of one of our engines another make of engine answers."""
    engine = FakeEngine()
    async with rig([engine]) as r:
        await engine.stop()
        engine.has_telemetry = FOREIGN
        await engine.start()
        await r.until_state(0, "foreign")
        await r.until(lambda: r.replica(0).is_routable)
        assert (await r.chat(what_is_this=1)).status_code == 200
        (request,) = engine.requests
        assert "what_is_this" not in request.json
        assert RESPONSE_ID not in request.headers


# headers


@pytest.mark.parametrize("has_telemetry", [OURS, FOREIGN])
async def test_engines_get_known_headers_only(has_telemetry: bool) -> None:
    sent = {
        "accept": "text/event-stream",
        "user-agent": "me/1",
        "traceparent": "00-1-2-3",
        "tracestate": "a=b",
    }
    dropped = {
        "x-data-parallel-rank": "1",
        "x-smg-target-worker": "0",
        "x-gateway-destination-endpoint": "10.0.0.1:80",
        "x-session-id": "s",
        "x-stainless-lang": "python",
        "x-anything": "1",
        "x-argosy-internal-response-id": "another's",
        "range": "bytes=0-1",
    }
    async with rig([FakeEngine(has_telemetry=has_telemetry)]) as r:
        await r.http.post("/v1/chat/completions", json=chat(), headers=sent | dropped)
        headers = r.engines[0].requests[0].headers
        assert sent.items() <= headers.items()
        assert not (dropped.keys() - {RESPONSE_ID}) & headers.keys()
        assert headers.get(RESPONSE_ID) != "another's"


async def test_clients_get_known_headers_only() -> None:
    async def answer(connection: Connection, _: Received) -> None:
        connection.answer(
            200,
            completion(),
            "content-type: application/json\r\ncache-control: no-cache\r\nretry-after-ms: 5\r\n"
            "endpoint-load-metrics: kv=0.9\r\nx-worker: 10.0.0.1\r\nset-cookie: a=b\r\nserver: x\r\n",
        )

    async with rig([FakeEngine(script=answer, has_telemetry=FOREIGN)]) as r:
        headers = (await r.chat()).headers
        assert (headers["cache-control"], headers["retry-after-ms"]) == ("no-cache", "5")
        assert not {"endpoint-load-metrics", "x-worker", "set-cookie", "server"} & headers.keys()


def test_ids_are_random_and_given_out_once() -> None:
    source, another = UpstreamIds(), UpstreamIds()
    made = [source.next() for _ in range(1000)] + [another.next() for _ in range(1000)]
    assert len(set(made)) == 2000
    assert all(re.fullmatch(rb"[0-9a-f]{32}", one) for one in made)
