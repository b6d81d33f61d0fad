"""Codex, OpenAI's coding agent, run headless: it streams /v1/responses with tools, and sends their results back."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import reserved_port, running

CODEX = os.environ.get("ARGOSY_CODEX", "")
OFF = ("apps", "goals", "multi_agent", "plugins", "skill_search", "view_image")
"""Features whose tools and instructions leave the tiny model no room, or that are no functions."""
TURN_TIMEOUT_S = 100

pytestmark = pytest.mark.skipif(not os.access(CODEX, os.X_OK), reason="npm has not installed Codex")


def turn(prompt: str, base_url: str, home: Path) -> list[dict[str, Any]]:
    """Let the agent do what the prompt says; return its events."""
    instructions = home / "instructions.md"
    instructions.write_text("You are a helpful assistant.")
    provider = {
        "name": "argosy", "base_url": base_url, "wire_api": "responses", "env_key": "ARGOSY_API_KEY",
        "request_max_retries": 0, "stream_max_retries": 0,
    }  # fmt: skip
    fields = ", ".join(f"{name}={json.dumps(value)}" for name, value in provider.items())
    settings = {
        "model_provider": '"argosy"',
        "model_providers.argosy": f"{{{fields}}}",
        "model_instructions_file": json.dumps(str(instructions)),
        "web_search": '"disabled"',
        "include_permissions_instructions": "false",
        "skills.bundled.enabled": "false",
    }
    command = [
        CODEX,
        "exec",
        "--json",
        "--ephemeral",
        "--skip-git-repo-check",
        "--sandbox",
        "danger-full-access",
    ]
    command += ["--model", "tiny", *(argument for name in OFF for argument in ("--disable", name))]
    for name, value in settings.items():
        command += ["--config", f"{name}={value}"]
    environment = {"PATH": os.environ["PATH"], "CODEX_HOME": str(home), "ARGOSY_API_KEY": "none"}
    done = subprocess.run(
        [*command, prompt], env=environment, cwd=home, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=TURN_TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def scripted() -> Iterator[str]:
    """A router in front of an engine whose model calls the agent's shell once, and then answers."""
    flags = ("--device", "cpu", "--dtype", "float32", "--logits-processors", "scripted_model:ScriptedModel")
    with (
        running("serve", "builtin://tiny", *flags, modules=Path(__file__).parent) as engine,
        reserved_port() as admin_port,
        running("router", "--replica", engine, "--admin-port", str(admin_port)) as url,
    ):
        yield f"{url}/v1"


def test_the_agent_runs_a_command_and_gets_an_answer_from_its_output(scripted: str, tmp_path: Path) -> None:
    events = turn("What does the command write?", scripted, tmp_path)
    assert [event for event in events if event["type"] == "error"] == []
    assert events[-1]["type"] == "turn.completed"
    assert events[-1]["usage"]["output_tokens"] > 0
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    (command,) = [item for item in items if item["type"] == "command_execution"]
    assert (command["exit_code"], command["aggregated_output"].strip()) == (0, "argosy-42")
    texts = [item["text"] for item in items if item["type"] == "agent_message"]
    assert texts == ["I look.", "The command wrote argosy-42."]
