"""A child process and its log.

Owns: starting a command that ends with this process, its log file and the file's bound, stopping it. Must not know:
whether the child is an engine or a router.
Invariants: a log takes at most twice `LOG_LIMIT_BYTES`; when `ended` is set, no process of the child's group is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Final

from argosy.local import end_with_parent

LOG_LIMIT_BYTES: Final = 10 * 1024 * 1024
"""Size at which a log is renamed to `NAME.log.1`, replacing the previous one."""
NOTE_PREFIX: Final = "-- "
"""Begins lines of a log that are ours, not the child's."""
_READ_BYTES: Final = 1 << 16


class LogFile:
    """An append-only file that is rotated once it is full."""

    def __init__(self, path: Path, limit: int = LOG_LIMIT_BYTES) -> None:
        self.path = path
        self._limit = limit
        self._file = _append_to(path)

    def write(self, data: bytes) -> None:
        if self._file.tell() + len(data) > self._limit and self._file.tell():
            self._file.close()
            self.path.replace(self.path.with_name(self.path.name + ".1"))
            self._file = _append_to(self.path)
        self._file.write(data)
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _append_to(path: Path) -> BinaryIO:
    return open(path, "ab", opener=lambda name, flags: os.open(name, flags, 0o600))


class Process:
    """A running child."""

    def __init__(self, process: asyncio.subprocess.Process, log: LogFile) -> None:
        self._process = process
        self._log = log
        self.ended = asyncio.Event()
        self._reaper = asyncio.create_task(self._reap(), name=f"reap {process.pid}")

    @classmethod
    async def start(
        cls, command: Sequence[str], env: Mapping[str, str], log_path: Path, *, more_oom_score_adj: int = 0
    ) -> Process:
        """Start `command` in a process group of its own; its output is appended to `log_path`.

        Args:
            more_oom_score_adj: how far above this process's `oom_score_adj` that of the child begins.

        Raises:
            OSError: the system cannot start a process or open the log.
        """
        log = LogFile(log_path)
        wrapper = (sys.executable, "-I", "-S", end_with_parent.__file__)
        try:
            process = await asyncio.create_subprocess_exec(
                *(*wrapper, str(os.getpid()), str(more_oom_score_adj), *command),
                env=env,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                # Not a session of its own: Linux gives each session (autogroup) an equal share of the CPUs, and with
                # many of them a router may wait for seconds beside engines that compute.
                process_group=0,
            )
        except BaseException:
            log.close()
            raise
        return cls(process, log)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The process's exit code, or the negative number of the signal that ended it; None while it runs."""
        return self._process.returncode

    @property
    def outcome(self) -> str:
        """Describe how the process ended, for messages."""
        code = self._process.returncode
        if code is None:
            return "running"
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        return f"exited with code {code}"

    def note(self, text: str) -> None:
        """Add a line of the supervisor's to the log."""
        self._log.write(f"{NOTE_PREFIX}{text}\n".encode())

    def reset_oom_score_adj(self) -> None:
        """Give all processes of the child's group the `oom_score_adj` of this process."""
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                *_, group = stat.read_text().rpartition(")")[2].split()[:3]
                if int(group) == self.pid:
                    own = Path("/proc/self/oom_score_adj").read_text()
                    (stat.parent / "oom_score_adj").write_text(own)

    def terminate(self) -> None:
        """Send SIGTERM to the child only, which stops its own children in order."""
        self._signal(signal.SIGTERM)

    async def stop(self, grace_s: float) -> None:
        """Send SIGTERM, and SIGKILL to the whole group if the child has not ended after `grace_s`."""
        self.terminate()
        try:
            async with asyncio.timeout(grace_s):
                await self.ended.wait()
        except TimeoutError:
            self.kill()
            await self.ended.wait()

    def kill(self) -> None:
        """Send SIGKILL to the whole group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            self._process.send_signal(number)

    async def _reap(self) -> None:
        output = self._process.stdout
        assert output is not None
        copying = asyncio.create_task(self._copy(output), name=f"log {self.pid}")
        try:
            await self._process.wait()
            self.kill()  # processes that the child left behind may keep its output open
            await copying
            self.note(self.outcome)
        finally:
            copying.cancel()
            self._log.close()
            self.ended.set()

    async def _copy(self, output: asyncio.StreamReader) -> None:
        while data := await output.read(_READ_BYTES):
            self._log.write(data)


def tail(path: Path, lines: int) -> str:
    """The last lines of a log; empty if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 400 * lines))
            data = file.read()
    except FileNotFoundError:
        return ""
    return b"\n".join(data.splitlines()[-lines:]).decode(errors="replace")


def began_after(outcome: str) -> str:
    """Say why there is another process than the first one; empty if there was none before it (no outcome)."""
    return f"started again after this end: {outcome}" if outcome else ""
