"""Codex, OpenAI's coding agent, run headless and as it comes: it streams /v1/responses with all its tools, and replays
what they have returned."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

CODEX = str(Path(os.environ.get("ARGOSY_NODE_MODULES", "")) / ".bin" / "codex")
TURN_TIMEOUT_S = 100
SHELL = 'script: exec_command {"cmd": "echo argosy-$((6 * 7))"}'
CODE = (
    'script: exec {"input": "const r = await tools.exec_command({cmd: \\"echo argosy-$((6 * 7))\\"});\\n'
    'text(r.output);"}'
)
AGENTS = "script: collaboration__list_agents {}"
SEARCH = 'script: tool_search {"query": "agents", "limit": 2}'
PATCH = (
    'script: apply_patch {"input": "*** Begin Patch\\n*** Add File: made.txt\\n+argosy-7\\n*** End Patch\\n"}'
)
READ = 'script: exec_command {"cmd": "cat made.txt"}'

pytestmark = pytest.mark.skipif(not os.access(CODEX, os.X_OK), reason="npm has not installed Codex")


def turn(prompt: str, router: str, home: Path, model: str, *arguments: str) -> list[dict[str, Any]]:
    """Let the agent do what the prompt says; return its events."""
    provider: dict[str, Any] = {
        "name": "argosy", "base_url": f"{router}/v1", "wire_api": "responses", "env_key": "ARGOSY_API_KEY",
        "request_max_retries": 0, "stream_max_retries": 0,
    }  # fmt: skip
    if model == "tiny":  # of others Codex has a catalog of its own, with other tools
        provider["model_catalog_url"] = f"{router}/v1/models"
    fields = ", ".join(f"{name}={json.dumps(value)}" for name, value in provider.items())
    command = [CODEX, "exec", *arguments, "--json", "--skip-git-repo-check", "--model", model]
    for setting in (
        'model_provider="argosy"',
        f"model_providers.argosy={{{fields}}}",
        'sandbox_mode="danger-full-access"',
    ):
        command += ["--config", setting]
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "CODEX_HOME": str(home),
        "ARGOSY_API_KEY": "none",
    }
    done = subprocess.run(
        [*command, prompt], env=environment, cwd=home, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=TURN_TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def said(events: list[dict[str, Any]]) -> list[str]:
    """What the agent has said in a turn that went well: the catalog of models was read, and no request was refused."""
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    assert [event for event in events if event["type"] == "error"] == []
    assert [item for item in items if item["type"] == "error"] == []
    assert events[-1]["type"] == "turn.completed"
    return [item["text"] for item in items if item["type"] == "agent_message"]


def commands(events: list[dict[str, Any]]) -> list[tuple[int, str]]:
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    return [
        (item["exit_code"], item["aggregated_output"].strip())
        for item in items
        if item["type"] == "command_execution"
    ]


def test_a_model_that_codex_does_not_know_runs_a_command(scripted: str, tmp_path: Path) -> None:
    events = turn(f"What does the command write?\n{SHELL}", scripted, tmp_path, "tiny")
    assert commands(events) == [(0, "argosy-42")]
    assert said(events) == ["I look.", "The tools returned argosy-42."]


def test_a_model_whose_tools_come_in_the_conversation(scripted: str, tmp_path: Path) -> None:
    """Codex sends models of this name `additional_tools` with namespaces; its shell is a custom tool that runs code."""
    events = turn(f"What does the command write?\n{CODE}\n{AGENTS}", scripted, tmp_path, "gpt-6.2-sol")
    assert commands(events) == [(0, "argosy-42")]
    assert said(events) == ["I look.", "I look.", "The tools returned argosy-42."]


def test_a_patch_and_a_search_for_tools(scripted: str, tmp_path: Path) -> None:
    """`apply_patch` is a custom tool with a grammar, and `tool_search` finds the tools of a namespace."""
    events = turn(f"Write a file.\n{PATCH}\n{SEARCH}\n{READ}", scripted, tmp_path, "gpt-5.5")
    assert (tmp_path / "made.txt").read_text() == "argosy-7\n"
    assert commands(events) == [(0, "argosy-7")]
    assert said(events) == ["I look.", "I look.", "I look.", "The tools returned argosy-7."]


def test_a_session_is_resumed(scripted: str, tmp_path: Path) -> None:
    first = turn(f"Begin.\n{CODE}", scripted, tmp_path, "gpt-6.2-sol")
    then = turn("Go on.", scripted, tmp_path, "gpt-6.2-sol", "resume", first[0]["thread_id"])
    assert said(then) == ["The tools returned argosy-42."]
