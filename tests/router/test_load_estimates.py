"""Load estimates: what they learn from, when prompts leave the account, and the cost of polling many replicas."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy_protocol.telemetry import Load
from argosy_router.fleet import foreign_engines
from argosy_router.fleet.foreign_engines import parse_load
from argosy_router.prefixes import PRIOR_BYTES_PER_TOKEN, PrefixIndex

from .engine_expositions import EXPOSITIONS, vllm
from .fake_engine import Connection, FakeEngine, Received, completion
from .harness import Rig, rig

# bytes per token


def picture(text: str) -> list[dict[str, Any]]:
    data = base64.b64encode(b"p" * 100).decode()
    return [
        {"type": "text", "text": text},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
    ]


async def learnt(content: Any, prompt_tokens: int, **fields: Any) -> float:
    """Bytes per token that a service assumes after some answers with these numbers of prompt tokens."""

    async def answer(connection: Connection, _: Received) -> None:
        connection.answer(200, completion(prompt_tokens=prompt_tokens))

    async with rig([FakeEngine(script=answer)]) as r:
        for _ in range(20):
            message = {"role": "user", "content": content}
            asked = {"model": "tiny", "messages": [message], **fields}
            assert (await r.http.post("/v1/chat/completions", json=asked)).status_code == 200
        return r.router.fleet.services["default/svc"].lengths.bytes_per_token


async def test_text_teaches_bytes_per_token() -> None:
    assert await learnt("word " * 200, 100) > 1.5 * PRIOR_BYTES_PER_TOKEN


async def test_pictures_teach_nothing_about_text() -> None:
    assert await learnt(picture("word " * 200), 3000) == PRIOR_BYTES_PER_TOKEN


async def test_prompts_that_are_cut_teach_nothing_about_text() -> None:
    """A key could have the prompts of all others taken for a quarter of their length."""
    assert await learnt("word " * 200, 4, truncate_prompt_tokens=4) == PRIOR_BYTES_PER_TOKEN


# unary prompts


class Held:
    """A script that keeps its requests until the test ends."""

    async def __call__(self, connection: Connection, _: Received) -> None:
        await connection.gone()


@pytest.mark.parametrize("has_telemetry", [False, True])
async def test_a_unary_prompt_leaves_the_account_when_it_should_be_computed(has_telemetry: bool) -> None:
    async with rig([FakeEngine(script=Held(), has_telemetry=has_telemetry)]) as r:
        load = r.replica(0).load
        if has_telemetry:
            r.engines[0].announce(Load(core_step_age_s=0.0, prefill_tokens_per_s=8000.0))
            await r.until(lambda: load.measured.prefill_tokens_per_s == 8000.0)
        asked = asyncio.create_task(r.chat("word " * 8000))
        await r.until(lambda: bool(r.engines[0].requests))
        assert load.queued_tokens > 8000, "a second's work"
        await r.until(lambda: load.queued_tokens == 0)
        assert (load.inflight, load.requests, load.inflight_tokens) == (1, 1, 0)
        asked.cancel()
        await r.until(lambda: load.inflight == 0)
        assert (load.queued_tokens, load.inflight_tokens, load.requests) == (0, 0, 0)


async def test_unary_traffic_does_not_make_a_foreign_replica_look_ever_fuller() -> None:
    async with rig([FakeEngine(script=Held(), has_telemetry=False), FakeEngine(has_telemetry=False)]) as r:
        asked = [asyncio.create_task(r.chat(f"{number} " + "word " * 500)) for number in range(8)]
        await r.until(lambda: r.replica(0).load.inflight > 0)
        await r.until(lambda: all(each.load.queued_tokens == 0 for each in r.router.fleet.replicas()))
        for task in asked:
            task.cancel()


# polling


@pytest.fixture
def quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign_engines, "POLL_INTERVAL_S", 0.005)


def polls(r: Rig) -> float:
    return r.replica(0).load.reported_requests


@pytest.mark.usefixtures("quick_polls")
async def test_polls_share_a_connection() -> None:
    engine = FakeEngine(has_telemetry=False, metrics=vllm(running=1))
    async with rig([engine]) as r:
        await r.until(lambda: polls(r) == 1)
        connections = engine.connections
        for running in range(2, 12):
            engine.metrics = vllm(running=running)
            await r.until(lambda running=running: polls(r) == running)  # type: ignore[misc]
        assert engine.connections == connections


class Closing(FakeEngine):
    """Closes each connection behind its answer, without saying so."""

    async def handle(self, connection: Connection, request: Received) -> None:
        await super().handle(connection, request)
        await connection.writer.drain()
        if request.path in ("/health", "/metrics"):
            raise ConnectionResetError


@pytest.mark.usefixtures("quick_polls")
async def test_a_kept_connection_that_was_closed_is_replaced() -> None:
    engine = Closing(has_telemetry=False, metrics=vllm(running=1))
    async with rig([engine]) as r:
        for running in range(2, 12):
            engine.metrics = vllm(running=running)
            await r.until(lambda running=running: polls(r) == running)  # type: ignore[misc]
            assert r.replica(0).health.is_answering


@pytest.mark.usefixtures("quick_polls")
async def test_a_replica_that_restarts_is_polled_again() -> None:
    engine = FakeEngine(has_telemetry=False, metrics=vllm(running=1))
    async with rig([engine]) as r:
        await r.until(lambda: polls(r) == 1)
        await engine.stop()
        await r.until(lambda: not r.replica(0).is_routable)
        engine.metrics = vllm(running=2)
        await engine.start()
        await r.until(lambda: polls(r) == 2)


def noise() -> st.SearchStrategy[bytes]:
    names = st.sampled_from(
        [
            "vllm:num_requests_running_total",
            "xvllm:num_requests_running",
            "# HELP vllm:num_requests_running",
            "go_x",
        ]
    )
    labels = st.sampled_from(["", '{a="vllm:num_requests_running 9"}', '{a="\\"} 7"}', '{a="b}"}'])
    return st.builds(lambda name, label: f"{name}{label} 5\n".encode(), names, labels)


@given(st.sampled_from(sorted(EXPOSITIONS)), st.lists(noise(), max_size=5), st.lists(noise(), max_size=5))
def test_only_the_wanted_samples_are_read(kind: str, before: list[bytes], after: list[bytes]) -> None:
    exposition, _ = EXPOSITIONS[kind]
    alone = parse_load(exposition)
    assert parse_load(b"".join(before) + exposition + b"".join(after)) == alone


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-1", "many", ""])
def test_values_that_are_none_are_left_out(value: str) -> None:
    load = parse_load(f"vllm:num_requests_running 3\nvllm:num_requests_running {value}\n".encode())
    assert load is not None
    assert load.running == 3


# slots of the index


def scrubbed(index: PrefixIndex) -> None:
    while index.scrub():
        pass


def filled(index: PrefixIndex, slots: list[int]) -> None:
    for slot in slots:
        index.add(slot, range(2000), [7] * 2000)


LIMIT = 64 << 20


def test_the_index_gets_as_small_as_the_fleet() -> None:
    index = PrefixIndex()
    few = [index.acquire_slot() for _ in range(4)]
    filled(index, few)
    bytes_of_few, capacity_of_few = index.bytes, index.capacity_within(LIMIT)
    many = [index.acquire_slot() for _ in range(600)]
    filled(index, many)
    assert index.bytes > 1.5 * bytes_of_few
    assert index.capacity_within(LIMIT) < capacity_of_few
    for slot in many:
        index.retire_slot(slot)
    scrubbed(index)
    assert index.bytes <= 1.1 * bytes_of_few
    assert index.capacity_within(LIMIT) == capacity_of_few
    assert len(index) == 2000
    assert index.match([0, 1]) == (dict.fromkeys(few, 7), 2)
    again = [index.acquire_slot() for _ in range(70)]
    assert sorted(again) == list(range(4, 74))
    filled(index, again)
    assert index.match([0])[0] == dict.fromkeys([*few, *again], 7)


def test_the_lowest_slots_are_used_again_first() -> None:
    index = PrefixIndex()
    slots = [index.acquire_slot() for _ in range(10)]
    for slot in (slots[7], slots[2], slots[5]):
        index.retire_slot(slot)
        scrubbed(index)
    assert [index.acquire_slot() for _ in range(4)] == [2, 5, 7, 10]


def test_a_slot_that_is_used_keeps_those_below_it() -> None:
    index = PrefixIndex()
    slots = [index.acquire_slot() for _ in range(300)]
    filled(index, slots)
    for slot in slots[:-1]:
        index.retire_slot(slot)
    scrubbed(index)
    assert index.match([0]) == ({slots[-1]: 7}, 1)
    index.retire_slot(slots[-1])
    scrubbed(index)
    assert len(index) == 0
    assert index.acquire_slot() == 0
