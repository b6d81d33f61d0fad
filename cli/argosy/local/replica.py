"""A replica of the local fleet: an engine process, restarted until it is retired.

Owns: the process's lifecycle: start, readiness, health, restarts with back-off, draining. Must not know: other
replicas, the rollout, the router; its owner sets `drained` once the router has no request there.
Invariants: a replica has at most one process; a ready process gets SIGTERM only after `drained`, the deadline for
draining, `halt`, or when it hangs; an engine that refuses its arguments is started again by `start_again` only.

    Starting -> Ready -> Draining -> Stopping -> gone
        ^         |
        +-BackOff-+   the process died
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Callable
from typing import Final

from argosy.errors import reason
from argosy.local.child_process import Process, began_after
from argosy.local.control_messages import Phase
from argosy.local.first_event import first_of
from argosy.local.gpus import gpu_env
from argosy.local.http_get import get
from argosy.local.settings import HOST, Settings, backoff_s, reserved_port
from argosy.local.state_dir import StateDir
from argosy_resource.engine_address import API_KEY_ENV
from argosy_resource.engine_command import engine_args, engine_env
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
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(process.stop(0.0))
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
