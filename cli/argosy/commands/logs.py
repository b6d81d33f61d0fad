"""`argosy logs`: print or follow the logs of replicas, router and supervisor.

Owns: reading log files while other processes write and rotate them. Must not know: their content.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, Final

from argosy.arguments import Parser, add_state_dir
from argosy.errors import OK, CommandError
from argosy.local.batch_process import LOG_NAME as BATCH_LOG
from argosy.local.child_process import tail
from argosy.local.control_client import SUPERVISOR_LOG, ControlClient
from argosy.local.control_messages import FleetStatus, ServiceStatus, Watch
from argosy.local.router_process import LOG_NAME
from argosy.local.state_dir import StateDir, choose_state_dir

_POLL_S: Final = 0.2
_ANSWER_S: Final = 5.0
_IN_CLUSTER: Final = "`kubectl argosy logs SERVICE -n NAMESPACE` shows those of a cluster"


def main(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="argosy logs", description="Print or follow the logs of replicas, router and supervisor."
    )
    parser.add_argument(
        "name", nargs="?", default="", help="a replica, a service, `router` or `supervisor`; all if left out"
    )
    parser.add_argument("-f", "--follow", action="store_true", help="follow the logs until the fleet ends")
    parser.add_argument(
        "-n", "--lines", type=int, default=200, help="lines of each log to begin with (%(default)s)"
    )
    add_state_dir(parser)
    options = parser.parse_args(argv)
    state = choose_state_dir(options.state_dir)
    paths = _logs(state, options.name)
    is_process = bool(options.name) and state.log_file(options.name).exists()
    status = None if is_process else _status(state)  # of a process: shown even if the supervisor hangs
    gone: set[Path] = set()
    if service := _service_without_replicas(status, options.name):
        why = f"{service.key} has no replica: {service.reason or 'its spec.replicas is 0'}"
        if not paths:
            raise CommandError(why)
        print(f"{why}; these are logs of earlier ones", file=sys.stderr, flush=True)
    elif gone := _gone(status, paths, options.name):
        paths = [path for path in paths if path not in gone]
        names = ", ".join(sorted(path.stem for path in gone))
        print(f"left out: replicas that are gone, {names}", file=sys.stderr, flush=True)
    if not paths:
        known = ", ".join(path.stem for path in _logs(state, "")) or "none"
        missing = f"no log of {options.name or 'any process'} in {state.logs}; there are: {known}"
        raise CommandError(missing if status else f"{missing}. {_IN_CLUSTER}")
    is_prefixed = len(paths) > 1 or (options.follow and paths[0].stem != options.name)
    with ExitStack() as files:
        ends = {path: _Follower(path, files) for path in paths} if options.follow else {}
        for path in paths:
            if text := tail(path, options.lines):
                _print(path, text.encode() + b"\n", is_prefixed)
        if options.follow:
            _follow(state, options.name, ends, files, is_prefixed, gone)
    return OK


def _logs(state: StateDir, name: str) -> list[Path]:
    """Find the logs for a name: of one process, or of the replicas of a service."""
    if name and (exact := state.log_file(name)).exists():
        return [exact]
    paths = sorted(state.logs.glob("*.log"))
    return [path for path in paths if not name or path.stem.rpartition("-")[0] == name]


def _status(state: StateDir) -> FleetStatus | None:
    """Ask the supervisor; None if none runs or it does not answer."""
    connection = state.connect()
    if connection is None:
        return None
    client = ControlClient(connection, Watch())
    try:
        return client.next_status(_ANSWER_S)
    except TimeoutError:
        return None
    finally:
        client.close()


def _gone(status: FleetStatus | None, paths: Sequence[Path], name: str) -> set[Path]:
    """The logs of replicas that a running fleet does not have any more; none if the name has no others."""
    if status is None:
        return set()
    present = {replica.name for service in status.services for replica in service.replicas}
    gone = {path for path in paths if path.stem not in present | {LOG_NAME, BATCH_LOG, SUPERVISOR_LOG}}
    return set() if name and len(gone) == len(paths) else gone


def _service_without_replicas(status: FleetStatus | None, name: str) -> ServiceStatus | None:
    """Find the service of a running fleet that a name means, if it has no replicas."""
    names = (f"default/{name}", name, name.replace(".", "/", 1))
    return next(
        (
            service
            for service in (status.services if status else ())
            if name and service.key in names and not service.replicas
        ),
        None,
    )


class _Follower:
    """Reads what is appended to one log, across rotation."""

    def __init__(self, path: Path, files: ExitStack, *, from_start: bool = False) -> None:
        self._path = path
        self._files = files
        self._file: BinaryIO = files.enter_context(path.open("rb"))
        if not from_start:
            self._file.seek(0, os.SEEK_END)

    def read(self) -> bytes:
        data = self._file.read()
        if not data and self._path.exists() and self._path.stat().st_ino != _inode(self._file):
            self._file.close()
            self._file = self._files.enter_context(self._path.open("rb"))
            data = self._file.read()
        return data


def _follow(
    state: StateDir,
    name: str,
    ends: dict[Path, _Follower],
    files: ExitStack,
    is_prefixed: bool,
    left_out: set[Path],
) -> None:
    connection = state.connect()
    watch = ControlClient(connection, Watch()) if connection else None
    while True:
        is_over = watch is None or _has_ended(watch)
        for path in _logs(state, name):
            if path not in ends and path not in left_out:
                ends[path] = _Follower(path, files, from_start=True)
        for path, end in ends.items():
            if data := end.read():
                _print(path, data, is_prefixed)
        if is_over:
            return


def _has_ended(watch: ControlClient) -> bool:
    """Wait for up to `_POLL_S` for the supervisor to end; return whether it has."""
    readable, _, _ = select.select([watch], [], [], _POLL_S)
    return bool(readable) and watch.next_status() is None


def _print(path: Path, data: bytes, is_prefixed: bool) -> None:
    if is_prefixed:
        prefix = f"{path.stem}  ".encode()
        data = b"".join(prefix + line + b"\n" for line in data.splitlines())
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def _inode(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_ino
