"""Engines over several nodes, here processes of one machine: the tokens of one process, and they end together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from argosy_engine import EngineArgs, LLMEngine, SamplingParams
from argosy_engine.errors import ConfigError, EngineDead
from engine_contract import FAKE_TOKENS, check_engine, finish, generate
from forked_serves import serve_each
from processes import answers, children, descendants, free_port, is_alive, wait_until

START_S = 400.0
PROMPTS = ("Hello there, how are you today? " * 3, "Tell me about the sea", "What is 2 plus 3?")
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
KEY = "0123456789abcdef0123456789abcdef"

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARGOSY_NODE_KEY", KEY)


def command_line(**flags: object) -> list[str]:
    line = ["builtin://tiny"]
    for name, value in flags.items():
        flag = f"--{name.replace('_', '-')}"
        line += [flag] if value is True else [flag, str(value)]
    return line


class Node:
    """A process of `argosy serve`."""

    def __init__(self, log: Path, **flags: object) -> None:
        self.log = log
        command = [sys.executable, "-m", "argosy_engine.api.serve", *command_line(**flags)]
        with log.open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)

    def wait(self) -> tuple[int, str]:
        """Wait for the end; return the exit code and what was said."""
        return self.process.wait(START_S), self.log.read_text()

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def fields(**layout: Any) -> dict[str, Any]:
    return {
        "device": "cpu", "dtype": "float32", "threads": 1, "num_gpu_blocks_override": 256, **layout,
        "nnodes": 2, "master_port": free_port(),
    }  # fmt: skip


@contextmanager
def engine(**flags: Any) -> Iterator[LLMEngine]:
    made = LLMEngine.from_engine_args(EngineArgs.of(model="builtin://tiny", **flags))
    try:
        yield made
    finally:
        made.close()


@contextmanager
def node(log: Path, **flags: Any) -> Iterator[Node]:
    made = Node(log, **flags)
    try:
        yield made
    finally:
        made.kill()


def tokens(engine: LLMEngine) -> list[list[int]]:
    for index, prompt in enumerate(PROMPTS):
        engine.add_request(str(index), prompt, GREEDY)
    finished = finish(engine)
    return [finished[str(index)] for index in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with engine(device="cpu", dtype="float32", threads=1, num_gpu_blocks_override=256) as one:
        return tokens(one)


def test_tensor_parallel_over_two_nodes_until_a_worker_is_killed(
    expected: list[list[int]], tmp_path: Path
) -> None:
    flags = fields(tensor_parallel_size=2)
    with node(tmp_path / "log", **flags, headless=True, node_rank=1) as other, engine(**flags) as made:
        assert tokens(made) == expected
        made.sleep()
        made.wake_up()
        assert tokens(made) == expected
        made.add_request("x", PROMPTS[0], GREEDY)
        (worker,) = children(other.process.pid)
        os.kill(worker, signal.SIGKILL)
        with pytest.raises(EngineDead, match=r"Worker_TP1 \(node 1 .*\) ended: killed by SIGKILL"):
            finish(made)
        made.close()
        code, log = other.wait()
        assert code == 1
        assert "Worker_TP1" in log
        assert "killed by SIGKILL" in log


def test_pipeline_parallel_over_two_nodes_until_one_is_killed(bare_workers: None, tmp_path: Path) -> None:
    flags = fields(pipeline_parallel_size=2, worker_cls="probe_worker.ProbeWorker")
    with node(tmp_path / "log", **flags, headless=True, node_rank=1) as other, engine(**flags) as made:
        check_engine(made, FAKE_TOKENS, num_workers=2)
        again = {**flags, "headless": True, "node_rank": 1}
        second, third = serve_each([command_line(**again), command_line(**again, block_size=32)])
        assert second.returncode == 1
        assert "has joined already with this --node-rank" in second.stderr
        assert third.returncode == 2
        assert "--block-size is 32 on node 1 and the default on node 0" in third.stderr
        assert generate(made) == FAKE_TOKENS
        workers = descendants(other.process.pid)
        assert len(workers) == 1
        other.process.kill()
        with pytest.raises(EngineDead, match=r"node 1 .* has ended or cannot be reached"):
            generate(made)
        wait_until(lambda: not any(map(is_alive, workers)), "the end of the workers")


def test_a_node_ends_with_the_first_one(bare_workers: None, tmp_path: Path) -> None:
    flags = fields(tensor_parallel_size=2)
    port = free_port()
    with (
        node(tmp_path / "log", **flags, headless=True, node_rank=1) as other,
        node(tmp_path / "first", **flags, port=port) as first,
    ):
        wait_until(lambda: answers(f"http://127.0.0.1:{port}/ready") or first.process.poll() is not None,
                   "the server", START_S)  # fmt: skip
        started = descendants(other.process.pid) + descendants(first.process.pid)
        assert len(started) >= 3
        first.process.kill()
        code, log = other.wait()
        assert code == 1
        assert "node 0 has ended or cannot be reached" in log
        wait_until(lambda: not any(map(is_alive, started)), "the end of the workers")


def test_nodes_say_what_they_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ARGOSY_NODE_KEY")
    flags = fields(tensor_parallel_size=2)
    refused: list[tuple[dict[str, object], str]] = [
        ({"headless": True, "node_rank": 1}, "needs a key"),
        ({"node_rank": 1}, "--node-rank 1 needs --headless"),
        ({"headless": True}, "--headless is for the nodes of an engine that are not its first"),
    ]
    ends = serve_each([command_line(**flags, **more) for more, _ in refused])
    for end, (_, message) in zip(ends, refused, strict=True):
        assert end.returncode == 2
        assert message in end.stderr
    with pytest.raises(ConfigError, match="run `argosy serve --headless` on it"):
        LLMEngine.from_engine_args(EngineArgs.of(model="builtin://tiny", node_rank=1, **flags))
