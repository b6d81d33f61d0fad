"""A service divided between two revisions: who answers, and what the router reports of each side."""

from __future__ import annotations

import asyncio
import contextlib
import json
from bisect import bisect_left
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from argosy_protocol.errors import Unavailable
from argosy_protocol.fleet import (
    REVISION_LABEL,
    Endpoint,
    FleetDocument,
    FleetService,
    RevisionSplit,
    ServiceLimits,
    decode_fleet,
    encode_fleet,
)
from argosy_protocol.reports import SIDE_BOUNDS_S, WINDOW_SLICES, LoadReport, RolloutReport
from argosy_protocol.telemetry import Load
from argosy_router.admin.app import explain_body
from argosy_router.admin.overview import LoadReports
from argosy_router.discovery.kubernetes import Pod, members_of
from argosy_router.discovery.sources import snapshot_of
from argosy_router.fleet.candidates import RevisionSides
from argosy_router.fleet.replica import Member, Replica
from argosy_router.prefixes import ServedName
from argosy_router.proxy import resilience

from .failure_scripts import never_answer
from .fake_engine import DONE, MODEL, Connection, FakeEngine, Received, answer_normally, completion, event
from .harness import Rig, StoppedClock, chat, rig, service


def divided(engines: list[FakeEngine], weight: int, **split: Any) -> FleetDocument:
    """One service: r0 and r1 are stable, r2 is the canary, r3 (if there is one) is of neither revision."""
    revisions = ["old", "old", "new", "other"]
    endpoints = tuple(
        Endpoint(name=f"r{number}", url=engine.url, revision=revisions[number])
        for number, engine in enumerate(engines)
    )
    given = {"canary": "new", "stable": "old", "weight": weight, **split}
    return FleetDocument(services=(service(engines, endpoints=endpoints, split=RevisionSplit(**given)),))


@contextlib.asynccontextmanager
async def divided_rig(weight: int, *, count: int = 3, **config: Any) -> AsyncIterator[Rig]:
    engines = [FakeEngine() for _ in range(count)]
    async with contextlib.AsyncExitStack() as stack:
        for engine in engines:
            await stack.enter_async_context(engine)
        async with rig(engines, document=divided(engines, weight), **config) as r:
            yield r


@contextlib.asynccontextmanager
async def named_rig(weight: int, **fields: Any) -> AsyncIterator[Rig]:
    """All but r0 have the adapter `sql` and the alias `small`; r1 is stable, r2 the canary, r3 of neither revision."""
    async with divided_rig(weight, count=4) as r:
        apply_names(r, weight, **fields)
        yield r


def apply_names(r: Rig, weight: int, **fields: Any) -> None:
    (only,) = divided(list(r.engines), weight).services
    spec = msgspec.structs.replace(only, adapters=("sql",), aliases=("small",), **fields)
    document = FleetDocument(services=(spec,))
    members = tuple(
        Member(each.name, "", each.url, revision=each.revision)
        if each.name == "r0"
        else Member(each.name, "", each.url, adapters=("sql",), aliases=("small",), revision=each.revision)
        for each in spec.endpoints
    )
    found = snapshot_of(document, encode_fleet(document))
    r.router.fleet.apply(replace(found, members={spec.qualified_name: members}))


async def answered_by(r: Rig, headers: list[dict[str, str]], model: str = MODEL) -> list[str]:
    """The replicas that answer one request with each of the headers."""
    found = []
    for each in headers:
        answer = await r.http.post("/v1/chat/completions", json=chat(model=model), headers=each)
        assert answer.status_code == 200
        found.append(answer.headers["x-argosy-replica"])
    return found


def ids(count: int) -> list[dict[str, str]]:
    return [{"x-request-id": f"request-{number}"} for number in range(count)]


def reports(r: Rig) -> LoadReports:
    return LoadReports(r.router.fleet, r.router.flow_control)


def sides(r: Rig) -> RolloutReport:
    (found,) = reports(r).now("r").services
    assert found.rollout is not None
    return found.rollout


@pytest.mark.parametrize(("weight", "expected"), [(0, 0), (25, 50), (100, 200)])
async def test_the_canary_gets_its_share_and_other_revisions_nothing(weight: int, expected: int) -> None:
    async with divided_rig(weight, count=4) as r:
        counts = Counter(await answered_by(r, ids(200)))
        assert counts["r2"] == pytest.approx(expected, abs=20 if 0 < weight < 100 else 0)
        assert counts["r3"] == 0
        assert counts["r0"] + counts["r1"] == 200 - counts["r2"]
        found = sides(r)
        assert (found.canary.attempts, found.stable.attempts) == (counts["r2"], 200 - counts["r2"])
        assert r.metric('rollout_weight_ratio{model="tiny"}') == weight / 100
        assert r.metric('rollout_attempts{model="tiny",side="canary"}') == found.canary.attempts
        assert r.metric('rollout_attempts{model="tiny",side="stable"}') == found.stable.attempts
        assert r.metric('rollout_failures{model="tiny",side="canary"}') == 0


@pytest.mark.parametrize("weight", [34, 60, 99])
async def test_a_canary_replica_gets_no_more_requests_than_a_stable_one(weight: int) -> None:
    async with divided_rig(weight) as r:
        counts = Counter(await answered_by(r, ids(600)))
        assert counts["r2"] == pytest.approx(200, abs=45)
        assert r.metric('rollout_weight_ratio{model="tiny"}') == pytest.approx(1 / 3)
        assert r.replica(0).health.failed(1e12, refused=True, may_eject=True)
        r.router.fleet.changed()
        counts = Counter(await answered_by(r, ids(600)))
        assert counts["r2"] == pytest.approx(min(weight / 100, 0.5) * 600, abs=50)
        assert r.replica(2).health.failed(1e12, refused=True, may_eject=True)
        r.router.fleet.changed()
        assert r.metric('rollout_weight_ratio{model="tiny"}') > 0, "or it would never be probed"


async def test_a_session_stays_on_its_side_while_the_weight_grows() -> None:
    async with divided_rig(15) as r:
        sessions = [{"x-session-id": f"session-{number}"} for number in range(30)]
        first = await answered_by(r, sessions)
        assert 0 < first.count("r2") < 30
        body = json.dumps(chat()).encode()
        explained = [
            json.loads(explain_body(r.router.fleet, body, each["x-session-id"].encode()))["replica"]
            for each in sessions
        ]
        assert [name == "r2" for name in explained] == [name == "r2" for name in first]
        r.discovery.set(divided(list(r.engines), 100))
        raised = await answered_by(r, sessions)
        assert all(after == "r2" for before, after in zip(first, raised, strict=True) if before == "r2")
        assert raised.count("r2") > first.count("r2")


async def test_a_side_that_cannot_answer_leaves_its_share_to_the_other() -> None:
    async with divided_rig(100) as r:
        assert set(await answered_by(r, ids(5))) == {"r2"}
        assert r.replica(2).health.failed(1e12, refused=True, may_eject=True)
        r.router.fleet.changed()
        assert set(await answered_by(r, ids(10))) <= {"r0", "r1"}
        document = divided(list(r.engines), 0)
        (only,) = document.services
        canary_alone = msgspec.structs.replace(only, endpoints=only.endpoints[2:])
        r.discovery.set(FleetDocument(services=(canary_alone,)))
        assert set(await answered_by(r, ids(3))) == {"r2"}


class Unsearched(list[Replica]):
    """Replicas that were tried, which are not searched for each one that was not: there may be a thousand of both."""

    def __contains__(self, _: object) -> bool:
        raise AssertionError("searched")


async def test_what_one_side_cannot_answer_goes_to_the_other_and_not_to_further_revisions() -> None:
    async with divided_rig(100, count=4) as r:
        service = r.router.fleet.services["default/svc"]
        canary, other = r.replica(2), r.replica(3)
        assert service.candidates.healthy(0.0, (), ServedName(side="canary")).replicas == [canary]
        assert service.candidates.healthy(0.0, [canary], ServedName(side="canary")).replicas == [
            r.replica(0),
            r.replica(1),
        ]
        everyone_else = Unsearched([r.replica(0), r.replica(1), canary])
        assert service.candidates.healthy(0.0, everyone_else, ServedName(side="stable")).replicas == [other]


NAMES = pytest.mark.parametrize("model", [f"{MODEL}:sql", "small"])
"""An adapter, and an alias that not all replicas have."""


@NAMES
async def test_requests_for_adapters_and_partial_aliases_are_divided_too(model: str) -> None:
    async with named_rig(0) as r:
        assert set(await answered_by(r, ids(30), model)) == {"r1"}
        found = sides(r)
        assert (found.canary.attempts, found.stable.attempts >= 30) == (0, True)
        apply_names(r, 30)
        counts = Counter(await answered_by(r, ids(100), model))
        assert set(counts) == {"r1", "r2"}
        assert counts["r2"] == pytest.approx(30, abs=15)
        apply_names(r, 100)
        assert set(await answered_by(r, ids(10), model)) == {"r2"}


@NAMES
async def test_a_session_gets_adapters_and_aliases_from_its_side(model: str) -> None:
    async with named_rig(50) as r:
        sessions = [{"x-session-id": f"session-{number}"} for number in range(20)]
        plain, named = await answered_by(r, sessions), await answered_by(r, sessions, model)
        assert [name == "r2" for name in named] == [name == "r2" for name in plain]
        assert set(named) == {"r1", "r2"}
        explained = [
            json.loads(
                explain_body(
                    r.router.fleet, json.dumps(chat(model=model)).encode(), each["x-session-id"].encode()
                )
            )
            for each in sessions
        ]
        assert [each["replica"] for each in explained] == named
        reasons = {each["replica"]: each["reason"] for each in explained[0]["excluded"]}
        assert "does not have" in reasons.pop("r0")
        assert set(reasons.values()) == {"it is on the other side of the canary rollout"}


@NAMES
async def test_a_side_that_cannot_answer_as_a_name_leaves_it_to_replicas_that_have_it(model: str) -> None:
    async with named_rig(100) as r:
        candidates = r.router.fleet.services["default/svc"].candidates
        plain, stable, canary, other = (r.replica(number) for number in range(4))
        name = ServedName(model.removeprefix(f"{MODEL}:"), "canary")
        assert candidates.healthy(0.0, (), name).replicas == [canary]
        assert candidates.healthy(0.0, [canary], name).replicas == [stable]
        assert candidates.healthy(0.0, [canary, stable], name).replicas == [other]
        with pytest.raises(Unavailable, match=f"'{model}'"):
            candidates.healthy(0.0, [canary, stable, other], name)
        assert plain.is_routable
        assert canary.health.failed(1e12, refused=True, may_eject=True)
        r.router.fleet.changed()
        assert set(await answered_by(r, ids(5), model)) == {"r1"}


async def test_requests_for_an_adapter_wait_for_room_on_their_side() -> None:
    is_done = asyncio.Event()

    async def held(connection: Connection, request: Received) -> None:
        await is_done.wait()
        await answer_normally(connection, request)

    async with named_rig(100, limits=ServiceLimits(max_inflight_per_replica=1)) as r:
        r.engines[2].script = held
        tasks = [asyncio.create_task(r.chat(model=f"{MODEL}:sql")) for _ in range(3)]
        await r.until(lambda: r.metric(f'queued_requests{{model="{MODEL}"}}') == 2)
        is_done.set()
        assert [(await task).headers["x-argosy-replica"] for task in tasks] == ["r2"] * 3


async def test_the_division_ends_with_the_document() -> None:
    async with divided_rig(0) as r:
        assert "r2" not in await answered_by(r, ids(20))
        (only,) = divided(list(r.engines), 0).services
        r.discovery.set(FleetDocument(services=(msgspec.structs.replace(only, split=None),)))
        assert "r2" in await answered_by(r, ids(40))
        (found,) = reports(r).now("r").services
        assert found.rollout is None


async def failing(connection: Connection, request: Received) -> None:
    connection.answer(500, b'{"error":{"message":"no","type":"server_error","param":null,"code":500}}')


async def test_each_sides_failures_are_counted_although_clients_see_none() -> None:
    async with divided_rig(50) as r:
        r.engines[2].script = failing
        statuses = [
            (await r.http.post("/v1/chat/completions", json=chat(), headers=each)).status_code
            for each in ids(12)
        ]
        found = sides(r)
        assert found.canary.failures == found.canary.attempts > 0
        assert found.stable.failures == 0
        assert set(statuses) == {200}, "the other side answers what the canary fails"


async def test_a_full_replica_has_not_failed() -> None:
    async def full(connection: Connection, request: Received) -> None:
        connection.answer(503, b'{"error":{"message":"full","type":"t","param":null,"code":503}}')

    async with divided_rig(100) as r:
        r.engines[2].script = full
        await r.http.post("/v1/chat/completions", json=chat())
        assert (sides(r).canary.attempts, sides(r).canary.failures) == (0, 0), "it says nothing of the build"


async def test_an_attempt_counts_when_it_ends_and_not_if_its_client_leaves() -> None:
    is_done = asyncio.Event()

    async def held(connection: Connection, request: Received) -> None:
        await is_done.wait()
        await answer_normally(connection, request)

    async with divided_rig(100) as r:
        r.engines[2].script = held
        kept, left = (asyncio.create_task(r.chat()) for _ in range(2))
        await r.until(lambda: len(r.engines[2].requests) == 2)
        assert sides(r).canary.attempts == 0
        left.cancel()
        await r.until(lambda: r.router.requests.inflight == 1)
        is_done.set()
        assert (await kept).status_code == 200
        assert (sides(r).canary.attempts, sides(r).canary.failures) == (1, 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_does_not_begin_in_time_is_a_slow_failure(stream: bool) -> None:
    """Although the replica reports that it computes. The stable side's answer to the retry is not slow by it."""
    times = {"first_byte_timeout_s": 0.2, "request_timeout_s": 0.2}
    async with divided_rig(100, **times) as r:
        r.engines[2].script = never_answer
        r.engines[2].announce(Load(core_step_age_s=0.0, num_running=1, decode_step_s=0.001))
        await r.until(lambda: r.replica(2).is_computing)
        status = (await r.chat(stream=stream, max_tokens=1)).status_code
        found = sides(r)
        assert (found.canary.attempts, found.canary.failures) == (1, 1)
        assert status == (200 if stream else 504)
        waited = bisect_left(SIDE_BOUNDS_S, 0.2)
        assert [bucket >= waited for bucket in buckets(found.canary.ttft)] == [True] * stream
        assert [bucket <= waited for bucket in buckets(found.stable.ttft)] == [True] * stream


def buckets(counts: tuple[int, ...]) -> list[int]:
    """The buckets that have a count."""
    return [number for number, count in enumerate(counts) if count]


async def test_a_slow_attempt_that_a_hedge_outruns_is_no_fast_one() -> None:
    async def slow(connection: Connection, request: Received) -> None:
        await connection.gone()

    times = {"hedge_after": 1.0, "clock": StoppedClock()}
    async with divided_rig(100, **times) as r:
        r.engines[2].script = slow
        task = asyncio.create_task(r.chat(stream=True))
        await r.until(lambda: len(r.engines[2].requests) == 1)
        await r.pass_time(2 * resilience.MIN_FIRST_TOKEN_S)
        assert (await task).status_code == 200
        found = sides(r)
        assert (sum(found.canary.ttft), sum(found.stable.ttft)) == (1, 1)
        assert buckets(found.canary.ttft) > buckets(found.stable.ttft)


async def test_answers_of_4xx_are_counted_by_side() -> None:
    async def refusing(connection: Connection, request: Received) -> None:
        connection.answer(400, b'{"error":{"message":"no","type":"t","param":null,"code":400}}')

    async with divided_rig(100) as r:
        r.engines[2].script = refusing
        assert (await r.chat()).status_code == 400
        found = sides(r).canary
        assert (found.attempts, found.failures, found.client_errors) == (1, 0, 1)


async def test_tokens_and_times_to_first_token_are_counted_by_side() -> None:
    async def answer(connection: Connection, request: Received) -> None:
        if request.json.get("stream"):
            connection.begin_stream()
            connection.chunk(event("a") + DONE)
            connection.end_stream()
        else:
            connection.answer(200, completion())

    async with divided_rig(100) as r:
        for engine in r.engines:
            engine.script = answer
        await r.chat()
        await r.chat(stream=True)
        found = sides(r)
        assert found.canary.prompt_tokens > 0
        assert sum(found.canary.ttft_counts) == sum(found.canary.ttft) == 1
        assert (found.canary.sampled, found.canary.sampled_cached) == (1, 0)
        assert (found.stable.prompt_tokens, found.stable.ttft_counts, found.stable.ttft) == (0, (), ())


async def test_times_between_tokens_are_counted_by_side() -> None:
    async def answer(connection: Connection, request: Received) -> None:
        usage = {"prompt_tokens": 8, "completion_tokens": 5, "total_tokens": 13}
        last = json.dumps({"id": "c", "object": "chat.completion.chunk", "choices": [], "usage": usage})
        connection.begin_stream()
        connection.chunk(event("a") + event("b", "stop") + f"data: {last}\n\n".encode() + DONE)
        connection.end_stream()

    async with divided_rig(100) as r:
        r.engines[2].script = answer
        await r.chat(stream=True, stream_options={"include_usage": True})
        assert sum(sides(r).canary.itl) == 1
        assert sides(r).stable.itl == ()


def test_of_each_answer_one_token_is_drawn() -> None:
    divided_sides = RevisionSides(RevisionSplit(canary="new", window_s=60))
    for _ in range(1000):
        divided_sides.observe_tokens("new", prompt=100, predicted=50, cached=40, now=1.0)
    found = divided_sides.report(1.0).canary
    assert (found.sampled, found.expected) == (1000, 1000)
    assert found.sampled_cached == pytest.approx(400, abs=100)
    assert found.expected_cached == pytest.approx(800, abs=80)


async def test_another_weight_starts_counting_anew() -> None:
    async with divided_rig(100) as r:
        await answered_by(r, ids(3))
        assert sides(r).canary.attempts == 3
        r.discovery.set(divided(list(r.engines), 100))
        assert sides(r).canary.attempts == 3, "the same document changes nothing"
        r.discovery.set(divided(list(r.engines), 60))
        assert (sides(r).weight, sides(r).canary.attempts) == (60, 0)


def test_figures_leave_their_window_and_take_bounded_memory() -> None:
    divided_sides = RevisionSides(RevisionSplit(canary="new", stable="old", weight=10, window_s=60))
    for second in range(600):
        divided_sides.ended("new", 200, float(second))
        divided_sides.failed("old", float(second))
    kept = divided_sides.report(599.0)
    assert 60 - 60 / WINDOW_SLICES <= kept.canary.attempts <= 60
    assert kept.stable.failures == kept.canary.attempts
    divided_sides.ended("third", 200, 599.0)
    assert divided_sides.report(599.0) == kept, "a third revision is on no side"
    past = divided_sides.report(700.0)
    assert past.canary.attempts == 0
    assert past.canary_total is not None
    assert past.stable_total is not None
    assert (past.canary_total.attempts, past.stable_total.failures) == (600, 600)


def test_sides_by_revision() -> None:
    named = RevisionSides(RevisionSplit(canary="new", stable="old"))
    assert [named.side_of(each) for each in ("new", "old", "third", "")] == ["canary", "stable", "", ""]
    unnamed = RevisionSides(RevisionSplit(canary="new"))
    assert [unnamed.side_of(each) for each in ("new", "old", "")] == ["canary", "stable", "stable"]


def test_pods_tell_their_revision_by_their_label() -> None:
    metadata = {"name": "p", "uid": "u", "labels": {"app": "x", REVISION_LABEL: "abc"}}
    pod = msgspec.convert({"metadata": metadata, "status": {"podIP": "10.0.0.1", "conditions": [
        {"type": "ContainersReady", "status": "True"}]}}, Pod)  # fmt: skip
    (member,) = members_of(
        FleetService(namespace="n", name="s", uid="u", model="m", selector={"app": "x"}), [pod]
    )
    assert member.revision == "abc"


def test_reports_of_older_routers_and_documents_for_them_are_read() -> None:
    old = b'{"router":"r","version":1,"revision":3,"services":[{"service":"a/b","queued":2}]}'
    (found,) = msgspec.json.decode(old, type=LoadReport).services
    assert (found.queued, found.rollout) == (2, None)
    document = FleetDocument(
        services=(FleetService(namespace="n", name="s", uid="u", model="m", split=RevisionSplit(canary="c")),)
    )
    assert decode_fleet(encode_fleet(document)) == document


@pytest.mark.parametrize(
    "side",
    [
        {"attempts": -1},
        {"ttft_counts": [0] * 1000},
        {"ttft": [0] * 1000},
        {"itl": [-1]},
        {"failures": "1"},
        {"ttft_counts": [-1]},
    ],
)
def test_a_report_out_of_bounds_is_refused(side: dict[str, Any]) -> None:
    text = json.dumps(
        {"router": "r", "services": [{"service": "a/b", "rollout": {"canary_revision": "c", "canary": side}}]}
    )
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text, type=LoadReport)
