"""External launcher: copies of a program under torchrun give the tokens of one process, or end together."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from argosy_engine import LLM
from argosy_engine.distributed.engine_copies import LaunchEnvironment, read_launch
from argosy_engine.distributed.parallel_config import ParallelConfig
from argosy_engine.errors import ConfigError
from launched_copies import LAUNCHED, LAYOUTS, TINY, experts, observe
from processes import free_port
from random_checkpoints import KINDS, make_checkpoint
from served_engine import SERVE_TINY

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests" / "support" / "launched_copies.py"
ENVIRONMENT = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}

pytestmark = pytest.mark.timeout(600)


def environment(**variables: str) -> dict[str, str]:
    packages = ("argosy_engine", "argosy_protocol", "argosy_fetcher")
    paths = [str(Path(sys.modules[name].__path__[0]).parent) for name in packages]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **variables}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3-moe")
    make_checkpoint(KINDS["qwen3-moe"], path)
    shutil.copy(ROOT / "models" / "argosy-tiny" / "tokenizer.json", path)
    return path


@pytest.fixture(scope="module")
def torchrun(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> tuple[list[dict[str, Any]], str]:
    """What each copy found, and what they printed."""
    folder = tmp_path_factory.mktemp("same")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, str(PROGRAM), "same", str(folder), str(checkpoint)],
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert done.returncode == 0
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)], done.stdout


@pytest.fixture(scope="module")
def one() -> dict[str, Any]:
    with LLM(**TINY) as llm:
        return observe(llm)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_copies_give_the_tokens_of_one_process(
    torchrun: tuple[list[dict[str, Any]], str], one: dict[str, Any], layout: str
) -> None:
    for found in torchrun[0]:
        for name in ("generated", "repeated", "slept"):
            assert found[layout][name] == one["generated"]
        assert found[layout]["survivor"] == one["survivor"]
        assert found[layout]["cached"] == one["cached"] > 0
        assert found[layout]["preemptions"] > 0


def test_copies_divide_experts(torchrun: tuple[list[dict[str, Any]], str], checkpoint: Path) -> None:
    expected = experts(str(checkpoint))
    assert [found["experts"] for found in torchrun[0]] == [expected, expected]


@pytest.mark.parametrize("layout", ["tensor", "pipeline"])
def test_copies_without_a_seed_draw_the_same_tokens(
    torchrun: tuple[list[dict[str, Any]], str], layout: str
) -> None:
    first, second = (found[f"{layout} without a seed"] for found in torchrun[0])
    assert first == second
    assert len({tuple(tokens) for tokens in first}) > 1


def test_the_copy_with_least_room_determines_the_size_of_the_cache(
    torchrun: tuple[list[dict[str, Any]], str],
) -> None:
    first, second = (found["blocks"] for found in torchrun[0])
    assert first == second
    assert first[1] == "--kv-cache-memory-bytes"


def test_the_example_prints_the_outputs_once(torchrun: tuple[list[dict[str, Any]], str]) -> None:
    assert torchrun[1].count("'Tell me about ships': '") == 1


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> list[dict[str, Any]]:
    """How the engines of each copy ended. Without torchrun, as any launcher may: one copy survives the other."""
    folder = tmp_path_factory.mktemp("ends")
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "ends", str(folder), str(checkpoint)],
        env=environment(**{**ENVIRONMENT, "MASTER_PORT": str(free_port())}),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "0 -9"
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize(
    ("cause", "first", "second"),
    [
        ("arguments", "ConfigError: rank 1 was given max_num_seqs 5 and rank 0 4", None),
        ("start", "EngineDead: rank 1 failed: as asked", "ConfigError: as asked"),
        (
            "memory, tensor",
            "EngineDead: rank 1 failed: OutOfMemoryError: as asked",
            "OutOfMemoryError: as asked",
        ),
        (
            "memory, pipeline 1",
            "EngineDead: rank 1 failed: OutOfMemoryError: as asked",
            "OutOfMemoryError: as asked",
        ),
        (
            "memory, pipeline 0",
            "OutOfMemoryError: as asked",
            "EngineDead: rank 0 failed: OutOfMemoryError: as asked",
        ),
        (
            "prompts",
            "EngineDead: the copies of the program have diverged before step 1: rank 1 has scheduled another step than "
            "rank 0; give all copies the same prompts and parameters in the same order, and abort at the same steps "
            "(rank 0: 2 requests, 8 tokens; rank 1: 1 requests, 4 tokens)",
            None,
        ),
        (
            "tokens",
            "EngineDead: the copies of the program have diverged before step 2: rank 1 has sampled other tokens than",
            None,
        ),
        ("closed", "EngineDead: rank 1 has closed its engine", ""),
        ("closed, grammar", "", "EngineDead: rank 0 has closed its engine"),
        ("late", "CopyLost: rank 1 did not begin the next step within 0.5 s", "CopyLost: rank 0 has waited for rank 1"),
        ("killed", "EngineDead: rank 1 ended without a word, or lost the connection (", ""),
    ],
)  # fmt: skip
def test_copies_end_together_and_say_why(
    ends: list[dict[str, Any]], cause: str, first: str, second: str | None
) -> None:
    """Args: second: what the second copy says; None: the same."""
    for found, expected in zip(ends, (first, first if second is None else second), strict=True):
        assert ": ".join(found.get(cause, ())).startswith(expected)
        assert bool(expected) == bool(found.get(cause))


@pytest.mark.parametrize("constrained", [0, 1])
def test_copies_end_if_the_output_of_only_one_is_structured(
    ends: list[dict[str, Any]], constrained: int
) -> None:
    for found in ends:
        kind, message = found[f"parameters {constrained}"]
        assert kind == "EngineDead"
        assert "makes other calls than" in message
        assert "a broadcast of rank 0" in message
        assert message.endswith("give all copies the same prompts and parameters in the same order")


def test_an_engine_stays_dead_and_the_program_may_make_another(ends: list[dict[str, Any]]) -> None:
    assert set(ends[0]["after"]) == set(ends[1]["after"]) == {"EngineDead"}
    assert ends[0]["fine"] == ends[1]["fine"] != []


def test_the_launcher_tells_the_place_of_a_process() -> None:
    config = ParallelConfig(tensor=2)
    assert read_launch(config, ENVIRONMENT) == LaunchEnvironment(1, 2, 1, 2)
    several = {**ENVIRONMENT, "WORLD_SIZE": "4", "RANK": "3", "LOCAL_WORLD_SIZE": "2"}
    assert read_launch(ParallelConfig(tensor=2, data=2), several) == LaunchEnvironment(3, 4, 1, 2)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "", "MASTER_ADDR": ""}, "not set: RANK, MASTER_ADDR; start the program with `torchrun --nproc-per-"),
        ({"WORLD_SIZE": "4"}, r"started 4 processes \(WORLD_SIZE\), and 2 are needed, which is --tensor-"),
        ({"RANK": "2"}, "RANK 2 of WORLD_SIZE 2"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK is a number from 0, not '-1'"),
        ({"LOCAL_WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE 3 contradict"),
    ],
)  # fmt: skip
def test_other_environments_are_refused(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], message: str
) -> None:
    for name, value in {**ENVIRONMENT, **variables}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        LLM(**TINY, **LAUNCHED, tensor_parallel_size=2)


def test_a_core_outside_of_the_program_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"runs programs that make an LLM\(\.\.\.\) without multiprocess"):
        LLM(**TINY, **LAUNCHED, multiprocess=True)
    arguments = [sys.executable, "-m", *SERVE_TINY, "--distributed-executor-backend", "external_launcher"]
    done = subprocess.run(arguments, env=environment(), stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert "the copies of a server would not be; serve with mp" in done.stderr


def test_requests_are_not_failed_for_their_age() -> None:
    with pytest.raises(ConfigError, match="--request-stall-timeout cannot be used"):
        LLM(**TINY, **LAUNCHED, request_stall_timeout=5.0)
