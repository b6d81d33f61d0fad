"""Reservations of a key's limits: made before a request is sent, settled once by usage."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy_protocol.telemetry import Load
from argosy_router.auth.accounts import Account, RateLimited, Reservation
from argosy_router.auth.key_terms import KeyTerms
from argosy_router.token_bucket import PERIOD_S

from .failure_scripts import SCRIPTS, never_answer
from .fake_engine import MODEL, Connection, FakeEngine, Received
from .harness import Rig, raw, rig
from .resumable_stream import ResumableStream

LIMIT = 100_000
STEP_S = 0.001
"""What a decode step takes at the fake engines."""


class Clock:
    """A clock that stands still until it is moved: buckets do not refill meanwhile."""

    def __init__(self) -> None:
        self.time = time.monotonic() + 3600.0

    def __call__(self) -> float:
        return self.time


@contextlib.asynccontextmanager
async def metered(
    tmp_path: Path, *engines: FakeEngine, limit: int = LIMIT, **config: Any
) -> AsyncIterator[tuple[Rig, Clock]]:
    """A router whose only key has this many tokens a minute, and whose clock the test moves."""
    keys = tmp_path / "keys"
    keys.write_text(f"sk-key name=key tokens_per_minute={limit}\n")
    clock = Clock()
    async with rig(engines, api_keys_file=keys, **config) as r:
        r.router.requests.shared.now = clock
        r.http.headers["authorization"] = "Bearer sk-key"
        for engine in engines:
            engine.announce(Load(core_step_age_s=0.0, prefill_tokens_per_s=1e6, decode_step_s=STEP_S))
        await r.until(lambda: all(each.load.decode_step_s == STEP_S for each in r.router.fleet.replicas()))
        yield r, clock


def remaining(answer: httpx.Response) -> int:
    return int(answer.headers["x-ratelimit-remaining-tokens"])


def usage(prompt: int, completion: int) -> bytes:
    told = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return json.dumps({"id": "c", "choices": [], "usage": told}).encode()


async def complete(r: Rig, **fields: Any) -> httpx.Response:
    return await r.http.post("/v1/completions", json={"model": MODEL, "prompt": "hi", **fields})


async def left(r: Rig) -> int:
    """Tokens left of the limit, as the answer to a request with the smallest prompt reports them."""
    answer = await r.http.post("/tokenize", json={"model": MODEL, "prompt": "x"})
    return remaining(answer) + 1


# before the answer


@pytest.mark.parametrize(
    ("fields", "outputs"),
    [
        ({"max_tokens": 100}, 100),
        ({"max_tokens": 100, "n": 4}, 400),
        ({"max_tokens": 100, "prompt": ["hi"] * 8}, 800),
        ({"max_tokens": 100, "prompt": ["hi"] * 8, "n": 4}, 3200),
        ({"max_tokens": 100, "prompt": [[1, 2], [3, 4], [5, 6]]}, 300),
        ({"max_tokens": 100, "prompt": [1, 2, 3]}, 100),
        ({"max_tokens": 100, "use_beam_search": True, "best_of": 16}, 1600),
        ({"max_tokens": 100, "use_beam_search": True, "n": 2, "best_of": 16, "prompt": ["a", "b"]}, 3200),
        ({"max_tokens": 0, "echo": True}, 0),
    ],
)
async def test_every_sequence_of_a_request_is_reserved(
    tmp_path: Path, fields: dict[str, Any], outputs: int
) -> None:
    async with metered(tmp_path, FakeEngine()) as (r, _):
        reserved = LIMIT - remaining(await complete(r, **fields))
        prompts = fields.get("prompt", "hi")
        most = 8 * (len(prompts) if isinstance(prompts, list) else 1)
        assert outputs < reserved <= outputs + most


async def test_prompts_that_are_tokenized_reserve_no_output(tmp_path: Path) -> None:
    async with metered(tmp_path, FakeEngine()) as (r, _):
        for path, fields in (("/tokenize", {"prompt": "hi"}), ("/v1/embeddings", {"input": ["a", "b"]})):
            answer = await r.http.post(path, json={"model": MODEL, **fields})
            assert LIMIT - 20 <= remaining(answer) < LIMIT


async def test_an_answer_without_a_limit_is_reserved_as_the_key_s_answers_usually_are(tmp_path: Path) -> None:
    async def long(connection: Connection, request: Received) -> None:
        connection.answer(200, usage(5, 2000 * (request.json.get("n") or 1)))

    async with metered(tmp_path, FakeEngine(script=long)) as (r, clock):
        first = LIMIT - remaining(await complete(r))
        assert 256 <= first < 300, "nothing is known yet"
        for _ in range(40):
            clock.time += PERIOD_S
            answer = await complete(r, n=3)
        assert LIMIT - remaining(answer) == pytest.approx(3 * 2000, rel=0.05)
        clock.time += PERIOD_S
        for _ in range(40):
            await complete(r, max_tokens=1)
            clock.time += PERIOD_S
        assert LIMIT - remaining(await complete(r)) == pytest.approx(2000, rel=0.05), "limits teach nothing"


async def test_prompts_of_other_keys_do_not_change_what_a_key_s_prompts_are_estimated_at(
    tmp_path: Path,
) -> None:
    async def by_bytes(connection: Connection, request: Received) -> None:
        prompt = request.json["prompt"]
        connection.answer(200, usage(len(prompt) * (4 if prompt.startswith("\u0394") else 1) // 4, 1))

    async with metered(tmp_path, FakeEngine(script=by_bytes)) as (r, clock):
        (tmp_path / "keys").write_text(
            (tmp_path / "keys").read_text() + "sk-other name=other tokens_per_minute=1000000000\n"
        )

        async def reserved() -> int:
            clock.time += PERIOD_S
            return LIMIT - remaining(await complete(r, prompt="word" * 500, max_tokens=1))

        r.http.headers["authorization"] = "Bearer sk-other"
        async with asyncio.timeout(60):
            while (await complete(r)).status_code != 200:  # until the file is read again
                pass
        for _ in range(60):
            assert (await complete(r, prompt="\u0394" * 500, max_tokens=1)).status_code == 200
        (service,) = r.router.fleet.services.values()
        assert service.lengths.bytes_per_token < 3.0, "half of what English has"
        r.http.headers["authorization"] = "Bearer sk-key"
        assert await reserved() == pytest.approx(501, abs=5)


async def test_batches_side_by_side_stay_within_the_limit(tmp_path: Path) -> None:
    limit, prompts, tokens = 5000, 16, 80
    granted = 0

    async def batch(connection: Connection, request: Received) -> None:
        nonlocal granted
        granted += len(request.json["prompt"]) * (3 + tokens)
        await asyncio.sleep(0.01)
        connection.answer(200, usage(3 * prompts, tokens * prompts))

    async with metered(tmp_path, FakeEngine(script=batch), limit=limit) as (r, _):
        answers = await asyncio.gather(
            *(complete(r, prompt=["one two"] * prompts, max_tokens=tokens) for _ in range(20))
        )
        assert {answer.status_code for answer in answers} == {200, 429}
        assert granted <= limit


# how a request may end


async def ask_and_leave(r: Rig, request: dict[str, Any], path: str = "/v1/completions") -> None:
    """Sends a request, and leaves once an engine has it."""
    sent = sum(len(engine.requests) for engine in r.engines)
    body = json.dumps(request).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer sk-key\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    async with raw(r.router) as (_, writer):
        writer.write(head.encode() + body)
        await r.until(lambda: sum(len(engine.requests) for engine in r.engines) > sent)


@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_before_the_first_byte_is_charged_the_prompt(tmp_path: Path, stream: bool) -> None:
    async with metered(tmp_path, FakeEngine(script=never_answer)) as (r, _):
        prompt = "word " * 400
        await ask_and_leave(
            r, {"model": MODEL, "prompt": [prompt, prompt], "max_tokens": 4000, "stream": stream}
        )
        await r.until(lambda: r.router.requests.inflight == 0)
        r.engines[0].script = answer_usage
        assert LIMIT - await left(r) == pytest.approx(2 * len(prompt) / 4.0, abs=20)


async def answer_usage(connection: Connection, request: Received) -> None:
    connection.answer(200, usage(5, 1))


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({"max_tokens": 4000}, 2 / STEP_S),
        ({"max_tokens": 4000, "n": 2}, 2 * 2 / STEP_S),
        ({"max_tokens": 50}, 50),
        ({}, 2 / STEP_S),
    ],
)
async def test_leaving_late_is_charged_what_was_computed(
    tmp_path: Path, fields: dict[str, Any], tokens: float
) -> None:
    async with metered(tmp_path, FakeEngine(script=never_answer), limit=12_000) as (r, clock):
        asked = asyncio.create_task(complete(r, **fields))
        await r.until(lambda: bool(r.engines[0].requests))
        clock.time += 2.0
        asked.cancel()
        await r.until(lambda: r.router.requests.inflight == 0)
        r.engines[0].script = answer_usage
        # Two seconds refill 400 tokens.
        assert 12_000 - await left(r) == pytest.approx(max(0.0, tokens - 400), abs=60)


async def test_a_client_that_leaves_a_response_early_cannot_say_what_it_used(tmp_path: Path) -> None:
    """The first event repeats the tools of the request, in which there may be anything."""
    free = {"input_tokens": 0, "output_tokens": 0, "total_tokens": 0}
    tool = {"type": "function", "name": "f", "parameters": {"type": "object", "usage": free}}

    async def begin(connection: Connection, request: Received) -> None:
        if not request.json.get("stream"):
            connection.answer(200, usage(5, 1))
            return
        connection.begin_stream()
        response = {"id": "resp_1", "tools": request.json["tools"], "usage": None}
        event = json.dumps({"type": "response.created", "response": response}).encode()
        connection.chunk(b"event: response.created\ndata: %b\n\n" % event)
        await connection.gone()

    async with metered(tmp_path, FakeEngine(script=begin)) as (r, _):
        told = "word " * 4000
        asked = {"model": MODEL, "input": told, "tools": [tool], "max_output_tokens": 16, "stream": True}
        async with r.http.stream("POST", "/v1/responses", json=asked) as answer:
            assert await anext(answer.aiter_bytes())
        await r.until(lambda: r.router.requests.inflight == 0)
        assert LIMIT - await left(r) >= len(told) / 4.0


async def test_a_unary_answer_that_is_cut_counts_for_what_was_computed(tmp_path: Path) -> None:
    begun = asyncio.Event()
    die = asyncio.Event()

    async def cut(connection: Connection, _: Received) -> None:
        connection.send(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 9000000\r\n\r\n"
        )
        connection.send(b"{" + b" " * 2_000_000)
        await connection.writer.drain()
        begun.set()
        await die.wait()
        connection.die()

    async with metered(tmp_path, FakeEngine(script=cut), limit=12_000) as (r, clock):
        asked = asyncio.create_task(complete(r))
        await begun.wait()
        await r.until(lambda: r.replica(0).load.queued_tokens == 0)
        clock.time += 2.0
        die.set()
        with pytest.raises(httpx.HTTPError):
            await asked
        await r.until(lambda: r.router.requests.inflight == 0)
        r.engines[0].script = answer_usage
        assert 12_000 - await left(r) == pytest.approx(2 / STEP_S - 400, abs=60)


@pytest.mark.parametrize(
    ("stream", "num_running", "tokens"),
    [(False, 1, 2 / STEP_S - 400), (True, 1, 0), (False, 0, 0), (True, 0, 0)],
    ids=["what was computed", "a stream's prompt", "no answer", "no stream"],
)
async def test_a_request_whose_time_passes_counts_for_what_was_computed(
    tmp_path: Path, stream: bool, num_running: int, tokens: float
) -> None:
    engine = FakeEngine()
    times = {"request_timeout_s": 0.5, "first_byte_timeout_s": 0.5}
    async with metered(tmp_path, engine, limit=12_000, **times) as (r, clock):

        async def compute(connection: Connection, _: Received) -> None:
            clock.time += 2.0  # refills 400 tokens
            await connection.gone()

        engine.script = compute
        engine.announce(Load(core_step_age_s=0.0, num_running=num_running, decode_step_s=STEP_S))
        await r.until(lambda: r.replica(0).load.reported_requests == num_running)
        assert (await complete(r, max_tokens=4000, stream=stream)).status_code == 504
        await r.until(lambda: r.router.requests.inflight == 0)
        engine.script = answer_usage
        assert 12_000 - await left(r) == pytest.approx(tokens, abs=60)


async def test_beams_that_are_not_returned_count(tmp_path: Path) -> None:
    async def beams(connection: Connection, _: Received) -> None:
        connection.answer(200, usage(5, 100))

    async with metered(tmp_path, FakeEngine(script=beams)) as (r, _):
        await complete(r, max_tokens=100, use_beam_search=True, best_of=16)
        assert LIMIT - await left(r) == pytest.approx(16 * 100, abs=20)


async def test_an_error_costs_no_tokens(tmp_path: Path) -> None:
    async def fail(connection: Connection, _: Received) -> None:
        connection.answer(400, b'{"error":{"message":"no"}}')

    async with metered(tmp_path, FakeEngine(script=fail)) as (r, _):
        assert (await complete(r, max_tokens=4000)).status_code == 400
        r.engines[0].script = answer_usage
        assert LIMIT - await left(r) <= 20


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
async def test_no_kind_of_end_leaves_a_request_reserved(tmp_path: Path, script: Any, stream: bool) -> None:
    """A key with two parallel requests is never locked out by those that have ended."""
    keys = tmp_path / "keys"
    keys.write_text("sk-key name=key max_parallel_requests=2 tokens_per_minute=1000000\n")
    async with rig([FakeEngine(script=script), FakeEngine(script=script)], api_keys_file=keys) as r:
        r.http.headers["authorization"] = "Bearer sk-key"
        for number in range(6):
            with contextlib.suppress(httpx.HTTPError):
                answer = await r.chat(f"question {number}", stream=stream, n=2)
                told = answer.json() if answer.status_code == 429 else {}
                assert told.get("error", {}).get("code") != "rate_limit_exceeded"
            await r.until(lambda: r.router.requests.inflight == 0)


async def test_every_sequence_of_a_request_counts_as_parallel(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-key name=key max_parallel_sequences=4\n")
    async with rig([FakeEngine()], api_keys_file=keys) as r:
        r.http.headers["authorization"] = "Bearer sk-key"
        for _ in range(2):
            assert (await r.chat(n=4)).status_code == 200
        answer = await r.chat(n=5)
        assert answer.status_code == 400
        assert "may have 4 in progress" in answer.json()["error"]["message"]
        assert len(r.engines[0].requests) == 2


async def test_a_stream_that_moves_on_is_settled_once(tmp_path: Path) -> None:
    script = ResumableStream(deaths=[400])
    async with metered(tmp_path, FakeEngine(script=script), FakeEngine(script=script)) as (r, _):
        answer = await r.chat(stream=True, max_tokens=4000)
        assert answer.content.endswith(b"data: [DONE]\n\n")
        assert r.metric('migrations_total{model="tiny",outcome="resumed"}') == 1
        assert LIMIT - await left(r) == pytest.approx(7 + 3, abs=12)


# the limits themselves

STEPS = st.lists(
    st.tuples(st.floats(0, 40), st.integers(1, 3000), st.integers(0, 6000), st.booleans()), max_size=80
)


@settings(deadline=None)
@given(STEPS)
def test_granted_tokens_are_the_limit_plus_what_was_underestimated(
    steps: list[tuple[float, int, int, bool]],
) -> None:
    """Requests side by side: whatever they reserve and use, the account gives no more than was refilled, except for
    what those under way were underestimated by, and that is repaid before anything else passes."""
    limit = 1000
    account = Account(KeyTerms(name="a", tokens_per_minute=limit), 0.0)
    now = used = overshoot = 0.0
    pending: list[tuple[Reservation, int, int]] = []
    for pause_s, asked, takes, ends in steps:
        now += pause_s
        if ends and pending:
            reservation, reserved, took = pending.pop(0)
            reservation.settle(took)
            reservation.settle(took)
            used += took
            overshoot += max(0, took - reserved)
        refilled = limit + limit * now / PERIOD_S
        reserved_now = sum(reserved for _, reserved, _ in pending)
        try:
            reservation = account.reserve(asked, now)
        except RateLimited as error:
            wait_s = error.retry_after_s
            assert wait_s is not None
            assert wait_s <= (min(asked, limit) + overshoot) * PERIOD_S / limit + 1e-6
            now += wait_s + 1e-6
            account.reserve(asked, now).cancel()  # debt is repaid at the rate of the limit
        else:
            reserved = min(asked, limit)
            pending.append((reservation, reserved, takes))
            assert used + reserved_now + reserved <= refilled + 1e-6, "nothing passes while there is a debt"
    total = used + sum(takes for _, _, takes in pending)
    overshoot += sum(max(0, takes - reserved) for _, reserved, takes in pending)
    assert total <= limit + limit * now / PERIOD_S + overshoot + 1e-6


@settings(deadline=None)
@given(STEPS)
def test_one_after_another_only_the_last_request_exceeds_the_limit(
    steps: list[tuple[float, int, int, bool]],
) -> None:
    limit = 1000
    account = Account(KeyTerms(name="a", tokens_per_minute=limit), 0.0)
    now, grants = 0.0, []
    for pause_s, asked, takes, _ in steps:
        now += pause_s
        with contextlib.suppress(RateLimited):
            account.reserve(asked, now).settle(takes)
            grants.append((now, takes))
    for first in range(len(grants)):
        for last in range(first, len(grants)):
            between = limit + limit * (grants[last][0] - grants[first][0]) / PERIOD_S
            assert sum(takes for _, takes in grants[first:last]) <= between + 1e-6
