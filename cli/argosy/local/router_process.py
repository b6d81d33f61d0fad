"""The local fleet's router process and its report.

Owns: the process, restarted with back-off, and the long poll of its report. Must not know: how replicas are run.
Invariant: `report` is the last one of the running router process; None while there is none.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from typing import Final

import msgspec

from argosy.local.child_process import Process, began_after
from argosy.local.first_event import first_of
from argosy.local.http_get import get
from argosy.local.settings import HOST, Settings, backoff_s, reserved_port
from argosy.local.state_dir import StateDir
from argosy_protocol.bearer_keys import internal_key
from argosy_protocol.routable_report import ADMIN_KEY_UID, REPORT_PATH, ReplicaReport, RoutableReport

LOG_NAME: Final = "router"
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
        process = await Process.start(command, self._environment(), self._state.log_file(LOG_NAME))
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
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(process.stop(0.0))
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
