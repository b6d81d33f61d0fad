"""Polling fetching pods: what is kept of their answers, how often they are asked, and which answers cost nothing."""

from __future__ import annotations

import asyncio
import gzip
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from aiohttp import web
from builders import NOW
from fetching import RUNNING, ended, fetching_pod, report, so_far
from virtual_time import virtual_time

from argosy_operator.cluster import fetch_watch
from argosy_operator.cluster.fetch_watch import (
    BURST,
    CHANGE_INTERVAL,
    DEADLINE,
    MAX_POLLS_AT_ONCE,
    MAX_POLLS_PER_SECOND,
    POLL_INTERVAL,
    SERVICE_INTERVAL,
    SLOW_CHANGE_INTERVAL,
    FetchingPod,
    FetchWatch,
    http_progress,
    read_fetching_pod,
)
from argosy_operator.names import Name
from argosy_protocol.reports import MAX_REPORT_BYTES, PROGRESS_PATH, ModelProgress


def pod(name: str, container_id: str = "c1", namespace: str = "team") -> FetchingPod:
    return FetchingPod(
        uid=f"uid-{name}", name=name, service=(namespace, "tiny"), address=name, container_id=container_id
    )


class Fetchers:
    """Pods by address: a report, an error, or None for one that never answers."""

    def __init__(self, **answers: ModelProgress | Exception | None) -> None:
        self.answers = answers
        self.asked: list[tuple[float, str]] = []

    async def __call__(self, address: str) -> ModelProgress:
        self.asked.append((asyncio.get_running_loop().time(), address))
        answer = self.answers[address]
        if answer is None:
            await asyncio.Event().wait()
        if isinstance(answer, Exception):
            raise answer
        assert answer is not None
        return answer


class Changes(list[tuple[float, Name]]):
    def __call__(self, service: Name) -> None:
        self.append((asyncio.get_running_loop().time(), service))


@virtual_time
async def test_view_follows_the_reports() -> None:
    fetchers, changes = Fetchers(a=so_far(10), b=report("waiting")), Changes()
    watch = FetchWatch(fetchers, changes)
    watch.set_pods([pod("a"), pod("b")])
    await asyncio.sleep(1)
    assert watch.view == {"uid-a": so_far(10), "uid-b": report("waiting")}
    assert [service for _, service in changes] == [("team", "tiny"), ("team", "tiny")]
    fetchers.answers["a"] = so_far(20)
    await asyncio.sleep(2 * CHANGE_INTERVAL)
    assert watch.view["uid-a"] == so_far(20)
    assert len(changes) == 3
    watch.close()


@virtual_time
async def test_a_pod_is_polled_often_and_announces_changes_seldom() -> None:
    fetchers, changes = Fetchers(a=so_far(0, eta_seconds=0.0)), Changes()
    watch = FetchWatch(fetchers, changes)
    watch.set_pods([pod("a")])
    for second in range(60):
        fetchers.answers["a"] = so_far(second, eta_seconds=float(second))
        await asyncio.sleep(1)
    assert 60 / CHANGE_INTERVAL / 2 <= len(changes) <= 60 / CHANGE_INTERVAL + 1
    changes.clear()
    fetchers.asked.clear()
    await asyncio.sleep(60)
    assert len(changes) <= 1, "the same report is no change"
    assert len(fetchers.asked) >= 60 / POLL_INTERVAL / 2
    fetchers.answers["a"] = so_far(59, eta_seconds=59.4, revision="1a2b3c")
    changes.clear()
    await asyncio.sleep(10)
    watch.close()
    assert changes == [], "what is not shown is no change"


@pytest.mark.parametrize(
    "answer",
    [
        None,
        ConnectionRefusedError(),
        ConnectionResetError("cut"),
        msgspec.ValidationError("wrong"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "wrong"),
        ValueError("too long"),
        RecursionError("too deep"),
    ],
    ids=repr,
)
@virtual_time
async def test_a_pod_without_a_usable_answer_costs_the_others_nothing(answer: Exception | None) -> None:
    fetchers, changes = Fetchers(bad=answer, good=so_far(10)), Changes()
    watch = FetchWatch(fetchers, changes)
    watch.set_pods([pod("bad"), pod("good")])
    await asyncio.sleep(30)
    assert watch.view == {"uid-good": so_far(10)}
    assert len(changes) <= 2, "one report, and that all were asked"
    bad = [at for at, address in fetchers.asked if address == "bad"]
    assert len(bad) >= 30 / (POLL_INTERVAL + DEADLINE) / 2, "it is asked again"
    fetchers.answers["bad"] = so_far(5)
    await asyncio.sleep(2 * (POLL_INTERVAL + DEADLINE))
    assert watch.view["uid-bad"] == so_far(5)
    fetchers.answers["bad"] = answer
    await asyncio.sleep(30)
    assert watch.view["uid-bad"] == so_far(5), "its last report still counts"
    watch.close()


@virtual_time
async def test_a_new_attempt_begins_without_a_report() -> None:
    fetchers = Fetchers(a=so_far(90))
    watch = FetchWatch(fetchers, Changes())
    watch.follow(pod("a"))
    await asyncio.sleep(1)
    fetchers.answers["a"] = ConnectionRefusedError()
    watch.follow(pod("a"))
    assert watch.view == {"uid-a": so_far(90)}, "the same attempt"
    watch.follow(pod("a", "c2"))
    assert watch.view == {}
    await asyncio.sleep(10)
    assert watch.view == {}
    watch.close()


@virtual_time
async def test_a_pod_that_is_gone_is_asked_no_more() -> None:
    fetchers = Fetchers(a=so_far(10), b=so_far(20), c=None)
    watch = FetchWatch(fetchers, Changes())
    watch.set_pods([pod("a"), pod("b"), pod("c")])
    await asyncio.sleep(1)
    watch.set_pods([pod("b")])
    assert watch.view == {"uid-b": so_far(20)}
    watch.forget("uid-b")
    watch.forget("uid-of-a-router")
    assert watch.view == {}
    fetchers.asked.clear()
    await asyncio.sleep(60)
    assert fetchers.asked == []
    assert [task for task in asyncio.all_tasks() if task.get_name().startswith("fetch of")] == []


@virtual_time
async def test_many_pods_are_polled_at_a_bounded_rate() -> None:
    names = [f"p{number}" for number in range(1000)]
    fetchers = Fetchers(**dict.fromkeys(names, so_far(10)))
    watch = FetchWatch(fetchers, Changes())
    watch.set_pods(map(pod, names))
    await asyncio.sleep(200)
    watch.close()
    assert len(fetchers.asked) <= len(names) + 200 * MAX_POLLS_PER_SECOND
    turns = Counter(address for _, address in fetchers.asked)
    assert min(turns[name] for name in names) >= 200 * MAX_POLLS_PER_SECOND / len(names) / 2, (
        "each has its turn"
    )


@virtual_time
async def test_many_pods_of_one_service_announce_a_bounded_number_of_changes() -> None:
    names = [f"p{number}" for number in range(1000)]
    fetchers, changes = Fetchers(**dict.fromkeys(names, so_far(0))), Changes()
    watch = FetchWatch(fetchers, changes)
    watch.set_pods(map(pod, names))
    for step in range(20):
        fetchers.answers = dict.fromkeys(names, so_far(step))
        await asyncio.sleep(10)
    num_told = len(watch.view)
    watch.close()
    bound = BURST + 200 / SERVICE_INTERVAL
    assert bound / 2 <= len(changes) <= bound + 1, "and one when all were asked for the first time"
    assert num_told >= bound / 2, "each has its turn"


@virtual_time
async def test_many_pods_of_one_service_do_not_slow_down_another_one() -> None:
    names = [f"p{number}" for number in range(100)]
    fetchers, changes = Fetchers(alone=so_far(0), **dict.fromkeys(names, so_far(0))), Changes()
    watch = FetchWatch(fetchers, changes)
    alone = msgspec.structs.replace(pod("alone"), service=("team", "other"))
    watch.set_pods([alone, *map(pod, names)])
    for second in range(60):
        fetchers.answers = dict.fromkeys(("alone", *names), so_far(second))
        await asyncio.sleep(1)
    watch.close()
    assert [name for _, name in changes].count(("team", "other")) >= 60 / CHANGE_INTERVAL / 2


@virtual_time
async def test_slow_progress_is_announced_seldom() -> None:
    fetchers, changes = Fetchers(a=so_far(43)), Changes()
    watch = FetchWatch(fetchers, changes)
    watch.set_pods([pod("a")])
    for second in range(300):
        fetchers.answers["a"] = so_far(43, eta_seconds=9000.0 - 60 * second)
        await asyncio.sleep(1)
    assert 300 / SLOW_CHANGE_INTERVAL / 2 <= len(changes) <= 300 / SLOW_CHANGE_INTERVAL + 2
    changes.clear()
    fetchers.answers["a"] = so_far(43, note="503 from the hub")
    await asyncio.sleep(2 * CHANGE_INTERVAL)
    watch.close()
    assert len(changes) == 1, "what stops it is told at once"


@virtual_time
async def test_replaced_pods_of_a_service_announce_no_more_than_its_other_pods() -> None:
    names = [f"p{number}" for number in range(60)]
    fetchers, changes = Fetchers(**dict.fromkeys(names, so_far(10))), Changes()
    watch = FetchWatch(fetchers, changes)
    for name in names:
        watch.set_pods([pod(name)])
        await asyncio.sleep(0.1)
    watch.set_pods([])
    assert BURST <= len(changes) <= BURST + 60 * 0.1 / SERVICE_INTERVAL + 1
    changes.clear()
    await asyncio.sleep(BURST * SERVICE_INTERVAL)
    watch.set_pods(map(pod, names))
    await asyncio.sleep(2)
    watch.close()
    assert BURST <= len(changes) <= BURST + 2 / SERVICE_INTERVAL + 1, "what was not used comes back"


@virtual_time
async def test_that_all_pods_were_asked_is_told_late_after_many_changes() -> None:
    names = [f"p{number}" for number in range(BURST)]
    fetchers, changes = (
        Fetchers(**dict.fromkeys(names, so_far(10)), silent=ConnectionRefusedError()),
        Changes(),
    )
    watch = FetchWatch(fetchers, changes)
    watch.set_pods(map(pod, names))
    await asyncio.sleep(0.5)
    assert len(changes) == BURST
    watch.set_pods([pod("silent")])
    await asyncio.sleep(0.5)
    assert watch.unpolled == set()
    assert len(changes) == BURST
    await asyncio.sleep(60)
    watch.close()
    assert len(changes) == BURST + 1, "once, when the service may announce a change again"


@virtual_time
async def test_what_was_not_asked_yet_is_known() -> None:
    fetchers, changes = Fetchers(a=ConnectionRefusedError(), b=None), Changes()
    watch = FetchWatch(fetchers, changes)
    watch.set_pods([pod("a"), pod("b")])
    assert watch.unpolled == {"uid-a", "uid-b"}
    await asyncio.sleep(1)
    assert watch.unpolled == {"uid-b"}
    assert changes == []
    await asyncio.sleep(DEADLINE)
    assert watch.unpolled == set()
    assert [name for _, name in changes] == [("team", "tiny")], "the service is looked at when all were asked"
    watch.follow(pod("a", "c2"))
    assert watch.unpolled == {"uid-a"}
    watch.forget("uid-a")
    assert watch.unpolled == set()
    watch.close()


@virtual_time
async def test_a_restart_does_not_ask_all_pods_at_once() -> None:
    names = [f"p{number}" for number in range(1000)]
    fetchers = Fetchers(**dict.fromkeys(names, so_far(10)))
    watch = FetchWatch(fetchers, Changes())
    watch.set_pods(map(pod, names))
    await asyncio.sleep(60)
    watch.close()
    in_second = Counter(int(at) for at, _ in fetchers.asked)
    assert max(in_second.values()) < 2 * MAX_POLLS_PER_SECOND


@virtual_time
async def test_pods_that_never_answer_occupy_a_bounded_number_of_polls() -> None:
    running = most = 0

    async def ask(address: str) -> ModelProgress:
        nonlocal running, most
        running += 1
        most = max(most, running)
        try:
            await asyncio.Event().wait()
        finally:
            running -= 1
        raise AssertionError

    watch = FetchWatch(ask, Changes())
    watch.set_pods(pod(f"p{number}", namespace=f"team-{number % 10}") for number in range(100))
    await asyncio.sleep(60)
    watch.close()
    assert most == MAX_POLLS_AT_ONCE


@virtual_time
async def test_pods_of_one_namespace_that_never_answer_do_not_keep_others_from_being_asked() -> None:
    """They occupied all polls for two seconds each, first come first served."""
    number, seconds = 400, 300.0
    silent = [pod(f"p{each}", namespace="hostile") for each in range(number)]
    fetchers = Fetchers(a=so_far(10), **{each.name: None for each in silent})
    watch = FetchWatch(fetchers, Changes())
    watch.set_pods([*silent, pod("a")])
    await asyncio.sleep(seconds)
    watch.close()
    longest_pause = 1.2 * (number + 1) / MAX_POLLS_PER_SECOND
    times = [at for at, name in fetchers.asked if name == "a"]
    assert len(times) >= seconds / longest_pause - 2


@pytest.mark.parametrize(
    ("name", "container", "is_fetching"),
    [
        ("not reported", {}, False),
        ("starts", {"state": {"waiting": {"reason": "PodInitializing"}}}, False),
        ("runs", {"state": RUNNING}, True),
        ("runs again", {"state": RUNNING, "lastState": ended(1)}, True),
        ("has succeeded", {"state": ended(0)}, False),
        ("has failed", {"state": ended(1)}, False),
    ],
)
def test_which_pods_are_asked(name: str, container: dict[str, Any], is_fetching: bool) -> None:
    obj = fetching_pod("p", containerID="c9", **container) if container else fetching_pod("p")
    expected = FetchingPod(uid="uid-p", name="p", service=("team", "tiny"), address="p", container_id="c9")
    assert read_fetching_pod(obj) == (expected if is_fetching else None), name
    without_address = fetching_pod("p", **container)
    del without_address["status"]["podIP"]
    assert read_fetching_pod(without_address) is None
    evicted = fetching_pod("p", **container)
    evicted["status"]["phase"] = "Failed"
    assert read_fetching_pod(evicted) is None
    obj["metadata"]["deletionTimestamp"] = NOW
    assert read_fetching_pod(obj) is None


def test_a_pod_of_no_service_is_not_asked() -> None:
    obj = fetching_pod("p", state=RUNNING)
    obj["metadata"]["labels"] = {"app.kubernetes.io/component": "router"}
    assert read_fetching_pod(obj) is None


# over HTTP

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def served(
    handler: Handler, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Callable[[], Awaitable[ModelProgress]], list[str]]]:
    """A pod that answers with `handler`: a function that asks it, and the paths that were requested."""
    paths: list[str] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        paths.append(request.path_qs)
        return await handler(request)

    app = web.Application()
    app.router.add_get("/{path:.*}", handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    monkeypatch.setattr(fetch_watch, "PROGRESS_PORT", runner.addresses[0][1])
    try:
        yield lambda: http_progress("127.0.0.1"), paths
    finally:
        await runner.cleanup()


async def test_a_pod_is_asked_by_address(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = so_far(43, eta_seconds=70.0, note="n")

    async def answer(request: web.Request) -> web.Response:
        assert "cookie" not in request.headers
        response = web.Response(body=msgspec.json.encode(sent))
        response.set_cookie("a", "b")
        return response

    async with served(answer, monkeypatch) as (ask, paths):
        assert await ask() == sent
        assert await ask() == sent
    assert paths == [PROGRESS_PATH, PROGRESS_PATH]


REPORT = msgspec.json.encode(so_far(43))


@pytest.mark.parametrize(
    ("name", "status", "body", "headers"),
    [
        ("an error", 500, REPORT, {}),
        ("a redirect", 302, REPORT, {"location": "/elsewhere"}),
        ("too long", 200, REPORT + b" " * MAX_REPORT_BYTES, {}),
        ("no JSON", 200, b"<html>", {}),
        ("not text", 200, b'{"source": "\xff"}', {}),
        ("nested deeply", 200, b'{"x":' + b"[" * 4000, {}),
        ("another type", 200, REPORT.replace(b'"fetching"', b'"sleeping"'), {}),
        ("a negative number", 200, REPORT.replace(b'"fetched_bytes":', b'"fetched_bytes":-'), {}),
        ("too large a number", 200, REPORT.replace(b'"bytes_per_second":0.0', b'"bytes_per_second":1e999'), {}),
        ("compressed", 200, gzip.compress(REPORT), {"content-encoding": "gzip"}),
    ],
)  # fmt: skip
async def test_a_wrong_answer_is_no_report(
    name: str, status: int, body: bytes, headers: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=status, body=body, headers=headers)

    async with served(answer, monkeypatch) as (ask, paths):
        with pytest.raises(fetch_watch.UNUSABLE):
            await ask()
    assert paths == [PROGRESS_PATH], name


async def test_an_endless_answer_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = 0

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b" " * 65536)
            sent += 65536

    async with served(answer, monkeypatch) as (ask, _):
        with pytest.raises(ValueError, match="more than 8192 bytes"):
            await ask()
    assert sent < 1 << 26, "the connection was closed, as far as buffers allow"


@pytest.mark.parametrize(
    ("name", "begin", "repeated"),
    [
        ("interim responses", b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        ("early hints", b"", b"HTTP/1.1 103 Early Hints\r\nX-A: b\r\n\r\n"),
        ("fields", b"HTTP/1.1 200 OK\r\n", b"X-A: b\r\n"),
        ("chunks", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
        ("no line", b"", b"x"),
    ],
)
async def test_an_endless_head_is_cut(
    name: str, begin: bytes, repeated: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = 0
    closed = asyncio.Event()

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(begin)
        try:
            while True:
                writer.write(repeated * 1000)
                await writer.drain()
                sent += 1000 * len(repeated)
        except OSError:
            closed.set()
        finally:
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    monkeypatch.setattr(fetch_watch, "PROGRESS_PORT", server.sockets[0].getsockname()[1])
    async with server, asyncio.timeout(60):
        with pytest.raises(ValueError, match="more than 8192 bytes"):
            await http_progress("127.0.0.1")
        await closed.wait()
    assert sent < 1 << 26, name


async def test_a_report_after_an_interim_response_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n\r\n" + REPORT)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    monkeypatch.setattr(fetch_watch, "PROGRESS_PORT", server.sockets[0].getsockname()[1])
    async with server:
        with pytest.raises(ValueError, match="no answer of status 200"):
            await http_progress("127.0.0.1")
