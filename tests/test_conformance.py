"""The suite that runs vLLM's server tests, on a source distribution that has three of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import vllm_tests
from vllm_suite import PASSING, lost

ROOT = Path(__file__).resolve().parent.parent
FILE = "tests/entrypoints/openai/chat_completion/test_chat_echo.py"
TESTS = """
import pytest
from tests.utils import RemoteOpenAIServer
from vllm.config import ModelConfig
from vllm.sampling_params import SamplingParams

MODEL_NAME = "someone/a-model"
DEFAULTS = SamplingParams(n=1)


@pytest.fixture(scope="module")
def server():
    with RemoteOpenAIServer(MODEL_NAME, ["--dtype", "half", "--max-model-len", "4080"]) as up:
        yield up


def ask(server, **fields):
    with server.get_client() as client:
        return client.chat.completions.create(
            model=MODEL_NAME, messages=[{"role": "user", "content": "Hello!"}], **fields
        )


def test_answers(server):
    answer = ask(server, max_tokens=2, logprobs=True, top_logprobs=1)
    assert answer.usage.completion_tokens == 2
    assert ModelConfig(model=MODEL_NAME).get_vocab_size() == 1024


def test_fails(server):
    assert ask(server, max_tokens=1).usage.completion_tokens == 5


def test_of_a_class(server):
    assert SamplingParams(n=1).n == 1


def test_without_a_server():
    assert SamplingParams(n=1).n == 1
"""


@pytest.mark.full  # the lane `clients` runs the suite on a sample of the real tests
@pytest.mark.timeout(900)  # a server starts, and pytest in a process of its own
def test_the_report_counts_what_passes_fails_and_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / FILE
    file.parent.mkdir(parents=True)
    for folder in file.relative_to(tmp_path).parents[:-1]:
        (tmp_path / folder / "__init__.py").touch()
    file.write_text(TESTS)
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    arguments = ["--sdist", str(tmp_path), "--only", "test_chat_echo", "--out", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, str(ROOT / "conformance" / "vllm_suite.py"), *arguments],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    path = FILE.removeprefix("tests/")
    assert f"| {path} | 1 | 1 | 1 |" in done.stdout
    assert f"- {path}::test_fails: failed: assert 1 == 5" in done.stdout
    assert "- 1: tests vLLM's own classes, without a server" in done.stdout


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        ({"a.py::x": ("passed", ""), "a.py::y": ("failed", "of no matter")}, []),
        ({"a.py::x": ("failed", "assert 1 == 2")}, ["- a.py::x: failed: assert 1 == 2"]),
        ({}, ["- a.py::x: not run: "]),
    ],
)
def test_listed_tests_must_pass(results: dict[str, tuple[str, str]], expected: list[str]) -> None:
    assert lost(["a.py::x", "b.py::x"], results, "a") == expected


def test_a_choice_without_listed_tests_is_an_error() -> None:
    assert lost(["a.py::x"], {"b.py::x": ("passed", "")}, "b")


def test_only_files_of_the_suite_are_listed() -> None:
    assert {test.partition("::")[0] for test in PASSING.read_text().splitlines()} <= vllm_tests.TESTS.keys()


def test_a_directory_without_the_tests_is_refused(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "conformance" / "vllm_suite.py"), "--sdist", str(tmp_path)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert (
        "has no tests/entrypoints: give the directory of vLLM's unpacked source distribution" in done.stderr
    )
