"""Servers under test, ours or vLLM's, with the interface of the class `RemoteOpenAIServer` that vLLM's tests use.

A test asks for a model and a vLLM command line. The server gets the conformance model under that name, and of the
command line what changes how requests are answered: sizes, data types, adapters and parsers' back ends are left out. So
most test files need the same server, which is kept until another one is needed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai

START_TIMEOUT_S = 600
CLIENT_TIMEOUT_S = 100
MAX_MODEL_LEN = 8192
"""Of servers whose tests do not depend on their own value; some tests expect this one."""
DUMMY_KEY = "token-abc123"
IGNORED_FLAGS = {
    "chat-template": 1,
    "dtype": 1,
    "enable-lora": 0,
    "enforce-eager": 0,
    "gpu-memory-utilization": 1,
    "host": 1,
    "load-format": 1,
    "lora-modules": None,
    "max-cpu-loras": 1,
    "max-lora-rank": 1,
    "max-model-len": 1,
    "max-num-seqs": 1,
    "no-async-scheduling": 0,
    "no-enable-prefix-caching": 0,
    "port": 1,
    "runner": 1,
    "served-model-name": None,
    "show-hidden-metrics-for-version": 1,
    "skip-tokenizer-init": 0,
    "structured-outputs-config.backend": 1,
    "trust-remote-code": 0,
}
"""Flags that are left out, and how many values follow each (None: all up to the next flag)."""


@dataclass
class Target:
    """What servers are started from.

    Attributes:
        kind: `argosy` or `vllm`.
        python: the interpreter that has it.
        model: directory of the model that every server serves.
        logs: directory for the servers' logs.
    """

    kind: str
    python: str
    model: str
    logs: Path
    names: tuple[str, ...] = ()
    """Names that every server gives the model, besides the one that a test asks for."""
    _running: list[_Process] = field(default_factory=list)

    def process(self, names: tuple[str, ...], flags: list[str], env: dict[str, str], reuse: bool) -> _Process:
        """Return a running server for these names and flags: one that was kept, or a new one.

        Servers that no test uses any more are stopped before a new one is started.

        Raises:
            RuntimeError: the server did not start; the message has the end of its log.
        """
        for kept in self._running:
            is_same = (kept.flags, kept.env) == (flags, env) and set(names) <= set(kept.names)
            if reuse and is_same and kept.is_running:
                return kept
        for idle in [kept for kept in self._running if not kept.users]:
            self.stop(idle)
        started = _Process(self, tuple(dict.fromkeys((*names, *self.names))), flags, env)
        self._running.append(started)
        return started

    def stop(self, process: _Process) -> None:
        self._running.remove(process)
        process.stop()

    def close(self) -> None:
        """Stop all servers."""
        for process in list(self._running):
            self.stop(process)

    def command(self, names: tuple[str, ...], flags: list[str]) -> list[str]:
        module = (
            ["argosy", "serve"]
            if self.kind == "argosy"
            else ["vllm.entrypoints.openai.api_server", "--model"]
        )
        own = ["--device", "cpu"] if self.kind == "argosy" else ["--enforce-eager"]
        if "--max-model-len" not in flags:
            own += ["--max-model-len", str(MAX_MODEL_LEN)]
        return [
            self.python, "-P", "-m", *module, self.model, "--dtype", "float32", *own, *flags,
            "--served-model-name", *names,
        ]  # fmt: skip


class _Process:
    def __init__(self, target: Target, names: tuple[str, ...], flags: list[str], env: dict[str, str]) -> None:
        self.names, self.flags, self.env = names, flags, env
        self.users = 0
        """Fixtures that use the server now."""
        self.uds = flags[flags.index("--uds") + 1] if "--uds" in flags else None
        # Bound until the server has ended: Linux gives its port to no other socket that asks for any port, and lets the
        # server listen, which sets SO_REUSEADDR as well.
        self._reservation = socket.socket()
        self._reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reservation.bind(("127.0.0.1", 0))
        self.port: int = self._reservation.getsockname()[1]
        target.logs.mkdir(parents=True, exist_ok=True)
        self.log = target.logs / f"{target.kind}-{self.port}.log"
        command = target.command(names, flags)
        if self.uds is None:
            command += ["--host", "127.0.0.1", "--port", str(self.port)]
        settings = {**os.environ, **env, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
        if target.kind != "argosy":
            settings.pop("PYTHONPATH", None)
        with self.log.open("wb") as log:
            log.write((" ".join(command) + "\n").encode())
            log.flush()
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env=settings, process_group=0
            )  # fmt: skip
        self._wait_until_ready("ready" if target.kind == "argosy" else "health")

    @property
    def root(self) -> str:
        return "http://localhost" if self.uds else f"http://127.0.0.1:{self.port}"

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def _wait_until_ready(self, path: str) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        transport = httpx.HTTPTransport(uds=self.uds) if self.uds else None
        with httpx.Client(base_url=self.root, transport=transport, timeout=10) as client:
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    if client.get(path).status_code == 200:
                        return
                if not self.is_running or time.monotonic() > deadline:
                    self.stop()
                    raise RuntimeError(f"the server did not start:\n{self.log.read_text()[-2000:]}")
                time.sleep(0.1)

    def stop(self) -> None:
        """Stop the server and what is left of its process group."""
        with contextlib.suppress(ProcessLookupError):
            if self.is_running:
                self.process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(timeout=60)
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._reservation.close()


def kept_flags(arguments: list[str], ignored: dict[str, int | None]) -> list[str]:
    """Return a command line without the flags that are ignored and their values."""
    kept: list[str] = []
    rest = list(arguments)
    while rest:
        flag = rest.pop(0)
        name = flag.removeprefix("--").replace("_", "-").partition("=")[0]
        if not flag.startswith("--") or name not in ignored:
            kept.append(flag)
            continue
        count = ignored[name] if "=" not in flag else 0
        while rest and (count is None or count > 0) and not rest[0].startswith("--"):
            rest.pop(0)
            count = None if count is None else count - 1
    return kept


def served_names(model: str, arguments: list[str]) -> tuple[str, ...]:
    """Return the model's names: the one that is asked for, or those of `--served-model-name`."""
    if "--served-model-name" not in arguments:
        return (model,)
    names = arguments[arguments.index("--served-model-name") + 1 :]
    end = next((at for at, value in enumerate(names) if value.startswith("--")), len(names))
    return tuple(names[:end])


class RemoteOpenAIServer:
    """A running server, as a context manager.

    `target`, `ignored`, `thinks` and `reuse` are set by the plugin, before a test file is run.
    """

    DUMMY_API_KEY = DUMMY_KEY
    show_hidden_metrics = False
    target: Target
    ignored: dict[str, int | None] = IGNORED_FLAGS
    thinks = False
    reuse = True

    def __init__(
        self, model: str, vllm_serve_args: list[str], *, env_dict: dict[str, str] | None = None, **_: Any
    ) -> None:
        flags = kept_flags(vllm_serve_args, self.ignored)
        if "--reasoning-parser" not in flags and not self.thinks:
            flags += ["--default-chat-template-kwargs", '{"enable_thinking": false}']
        env = {name: value for name, value in (env_dict or {}).items() if os.environ.get(name) != value}
        self._process = self.target.process(served_names(model, vllm_serve_args), flags, env, self.reuse)
        self.uds, self.host, self.port = self._process.uds, "127.0.0.1", self._process.port
        self.proc = self._process.process

    def __enter__(self) -> RemoteOpenAIServer:
        self._process.users += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._process.users -= 1
        if not self.reuse:
            self.target.stop(self._process)

    @property
    def url_root(self) -> str:
        return f"http://{self.uds.split('/')[-1]}" if self.uds else self._process.root

    def url_for(self, *parts: str) -> str:
        path = "/".join(part.strip("/") for part in parts if part)
        return f"{self.url_root}/{path}"

    def _settings(self, base: str, options: dict[str, Any]) -> dict[str, Any]:
        return {
            "base_url": base,
            "api_key": DUMMY_KEY,
            "max_retries": 0,
            "timeout": CLIENT_TIMEOUT_S,
            **options,
        }

    def get_client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(**self._settings(self.url_for("v1"), options))

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(**self._settings(self.url_for("v1"), options))

    def get_client_anthropic(self, **options: Any) -> anthropic.Anthropic:
        return anthropic.Anthropic(**self._settings(self.url_for(), options))

    def get_async_client_anthropic(self, **options: Any) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(**self._settings(self.url_for(), options))
