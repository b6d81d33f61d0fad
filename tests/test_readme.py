"""The lines of the README that serve a model of a hub, run as they are written but for the port."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from argosy_engine.api.server_args import ServerArgs
from argosy_engine.native.build import cache_directory
from hub_repositories import files_under
from hub_server import HubServer
from named_sources import TINY
from processes import answers, free_port, wait_until

README = (Path(__file__).parent.parent / "README.md").read_text("utf-8")
DEADLINE_S = 300.0

pytestmark = pytest.mark.timeout(4 * DEADLINE_S)


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as hub:
        hub.add_model(
            "Qwen/Qwen3-0.6B", files_under(TINY)
        )  # under its name, because no test fetches from outside
        yield hub


def lines() -> list[str]:
    found = re.search(r"^\*\*Serve your own model\*\*.*?^```\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert found
    return found[1].splitlines()


def checkout(folder: Path) -> Path:
    """Make what `make up` leaves: an environment to activate, with `argosy` in it."""
    programs = folder / ".venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "activate").write_text(f'PATH="{programs}:$PATH"\n')
    (programs / "argosy").write_text(f'#!/bin/sh\nexec "{sys.executable}" -P -m argosy "$@"\n')
    (programs / "argosy").chmod(0o755)
    built = cache_directory()  # which takes longer than the rest
    shutil.copytree(
        built, folder / "cache" / "argosy" / built.name, ignore=shutil.ignore_patterns(".build-*")
    )
    return folder


def start(folder: Path, hub: HubServer, *script: str) -> subprocess.Popen[str]:
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("HF_", "ARGOSY_", "XDG_"))
    }
    return subprocess.Popen(
        ["bash", "-ec", "\n".join(script)],
        cwd=folder,
        env=kept
        | {"HF_ENDPOINT": hub.endpoint, "HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_the_lines_serve_a_model_of_a_hub(hub: HubServer, tmp_path: Path) -> None:
    port = free_port()
    activate, doctor, serve, chat = lines()
    assert f":{ServerArgs().port}" in serve
    serve = f"{serve.partition('#')[0]} --port {port}"
    assert f":{ServerArgs().port}" in chat
    chat = chat.replace(f":{ServerArgs().port}", f":{port}")
    folder = checkout(tmp_path)
    asked = start(folder, hub, activate, doctor)
    assert "Qwen/Qwen3-0.6B" in asked.communicate(timeout=DEADLINE_S)[0]
    assert asked.returncode == 0
    assert hub.sent_bytes < 1_000_000
    server = start(folder, hub, activate, f"exec {serve}")
    try:
        wait_until(
            lambda: server.poll() is not None or answers(f"http://127.0.0.1:{port}/ready"),
            "the server",
            DEADLINE_S,
        )
        answered = start(folder, hub, activate, chat)
        assert answered.communicate(timeout=DEADLINE_S)[0].strip()
        assert answered.returncode == 0
    finally:
        server.terminate()
        output, _ = server.communicate(timeout=DEADLINE_S)
        print(output)  # for a failure's report
    assert "fetched 6.2 MiB" in output
