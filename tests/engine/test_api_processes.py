"""Two API processes in front of one engine core: one server, whichever of them a client meets."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families

from argosy_engine.api.api_process import ProcessGroup, ProcessStandsStill
from argosy_engine.api.server_args import ServerArgs
from argosy_engine.config import EngineArgs
from argosy_protocol.headers import TELEMETRY_PATH
from argosy_protocol.telemetry import FrameReader, Hello, Load, Snapshot, Stored
from processes import Server, children, descendants, free_port, is_alive, running, wait_until
from served_engine import FOREVER, SERVE_TINY

pytestmark = pytest.mark.timeout(300)

SERVE = [*SERVE_TINY, "--dtype", "float32", "--num-gpu-blocks-override", "600", "--api-server-count", "2"]
LIMIT = 4
COMPLETIONS = "/v1/completions"
KEY = {"authorization": "Bearer admin"}
LAYER = """
async def counts(request, call_next):
    state = request.app.state
    state.count = getattr(state, "count", 0) + 1
    answer = await call_next(request)
    answer.headers["x-count"] = str(state.count)
    return answer
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    port, directory = free_port(), tmp_path_factory.mktemp("serve")
    (directory / "layer.py").write_text(LAYER)
    arguments = [*SERVE, "--port", str(port), "--admin-api-key", "admin", "--timeout-keep-alive", "3600"]
    arguments += ["--max-num-queued-reqs", str(LIMIT), "--access-log", "--served-model-name", "tiny"]
    arguments += ["--middleware", "layer.counts"]
    path = os.pathsep.join((str(directory), os.environ.get("PYTHONPATH", "")))
    with running(arguments, directory / "log", port=port, env={"PYTHONPATH": path}) as up:
        yield up


@pytest.fixture
def first(server: Server) -> Iterator[httpx.Client]:
    with connected(server, server.process.pid) as client:
        yield client


@pytest.fixture
def second(server: Server) -> Iterator[httpx.Client]:
    with connected(server, other_process(server)) as client:
        yield client


def other_process(server: Server) -> int:
    (found,) = (pid for pid in children(server.process.pid) if b"api_process" in command(pid))
    return found


def command(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: state(pid) == "T", "the process to stand still")
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@contextmanager
def connected(server: Server, pid: int) -> Iterator[httpx.Client]:
    """A client whose one connection a process has accepted, while the other one stood still."""
    others = {server.process.pid, other_process(server)} - {pid}
    limits = httpx.Limits(max_connections=1, keepalive_expiry=None)
    with httpx.Client(base_url=server.url, timeout=120, limits=limits, headers=KEY) as client:
        with stopped(*others):
            assert client.get("/version").status_code == 200
        yield client


def complete(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    answer = client.post(COMPLETIONS, json={"temperature": 0, "max_tokens": 8, "ignore_eos": True, **fields})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


@contextmanager
def begun_stream(server: Server, pid: int) -> Iterator[Iterator[str]]:
    """The lines of a stream of a process, which does not end before its client leaves it."""
    with connected(server, pid) as client, client.stream("POST", COMPLETIONS, json=FOREVER) as response:
        assert response.status_code == 200
        lines = response.iter_lines()
        next(lines)
        yield lines


def series(client: httpx.Client, name: str) -> float:
    """The sum of a family's samples of that name."""
    return sum(
        sample.value
        for family in text_string_to_metric_families(client.get("/metrics").text)
        for sample in family.samples
        if sample.name == name
    )


def test_both_processes_answer_alike_and_alone(
    server: Server, first: httpx.Client, second: httpx.Client
) -> None:
    prompt = "Tell me of the sea and of ships."
    texts, ids = set(), set()
    for client, other in ((first, other_process(server)), (second, server.process.pid)):
        with stopped(other):
            answer = complete(client, prompt=prompt)
            chat = client.post(
                "/v1/chat/completions",
                json={"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
            )
            assert chat.status_code == 200
            ids |= {answer["id"], chat.json()["id"]}
            texts.add(answer["choices"][0]["text"])
    assert len(texts) == 1
    assert len(ids) == 4


def test_layers_of_the_user_s_own_find_the_application_in_both(
    first: httpx.Client, second: httpx.Client
) -> None:
    for client in (first, second):
        counts = [int(client.get("/v1/models").headers["x-count"]) for _ in range(2)]
        assert counts[1] == counts[0] + 1


def test_metrics_are_those_of_both_processes(first: httpx.Client, second: httpx.Client) -> None:
    names = ("vllm:generation_tokens_total", "vllm:e2e_request_latency_seconds_count")
    before = [series(first, name) for name in names]
    for client, num_tokens in ((first, 5), (second, 7)):
        complete(client, prompt="x", max_tokens=num_tokens)
    for client in (first, second):
        assert [series(client, name) for name in names] == [before[0] + 12, before[1] + 2]
        assert series(client, "vllm:cache_config_info") == 1
        assert series(client, "argosy_engine_info") == 1


def test_load_and_limits_count_the_requests_of_both(
    server: Server, first: httpx.Client, second: httpx.Client
) -> None:
    pids = [server.process.pid, other_process(server)]
    with ExitStack() as streams:
        for number in range(LIMIT):
            streams.enter_context(begun_stream(server, pids[number % 2]))
        for client in (first, second):
            assert client.get("/load").json() == {"server_load": LIMIT}
            refused = client.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 1})
            assert refused.status_code == 503
            assert f"{LIMIT} requests are waiting or running, at most {LIMIT} may" in refused.text
        wait_until(lambda: series(second, "vllm:num_requests_running") == LIMIT, "all to run")
    for client in (second, first):
        wait_until(lambda client=client: client.get("/load").json() == {"server_load": 0}, "no load")  # type: ignore[misc]
    wait_until(lambda: series(second, "vllm:num_requests_running") == 0, "the aborts")
    complete(second, prompt="x")


def test_a_router_that_meets_the_second_process_hears_of_all(
    first: httpx.Client, second: httpx.Client
) -> None:
    assert first.post("/reset_prefix_cache").status_code == 200
    reader = FrameReader()
    with second.stream("GET", TELEMETRY_PATH) as response:
        frames = (frame for data in response.iter_bytes() for frame in reader.feed(data))
        opening = next(frames)
        assert isinstance(opening, Hello)
        assert opening.model == "tiny"
        complete(first, prompt="What the first process computes is told by the second. " * 20)
        resident = False
        while not resident:
            resident = isinstance(next(frames), (Stored, Snapshot))
        assert isinstance(next(frame for frame in frames if isinstance(frame, Load)), Load)


def test_stored_responses_are_found_through_both(first: httpx.Client, second: httpx.Client) -> None:
    body = {"input": "My name is Tom.", "max_output_tokens": 8}
    for maker, finder in ((first, second), (second, first)):
        made = maker.post("/v1/responses", json=body)
        assert made.status_code == 200, made.text
        found = finder.get(f"/v1/responses/{made.json()['id']}")
        assert found.json() == made.json()
        follow = {**body, "previous_response_id": made.json()["id"]}
        assert finder.post("/v1/responses", json=follow).status_code == 200
        assert finder.delete(f"/v1/responses/{made.json()['id']}").status_code == 200
        assert maker.get(f"/v1/responses/{made.json()['id']}").status_code == 404
    with second.stream("POST", "/v1/responses", json={**body, "stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        events = [line for line in response.iter_lines() if line.startswith("event: ")]
    assert events[0] == "event: response.created"
    assert events[-1] in ("event: response.completed", "event: response.incomplete")


def test_a_request_that_is_passed_on_is_one_line_of_the_log(server: Server, second: httpx.Client) -> None:
    body = {"model": "tiny", "input": "Hello", "max_output_tokens": 5}
    made = second.post("/v1/responses", json=body, headers={"x-request-id": "passed-on"})
    assert made.status_code == 200, made.text

    def lines() -> list[str]:
        return [line for line in server.log.read_text().splitlines() if "request=passed-on " in line]

    wait_until(lines, "the request's line")
    (line,) = lines()
    assert f" prompt_tokens={made.json()['usage']['input_tokens']} " in line
    assert " model=tiny " in line


def test_what_the_second_process_passes_on_is_answered_as_by_the_first(
    first: httpx.Client, second: httpx.Client
) -> None:
    for method, path in (
        ("GET", "/health"),
        ("GET", "/ready"),
        ("GET", "/v1/models"),
        ("GET", "/no/such/path"),
        ("GET", "/v1/completions"),
        ("GET", "/is_sleeping"),
        ("POST", "/v1/responses/unknown/cancel"),
    ):
        own, relayed = first.request(method, path), second.request(method, path)
        assert (relayed.status_code, relayed.text) == (own.status_code, own.text), path
    assert second.get("/is_sleeping", headers={"authorization": ""}).status_code in (401, 403)


def test_both_processes_sleep_and_wake_up(server: Server, first: httpx.Client, second: httpx.Client) -> None:
    pids = [server.process.pid, other_process(server)]
    with begun_stream(server, pids[0]), begun_stream(server, pids[1]):
        assert second.post("/sleep?level=1").status_code == 200
        assert first.get("/load").json() == {"server_load": 0}
    for client in (first, second):
        assert client.get("/is_sleeping").json() == {"is_sleeping": True}
        assert client.post(COMPLETIONS, json={"prompt": "x"}).status_code == 503
        assert client.get("/ready").json() == {"status": "sleeping"}
    assert second.post("/wake_up").status_code == 200
    for client in (first, second):
        complete(client, prompt="x")


async def test_a_process_that_stands_still_keeps_no_other_asleep(caplog: pytest.LogCaptureFixture) -> None:
    options, args = ServerArgs(api_server_count=2), EngineArgs.of(model="builtin://tiny")
    group = ProcessGroup(options, args, [], 0, ping_interval_s=0.001, ping_timeout_s=0.01)
    (pid,) = group.pids
    try:
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: state(pid) == "T", "the process to stand still")
        await group.open(FastAPI())
        with pytest.raises(ProcessStandsStill, match="ApiServer_1 has not answered"):
            await group.sleep(1, "abort")
        await group.sleep(0, "wait")
    finally:
        os.kill(pid, signal.SIGKILL)
        await group.stop(0.0)
    assert "it accepts requests again once it goes on" in caplog.text


def test_the_debug_signal_reaches_every_process(server: Server) -> None:
    server.process.send_signal(signal.SIGUSR1)
    for pid in (server.process.pid, other_process(server)):
        told = f"argosy engine API, process {pid}: state of the API"
        wait_until(lambda told=told: told in server.log.read_text(), told)  # type: ignore[misc]


def test_a_drain_lets_the_requests_of_both_finish(bare_workers: None, tmp_path: Path) -> None:
    """Over a Unix domain socket, whose file is removed."""
    path, temporary = tmp_path / "socket", tmp_path / "tmp"
    temporary.mkdir()

    def client() -> httpx.Client:
        return httpx.Client(
            transport=httpx.HTTPTransport(uds=str(path)), base_url="http://engine", timeout=120
        )

    def is_ready() -> bool:
        with suppress(httpx.TransportError), client() as probe:
            return path.exists() and probe.get("/ready").status_code == 200
        return False

    with ExitStack() as stack:
        server = stack.enter_context(
            running(
                [*SERVE, "--uds", str(path)],
                tmp_path / "log",
                port=0,
                is_ready=is_ready,
                env={"TMPDIR": str(temporary)},
            )
        )
        assert list(temporary.iterdir()) == [], "a running engine has no files"
        pids = [server.process.pid, other_process(server)]
        processes = [server.process.pid, *descendants(server.process.pid)]
        body = {**FOREVER, "max_tokens": 300}
        streams = []
        for other in pids:
            http = stack.enter_context(client())
            with stopped(other):
                response = stack.enter_context(http.stream("POST", COMPLETIONS, json=body))
                assert response.status_code == 200
                streams.append(response.iter_lines())
                next(streams[-1])
        server.process.terminate()
        for lines in streams:
            events = [line for line in lines if line.startswith("data: ")]
            assert events[-1] == "data: [DONE]"
            assert '"finish_reason":"length"' in events[-2]
        assert server.process.wait(60) == 0
        wait_until(lambda: not any(map(is_alive, processes)), "all processes to end")
        assert not path.exists()


@pytest.mark.parametrize("victim", ["first", "second"])
def test_a_killed_process_ends_all(victim: str, bare_workers: None, tmp_path: Path) -> None:
    port, log = free_port(), tmp_path / "log"
    with running([*SERVE, "--port", str(port)], log, port=port) as server:
        processes = [server.process.pid, *descendants(server.process.pid)]
        second = other_process(server)
        pid = server.process.pid if victim == "first" else second
        with begun_stream(server, second if victim == "first" else server.process.pid):
            os.kill(pid, signal.SIGKILL)
            assert server.process.wait(60) == (-signal.SIGKILL if victim == "first" else 1)
        wait_until(lambda: not any(map(is_alive, processes)), "all processes to end")
    if victim == "second":
        assert f"ERROR argosy.api ApiServer_1 (process {second}) ended: killed by SIGKILL" in log.read_text()
