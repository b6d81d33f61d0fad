"""Response statuses of replicas: which are retried, which count as failures, and what the client gets."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from argosy_router.proxy.relay import CONSECUTIVE_ERRORS, Refused, is_fault, refusal

from .fake_engine import Connection, FakeEngine, Received, Script, completion
from .harness import rig


def answering(status: int, headers: str = "") -> Script:
    async def script(connection: Connection, _: Received) -> None:
        lines = "content-type: application/json\r\n" + headers
        connection.answer(status, b'{"error":{"message":"of the engine"}}', lines)

    return script


@pytest.mark.parametrize(
    ("status", "goes_elsewhere", "counts_against"),
    [
        (200, False, False),
        (400, False, False),
        (404, False, False),
        (401, True, True),
        (403, True, True),
        (429, True, False),
        (500, False, True),
        (501, False, False),
        (502, True, True),
        (503, True, False),
        (504, True, True),
        (520, False, True),
    ],
)
def test_every_status_has_its_outcome(status: int, goes_elsewhere: bool, counts_against: bool) -> None:
    assert (refusal(status) is not None) is goes_elsewhere
    assert is_fault(status) is counts_against


@pytest.mark.parametrize(
    ("line", "seconds"),
    [
        (b"retry-after: 7\r\n", 7.0),
        (b"x: 1\r\nRetry-After:  30\r\n", 30.0),
        (b"retry-after: 100000\r\n", 60.0),
        (b"retry-after: 0\r\n", 1.0),
        (b"retry-after: Fri, 31 Dec 1999 23:59:59 GMT\r\n", 1.0),
        (b"x-retry-after: 9\r\n", 1.0),
        (b"", 1.0),
    ],
)
def test_the_replicas_hint_is_kept_within_bounds(line: bytes, seconds: float) -> None:
    assert Refused(429, line).retry_after_s == seconds


@pytest.mark.usefixtures("ejections_last")
@pytest.mark.parametrize("status", [429, 502, 503, 504])
async def test_retryable_statuses_are_retried_elsewhere(status: int) -> None:
    engines = [FakeEngine(script=answering(status, "retry-after: 60\r\n")), FakeEngine()]
    async with rig(engines, policy="round-robin") as r:
        answers = [await r.chat(f"q {number}") for number in range(8)]
        assert [answer.status_code for answer in answers] == [200] * 8
        is_ejected = r.replica(0).health.is_ejected
        assert is_ejected is (status in (502, 504))
        assert len(engines[0].requests) == (3 if is_ejected else 1), "or it rests"


async def test_a_replica_that_always_fails_does_not_attract_the_traffic() -> None:
    async def good(connection: Connection, _: Received) -> None:
        await asyncio.sleep(0.02)
        connection.answer(200, completion())

    engines = [FakeEngine(script=answering(500)), FakeEngine(script=good), FakeEngine(script=good)]
    async with rig(engines) as r:
        workers = 6
        statuses: Counter[int] = Counter()

        async def ask(worker: int) -> None:
            for number in range(10):
                statuses[(await r.chat(f"{worker} {number} " + "w" * 600)).status_code] += 1

        await asyncio.gather(*map(ask, range(workers)))
        assert r.replica(0).health.is_ejected
        # Until the ejection each worker may have one more under way; then one probe at a time.
        failures = r.metric('upstream_failures_total{model="tiny",reason="status",replica="r0"}')
        assert CONSECUTIVE_ERRORS <= failures < CONSECUTIVE_ERRORS + 2 * workers
        assert statuses == {200: 10 * workers}, "another one answered"


async def test_one_request_s_error_is_returned_and_ejects_no_replica() -> None:
    async def picky(connection: Connection, request: Received) -> None:
        await answering(500 if b"bad" in request.body else 200)(connection, request)

    engines = [FakeEngine(script=picky), FakeEngine(script=picky)]
    async with rig(engines, policy="round-robin") as r:
        for _ in range(2 * CONSECUTIVE_ERRORS):
            assert (await r.chat("bad")).status_code == 500
            assert (await r.chat("good")).status_code == 200
            assert (await r.chat("good")).status_code == 200
        assert not any(replica.health.is_ejected for replica in r.router.fleet.replicas())
        assert r.metric("retries_total") == 2 * CONSECUTIVE_ERRORS, "each was tried once more"


async def test_errors_do_not_end_an_ejection() -> None:
    async with rig([FakeEngine(script=answering(500)), FakeEngine()]) as r:
        health = r.replica(0).health
        assert health.failed(r.router.requests.now() - 100.0, may_eject=True, refused=True)
        assert (await r.chat(model="tiny")).status_code in (200, 500)
        for number in range(4):
            await r.chat(str(number))
        assert health.is_ejected


@pytest.mark.parametrize("status", [429, 503])
async def test_a_busy_fleet_answers_with_a_retry_hint(status: int) -> None:
    engines = [FakeEngine(script=answering(status, "retry-after: 7\r\n")) for _ in range(2)]
    async with rig(engines) as r:
        answer = await r.chat()
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "7"
        assert answer.headers["x-should-retry"] == "true"
        assert answer.json()["error"]["type"] == "rate_limit_error"
        assert "of the engine" not in answer.text
        assert [len(engine.requests) for engine in engines] == [1, 1]


@pytest.mark.parametrize("status", [502, 504])
async def test_a_gateways_page_never_reaches_the_client(status: int) -> None:
    async with rig([FakeEngine(script=answering(status))]) as r:
        answer = await r.chat()
        assert answer.status_code == 502
        assert answer.headers["retry-after"] == "1"
        assert "of the engine" not in answer.text
