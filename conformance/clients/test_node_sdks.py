"""The SDKs of OpenAI and Anthropic for Node, which node_sdks.mjs calls as applications do."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

MODULES = os.environ.get("ARGOSY_NODE_MODULES", "")
SCRIPT = Path(__file__).with_name("node_sdks.mjs")
SDKS = ("openai", "anthropic")
TIMEOUT_S = 100

pytestmark = pytest.mark.skipif(
    not all((Path(MODULES) / name).is_dir() for name in ("openai", "@anthropic-ai/sdk")),
    reason="npm has not installed the SDKs for Node",
)


def running_and_aborted(engine: str) -> tuple[float, float]:
    """The engine's requests that run, and how many it has ended since their client left."""
    with urllib.request.urlopen(f"{engine}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    running = re.findall(r"^vllm:num_requests_running\{.*\} (\S+)$", text, re.M)
    ended = re.findall(r'^vllm:request_success_total\{.*finished_reason="abort".*\} (\S+)$', text, re.M)
    return sum(map(float, running)), sum(map(float, ended))


@pytest.fixture(scope="module", params=["engine", "router"])
def results(request: pytest.FixtureRequest, engine: str) -> dict[str, Any]:
    """What each call of the script gave, at an engine and at a router in front of it."""
    _, aborted_before = running_and_aborted(engine)
    done = subprocess.run(
        ["node", SCRIPT, request.getfixturevalue(request.param)], stdin=subprocess.DEVNULL, capture_output=True,
        text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        running, aborted = running_and_aborted(engine)
        if running == 0 or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return found | {"running": running, "aborted": aborted - aborted_before}


def test_no_call_fails(results: dict[str, Any]) -> None:
    failed = {
        name: result for name, result in results.items() if isinstance(result, dict) and "failed" in result
    }
    assert failed == {}


@pytest.mark.parametrize("sdk", SDKS)
def test_a_chat_is_the_same_whole_and_streamed(results: dict[str, Any], sdk: str) -> None:
    whole, streamed = results[f"{sdk}_chat"], results[f"{sdk}_stream"]
    assert whole["text"]
    assert (streamed["text"], streamed["finish"]) == (whole["text"], whole["finish"])
    count = {"openai": "completion_tokens", "anthropic": "output_tokens"}[sdk]
    assert streamed["usage"][count] == whole["usage"][count] > 0


def test_tools_are_called(results: dict[str, Any]) -> None:
    assert results["openai_tools"]["called"] == [{"city": "Paris"}]
    assert "sunny" in results["openai_tools"]["text"]
    wanted = {"called": [{"name": "get_weather", "input": {"city": "Paris"}}], "finish": "tool_use"}
    assert results["anthropic_tools"] == wanted


@pytest.mark.parametrize("sdk", SDKS)
def test_a_structured_output_follows_its_schema(results: dict[str, Any], sdk: str) -> None:
    answer = results[f"{sdk}_structured"]
    assert set(answer) == {"mood", "level"}
    assert answer["mood"] in ("good", "bad")
    assert answer["level"] in range(10)


def test_errors_are_the_sdks_classes(results: dict[str, Any]) -> None:
    names = [f"{sdk}_{case}" for sdk in SDKS for case in ("error", "unknown_model")]
    shown = {name: [results[name][key] for key in ("class", "status", "type")] for name in names}
    wanted = {
        "error": ["BadRequestError", 400, "invalid_request_error"],
        "unknown_model": ["NotFoundError", 404, "not_found_error"],
    }
    assert shown == {f"{sdk}_{case}": values for sdk in SDKS for case, values in wanted.items()}
    assert (results["openai_error"]["param"], results["openai_unknown_model"]["param"]) == (
        "temperature",
        "model",
    )
    assert "temperature" in results["anthropic_error"]["message"]


def test_an_abort_reaches_the_engine(results: dict[str, Any]) -> None:
    for sdk in SDKS:
        assert results[f"{sdk}_abort"]["events"] >= 1
    assert (results["aborted"], results["running"]) == (len(SDKS), 0)
