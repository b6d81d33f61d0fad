"""Coding agents that speak Anthropic's Messages or OpenAI's chats: a session of each, as it comes."""

from __future__ import annotations

import base64
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

NPM = Path(os.environ.get("ARGOSY_NODE_MODULES", "")) / ".bin"
CLAUDE, OPENCODE = str(NPM / "claude"), str(NPM / "opencode")
AIDER, LLM = os.environ.get("ARGOSY_AIDER", ""), os.environ.get("ARGOSY_LLM", "")
TIMEOUT_S = 100
COUNT = '{"command": "echo argosy-$((6 * 7))", "description": "Count"}'
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
"""A PNG of one pixel."""


def needs(program: str, name: str, source: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        not os.access(program, os.X_OK), reason=f"{source} has not installed the agent {name}"
    )


def run(command: list[str], home: Path, given: str = "", **environment: str) -> str:
    """Run an agent that knows nothing of this machine; return what it writes."""
    done = subprocess.run(
        command, env={"PATH": os.environ["PATH"], "HOME": str(home), **environment}, cwd=home, input=given,
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def claude(prompt: str, router: str, home: Path, *arguments: str) -> dict[str, Any]:
    command = [CLAUDE, "-p", prompt, *arguments, "--output-format", "json", "--model", "claude-sonnet-4-5"]
    written = run(
        [*command, "--allowedTools", "Bash,Read"], home, CLAUDE_CONFIG_DIR=str(home / ".claude"),
        ANTHROPIC_BASE_URL=router, ANTHROPIC_AUTH_TOKEN="none",
    )  # fmt: skip
    told: dict[str, Any] = json.loads(written)
    return told


@needs(CLAUDE, "Claude Code", "npm")
def test_claude_code_replays_images_and_searches_for_tools(scripted: str, tmp_path: Path) -> None:
    (tmp_path / "pixel.png").write_bytes(base64.b64decode(PIXEL))
    steps = (
        f'script: Read {{"file_path": "{tmp_path}/pixel.png"}}',
        'script: ToolSearch {"query": "select:WebFetch", "max_results": 5}',
        f"script: Bash {COUNT}",
    )
    told = claude("\n".join(("Do it.", *steps)), scripted, tmp_path)
    assert (told["is_error"], told["result"]) == (False, "The tools returned argosy-42.")
    assert told["num_turns"] == 4
    then = claude("Go on.", scripted, tmp_path, "--resume", told["session_id"])
    assert (then["is_error"], then["result"]) == (False, "The tools returned argosy-42.")


@needs(OPENCODE, "opencode", "npm")
def test_opencode_runs_a_command(scripted: str, tmp_path: Path) -> None:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Argosy",
        "options": {"baseURL": f"{scripted}/v1", "apiKey": "none"},
        "models": {"tiny": {"name": "tiny", "limit": {"context": 131072, "output": 8192}}},
    }
    (tmp_path / "opencode.json").write_text(json.dumps({"provider": {"argosy": provider}}))
    command = [OPENCODE, "run", "--format", "json", "--model", "argosy/tiny"]
    written = run(command, tmp_path, f"Do it.\nscript: bash {COUNT}\n")
    parts = [event["part"] for event in map(json.loads, written.splitlines())]
    assert [part["state"]["output"] for part in parts if part["type"] == "tool"] == ["argosy-42\n"]
    assert [part["text"] for part in parts if part["type"] == "text"] == [
        "I look.",
        "The tools returned argosy-42.",
    ]


@needs(AIDER, "aider", "pip")
def test_aider_writes_a_file(scripted: str, tmp_path: Path) -> None:
    answer = "made.txt\n```\nargosy-42\n```\n"
    quiet = (
        "--no-git",
        "--yes-always",
        "--no-check-update",
        "--no-show-model-warnings",
        "--analytics-disable",
    )
    command = [AIDER, "--model", "openai/tiny", "--edit-format", "whole", *quiet, "made.txt"]
    run(
        [*command, "--message", f"Write it. say: {json.dumps(answer)}"],
        tmp_path,
        OPENAI_API_BASE=f"{scripted}/v1",
        OPENAI_API_KEY="none",
    )
    assert (tmp_path / "made.txt").read_text() == "argosy-42\n"


@needs(LLM, "llm", "pip")
def test_llm_calls_a_function(scripted: str, tmp_path: Path) -> None:
    model = {"model_id": "tiny", "model_name": "tiny", "api_base": f"{scripted}/v1", "supports_tools": True}
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([model]))
    function = 'def count(by: int) -> str:\n    "Count."\n    return f"argosy-{6 * by}"'
    command = [LLM, "--model", "tiny", "--key", "none", "--functions", function]
    written = run([*command, 'Do it.\nscript: count {"by": 7}'], tmp_path, LLM_USER_PATH=str(tmp_path))
    assert "The tools returned argosy-42." in written
