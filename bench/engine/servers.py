"""Servers that a benchmark compares: processes that start once, only one of which runs at a time.

The others are stopped with SIGSTOP, so that they use no CPU while one is measured, and rounds can alternate without
restarting the servers.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

START_TIMEOUT_S = 600
VLLM = {"vllm": 1, "vllm-all-cores": 0}
"""Maps vLLM's two settings to the cores that it leaves free (VLLM_CPU_NUM_OF_RESERVED_CPU). Its default, 1, suits small
models on a few cores; 0 suits large ones. The better one also depends on the CPU's model, so both are measured."""


@dataclass
class Server:
    name: str
    url: str
    process: subprocess.Popen[bytes]
    log: Path
    start_s: float = 0.0
    """From exec to the first token of a one-token completion."""

    def awake(self) -> AbstractContextManager[None]:
        return awake(self.process)

    def stop(self) -> None:
        stop(self.process)


@contextmanager
def awake(process: subprocess.Popen[Any]) -> Iterator[None]:
    """Let a process and its group run until the block ends."""
    os.killpg(process.pid, signal.SIGCONT)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGSTOP)


def stop(process: subprocess.Popen[Any]) -> None:
    """Stop a process and whatever is left of its group, because vLLM's workers outlive their parents."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGCONT)
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=30)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def start_argosy(
    model: str,
    dtype: str,
    logs: Path,
    threads: int,
    *flags: str,
    device: str = "cpu",
    env: Mapping[str, str] = MappingProxyType({}),
) -> Server:
    port = _free_port()
    command = [
        sys.executable, "-P", "-m", "argosy", "serve", model, "--port", str(port), "--device", device,
        "--dtype", dtype, "--threads", str(threads), "--served-model-name", "bench",
        *flags,
    ]  # fmt: skip
    return _start("argosy", command, env, port, logs)


def start_vllm(name: str, python: str, model: str, dtype: str, logs: Path, *flags: str) -> Server:
    """Start vLLM's server.

    Args:
        name: a key of `VLLM`.
    """
    port = _free_port()
    command = [
        python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--port", str(port),
        "--dtype", dtype, "--served-model-name", "bench", *flags,
    ]  # fmt: skip
    env = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_NUM_OF_RESERVED_CPU": str(VLLM[name])}
    return _start(name, command, env, port, logs)


def _start(name: str, command: list[str], env: Mapping[str, str], port: int, logs: Path) -> Server:
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"{name}.log"
    started = time.perf_counter()
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=file, env={**os.environ, **env}, process_group=0
        )
    server = Server(name, f"http://127.0.0.1:{port}", process, log)
    body = b'{"model": "bench", "prompt": [5, 6, 7], "max_tokens": 1}'
    request = urllib.request.Request(
        f"{server.url}/v1/completions", body, {"content-type": "application/json"}
    )
    while True:
        try:
            with urllib.request.urlopen(request, timeout=60):
                break
        except OSError:
            if process.poll() is not None or time.perf_counter() - started > START_TIMEOUT_S:
                stop(process)
                raise SystemExit(f"{name} did not start:\n{log.read_text()[-3000:]}") from None
            time.sleep(0.02)
    server.start_s = time.perf_counter() - started
    os.killpg(process.pid, signal.SIGSTOP)
    return server


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
