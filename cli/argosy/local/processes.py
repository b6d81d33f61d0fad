"""The processes of the local fleet: engines (`Replica`), the router, and `argosy batch`, each restarted with back-off.

A replica's owner sets `drained` once the router has no request there. Invariants: a replica has at most one process; a
ready process gets SIGTERM only after `drained`, the deadline for draining, `halt`, or when it hangs; an engine that
refuses its arguments is started again by `start_again` only.

    Starting -> Ready -> Draining -> Stopping -> gone
        ^         |
        +-BackOff-+   the process died

The router's `report` is the last one of the running process; None while there is none. The port of `argosy batch` is
this fleet's for as long as the supervisor runs, so that the router need not be told of a restart.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from typing import Final

import msgspec

from argosy.errors import reason
from argosy.local.child_process import (
    HOST,
    Process,
    Settings,
    backoff_s,
    began_after,
    first_of,
    get,
    gpu_env,
    reserved_port,
)
from argosy.local.control import BATCH_LOG, ROUTER_LOG, Phase, StateDir
from argosy_protocol.headers import internal_key
from argosy_protocol.reports import ADMIN_KEY_UID, REPORT_PATH, ReplicaReport, RoutableReport
from argosy_resource.engine_command import API_KEY_ENV, engine_args, engine_env
from argosy_resource.types import InferenceService

_READY_POLL_S: Final = 0.1
_PROBE_TIMEOUT_S: Final = 5.0
_LOADING_STOP_S: Final = 5.0
"""Time to stop for a replica that is not ready, and so has no requests to finish."""
_STOP_SLACK_S: Final = 10.0
"""Time beyond the engine's own shutdown timeout before SIGKILL."""
_WRONG_USAGE: Final = 2
"""Exit code of an engine that refuses its arguments or its model, as every further start would."""
_UNREADY_OOM_SCORE_ADJ: Final = 500
"""Half of the memory in Linux's choice of what to kill when memory runs out: a replica that loads its model goes before
one that serves, even if that is larger."""
_QUICK_RESTARTS: Final = 3
"""Failures in a row after which a replica that has served is no longer expected back soon."""


class Replica:
    """A member of one service, of one revision."""

    def __init__(
        self,
        name: str,
        service: InferenceService,
        revision: str,
        *,
        settings: Settings,
        state: StateDir,
        internal_key: str,
        threads: int,
        gpus: tuple[int, ...],
        changed: Callable[[], None],
    ) -> None:
        self.name = name
        self.service = service
        self.revision = revision
        self.gpus = gpus
        self.phase: Phase = "Starting"
        self.reason = ""
        self.restarts = 0
        self.url = ""
        self.pid: int | None = None
        self.started = 0.0
        self.ready_since = 0.0
        """Monotonic time at which this process became ready; 0 if it is not ready."""
        self.has_served = False
        """Whether a process of it has been ready."""
        self.drained = asyncio.Event()
        """Set by the owner: the router sends no requests to it, and none is running."""
        self._settings = settings
        self._log = state.log_file(name)
        self._internal_key = internal_key
        self._threads = threads
        self._changed = changed
        self._retired = asyncio.Event()
        self._halted = asyncio.Event()
        self._again = asyncio.Event()
        self._is_refused = False
        """Whether the last process ended with wrong usage before it was ready."""
        self._failures = 0
        self.last_exit = ""
        """How the previous process ended; empty if there was none."""

    @property
    def is_leaving(self) -> bool:
        return self._retired.is_set()

    @property
    def ready_s(self) -> float:
        """Seconds since this process became ready; 0 if it is not ready."""
        return time.monotonic() - self.ready_since if self.ready_since else 0.0

    @property
    def has_failed(self) -> bool:
        """Whether a process of it ended or hung, and no later one has been ready for `min_ready_s`."""
        is_steady = self.ready_since > 0 and self.ready_s >= self._settings.min_ready_s
        return self._failures > 0 and not is_steady

    @property
    def is_recovering(self) -> bool:
        """Whether it has served, and restarts after one of its first failures since it was steady."""
        return self.has_served and self.phase != "Ready" and self._failures <= _QUICK_RESTARTS

    def retire(self) -> None:
        """Let the replica drain and end."""
        if not self.is_leaving:
            self._retired.set()
            if self.phase == "Ready":  # at once, because a retired replica must not be seen as ready
                self.phase = "Draining"
            self._changed()

    def halt(self) -> None:
        """End the replica without waiting for `drained`."""
        self.retire()
        self._halted.set()

    def start_again(self) -> None:
        """Start an engine that has refused its arguments once more: what it refused may have changed on the disk."""
        if self._is_refused and self.phase == "BackOff":
            self._again.set()
            self._enter("Starting", self._began())  # at once: it is no longer refused

    async def run(self) -> None:
        """Run the replica, restarting its process, until it is retired and gone."""
        while not self._retired.is_set():
            with reserved_port() as port:
                await self._one_life(port)
            if self._retired.is_set():
                break
            if self._is_refused:
                self._enter("BackOff", f"{self.last_exit}; the next `argosy up` starts it again")
                await first_of(self._retired, self._again)
                self._again.clear()
            else:
                delay = backoff_s(self._settings, self._failures, has_served=self.has_served)
                self._enter("BackOff", f"{self.last_exit}; next start after {delay:.1f} s")
                await first_of(self._retired, timeout_s=delay)
            self.restarts += 1

    def _began(self) -> str:
        """Why there is another process than the first one; empty if it is the first."""
        return began_after(self.last_exit)

    async def _one_life(self, port: int) -> None:
        self._is_refused = False
        self.url = f"http://{HOST}:{port}"
        self.started = time.time()
        self._enter("Starting", self._began() or "starting the process")
        try:
            process = await Process.start(
                self._command(port),
                self._environment(),
                self._log,
                more_oom_score_adj=_UNREADY_OOM_SCORE_ADJ,
            )
        except OSError as error:
            self._failures += 1
            self.last_exit = f"cannot start: {reason(error)}"
            return
        self.pid = process.pid
        try:
            await self._serve(process)
            if self._retired.is_set():
                await self._leave(process)
        finally:
            await process.end()
            self.pid = None

    async def _serve(self, process: Process) -> None:
        """Follow the process until it ends or hangs, or the replica is retired."""
        if await self._becomes_ready(process):
            process.reset_oom_score_adj()
            since = self.ready_since = time.monotonic()
            self.has_served = True
            self._enter("Ready", self._began())
            try:
                hung = await self._stays_healthy(process)
            finally:
                self.ready_since = 0.0
            if time.monotonic() - since >= self._settings.steady_s:
                self._failures = 0
            if self._retired.is_set():
                return
            self._failures += 1
            self.last_exit = "hung: /health did not answer" if hung else process.outcome
        elif not self._retired.is_set():
            self._failures += 1
            self.last_exit = f"{process.outcome} while starting"
            self._is_refused = process.exit_code == _WRONG_USAGE

    async def _becomes_ready(self, process: Process) -> bool:
        """Wait until the engine is ready (True), or has ended or is retired (False). The phase that the engine reports
        is shown as the reason."""
        while not (process.ended.is_set() or self._retired.is_set()):
            answer = await get(f"{self.url}/ready", timeout_s=_PROBE_TIMEOUT_S)
            if answer.status == 200:
                return True
            if (phase := _phase_of(answer.body)) and phase != self.reason:
                self._enter("Starting", phase)
            await first_of(process.ended, self._retired, timeout_s=_READY_POLL_S)
        return False

    async def _stays_healthy(self, process: Process) -> bool:
        """Check the health until the process ends or the replica is retired (False), or the process hangs (True)."""
        misses = 0
        while not await first_of(process.ended, self._retired, timeout_s=self._settings.health_period_s):
            answer = await get(f"{self.url}/health", timeout_s=_PROBE_TIMEOUT_S)
            misses = 0 if answer.status == 200 else misses + 1
            if misses >= self._settings.health_failures:
                return True
        return False

    async def _leave(self, process: Process) -> None:
        finish_s = float(self.service.spec.engine.shutdown_timeout_seconds)
        if self.phase != "Draining":
            finish_s = _LOADING_STOP_S
        else:
            self._enter("Draining", "running requests finish")
            await first_of(self.drained, self._halted, process.ended, timeout_s=finish_s)
        self._enter("Stopping", "")
        await process.stop(finish_s + _STOP_SLACK_S)

    def _command(self, port: int) -> tuple[str, ...]:
        args = engine_args(self.service, host=HOST, port=port)
        if self.service.spec.engine.threads is None:
            args += ["--threads", str(self._threads)]
        return (*self._settings.engine, *args)

    def _environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            **gpu_env(self.gpus),
            **engine_env(self.service),
            API_KEY_ENV: self._internal_key,
        }

    def _enter(self, phase: Phase, reason: str) -> None:
        self.phase, self.reason = phase, reason
        self._changed()


def _phase_of(body: bytes) -> str:
    """Read the phase from a starting engine's answer, such as `{"status": "loading the model"}`; empty if invalid."""
    try:
        status = json.loads(body)["status"]
    except (ValueError, KeyError, TypeError):
        return ""
    return status if isinstance(status, str) else ""


_POLL_S: Final = 2.0
"""Duration of a long poll. Changes of a replica's state are reported at once; this bounds the age of in-flight
counts."""
_DRAIN_POLL_S: Final = 0.1
"""The same while a replica drains and its in-flight count is waited for."""
_ANSWER_S: Final = 5.0
_RETRY_S: Final = 0.05
_EXIT_ADDRESS: Final = "exited with code 3"


class RouterProcess:
    """The fleet's one router."""

    def __init__(
        self, settings: Settings, state: StateDir, batch_url: str, changed: Callable[[], None]
    ) -> None:
        self.url = f"http://{HOST}:{settings.port}"
        self.admin_url = ""
        """Empty while the process is not running."""
        self.report: RoutableReport | None = None
        self.reason = "starting"
        self.restarts = 0
        self.pid: int | None = None
        self.is_drain_awaited = False
        """Whether the supervisor waits for a replica's in-flight count to reach 0."""
        self.has_reported = asyncio.Event()
        """Set once it has been ready."""
        self._batch_url = batch_url
        self._settings = settings
        self._state = state
        self._changed = changed
        self._fleet_key = state.fleet_key()
        self._process: Process | None = None
        self._stopped = asyncio.Event()
        self._grace_s = 0.0
        self._began = ""
        """Why there is another process than the first one; empty if it is the first."""

    @property
    def is_ready(self) -> bool:
        return self.report is not None

    def replica(self, service: str, name: str, url: str) -> ReplicaReport | None:
        """The report's entry for one replica's current process, identified by its URL; None if there is none."""
        for entry in self.report.replicas if self.report else ():
            if (entry.service, entry.name, entry.url) == (service, name, url):
                return entry
        return None

    async def run(self) -> None:
        """Run the process, restarting it with back-off, until `stop`."""
        failures = 0
        while not self._stopped.is_set():
            with reserved_port() as admin_port:
                process = await self._one_life(admin_port)
            failures = 1 if self.report else failures + 1
            delay = backoff_s(self._settings, failures)
            self.report, self.pid, self.admin_url, self.reason = None, None, "", process.outcome
            self._began = began_after(process.outcome)
            if process.outcome == _EXIT_ADDRESS:
                self.reason = (
                    f"port {self._settings.port} is taken; `argosy down`, then `argosy up --port PORT`"
                )
            self._changed()
            await first_of(self._stopped, timeout_s=delay)
            self.restarts += 1

    async def _one_life(self, admin_port: int) -> Process:
        """Run the process until it ends or `stop`."""
        command = (
            *self._settings.router,
            *("--host", HOST, "--port", str(self._settings.port)),
            *("--admin-host", HOST, "--admin-port", str(admin_port)),
            *("--fleet-file", str(self._state.fleet_file), "--batch-url", self._batch_url),
        )
        if self._settings.api_keys_file:
            command += ("--api-keys-file", self._settings.api_keys_file)
        process = await Process.start(command, self._environment(), self._state.log_file(ROUTER_LOG))
        self._process, self.pid = process, process.pid
        self.admin_url = f"http://{HOST}:{admin_port}"
        following = asyncio.create_task(self._follow(admin_port), name="router's report")
        try:
            await first_of(process.ended, self._stopped)
            if self._stopped.is_set():
                await process.stop(self._grace_s)
        finally:
            following.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await following
            await process.end()
        return process

    def stop(self, grace_s: float) -> None:
        """Stop the process; running requests have `grace_s` to finish."""
        self._grace_s = grace_s
        self._stopped.set()

    async def _follow(self, admin_port: int) -> None:
        base = f"http://{HOST}:{admin_port}"
        key = internal_key(self._fleet_key, ADMIN_KEY_UID)
        while True:
            if (await get(f"{base}/ready", timeout_s=_ANSWER_S)).status == 200:
                break
            await asyncio.sleep(_RETRY_S)
        after = -1
        while True:
            wait = _DRAIN_POLL_S if self.is_drain_awaited else _POLL_S
            url = f"{base}{REPORT_PATH}?after={after}&wait={wait}"
            answer = await get(url, timeout_s=wait + _ANSWER_S, bearer=key)
            report = None
            if answer.status == 200:
                report = msgspec.json.decode(answer.body, type=RoutableReport)
                after = report.revision
            if report is not None:
                self.has_reported.set()
            if report != self.report:
                self.report = report
                self.reason = self._began if report else "its admin port does not answer"
                self._changed()
            if report is None:
                await asyncio.sleep(_RETRY_S)

    def _environment(self) -> dict[str, str]:
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "ARGOSY_FLEET_KEY": self._fleet_key.decode()}
        environment.pop("ARGOSY_ROUTER_API_KEY", None)
        if self._settings.api_key:
            environment["ARGOSY_ROUTER_API_KEY"] = self._settings.api_key
        return environment


log = logging.getLogger(__name__)
STOP_S: Final = 10.0
"""For the answers to requests in flight, whose results are kept; the rest is sent again at the next start."""
_DRAIN_S: Final = 3
"""Of it for requests of batches, and again for those of the router. Then it keeps its results and releases its batches,
which it could not if it were killed first."""


class BatchProcess:
    """The fleet's one `argosy batch`."""

    def __init__(self, settings: Settings, state: StateDir, port: int, changed: Callable[[], None]) -> None:
        self.url = f"http://{HOST}:{port}"
        self._port = port
        self._settings = settings
        self._state = state
        self._changed = changed
        self._stopped = asyncio.Event()
        self._began = ""
        self.pid: int | None = None
        self.restarts = 0
        self.reason = "waits for the router"
        """Why it does not run, or why there is another process than the first one."""

    @classmethod
    @contextlib.contextmanager
    def with_port(
        cls, settings: Settings, state: StateDir, changed: Callable[[], None]
    ) -> Iterator[BatchProcess]:
        """Reserve a port inside the block. `changed` is called when the process has started or ended."""
        with reserved_port() as port:
            yield cls(settings, state, port, changed)

    async def run(self, may_start: asyncio.Event) -> None:
        """Run the process from `may_start` on, restarting it with back-off, until `stop`."""
        await first_of(may_start, self._stopped)
        failures = 0
        while not self._stopped.is_set():
            started = asyncio.get_running_loop().time()
            outcome = await self._one_life()
            if self._stopped.is_set():
                return
            has_lasted = asyncio.get_running_loop().time() - started >= self._settings.steady_s
            failures = 1 if has_lasted else failures + 1
            delay = backoff_s(self._settings, failures)
            log.warning("argosy batch has ended (%s); it is started again", outcome)
            self.reason = f"{outcome}; next start after {delay:.1f} s"
            self._changed()
            await first_of(self._stopped, timeout_s=delay)
            self.restarts += 1
            self._began = began_after(outcome)

    def stop(self) -> None:
        """Stop the process."""
        self._stopped.set()

    async def _one_life(self) -> str:
        command = (
            *self._settings.batch,
            *("--host", HOST, "--port", str(self._port)),
            *("--router-url", f"http://{HOST}:{self._settings.port}"),
            *("--storage", str(self._state.storage)),
            *("--shutdown-timeout", str(_DRAIN_S)),
        )
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        environment["ARGOSY_FLEET_KEY"] = self._state.fleet_key().decode()
        process = await Process.start(command, environment, self._state.log_file(BATCH_LOG))
        self.pid, self.reason = process.pid, self._began
        self._changed()
        try:
            await first_of(process.ended, self._stopped)
            await process.stop(STOP_S)
        finally:
            await process.end()
            self.pid = None
        return process.outcome
