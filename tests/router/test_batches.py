"""/v1/batches through a router: from the upload to the results, with OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError
from openai.types import Batch

from argosy_batch import line_requests, router_client
from argosy_batch.batch_run import MAX_RUNNING, MAX_RUNNING_OF_OWNER
from argosy_batch.router_client import AnswerMemory, HeldAnswer
from argosy_protocol.fleet import ServiceLimits

from .batch_rig import DEADLINE_S, line, lines, official, results, start_batch, stored
from .fake_engine import Connection, FakeEngine, Received, answer_normally, completion
from .harness import MODEL, chat, is_settled, until


async def ended(client: AsyncOpenAI, batch: Batch) -> Batch:
    async with asyncio.timeout(DEADLINE_S):
        while batch.status not in ("completed", "failed", "cancelled", "expired"):
            await asyncio.sleep(0.01)
            batch = await client.batches.retrieve(batch.id)
        return batch


def content_of(request: Received) -> str:
    return str(request.json["messages"][0]["content"])


async def echo(connection: Connection, request: Received) -> None:
    """Answers with what it was asked."""
    connection.answer(200, completion(content_of(request), cached=4))


async def test_a_batch_runs_to_its_end_and_its_files_have_a_line_per_request(tmp_path: Path) -> None:
    async def script(connection: Connection, request: Received) -> None:
        if content_of(request) == "bad":
            connection.answer(400, b'{"error":{"message":"too\\nbad",\n"type":"invalid_request_error"}}')
        else:
            await echo(connection, request)

    async with stored(tmp_path, [FakeEngine(script=script)]) as r, official(r) as client:
        content = lines(*map(str, range(30)), "bad") + line("elsewhere", model="unknown") + b"\n"
        batch = await start_batch(client, content, metadata={"for": "a test"})
        assert (batch.status, batch.endpoint, batch.metadata) == (
            "validating",
            "/v1/chat/completions",
            {"for": "a test"},
        )
        assert batch.expires_at == batch.created_at + 86400
        batch = await ended(client, batch)
        assert batch.status == "completed"
        assert batch.request_counts is not None
        assert batch.request_counts.to_dict() == {"total": 32, "completed": 30, "failed": 2}
        assert batch.usage is not None
        assert (batch.usage.input_tokens, batch.usage.output_tokens, batch.usage.total_tokens) == (
            300,
            30,
            330,
        )
        assert batch.usage.input_tokens_details.cached_tokens == 120
        assert batch.model == MODEL
        assert batch.in_progress_at is not None
        assert batch.finalizing_at is not None
        assert batch.completed_at is not None

        good = await results(client, batch.output_file_id)
        assert set(good) == set(map(str, range(30)))
        for custom_id, result in good.items():
            response = result["response"]
            assert (response["status_code"], result["error"]) == (200, None)
            assert response["body"]["choices"][0]["message"]["content"] == custom_id
            assert result["id"].startswith("batch_req_")
            assert response["request_id"]
        bad = await results(client, batch.error_file_id)
        assert bad["bad"]["response"]["body"]["error"]["message"] == "too\nbad"
        assert bad["elsewhere"]["response"]["status_code"] == 404
        assert bad["elsewhere"]["response"]["body"]["error"]["code"] == "model_not_found"
        assert [file.purpose async for file in client.files.list()] == [
            "batch_output",
            "batch_output",
            "batch",
        ]
        objects = tmp_path / "storage" / "objects"
        await until(lambda: not [*objects.glob("work/*/*"), *objects.glob("leases/*/*")], DEADLINE_S)
        await until(lambda: is_settled(r))
        assert r.jobs_metric('batches_ended_total{status="completed"}') == 1
        assert r.jobs_metric('requests_total{outcome="completed"}') == 30
        assert r.jobs_metric('requests_total{outcome="failed"}') == 2
        assert r.metric("batch_requests_inflight") == 0


async def test_a_batch_of_embeddings_or_completions_runs_too(tmp_path: Path) -> None:
    async def script(connection: Connection, request: Received) -> None:
        connection.answer(200, b'{"object":"list","data":[],"usage":{"prompt_tokens":3,"total_tokens":3}}')

    async with stored(tmp_path, [FakeEngine(script=script)]) as r, official(r) as client:
        for endpoint, fields in (("/v1/embeddings", {"input": "a"}), ("/v1/completions", {"prompt": "a"})):
            body = {"model": MODEL, **fields}
            request = {"custom_id": "a", "method": "POST", "url": endpoint, "body": body}
            batch = await ended(
                client, await start_batch(client, json.dumps(request).encode(), endpoint=endpoint)
            )
            assert (batch.status, batch.error_file_id) == ("completed", None)
            assert len(await results(client, batch.output_file_id)) == 1


async def test_a_file_with_faults_fails_the_batch_and_tells_them(tmp_path: Path) -> None:
    async with stored(tmp_path, [FakeEngine()]) as r, official(r) as client:
        batch = await ended(client, await start_batch(client, lines("a", "b", "a") + b"{\n"))
        assert batch.status == "failed"
        assert batch.failed_at is not None
        assert batch.errors is not None
        assert batch.errors.data is not None
        told = [(error.code, error.line, error.param) for error in batch.errors.data]
        assert told == [("duplicate_custom_id", 3, "custom_id"), ("invalid_json_line", 4, None)]
        assert r.engines[0].requests == []


async def test_more_requests_than_allowed_fail_the_batch(tmp_path: Path) -> None:
    async with stored(tmp_path, [FakeEngine()], {"batch_max_requests": 2}) as r, official(r) as client:
        batch = await ended(client, await start_batch(client, lines("a", "b", "c")))
        assert batch.errors is not None
        assert batch.errors.data is not None
        assert [error.code for error in batch.errors.data] == ["maximum_requests_exceeded"]


async def test_batches_belong_to_the_key_that_made_them(tmp_path: Path) -> None:
    async with stored(tmp_path, [FakeEngine()]) as r, official(r) as shop, official(r, "sk-lab") as lab:
        batch = await start_batch(shop, lines("a"))
        with pytest.raises(NotFoundError):
            await lab.batches.retrieve(batch.id)
        with pytest.raises(NotFoundError):
            await lab.batches.cancel(batch.id)
        with pytest.raises(BadRequestError, match="there is no file"):
            await lab.batches.create(
                input_file_id=batch.input_file_id, endpoint="/v1/chat/completions", completion_window="24h"
            )
        assert [each async for each in lab.batches.list()] == []
        batch = await ended(shop, batch)
        with pytest.raises(NotFoundError):
            await lab.files.content(batch.output_file_id or "")
        assert r.metric('usage_requests_total{key="shop"') == 1, "the key that made the batch pays for it"


async def test_batches_are_listed_in_pages_the_newest_first(tmp_path: Path) -> None:
    async with stored(tmp_path, [FakeEngine()]) as r, official(r) as client:
        made = [(await start_batch(client, lines("a"))).id for _ in range(5)]
        assert [batch.id async for batch in client.batches.list(limit=2)] == made[::-1]
        page = await client.batches.list(limit=2)
        assert (page.has_more, [batch.id for batch in page.data]) == (True, made[:2:-1])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/messages"}, "endpoint"),
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"input_file_id": "file-1"}, "input_file_id"),
        ({"input_file_id": "../../keys"}, "input_file_id"),
        ({"priority": 1}, "priority"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after.seconds"),
    ],
)
async def test_a_request_for_a_batch_is_checked(tmp_path: Path, fields: dict[str, Any], param: str) -> None:
    async with stored(tmp_path, [FakeEngine()]) as r, official(r) as client:
        file = await client.files.create(file=lines("a"), purpose="batch")
        given = {"input_file_id": file.id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        answer = await r.http.post("/v1/batches", json={**given, **fields})
        error = answer.json()["error"]
        assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
        assert (error["param"] or "").startswith(param)


async def test_a_cancelled_batch_keeps_the_results_that_it_has(tmp_path: Path) -> None:
    may_answer = asyncio.Event()

    async def script(connection: Connection, request: Received) -> None:
        if content_of(request) != "first":
            await may_answer.wait()
        await echo(connection, request)

    limits = {"lease_s": 3.0}
    async with stored(tmp_path, [FakeEngine(script=script)], limits) as r, official(r) as client:
        batch = await start_batch(client, lines("first", "second", "third"))
        await until(lambda: r.jobs_metric('requests_total{outcome="completed"}') == 1, DEADLINE_S)
        batch = await client.batches.cancel(batch.id)
        assert batch.status in ("cancelling", "cancelled")
        batch = await ended(client, batch)
        assert (batch.status, batch.error_file_id) == ("cancelled", None)
        assert set(await results(client, batch.output_file_id)) == {"first"}
        await until(lambda: is_settled(r), DEADLINE_S)
        with pytest.raises(NotFoundError):
            await client.batches.cancel("batch_1")
        assert (await client.batches.cancel(batch.id)).status == "cancelled"
        may_answer.set()


async def test_an_ended_batch_cannot_be_cancelled(tmp_path: Path) -> None:
    async with stored(tmp_path, [FakeEngine()]) as r, official(r) as client:
        batch = await ended(client, await start_batch(client, lines("a")))
        with pytest.raises(BadRequestError, match="'completed' cannot be cancelled"):
            await client.batches.cancel(batch.id)


async def test_requests_of_batches_go_behind_all_others(tmp_path: Path) -> None:
    order: list[str] = []
    may_answer = asyncio.Event()

    async def script(connection: Connection, request: Received) -> None:
        order.append(content_of(request))
        await may_answer.wait()
        await echo(connection, request)

    engine = FakeEngine(script=script)
    one = {"limits": ServiceLimits(max_inflight_per_replica=1)}
    async with stored(tmp_path, [engine], fields=one) as r, official(r) as client:
        first = asyncio.create_task(r.chat("first"))
        await until(lambda: order == ["first"])
        batch = await start_batch(client, lines("batch-1", "batch-2"))
        await until(lambda: r.metric("queued_requests") == 1, DEADLINE_S)
        later = []
        for number in range(3):
            later.append(asyncio.create_task(r.chat(f"chat-{number}")))
            await until(lambda: r.metric("queued_requests") == 1 + len(later), DEADLINE_S)
        may_answer.set()
        await asyncio.gather(first, *later)
        await ended(client, batch)
        assert order[1:4] == ["chat-0", "chat-1", "chat-2"]
        assert sorted(order[4:]) == ["batch-1", "batch-2"]


async def test_many_batches_of_one_key_leave_room_to_run_those_of_another(tmp_path: Path) -> None:
    may_answer = asyncio.Event()

    async def script(connection: Connection, request: Received) -> None:
        if content_of(request) == "slow":
            await may_answer.wait()
        await echo(connection, request)

    engine = FakeEngine(script=script)
    async with stored(tmp_path, [engine]) as r, official(r) as shop, official(r, "sk-lab") as lab:
        slow = [await start_batch(shop, lines("slow")) for _ in range(MAX_RUNNING)]
        await until(lambda: len(engine.requests) == MAX_RUNNING_OF_OWNER, DEADLINE_S)
        assert (await ended(lab, await start_batch(lab, lines("quick")))).status == "completed"
        assert len(engine.requests) == MAX_RUNNING_OF_OWNER + 1
        may_answer.set()
        for batch in slow:
            assert (await ended(shop, batch)).status == "completed"


@pytest.mark.parametrize("is_queued", [False, True], ids=["refused at once", "refused after a while"])
async def test_batches_that_only_wait_yield_their_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_queued: bool
) -> None:
    monkeypatch.setattr(line_requests, "YIELD_AFTER_S", 0.0)
    looked = asyncio.Event()
    may_answer = False
    most = 0

    async def script(connection: Connection, request: Received) -> None:
        if content_of(request) == "quick" or may_answer:
            await echo(connection, request)
            return
        if is_queued:
            await looked.wait()
        connection.answer(503, b'{"error":{"message":"full"}}')

    async with stored(tmp_path, [FakeEngine(script=script)]) as r, official(r) as client:
        assert r.jobs is not None
        stuck = [await start_batch(client, lines("a", "b")) for _ in range(MAX_RUNNING_OF_OWNER + 2)]
        quick = await start_batch(client, lines("quick"))
        async with asyncio.timeout(DEADLINE_S):
            while (quick := await client.batches.retrieve(quick.id)).status != "completed":
                running = r.jobs_metric('batches{status="in_progress"}') + r.jobs_metric(
                    'batches{status="finalizing"}'
                )
                most = max(most, int(running))
                r.jobs.runner.wake()
                looked.set()
                looked.clear()
        assert 0 < most <= MAX_RUNNING_OF_OWNER
        may_answer = True
        looked.set()
        for batch in stuck:
            r.jobs.runner.wake()
            done = await ended(client, batch)
            assert done.request_counts is not None
            assert done.request_counts.to_dict() == {"total": 2, "completed": 2, "failed": 0}
            assert sorted(await results(client, done.output_file_id)) == ["a", "b"]


async def test_the_results_of_a_batch_take_twice_the_quota_at_most(tmp_path: Path) -> None:
    """Requests of a few bytes may have answers of megabytes, such as embeddings of many texts."""
    size = 100_000

    async def large(connection: Connection, _: Received) -> None:
        connection.answer(200, completion("x" * (size // 2)))  # which has it twice

    limits = {"storage_max_bytes": 5 * size, "batch_max_inflight": 1}
    async with stored(tmp_path, [FakeEngine(script=large)], limits) as r, official(r) as client:
        batch = await ended(client, await start_batch(client, lines(*map(str, range(30)))))
        counts = batch.request_counts
        assert counts is not None
        assert (batch.status, counts.total) == ("completed", 30)
        assert 5 < counts.completed < 15
        failed = await results(client, batch.error_file_id)
        assert len(failed) == counts.failed == 30 - counts.completed
        assert {each["error"]["code"] for each in failed.values()} == {"storage_quota_exceeded"}
        assert len(r.engines[0].requests) - 1 <= counts.completed + 1, "nothing else was computed"


async def test_answers_of_all_batches_share_a_bound_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, pieces, limit = 4_000_000, 40, 3_000_000
    monkeypatch.setattr(router_client, "MAX_HELD_BYTES", limit)
    held: list[int] = []
    add = AnswerMemory.add

    def counted(memory: AnswerMemory, answer: HeldAnswer, more: int) -> None:
        add(memory, answer, more)
        held.append(memory.held)

    monkeypatch.setattr(AnswerMemory, "add", counted)

    async def script(connection: Connection, request: Received) -> None:
        body = completion("x" * size)
        connection.send(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        )
        for start in range(0, len(body), size // pieces):
            connection.send(body[start : start + size // pieces])
            await connection.writer.drain()
            await asyncio.sleep(0.001)

    async with (
        stored(tmp_path, [FakeEngine(script=script)], {"batch_share": 1.0}) as r,
        official(r) as client,
    ):
        batches = [await start_batch(client, lines(*"abcd")) for _ in range(2)]
        for batch in batches:
            done = await ended(client, batch)
            assert done.request_counts is not None
            assert done.request_counts.completed == 4
    assert limit < max(held) <= limit + size + 8 * 1_500_000, "without a bound there are 8 * size"


async def test_engines_that_schedule_by_priority_get_that_of_batches(tmp_path: Path) -> None:
    engine = FakeEngine(hello={"schedules_by_priority": True})
    async with stored(tmp_path, [engine]) as r, official(r) as client:
        await ended(client, await start_batch(client, lines("a")))
        await r.http.post("/v1/chat/completions", json=chat("b"))
        priorities = {content_of(request): request.json.get("priority", 0) for request in engine.requests}
        assert priorities == {"a": 1 << 30, "b": 0}


async def test_batches_take_their_share_of_the_capacity(tmp_path: Path) -> None:
    running = most = 0
    may_answer = asyncio.Event()

    async def script(connection: Connection, request: Received) -> None:
        nonlocal running, most
        if content_of(request) == "chat":
            await echo(connection, request)
            return
        running += 1
        most = max(most, running)
        await may_answer.wait()
        running -= 1
        await echo(connection, request)

    fields = {"limits": ServiceLimits(max_inflight_per_replica=8)}
    limits = {"batch_share": 0.5}
    async with (
        stored(tmp_path, [FakeEngine(script=script)], limits, fields=fields) as r,
        official(r) as client,
    ):
        batch = await start_batch(client, lines(*map(str, range(20))))
        await until(lambda: running == 4, DEADLINE_S)
        for _ in range(4):
            answers = await asyncio.gather(*(r.chat("chat") for _ in range(4)))
            assert {answer.status_code for answer in answers} == {200}, "the other half is free for them"
        may_answer.set()
        assert (await ended(client, batch)).status == "completed"
        assert most == 4


async def test_requests_are_repeated_after_408_429_and_503(tmp_path: Path) -> None:
    hints = (b"1", b"\xb2")  # a number, and a character that is one elsewhere
    refused: set[str] = set()

    async def script(connection: Connection, request: Received) -> None:
        content = content_of(request)
        if content in refused:
            await answer_normally(connection, request)
            return
        refused.add(content)
        status, hint = {"a": 429, "b": 503, "c": 408}[content[0]], hints[int(content[1])]
        headers = b"content-type: application/json\r\nretry-after: %b\r\ncontent-length: 2\r\n\r\n" % hint
        connection.send(b"HTTP/1.1 %d X\r\n%b{}" % (status, headers))

    async with stored(tmp_path, [FakeEngine(script=script)]) as r, official(r) as client:
        batch = await ended(client, await start_batch(client, lines("a0", "b0", "c0", "a1", "b1", "c1")))
        assert batch.request_counts is not None
        assert batch.request_counts.to_dict() == {"total": 6, "completed": 6, "failed": 0}


async def test_a_router_that_stops_leaves_its_batches_to_the_next_one(tmp_path: Path) -> None:
    may_answer = asyncio.Event()

    async def script(connection: Connection, request: Received) -> None:
        if int(content_of(request)) >= 10:
            await may_answer.wait()
        await echo(connection, request)

    engine = FakeEngine(script=script)
    async with engine:
        async with stored(tmp_path, [engine], shutdown_timeout_s=0.0) as r, official(r) as client:
            batch = await start_batch(client, lines(*map(str, range(20))))
            await until(lambda: r.jobs_metric('requests_total{outcome="completed"}') == 10, DEADLINE_S)
            await r.router.drain()
        asked_first = len(engine.requests)
        may_answer.set()
        async with stored(tmp_path, [engine]) as r, official(r) as client:
            batch = await ended(client, await client.batches.retrieve(batch.id))
            assert batch.status == "completed"
            assert set(await results(client, batch.output_file_id)) == set(map(str, range(20)))
            asked_again = [content_of(request) for request in engine.requests[asked_first:]]
            assert sorted(asked_again, key=int) == [str(number) for number in range(10, 20)]


async def test_a_batch_of_many_requests_runs(tmp_path: Path) -> None:
    engine = FakeEngine()
    async with stored(tmp_path, [engine], {"batch_share": 1.0}) as r, official(r) as client:
        contents = [f"request {number}" for number in range(300)]
        batch = await ended(client, await start_batch(client, lines(*contents)))
        assert set(await results(client, batch.output_file_id)) == set(contents)
        assert len(engine.requests) == 300


async def test_a_hundred_thousand_lines_are_refused_while_others_are_served(tmp_path: Path) -> None:
    head = b'{"method":"POST","url":"/v1/chat/completions","body":{"model":"tiny"},"custom_id":"%d"}\n'
    content = b"".join(head % number for number in range(100_000))
    async with stored(tmp_path, [FakeEngine()]) as r, official(r) as client:
        batch = await start_batch(client, content)
        assert (await r.chat()).status_code == 200
        batch = await ended(client, batch)
        assert batch.errors is not None
        assert batch.errors.data is not None
        assert [error.code for error in batch.errors.data] == ["maximum_requests_exceeded"]
