"""`argosy serve ORG/NAME`: a model from a hub, fetched by the server's process before its core starts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from hub_faults import Fault, Hold
from hub_repositories import Content, files_under
from hub_server import HubServer
from named_sources import TINY
from processes import answers, free_port, running, wait_until

pytestmark = pytest.mark.timeout(300)

SERVE = ["argosy_engine.api.serve", "acme/tiny", "--threads", "1", "--device", "cpu"]


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        server.add_model("acme/tiny", files_under(TINY))
        yield server


def environment(hub: HubServer, tmp_path: Path) -> dict[str, str]:
    return {
        **os.environ,
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(tmp_path / "hf"),
        "ARGOSY_MODELS_DIR": str(tmp_path / "models"),
    }


def with_config(**changes: object) -> dict[str, Content]:
    config = json.loads((TINY / "config.json").read_bytes())
    return {**files_under(TINY), "config.json": json.dumps({**config, **changes}).encode()}


def test_a_second_start_asks_nobody(hub: HubServer, tmp_path: Path) -> None:
    env = environment(hub, tmp_path)
    for is_first in (True, False):
        hub.forget_requests()
        port = free_port()
        with running([*SERVE, "--port", str(port)], tmp_path / "log", port=port, env=env) as server:
            names = [model["id"] for model in httpx.get(f"{server.url}/v1/models").json()["data"]]
            body = {"model": "acme/tiny", "prompt": "Once", "max_tokens": 4}
            answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
            assert server.stop() == 0
        assert names == ["acme/tiny"]
        assert answer.status_code == 200
        assert bool(hub.requests()) == is_first
        log = (tmp_path / "log").read_text()
        name = f"hf://acme/tiny?endpoint={hub.endpoint}"
        assert f"{name}: revision {hub.repositories['acme/tiny'].refs['main']}" in log


def test_the_server_answers_while_the_model_is_fetched(hub: HubServer, tmp_path: Path) -> None:
    hold = Hold(after_bytes=1000)
    hub.faults.add("content", Fault(hold=hold), path="model.safetensors")
    port = free_port()
    arguments, env = [*SERVE, "--port", str(port)], environment(hub, tmp_path)
    with running(arguments, tmp_path / "log", port=port, env=env, ready_path="/health") as server:
        assert hold.reached.wait(60.0)
        ready = httpx.get(f"{server.url}/ready")
        assert ready.status_code == 503
        assert ready.json()["status"].startswith("fetching the model")
        refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": "Once"})
        assert refused.status_code == 503
        hold.release.set()
        wait_until(lambda: answers(f"{server.url}/ready"), "the model", 100.0)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_ends_a_fetch_and_the_next_start_serves(
    number: signal.Signals, code: int, hub: HubServer, tmp_path: Path
) -> None:
    hold = Hold(after_bytes=3_000_000)
    hub.faults.add("content", Fault(hold=hold), path="model.safetensors")
    port, env = free_port(), environment(hub, tmp_path)
    arguments = [*SERVE, "--port", str(port)]
    with running(arguments, tmp_path / "log", port=port, env=env, ready_path="/health") as server:
        assert hold.reached.wait(60.0)
        assert server.stop(number) == code
    hold.release.set()
    with running(arguments, tmp_path / "log", port=port, env=env) as server:
        assert server.stop(number) == 0  # once the model is loaded, either is a stop that was asked for


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("acme/bert", "hf://acme/bert: config.json: architecture BertModel is not supported; there is: "),
        ("acme/missing", "acme/missing"),
        ("hf://acme/tiny@no-such-branch", "no-such-branch"),
    ],
)
def test_a_model_that_cannot_be_served_is_one_line_and_exit_code_2(
    model: str, message: str, hub: HubServer, tmp_path: Path
) -> None:
    hub.add_model("acme/bert", with_config(architectures=["BertModel"]))
    command = [sys.executable, "-m", *SERVE, "--port", str(free_port())]
    command[command.index("acme/tiny")] = model
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, env=environment(hub, tmp_path)
    )
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("argosy serve: ")]
    assert message in line
    assert "Traceback" not in done.stderr
    assert hub.requests("content", "model.safetensors") == []
