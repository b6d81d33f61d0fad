"""The local fleet's `argosy batch`, which keeps files, batches and responses for its router.

Owns: the process, restarted with back-off, and its port. Must not know: what is kept.
Invariant: the port is this fleet's for as long as the supervisor runs, so that the router need not be told of a
restart.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from typing import Final

from argosy.local.child_process import Process, began_after
from argosy.local.first_event import first_of
from argosy.local.settings import HOST, Settings, backoff_s, reserved_port
from argosy.local.state_dir import StateDir

log = logging.getLogger(__name__)

LOG_NAME: Final = "batch"
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
        process = await Process.start(command, environment, self._state.log_file(LOG_NAME))
        self.pid, self.reason = process.pid, self._began
        self._changed()
        try:
            await first_of(process.ended, self._stopped)
            await process.stop(STOP_S)
        finally:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(process.stop(0.0))
            self.pid = None
        return process.outcome
