"""`argosy ps` and `argosy logs`: list services and replicas, print or follow logs of replicas, router and supervisor.

A replica's reason tells why it is not ready, so that one need not look into its log. Logs are read while other
processes write and rotate them.
"""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, Final

from argosy.errors import OK, CommandError
from argosy.local.control import (
    BATCH_LOG,
    ROUTER_LOG,
    SUPERVISOR_LOG,
    BatchStatus,
    ControlClient,
    FleetStatus,
    RouterStatus,
    ServiceStatus,
    StateDir,
    Watch,
    choose_state_dir,
    current_status,
    status_of,
    tail,
)
from argosy.terminal import Parser, add_output, add_state_dir, age, print_json, table

_HEADER = ("REPLICA", "MODEL", "STATE", "REVISION", "RESTARTS", "INFLIGHT", "PID", "URL", "AGE", "REASON")


def ps(argv: Sequence[str]) -> int:
    parser = Parser(prog="argosy ps", description="List services and replicas.")
    add_output(parser)
    add_state_dir(parser)
    options = parser.parse_args(argv)
    status = current_status(
        choose_state_dir(options.state_dir), in_cluster="`kubectl argosy top -A` asks a cluster"
    )
    if options.output == "json":
        print_json(status)
    else:
        print(_render(status, time.time()))
    return OK


def _render(status: FleetStatus, now: float) -> str:
    router = status.router
    rows: list[tuple[str, ...]] = [
        (
            replica.name,
            service.model,
            replica.phase,
            replica.revision + ("" if replica.is_current else " (old)"),
            str(replica.restarts),
            str(replica.inflight),
            str(replica.pid or ""),
            replica.url,
            age(now - replica.started),
            replica.reason,
        )
        for service in status.services
        for replica in service.replicas
    ]
    rows += [_row_without_replica(service) for service in status.services if not service.replicas]
    rows.append(_row_of_program("router", "Ready" if router.is_ready else "Starting", router))
    if (batch := status.batch) is not None:
        rows.append(_row_of_program("batch", "Starting" if batch.pid is None else "Running", batch))
    notes = [f"{service.key}: {service.reason}" for service in status.services if service.reason]
    return "\n".join((table(_HEADER, rows), *notes))


def _row_of_program(name: str, state: str, program: RouterStatus | BatchStatus) -> tuple[str, ...]:
    pid = str(program.pid or "")
    return (name, "", state, "", str(program.restarts), "", pid, program.url, "", program.reason)


def _row_without_replica(service: ServiceStatus) -> tuple[str, ...]:
    reason = f"{service.key}: spec.replicas is 0" if service.desired == 0 and not service.reason else ""
    return ("-", service.model, "NoReplica", service.revision, "", "", "", "", "", reason)


_POLL_S: Final = 0.2
_ANSWER_S: Final = 5.0
_IN_CLUSTER: Final = "`kubectl argosy logs SERVICE -n NAMESPACE` shows those of a cluster"


def logs(argv: Sequence[str]) -> int:
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
    status = (
        None if is_process else status_of(state.connect(), _ANSWER_S)
    )  # of a process: shown even if the supervisor hangs
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


def _gone(status: FleetStatus | None, paths: Sequence[Path], name: str) -> set[Path]:
    """The logs of replicas that a running fleet does not have any more; none if the name has no others."""
    if status is None:
        return set()
    present = {replica.name for service in status.services for replica in service.replicas}
    gone = {path for path in paths if path.stem not in present | {ROUTER_LOG, BATCH_LOG, SUPERVISOR_LOG}}
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
