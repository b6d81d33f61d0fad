"""An engine and a router in front of it, run by the interpreter that has them (`ARGOSY_PYTHON`)."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

START_TIMEOUT_S = 120
TINY = Path(__file__).parents[2] / "models" / "argosy-tiny"
FLEET_KEY = "a fleet key of tests"
CONTEXT_TOKENS = 1 << 17
"""Room for an agent's own prompt and tools: 20,000 to 50,000 tokens of a vocabulary as small as the tiny model's."""
AGENTS_MODELS = ("tiny", "gpt-6.2-sol", "gpt-5.5", "claude-sonnet-4-5")
"""Names that the scripted model is served by: agents send other tools to models that they know."""


@contextmanager
def reserved_port() -> Iterator[int]:
    """Reserve a port for a server: Linux gives it to no socket that asks for any port, and lets one with SO_REUSEADDR
    that asks for it listen."""
    with socket.socket() as reservation:
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reservation.bind(("127.0.0.1", 0))
        port: int = reservation.getsockname()[1]
        yield port


@contextmanager
def running(*arguments: str, modules: Path | None = None, fleet_key: str = "") -> Iterator[str]:
    """Run `argosy` with the arguments until the block ends; yield its URL.

    Args:
        modules: a directory of modules that it may import.
        fleet_key: by which a router and what keeps its responses know each other.
    """
    with reserved_port() as port:
        yield from _running(port, arguments, modules, fleet_key)


def _running(port: int, arguments: tuple[str, ...], modules: Path | None, fleet_key: str) -> Iterator[str]:
    command = [os.environ["ARGOSY_PYTHON"], "-m", "argosy", *arguments, "--port", str(port)]
    paths = [os.environ.get("PYTHONPATH", ""), *([str(modules)] if modules is not None else [])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    environment |= {"ARGOSY_FLEET_KEY": fleet_key} if fleet_key else {}
    process = subprocess.Popen(command, env=environment)
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + START_TIMEOUT_S
    try:
        while not is_ready(f"{url}/ready"):
            assert process.poll() is None, f"{command} exited with {process.returncode}"
            assert time.monotonic() < deadline, f"{command} is not ready after {START_TIMEOUT_S} s"
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


@pytest.fixture(scope="session")
def engine() -> Iterator[str]:
    with running("serve", "builtin://tiny", "--device", "cpu", "--dtype", "float32") as url:
        yield url


@pytest.fixture(scope="session")
def router(engine: str) -> Iterator[str]:
    with (
        reserved_port() as admin_port,
        running("router", "--replica", engine, "--admin-port", str(admin_port)) as url,
    ):
        yield url


@pytest.fixture(scope="session", params=["engine", "router"])
def base_url(request: pytest.FixtureRequest) -> str:
    """What an OpenAI SDK is told: an engine, and a router in front of it."""
    return f"{request.getfixturevalue(request.param)}/v1"


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A router, which stores responses, in front of an engine whose model writes what a test's script says.

    The model is one layer of random weights with the tiny model's tokenizer and template: it computes long prompts
    fast.
    """
    model = tmp_path_factory.mktemp("scripted") / "model"
    shutil.copytree(TINY, model, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((model / "config.json").read_text())
    config |= {"max_position_embeddings": CONTEXT_TOKENS, "layer_types": ["full_attention"]}
    config |= {"num_hidden_layers": 1, "max_window_layers": 1, "hidden_size": 32, "intermediate_size": 32}
    config |= {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 32}
    (model / "config.json").write_text(json.dumps(config))
    flags = ("--device", "cpu", "--dtype", "float32", "--load-format", "dummy")
    script = ("--logits-processors", "scripted_model:ScriptedModel")
    storage = str(tmp_path_factory.mktemp("storage"))
    with (
        running(
            "serve", str(model), *flags, *script, "--served-model-name", *AGENTS_MODELS,
            modules=Path(__file__).parent,
        ) as engine,
        running("batch", "--storage", storage, fleet_key=FLEET_KEY) as keeper,
        reserved_port() as admin_port,
        running(
            "router", "--replica", engine, "--admin-port", str(admin_port), "--batch-url", keeper, fleet_key=FLEET_KEY
        ) as url,
    ):  # fmt: skip
        yield url
