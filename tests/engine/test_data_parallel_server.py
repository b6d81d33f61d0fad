"""Two engine cores behind one API server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from argosy_engine import LLM, SamplingParams
from argosy_protocol.headers import DATA_PARALLEL_RANK, TELEMETRY_PATH
from argosy_protocol.telemetry import (
    Frame,
    FrameReader,
    Hello,
    Load,
    Removed,
    Snapshot,
    Stored,
    unpack_u64,
)
from processes import Server, children, free_port, is_alive, running, wait_until, workers
from served_engine import FOREVER, SERVE_TINY

pytestmark = pytest.mark.timeout(300)

SERVE = [*SERVE_TINY, "--dtype", "float32", "--data-parallel-size", "2", "--num-gpu-blocks-override", "600"]
PROMPTS = [f"{number}: tell me of the sea and of ships." for number in range(8)]
COMPLETIONS = "/v1/completions"
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": "x", "max_tokens": 1}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}),
    ("/v1/embeddings", {"input": "x"}),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    port = free_port()
    log = tmp_path_factory.mktemp("serve") / "log"
    with running([*SERVE, "--port", str(port), "--admin-api-key", "admin"], log, port=port) as up:
        yield up


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, headers={"authorization": "Bearer admin"}, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def expected() -> list[str]:
    """The texts of one core."""
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    with LLM("builtin://tiny", device="cpu", dtype="float32", threads=1) as llm:
        return [result.text for result in llm.generate(PROMPTS, params, use_tqdm=False)]


def of_ranks(http: httpx.Client, name: str, **labels: str) -> list[float]:
    """A series of /metrics, by rank."""
    found = {
        int(sample.labels["engine"]): sample.value
        for family in text_string_to_metric_families(http.get("/metrics").text)
        for sample in family.samples
        if sample.name == f"vllm:{name}" and labels.items() <= sample.labels.items()
    }
    assert sorted(found) == [0, 1]
    return [found[0], found[1]]


def until_idle(http: httpx.Client) -> None:
    wait_until(lambda: of_ranks(http, "num_requests_running") == [0, 0], "the cores to be idle")


def complete(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    answer = http.post(COMPLETIONS, json={"temperature": 0, "max_tokens": 10, "ignore_eos": True, **fields})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_a_crowd_spreads(server: Server, http: httpx.Client) -> None:
    with ExitStack() as streams:
        for prompt in PROMPTS:
            streams.enter_context(begun_stream(server, prompt=prompt))

        def held() -> list[float]:
            levels = (of_ranks(http, name) for name in ("num_requests_running", "num_requests_waiting"))
            return list(map(sum, zip(*levels, strict=True)))

        wait_until(lambda: held() == [4, 4], "each core to have half of the crowd")
    until_idle(http)


async def test_a_crowd_gets_the_texts_of_one_core(
    server: Server, http: httpx.Client, expected: list[str]
) -> None:
    before = of_ranks(http, "request_success_total", finished_reason="length")
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        body = {"temperature": 0, "max_tokens": 10, "ignore_eos": True}
        answers = await asyncio.gather(
            *(client.post(COMPLETIONS, json={**body, "prompt": prompt}) for prompt in PROMPTS)
        )
    assert [answer.json()["choices"][0]["text"] for answer in answers] == expected
    after = of_ranks(http, "request_success_total", finished_reason="length")
    assert sum(after) - sum(before) == len(PROMPTS)
    batch = complete(http, prompt=PROMPTS)
    assert [choice["text"] for choice in batch["choices"]] == expected


@pytest.mark.parametrize(
    ("way", "rank"),
    [
        ("header", 0),
        ("field", 1),
        pytest.param("header", 1, marks=pytest.mark.full),
        pytest.param("field", 0, marks=pytest.mark.full),
    ],
)
def test_a_request_may_choose_its_rank(http: httpx.Client, rank: int, way: str) -> None:
    def num_looked_up() -> list[float]:
        return of_ranks(http, "prefix_cache_queries_total")

    for path, body in REQUESTS:
        until_idle(http)
        before = num_looked_up()
        if way == "header":
            answer = http.post(path, json=body, headers={DATA_PARALLEL_RANK: str(rank)})
        else:
            answer = http.post(path, json={**body, "data_parallel_rank": rank})
        assert answer.status_code == 200, answer.text
        wait_until(lambda before=before: num_looked_up() != before, "the count")  # type: ignore[misc]
        moved = [now > then for now, then in zip(num_looked_up(), before, strict=True)]
        assert moved == [rank == 0, rank == 1], path


@pytest.mark.parametrize(("path", "body"), REQUESTS)
def test_a_rank_that_does_not_exist_is_refused(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    refused = [
        http.post(path, json={**body, "data_parallel_rank": value}) for value in (2, -1, 1 << 40, "one", 0.5)
    ]
    refused += [
        http.post(path, json=body, headers={DATA_PARALLEL_RANK: value})
        for value in ("2", "-1", "x", "9" * 99)
    ]
    refused.append(http.post(path, json={**body, "data_parallel_rank": 0}, headers={DATA_PARALLEL_RANK: "1"}))
    for answer in refused:
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "data_parallel_rank"
    assert "this engine has 2 (--data-parallel-size)" in refused[0].text


def test_repeats_find_their_prefix(http: httpx.Client) -> None:
    prefixes = [
        f"The {topic} is old and the {topic} is far away. " * 20 for topic in ("harbor", "lantern", "sea")
    ]
    for prefix in prefixes:
        complete(http, prompt=prefix + "Why?")
    for prefix in prefixes:
        usage = complete(http, prompt=prefix + "Where?")["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > 0.8 * usage["prompt_tokens"]


def test_an_abort_frees_the_blocks_of_its_core(server: Server, http: httpx.Client) -> None:
    with begun_stream(server, data_parallel_rank=0) as stays:
        with begun_stream(server, data_parallel_rank=1):
            wait_until(lambda: of_ranks(http, "num_requests_running") == [1, 1], "both to run")
            assert all(of_ranks(http, "kv_cache_usage_perc"))
        wait_until(lambda: of_ranks(http, "kv_cache_usage_perc")[1] == 0, "the blocks of core 1")
        assert of_ranks(http, "num_requests_running") == [1, 0]
        assert of_ranks(http, "kv_cache_usage_perc")[0] > 0
        next(stays)
    until_idle(http)
    wait_until(lambda: http.get("/load").json() == {"server_load": 0}, "no load")


@contextmanager
def begun_stream(server: Server, **fields: Any) -> Iterator[Iterator[str]]:
    """The lines of a stream, which the client leaves at the end of the block."""
    body = {**FOREVER, **fields}
    with (
        httpx.Client(base_url=server.url, timeout=60) as client,
        client.stream("POST", COMPLETIONS, json=body) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        yield lines


@pytest.mark.parametrize("rank", [0, 1])
def test_structured_outputs_on_every_core(http: httpx.Client, rank: int) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 22]}}, "required": ["n"]}
    body = {
        "prompt": "A number:",
        "max_tokens": 60,
        "ignore_eos": False,
        "structured_outputs": {"json": schema},
    }
    text = complete(http, **body, data_parallel_rank=rank)["choices"][0]["text"]
    assert json.loads(text)["n"] in (1, 22)


def test_choices_of_a_prompt_compute_it_once(http: httpx.Client) -> None:
    until_idle(http)
    before = sum(of_ranks(http, "prompt_tokens_cached_total"))
    complete(
        http,
        prompt="All choices of a prompt share what was computed of it. " * 20,
        n=4,
        temperature=1,
        seed=1,
    )
    wait_until(lambda: sum(of_ranks(http, "prompt_tokens_cached_total")) > before + 300, "cached prompts")


def test_all_cores_sleep_and_wake_up(http: httpx.Client, expected: list[str]) -> None:
    assert http.post("/sleep?level=1").status_code == 200
    assert of_ranks(http, "engine_sleep_state", sleep_state="weights_offloaded") == [1, 1]
    assert http.post(COMPLETIONS, json={"prompt": "x"}).status_code == 503
    assert http.post("/wake_up").status_code == 200
    for rank in (0, 1):
        text = complete(http, prompt=PROMPTS[0], data_parallel_rank=rank)["choices"][0]["text"]
        assert text == expected[0]
    assert http.post("/reset_prefix_cache").status_code == 200


def test_routers_hear_of_one_replica(server: Server, http: httpx.Client) -> None:
    """A prefix that both cores hold is announced once, and the load is that of both."""
    assert http.post("/reset_prefix_cache").status_code == 200
    with telemetry(server) as (hello, stream):
        assert (hello.data_parallel_size, hello.max_num_seqs) == (2, 2 * 256)
        for rank in (0, 1):
            complete(http, prompt="What is told of two caches is told once. " * 20, data_parallel_rank=rank)
        with telemetry(server) as (_, later):
            resident = announced_until_load(later)
        assert len(resident) > 1
        announced: list[int] = []
        while set(announced) != set(resident):
            announced += announced_until_load(stream)
        assert len(announced) == len(resident), "nothing twice"
    with (
        telemetry(server) as (_, stream),
        begun_stream(server, data_parallel_rank=0),
        begun_stream(server, data_parallel_rank=1),
    ):
        next(frame for frame in stream if isinstance(frame, Load) and frame.num_running == 2)


@contextmanager
def telemetry(server: Server) -> Iterator[tuple[Hello, Iterator[Frame]]]:
    """A telemetry stream: its first frame, and those after it."""
    reader = FrameReader()
    with (
        httpx.Client(base_url=server.url, timeout=60) as client,
        client.stream("GET", TELEMETRY_PATH) as response,
    ):
        frames = (frame for data in response.iter_bytes() for frame in reader.feed(data))
        hello = next(frames)
        assert isinstance(hello, Hello)
        yield hello, frames


def announced_until_load(frames: Iterator[Frame]) -> list[int]:
    """The chunks that are announced before the next report of the load."""
    chunks: list[int] = []
    for frame in frames:
        assert not isinstance(frame, Removed)
        if isinstance(frame, (Snapshot, Stored)):
            chunks += unpack_u64(frame.hashes)
        elif isinstance(frame, Load):
            break
    return chunks


def test_the_debug_signal_reaches_every_core(server: Server) -> None:
    server.process.send_signal(signal.SIGUSR1)
    for rank, pid in enumerate(sorted(children(server.process.pid))):
        told = f"argosy engine EngineCore_DP{rank}, process {pid}: state of the engine core"
        wait_until(lambda told=told: told in server.log.read_text(), told)  # type: ignore[misc]


def test_one_killed_core_ends_the_server_with_its_reason(bare_workers: None, tmp_path: Path) -> None:
    port, log, temporary = free_port(), tmp_path / "log", tmp_path / "tmp"
    temporary.mkdir()
    arguments = [*SERVE, "--port", str(port), "--distributed-executor-backend", "mp"]
    with running(arguments, log, port=port, env={"TMPDIR": str(temporary)}) as server:
        cores = children(server.process.pid)
        processes = [*cores, *(worker for core in cores for worker in workers(core))]
        assert len(processes) == 4
        assert list(temporary.iterdir()) == [], "a running engine has no files"
        body = {**FOREVER, "data_parallel_rank": 0}
        with httpx.stream("POST", server.url + COMPLETIONS, json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            os.kill(cores[1], signal.SIGKILL)
            events = [line for line in lines if line.startswith("data: ")]
        assert "the engine is not running" in events[-2]
        assert server.process.wait(60) == 1
        wait_until(lambda: not any(map(is_alive, processes)), "all processes to end")
    reason = f"EngineCore_DP1 (process {cores[1]}) ended: killed by SIGKILL"
    assert f"engine core dead: data-parallel rank 1: {reason}" in log.read_text()
    assert list(temporary.iterdir()) == []
