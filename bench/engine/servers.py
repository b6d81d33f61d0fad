"""The servers a benchmark compares: started once each, and only one of them awake at a time.

The others are stopped with SIGSTOP, so that they cost nothing while one is measured and rounds can alternate without
paying each start anew.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

START_TIMEOUT_S = 600


@dataclass
class Server:
    name: str
    url: str
    process: subprocess.Popen[bytes]
    log: Path
    start_s: float = 0.0
    """From exec to the first token of a one-token completion."""

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Runs the whole process group for the length of the block."""
        os.killpg(self.process.pid, signal.SIGCONT)
        try:
            yield
        finally:
            os.killpg(self.process.pid, signal.SIGSTOP)

    def rss(self) -> int:
        """Resident bytes of the process tree, shared pages counted once per process."""
        total = 0
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if os.getpgid(int(folder.name)) == self.process.pid:
                    pages = int((folder / "statm").read_text().split()[1])
                    total += pages * os.sysconf("SC_PAGE_SIZE")
            except (OSError, ValueError):
                continue
        return total

    def stop(self) -> None:
        os.killpg(self.process.pid, signal.SIGCONT)
        self.process.terminate()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def start_argosy(model: str, dtype: str, logs: Path, threads: int) -> Server:
    port = _free_port()
    command = [
        sys.executable, "-P", "-m", "argosy", "serve", model, "--port", str(port), "--device", "cpu",
        "--dtype", dtype, "--threads", str(threads), "--served-model-name", "bench",
    ]  # fmt: skip
    return _start("argosy", command, {}, port, logs)


def start_vllm(python: str, model: str, dtype: str, logs: Path, reserved_cpus: int) -> Server:
    """`reserved_cpus`: 1 is vLLM's default, one of two cores; 0 gives it both (better for large models)."""
    port = _free_port()
    command = [
        python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--port", str(port),
        "--dtype", dtype, "--served-model-name", "bench",
    ]  # fmt: skip
    env = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_NUM_OF_RESERVED_CPU": str(reserved_cpus)}
    return _start("vllm", command, env, port, logs)


def _start(name: str, command: list[str], env: dict[str, str], port: int, logs: Path) -> Server:
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"{name}.log"
    started = time.perf_counter()
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=file, env=os.environ | env, start_new_session=True
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
                raise SystemExit(f"{name} did not start:\n{log.read_text()[-3000:]}") from None
            time.sleep(0.02)
    server.start_s = time.perf_counter() - started
    os.killpg(process.pid, signal.SIGSTOP)
    return server


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
