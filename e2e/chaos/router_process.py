"""A real router beside the simulated one: it follows the fleet document and every pod, and answers `/health`.

Its replicas are simulated, so it reaches none of them. What is measured is what a large fleet costs it: memory, and
how long its event loop is held. A process of its own asks `/health` all the time (`python -m chaos.router_process`).
"""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from chaos.api import Api, until
from chaos.operator_process import (
    SYSTEM,
    kubeconfig,
    process_environment,
    require_running,
    resident,
    start_argosy,
)
from chaos.plane import Plane
from processes import free_port

ACCOUNT = "argosy-router"
PERIOD_S = 0.01


@dataclass(frozen=True)
class Pauses:
    """What a client saw since the last look."""

    longest_s: float
    """The longest answer to `/health`."""
    held_s: float
    """The most CPU time that the router used during one such answer: how long its own work, and not another process of
    a busy machine, held up the answer."""


class RouterProcess:
    """`start` comes first, once the operator has made the fleet key."""

    def __init__(self, plane: Plane, api: Api, folder: Path, *, compiled: str = "") -> None:
        """
        Args:
            compiled: an unpacked wheel of `make wheel` to run instead of the sources.
        """
        self._compiled = compiled
        self._plane = plane
        self._api = api
        self._folder = folder
        self._process: asyncio.subprocess.Process | None = None
        self._asking: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        secret = await self._api.find("secrets", SYSTEM, "argosy-fleet-key")
        key = base64.b64decode((secret or {})["data"]["key"]).decode()
        port, admin = free_port(), free_port()
        environment = process_environment() | {
            "KUBECONFIG": str(
                await kubeconfig(self._api, self._plane, self._folder, ACCOUNT, self._plane.url)
            ),
            "ARGOSY_FLEET_KEY": key,
            "POD_NAME": "argosy-router-real",
            "POD_NAMESPACE": SYSTEM,
        }
        if self._compiled:
            environment["PYTHONPATH"] = self._compiled
        log = self._folder / "router.log"
        words = ["router", "--host=127.0.0.1", f"--port={port}", f"--admin-port={admin}", "--no-auth"]
        words += ["--kubernetes", f"--fleet-namespace={SYSTEM}", "--fleet-configmap=argosy-fleet"]
        process = self._process = await start_argosy(words, environment, log)

        async def listens() -> bool:
            require_running(process, "the router", log)
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                return False
            writer.close()
            return True

        await until("the router to listen", listens, 60)
        self._asking = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "chaos.router_process", str(port), str(process.pid)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )

    async def close(self) -> None:
        for process in (self._asking, self._process):
            if process is not None and process.returncode is None:
                process.kill()
                await process.wait()

    def memory_mib(self) -> float:
        """Most resident memory so far."""
        assert self._process is not None
        return resident(self._process.pid)[1] / (1 << 20)

    async def pauses(self) -> Pauses:
        """Those since the last call."""
        assert self._asking is not None and self._asking.stdin is not None and self._asking.stdout is not None  # noqa: PT018
        self._asking.stdin.write(b"\n")
        return Pauses(**json.loads(await self._asking.stdout.readline()))


def _ask(port: int, pid: int) -> None:
    """Ask without end; at each line of standard input write what was seen."""
    import select

    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    longest = held = 0.0
    while True:
        cpu, began = _cpu_s(pid), time.monotonic()
        connection.request("GET", "/health")
        connection.getresponse().read()
        took = time.monotonic() - began
        longest, held = max(longest, took), max(held, min(took, _cpu_s(pid) - cpu))
        if select.select([sys.stdin], [], [], PERIOD_S)[0]:
            if not sys.stdin.readline():
                return
            print(json.dumps({"longest_s": longest, "held_s": held}), flush=True)
            longest = held = 0.0


def _cpu_s(pid: int) -> float:
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


if __name__ == "__main__":
    _ask(int(sys.argv[1]), int(sys.argv[2]))
