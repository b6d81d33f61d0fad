"""`argosy serve ORG/NAME`: a model from a hub, fetched by the server's process before its core starts."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from gguf import GGMLQuantizationType

from argosy_engine.native.build import cache_directory
from forked_serves import serve_each
from gguf_files import make_gguf
from hub_faults import Fault, Hold
from hub_repositories import Content, files_under
from hub_server import HubServer
from named_sources import TINY
from processes import Server, answers, free_port, running, wait_until

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


def check_answers(server: Server, name: str = "acme/tiny") -> None:
    assert [model["id"] for model in httpx.get(f"{server.url}/v1/models").json()["data"]] == [name]
    body = {"model": name, "prompt": "Once", "max_tokens": 4}
    assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200


def test_a_model_is_fetched_across_starts_and_the_next_one_asks_nobody(
    hub: HubServer, tmp_path: Path
) -> None:
    port, env, log = free_port(), environment(hub, tmp_path), tmp_path / "log"
    arguments = [*SERVE, "--port", str(port)]

    for number, code in ((signal.SIGTERM, 0), (signal.SIGINT, 130)):  # each ends a fetch
        hold = Hold(after_bytes=1_000_000)
        hub.faults.add("content", Fault(hold=hold), path="model.safetensors")
        with running(arguments, log, port=port, env=env, ready_path="/health") as server:
            assert hold.reached.wait(60.0)
            assert server.stop(number) == code
        hold.release.set()

    hold = Hold(after_bytes=1000)
    hub.faults.add("content", Fault(hold=hold), path="model.safetensors")
    with running(arguments, log, port=port, env=env, ready_path="/health") as server:
        assert hold.reached.wait(60.0)
        ready = httpx.get(f"{server.url}/ready")
        assert ready.status_code == 503
        assert ready.json()["status"].startswith("fetching the model")
        refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": "Once"})
        assert refused.status_code == 503
        hold.release.set()
        wait_until(lambda: answers(f"{server.url}/ready"), "the model", 100.0)
        check_answers(server)
        # Once the model is loaded, either signal is a stop that was asked for.
        assert server.stop(signal.SIGTERM) == 0
    name = f"hf://acme/tiny?endpoint={hub.endpoint}"
    told = f"{name}: revision {hub.repositories['acme/tiny'].refs['main']}"
    assert told in log.read_text()

    assert hub.requests()
    hub.forget_requests()
    with running(arguments, log, port=port, env=env) as server:
        check_answers(server)
        assert server.stop(signal.SIGINT) == 0
    assert hub.requests() == []
    assert told in log.read_text()


def test_a_gguf_file_is_served_and_the_next_start_asks_nobody(hub: HubServer, tmp_path: Path) -> None:
    file = tmp_path / "Tiny-Q8_0.gguf"
    make_gguf(file, "llama", GGMLQuantizationType.Q8_0)
    other = {"Tiny-Q4_0.gguf": b"GGUF"}
    hub.add_model("acme/tiny-gguf", {file.name: file, **other})
    port = free_port()
    env = {**environment(hub, tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    shutil.copytree(
        cache_directory(), tmp_path / "cache" / "argosy" / "native"
    )  # compiled once for all tests
    arguments = [SERVE[0], "acme/tiny-gguf:q8_0", *SERVE[2:], "--port", str(port)]
    logs = [tmp_path / "first", tmp_path / "second"]
    for log in logs:
        with running(arguments, log, port=port, env=env) as server:
            check_answers(server, "acme/tiny-gguf:Q8_0")
            assert server.stop(signal.SIGTERM) == 0
        seen = hub.requests()
        hub.forget_requests()
    assert seen == []
    assert [log.read_text().count("is widened to ") for log in logs] == [1, 0]


def test_a_model_that_cannot_be_served_is_one_line_and_exit_code_2(hub: HubServer, tmp_path: Path) -> None:
    hub.add_model("acme/bert", with_config(architectures=["SwinBackbone"]))
    messages = {
        "acme/bert": "hf://acme/bert: config.json: architecture SwinBackbone is not supported; there is: ",
        "acme/missing": "acme/missing",
        "hf://acme/tiny@no-such-branch": "no-such-branch",
    }
    flags = [*SERVE[2:], "--port", str(free_port())]
    outcomes = serve_each([[model, *flags] for model in messages], env=environment(hub, tmp_path))
    wrong = {}
    for (model, message), outcome in zip(messages.items(), outcomes, strict=True):
        lines = [line for line in outcome.stderr.splitlines() if line.startswith("argosy serve: ")]
        is_refused = outcome.returncode == 2 and len(lines) == 1 and message in lines[0]
        if not is_refused or "Traceback" in outcome.stderr:
            wrong[model] = outcome
    assert not wrong
    assert hub.requests("content", "model.safetensors") == []
