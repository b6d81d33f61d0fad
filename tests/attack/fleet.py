"""The fleet under attack: a router with API keys over three engines on the tiny model, and `argosy batch`, as processes
of this machine.

Owns the processes, their restarts after a kill, their process ids, and the search for what they leave behind. Must not
know attacks or clients. Everything listens on loopback. The engines are small (64 MiB of KV cache, 32 sequences), so
that attacks reach their limits.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from argosy_protocol.fleet import Endpoint, FleetDocument, FleetService, encode_fleet
from processes import children, free_port, is_alive

from .wire import Broken, ask

MODEL = "tiny"
PARTIAL_ALIAS = "small"
"""A name that only the first engine serves."""
UNKNOWN_ADAPTER = "poet"
"""An adapter that the fleet document lists and no engine serves."""
GUEST = "guest"
"""A model of another namespace, which may vanish. The first engine serves it, too."""
NUM_TENANTS = 10_000
"""Further keys of the router, each with an account of its own."""
CANARY_KEY, ATTACKER_KEY, ENGINE_KEY = "sk-attack-canary", "sk-attack-attacker", "sk-attack-engine"
_FLEET_KEY = {"ARGOSY_FLEET_KEY": "a fleet key of attacks"}
MAX_CONNECTIONS = 512
"""The router's connection limit, low enough for an attack to use it up."""
START_S = 300.0
LEFTOVER_S = 60.0
"""How long after the end of their parents processes may live on: those that end by themselves, one after the other."""
_FOLDER_VARIABLE = "ATTACK_FOLDER"
"""Environment variable of all the fleet's processes and their descendants, by which leftover ones are found."""
ENGINE_FLAGS = (
    *("--threads", "1", "--dtype", "float32", "--max-num-seqs", "32"),
    *("--kv-cache-memory-bytes", str(64 << 20), "--structured-outputs-cache-bytes", str(16 << 20)),
    *("--api-key", ENGINE_KEY, "--shutdown-timeout", "0", "--disable-log-stats"),
)
"""In float32, a stream that migrates to another replica continues exactly as it would have."""


_BUCKET = "attack"
_CREDENTIALS = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_REGION": "us-east-1"}


def tenant_key(number: int) -> str:
    return f"sk-attack-tenant-{number:05}"


def _replace(path: Path, content: bytes) -> None:
    """Write a file that its readers see whole."""
    new = path.with_suffix(".new")
    new.write_bytes(content)
    new.rename(path)


@dataclass
class Process:
    """One server process, which can be restarted."""

    name: str
    port: int
    arguments: tuple[str, ...]
    log: Path
    variables: dict[str, str] = field(default_factory=dict)
    python: str = sys.executable
    popen: subprocess.Popen[bytes] | None = None
    starts: int = 0

    @property
    def pid(self) -> int:
        assert self.popen is not None
        return self.popen.pid

    def start(self) -> None:
        self.starts += 1
        with self.log.open("ab") as output:
            self.popen = subprocess.Popen(
                [self.python, "-P", "-m", *self.arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,  # in one session, as `argosy up` starts them
                env={**os.environ, _FOLDER_VARIABLE: str(self.log.parent), **self.variables},
            )

    def stop(self) -> None:
        """Stop the process, which should end its descendants."""
        if self.popen is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGCONT)
            self.popen.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(20)
        self.popen.kill()
        self.popen.wait()

    @property
    def has_exited(self) -> bool:
        return self.popen is None or self.popen.poll() is not None


class Engine(Process):
    """One replica: an API process and its core."""

    @property
    def core(self) -> int:
        """Process id of the engine's core; 0 if there is none now."""
        with contextlib.suppress(OSError):
            for pid in children(self.pid):
                if b"argosy_engine.core.proc.core_process" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return pid
        return 0

    def signal_core(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            if core := self.core:
                os.kill(core, number)

    def stop_grammar_server(self) -> None:
        """Stop the core's grammar process (SIGSTOP), so that it cannot notice the core's end."""
        with contextlib.suppress(OSError):
            for pid in children(self.core):
                if b"grammar_server" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGSTOP)


class Fleet:
    """Router and engines, from `start` to `stop`.

    Args:
        bucket: interpreter of an environment with moto (`moto_server.prepare`), whose bucket is the storage then; else
            the storage is a directory.
    """

    def __init__(self, folder: Path, engines: int = 3, bucket: Path | None = None) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.engines = [self._engine(number) for number in range(engines)]
        self.storage = folder / "storage"
        self.bucket: Process | None = None
        location, variables = str(self.storage), dict(_FLEET_KEY)
        if bucket is not None:
            port = free_port()
            arguments = ("moto.server", "-H", "127.0.0.1", "-p", str(port))
            self.bucket = Process("bucket", port, arguments, folder / "bucket.log", python=str(bucket))
            location = f"s3://{_BUCKET}/jobs"
            variables |= {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", **_CREDENTIALS}
        self.batch = Process("batch", free_port(), (), folder / "batch.log", variables)
        self.keys = folder / "keys"
        self.fleet_file = folder / "fleet.json"
        self.router = self._router()
        self.batch.arguments = (
            *("argosy_batch.main", "--port", str(self.batch.port), "--storage", location),
            *("--router-url", f"http://127.0.0.1:{self.router.port}"),
        )

    def _engine(self, number: int) -> Engine:
        names = (MODEL, PARTIAL_ALIAS, GUEST) if number == 0 else (MODEL,)
        port = free_port()
        arguments = (
            *("argosy_engine.api.serve", "builtin://tiny", "--port", str(port), *ENGINE_FLAGS),
            *("--served-model-name", *names),
        )
        return Engine(f"r{number}", port, arguments, self.folder / f"r{number}.log")

    def write_fleet(self, *, has_guests: bool) -> None:
        """Tell the router of the services, with the other namespace or without it."""

        def service(namespace: str, model: str, engines: Sequence[Engine], **fields: Any) -> FleetService:
            endpoints = tuple(
                Endpoint(name=engine.name, url=f"http://127.0.0.1:{engine.port}") for engine in engines
            )
            return FleetService(
                namespace=namespace,
                name=model,
                uid=namespace,
                model=model,
                endpoints=endpoints,
                internal_key=ENGINE_KEY,
                **fields,
            )

        services = [
            service("default", MODEL, self.engines, aliases=(PARTIAL_ALIAS,), adapters=(UNKNOWN_ADAPTER,))
        ]
        if has_guests:
            services.append(service("guests", GUEST, self.engines[:1]))
        _replace(self.fleet_file, encode_fleet(FleetDocument(services=tuple(services))))

    def write_keys(self, tenants: Iterable[int] = range(NUM_TENANTS)) -> None:
        """Tell the router of its keys: the canary's, the attacker's, and those of tenants."""
        lines = [f"{CANARY_KEY} name=canary", f"{ATTACKER_KEY} name=attacker"]
        lines += [f"{tenant_key(number)} name=tenant-{number}" for number in tenants]
        _replace(self.keys, "".join(f"{line}\n" for line in lines).encode())

    def _router(self) -> Process:
        self.write_fleet(has_guests=True)
        self.write_keys()
        port, self.admin_port = free_port(), free_port()
        arguments = (
            *("argosy_router.main", "--port", str(port), "--admin-port", str(self.admin_port)),
            *("--fleet-file", str(self.fleet_file), "--api-keys-file", str(self.keys)),
            *("--max-connections", str(MAX_CONNECTIONS), "--no-access-log"),
            *("--batch-url", f"http://127.0.0.1:{self.batch.port}"),
        )
        return Process("router", port, arguments, self.folder / "router.log", _FLEET_KEY)

    @property
    def port(self) -> int:
        return self.router.port

    @property
    def processes(self) -> list[Process]:
        return [self.router, self.batch, *self.engines, *([self.bucket] if self.bucket else [])]

    async def start(self) -> None:
        """Start all processes and wait until every replica is synced with the router.

        Raises:
            RuntimeError: a process exited, or not all replicas are synced within `START_S`.
        """
        if self.bucket is not None:
            self.bucket.start()
            await self._create_bucket(self.bucket)
        for process in self.processes:
            if process is not self.bucket:
                process.start()
        await self.until_synced(START_S)

    async def _create_bucket(self, server: Process) -> None:
        request = urllib.request.Request(f"http://127.0.0.1:{server.port}/{_BUCKET}", method="PUT")
        deadline = time.monotonic() + START_S
        while True:
            try:
                (await asyncio.to_thread(urllib.request.urlopen, request)).close()
                return
            except OSError:
                if server.has_exited or time.monotonic() > deadline:
                    raise RuntimeError(f"no bucket can be made; logs are in {self.folder}") from None
            await asyncio.sleep(0.2)

    async def restart(self, engine: Engine) -> None:
        """Wait until a killed engine has exited, start it again, and wait until it is synced."""
        assert engine.popen is not None
        await asyncio.to_thread(engine.popen.wait, START_S)
        engine.start()
        await self.until_synced(START_S)

    async def until_synced(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while await self._synced() < len(self.engines):
            if ended := [process.name for process in self.processes if process.has_exited]:
                raise RuntimeError(f"{', '.join(ended)} ended; logs are in {self.folder}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"not all replicas are synced after {timeout_s:.0f} s: {self.folder}")
            await asyncio.sleep(0.2)

    async def _synced(self) -> int:
        with contextlib.suppress(OSError, TimeoutError, Broken):
            text = (await ask(self.admin_port, "/metrics", timeout_s=5.0)).body.decode()
            return sum(
                line.endswith(" 1.0") and 'state="synced"' in line and f'model="{MODEL}"' in line
                for line in text.splitlines()
                if line.startswith("argosy_router_replica_state{")
            )
        return 0

    @property
    def mortals(self) -> list[Engine]:
        """Engines that attacks may kill. The first one runs throughout, so that its memory can be judged."""
        return self.engines[1:]

    def pids(self) -> dict[str, int]:
        """Return the ids of the fleet's running processes by name, cores included."""
        found = {}
        for process in self.processes:
            if not process.has_exited:
                found[f"{process.name} #{process.starts}"] = process.pid
                if isinstance(process, Engine) and (core := process.core) and is_alive(core):
                    found[f"{process.name} core #{process.starts}"] = core
        return found

    def stop(self) -> list[str]:
        """Stop all processes and kill what is left of any that ever ran; return the command lines of those."""
        for process in self.processes:
            process.stop()
        deadline = time.monotonic() + LEFTOVER_S
        while (left := self._living()) and time.monotonic() < deadline:
            time.sleep(0.1)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return list(left.values())

    def _living(self) -> dict[int, str]:
        """Return the command lines of all descendants of the fleet's processes, past ones included."""
        mark = f"{_FOLDER_VARIABLE}={self.folder}".encode()
        found = {}
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if folder.name.isdigit() and mark in (folder / "environ").read_bytes().split(b"\0"):
                    command = (folder / "cmdline").read_bytes().rstrip(b"\0")
                    found[int(folder.name)] = command.replace(b"\0", b" ").decode()
        return found
