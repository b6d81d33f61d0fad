"""What the router enforces by API key: limits, models and priority; and that no key leaves it."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

import pytest

from argosy_protocol.fleet import FleetDocument
from argosy_protocol.telemetry import Draining
from argosy_router.auth.accounts import Account
from argosy_router.auth.key_terms import KeyTerms
from argosy_router.config import FlowControlLimits
from argosy_router.fleet.service import Service
from argosy_router.http.messages import Request
from argosy_router.proxy.call import names_for

from .fake_engine import DONE, MODEL, Connection, FakeEngine, Received, completion, event
from .harness import Rig, chat, raw, rig, service
from .keyed_rig import keyed, stop_clock
from .queueing import ONE_AT_A_TIME, Turnstile, check_hint
from .raw_requests import HEAD, answer, request


async def test_answers_tell_what_is_left_of_the_limits(tmp_path: Path) -> None:
    async def answer(connection: Connection, _: Received) -> None:
        connection.answer(200, completion(prompt_tokens=300), "x-ratelimit-remaining-tokens: 7\r\n")

    async with keyed(
        tmp_path, "requests_per_minute=3 tokens_per_minute=1000", [FakeEngine(script=answer)]
    ) as r:
        stop_clock(r)
        first = await r.chat(max_tokens=100)
        assert first.headers["x-ratelimit-limit-requests"] == "3"
        assert first.headers["x-ratelimit-remaining-requests"] == "2"
        assert first.headers["x-ratelimit-reset-requests"] == "20s"
        assert first.headers.get_list("x-ratelimit-remaining-tokens") == [str(1000 - 100 - first_prompt(r))]
        second = await r.chat(max_tokens=100)
        # The first one used 301, whatever was reserved.
        assert (
            abs(int(second.headers["x-ratelimit-remaining-tokens"]) - (1000 - 301 - 100 - first_prompt(r)))
            <= 20
        )
        assert (await r.chat()).status_code == 200
        refused = await r.chat()
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        check_hint(refused)
        assert r.metric('rate_limited_total{key="client"}') == 1
        assert len(r.engines[0].requests) == 3


async def test_streams_count_though_their_client_wants_no_usage(tmp_path: Path) -> None:
    async def answer(connection: Connection, request: Received) -> None:
        connection.begin_stream()
        connection.chunk(event("hel"))
        if request.json["stream_options"]["include_usage"]:
            usage = {"prompt_tokens": 300, "total_tokens": 400, "completion_tokens": 100}
            connection.chunk(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n")
        connection.chunk(DONE)
        connection.end_stream()

    async with keyed(tmp_path, "tokens_per_minute=1000", [FakeEngine(script=answer)]) as r:
        stop_clock(r)
        for _ in range(2):
            await r.chat(stream=True, max_tokens=1)
        third = await r.chat(stream=True, max_tokens=1)
        assert int(third.headers["x-ratelimit-remaining-tokens"]) == pytest.approx(200, abs=30)
        assert r.metric('usage_tokens_total{key="client",kind="completion",model="tiny"}') == 300


def first_prompt(r: Rig) -> int:
    """Tokens the router takes the prompt of `chat()` for."""
    from argosy_router.prefixes import measure
    from argosy_router.proxy.call import prompt_of
    from argosy_router.proxy.request_body import examine

    tiny = r.router.fleet.service_of(MODEL)
    assert tiny is not None
    _, prompts = examine("chat/completions", json.dumps(chat()).encode(), has_state=False)
    return tiny.lengths.tokens(prompt_of(tiny, MODEL, measure(prompts, 0), b""))


async def test_a_request_that_was_never_sent_counts_for_nothing(tmp_path: Path) -> None:
    no_queue = FlowControlLimits(max_queued_requests=0)
    async with keyed(tmp_path, "requests_per_minute=2", fields=ONE_AT_A_TIME, flow_control=no_queue) as r:
        replica = r.replica(0)
        charge = replica.load.charge(1)
        for _ in range(5):
            refused = await r.chat()
            assert refused.status_code == 429
            assert "rate limit" not in refused.json()["error"]["message"]
        charge.release()
        await r.until(lambda: replica.load.requests == 0)
        assert (await r.chat()).status_code == 200


async def test_a_key_opens_its_models_only(tmp_path: Path) -> None:
    async with keyed(tmp_path, "models=small,team/large") as r:
        engine = r.engines[0]
        r.discovery.set(
            FleetDocument(
                services=(
                    service([engine], aliases=("small", "fast")),
                    service([engine], namespace="team", name="large", uid="2", model="big"),
                )
            )
        )
        assert [card["id"] for card in (await r.http.get("/v1/models")).json()["data"]] == ["small", "big"]
        await r.until(lambda: all(replica.is_routable for replica in r.router.fleet.replicas()))
        statuses = {
            name: (await r.chat(model=name)).status_code
            for name in (MODEL, "small", "fast", "big", "team/large", "no")
        }
        assert statuses == {MODEL: 404, "small": 200, "fast": 404, "big": 200, "team/large": 200, "no": 404}
        assert (await r.http.get("/v1/models/fast")).json() == (await r.chat(model="fast")).json()
        for name in ("fast", "no"):
            message = (await r.chat(model=name)).json()["error"]["message"]
            assert message == f"the model `{name}` does not exist; models: 'small', 'big'"


class Answered:
    """A client that keeps its answer."""

    def __init__(self) -> None:
        self.body = b""

    def respond(self, status: int, headers: bytes, body: bytes) -> None:
        assert status == 200
        self.body = body

    def unexpected(self, *_: object) -> None:
        raise AssertionError

    attach = start = send = finish = abort = unexpected


def listed(r: Rig, target: bytes = b"/v1/models") -> tuple[bytes, Account]:
    """The list of models, as the application answers, and whose it is."""
    headers = [(b"host", b"a"), (b"authorization", b"Bearer sk-client")]
    request = Request(b"GET", target, headers, is_http10=False, keep_alive=True)
    client = Answered()
    r.router.application.on_head(request)
    r.router.application.on_request(client, request)
    assert isinstance(request.grant, Account)
    return client.body, request.grant


async def test_models_are_listed_anew_when_they_or_the_keys_terms_have_changed(tmp_path: Path) -> None:
    """Each list, and each 404, asked all services: with a thousand of them 16 requests took 87 ms."""
    async with keyed(tmp_path, "models=small,team/large") as r:
        services = [
            service([], aliases=("small", "fast")),
            service([], namespace="team", name="large", uid="2", model="big"),
        ]
        r.discovery.set(FleetDocument(services=tuple(services)))
        fleet = r.router.fleet
        first, account = listed(r)
        names = names_for(fleet, account)
        assert b"small" in first
        assert b"big" in first
        assert listed(r)[0] is first
        assert b"slug" in listed(r, b"/v1/models?client_version=1")[0]
        assert names_for(fleet, account) is names
        r.discovery.set(FleetDocument(services=tuple(services[:1])))
        assert b"small" in listed(r)[0]
        assert b"big" not in listed(r)[0]
        assert len(names_for(fleet, account)) == 1
        account.apply(KeyTerms(name="client"), 0.0)
        assert b"fast" in listed(r)[0]


async def test_a_replica_that_changes_its_state_has_no_list_of_models_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may do so thousands of times a second; a list of a thousand services takes five milliseconds."""
    async with keyed(tmp_path, "") as r:
        first, _ = listed(r)
        revision = r.router.fleet.revision
        r.engines[0].announce(Draining())
        await r.until_state(0, "draining")
        assert r.router.fleet.revision > revision
        assert listed(r)[0] is first
        with monkeypatch.context() as patched:  # the lengths of all names were compared for each request
            patched.setattr(Service, "max_model_len", property(lambda _: pytest.fail("asked again")))
            assert listed(r)[0] is first
        shorter = FakeEngine(hello={"max_model_len": 100})
        async with shorter:
            r.discovery.set(FleetDocument(services=(service([*r.engines, shorter]),)))
            await r.until(lambda: r.replica(1).is_synced)
            assert json.loads(listed(r)[0])["data"][0]["max_model_len"] == 100


@pytest.mark.parametrize("path", ["/v1/models", f"/v1/models/{MODEL}", "/v1/models/none"])
async def test_lists_of_models_count_against_the_limit_of_requests(tmp_path: Path, path: str) -> None:
    async with keyed(tmp_path, "requests_per_minute=2") as r:
        stop_clock(r)
        answers = [await r.http.get(path) for _ in range(3)]
        assert [answer.status_code == 429 for answer in answers] == [False, False, True]
        assert (await r.chat()).status_code == 429


async def test_a_key_for_a_name_opens_no_service_that_lost_it(tmp_path: Path) -> None:
    async with keyed(tmp_path, "models=chat") as r:
        engine = r.engines[0]
        older = service([engine], model="chat", created="2025")
        loser = service([engine], namespace="team", name="thief", uid="2", model="chat", created="2026")
        r.discovery.set(FleetDocument(services=(older, loser)))
        await r.until(lambda: all(replica.is_routable for replica in r.router.fleet.replicas()))
        assert (await r.chat(model="chat")).status_code == 200
        assert (await r.chat(model="default/svc")).status_code == 200
        assert (await r.chat(model="team/thief")).status_code == 404


async def test_an_unknown_model_s_error_names_eight_models() -> None:
    async with rig([FakeEngine()]) as r:
        aliases = tuple(f"alias-{index}" for index in range(9))
        r.discovery.set(FleetDocument(services=(service(r.engines, aliases=aliases),)))
        await r.until(lambda: all(replica.is_routable for replica in r.router.fleet.replicas()))
        message = (await r.chat(model="no")).json()["error"]["message"]
        assert message.endswith("'alias-5', 'alias-6' and 2 more")


async def test_the_key_s_class_reaches_the_engine(tmp_path: Path) -> None:
    engine = FakeEngine(hello={"schedules_by_priority": True})
    async with keyed(tmp_path, "priority=10", [engine]) as r:
        await r.chat()
        await r.chat(priority=-1000, top_p=0.5)
        assert [request.json.get("priority") for request in r.engines[0].requests] == [10, 10]
        assert r.engines[0].requests[1].json["top_p"] == 0.5


async def test_engines_that_would_refuse_a_priority_get_none() -> None:
    async with rig([FakeEngine()]) as r:
        assert (await r.chat(priority=5, top_p=0.5)).status_code == 200
        await r.chat(top_p=0.5)
        assert [request.json.get("priority", 0) for request in r.engines[0].requests] == [0, 0]
        assert (
            r.engines[0].requests[1].body == r.http.build_request("POST", "/", json=chat(top_p=0.5)).content
        )


async def test_reloading_keys_interrupts_no_request(tmp_path: Path) -> None:
    turnstile = Turnstile()
    async with keyed(tmp_path, "requests_per_minute=5", [FakeEngine(script=turnstile)]) as r:
        under_way = asyncio.create_task(r.chat("first"))
        await r.until(lambda: turnstile.order == ["first"])
        (tmp_path / "keys").write_text("another\n")
        while (await r.http.get("/v1/models")).status_code != 401:
            pass
        turnstile.let()
        assert (await under_way).status_code == 200


async def test_an_empty_key_file_closes_the_router(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("")
    async with rig([FakeEngine()], api_keys_file=path) as r:
        assert (await r.chat()).status_code == 401
        assert (await r.http.get("/v1/models")).status_code == 401
        assert (await r.http.get("/health")).status_code == 200


async def test_keys_are_never_written_down(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    async with keyed(
        tmp_path, "tokens_per_minute=1000\nsk-typo tokens=5", access_log=True, admin_port=0
    ) as r:
        answers = [await r.chat(), await r.http.get("/v1/models")]
        r.http.headers["authorization"] = "Bearer sk-guess"
        answers.append(await r.chat())
        shown = (
            r.router.metrics.render().decode() + (await r.http.get(r.router.admin_url + "/decisions")).text
        )
        shown += "".join(answer.text + str(answer.headers) for answer in answers)
    assert "API key file: line 2" in caplog.text
    shown += caplog.text + "".join(capfd.readouterr())
    assert "key=client" in shown
    assert not [secret for secret in ("sk-client", "sk-typo", "sk-guess") if secret in shown]
    assert not any("sk-client" in str(request.headers) for request in r.engines[0].requests)


async def test_credentials_stay_at_the_edge() -> None:
    async with rig([FakeEngine()]) as r:
        secrets = {"x-api-key": "sk-1", "api-key": "sk-2", "proxy-authorization": "sk-3", "cookie": "sk-4"}
        r.http.headers.update(secrets)
        assert (await r.chat()).status_code == 200
        assert not secrets.keys() & r.engines[0].requests[0].headers.keys()


async def test_resume_is_refused_at_the_edge() -> None:
    async with rig([FakeEngine()]) as r:
        answer = await r.chat(stream=True, resume={"created": 1, "choices": [{"token_ids": [1]}]})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "resume"
        assert not r.engines[0].requests


async def test_a_pipelined_request_finds_that_the_one_before_has_ended(tmp_path: Path) -> None:
    limits = "max_parallel_requests=1 max_parallel_sequences=1"
    async with keyed(tmp_path, limits) as r, raw(r.router) as (reader, writer):
        head = HEAD + b"authorization: Bearer sk-client\r\n"
        writer.write(request(json.dumps(chat()).encode(), head) * 3)
        assert [(await answer(reader))[0] for _ in range(3)] == [200, 200, 200]
        assert len(r.engines[0].requests) == 3
