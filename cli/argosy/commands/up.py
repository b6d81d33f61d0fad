"""`argosy up`: start the fleet of a manifest on this machine, or change a running one.

Owns: the command's arguments, what it waits for, and when it gives up. Must not know: how replicas are run.
Invariants: an invalid manifest, or a model that cannot be fetched, changes nothing; of two at once, the second applies
its manifest to the fleet that the first has started, or is refused.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Final, NamedTuple

from argosy.arguments import Parser, add_state_dir, port, positive_seconds, with_state_dir
from argosy.commands.down import GRACE_S, stop_fleet
from argosy.errors import INTERRUPTED, OK, CommandError, UsageError
from argosy.local.child_process import NOTE_PREFIX, tail
from argosy.local.control_client import ControlClient, connect, start_supervisor
from argosy.local.control_messages import Apply, FleetStatus, ReplicaStatus, Watch
from argosy.local.control_server import API_KEY_ENV
from argosy.local.fleet_models import local_services
from argosy.local.gpus import local_gpus
from argosy.local.manifests import read_services
from argosy.local.router_process import LOG_NAME
from argosy.local.settings import DEFAULT_PORT, is_port_free
from argosy.local.state_dir import StateDir, choose_state_dir
from argosy.terminal import PlainProgress, Progress, progress
from argosy_resource.engine_command import flags_as_fields

_MOST_FAILURES: Final = 3
"""Failed starts of one replica after which `up` gives up; the supervisor keeps trying, except if they are hopeless."""
_HOPELESS: Final = "exited with code 2"
"""The exit code of wrong usage, with which every further start would fail as well."""
_TAIL_LINES: Final = 20
_MOST_PROBLEMS: Final = 10
"""Lines of a key file that are named one by one."""


class Failure(NamedTuple):
    """A replica or router that will not become ready."""

    name: str
    reason: str


def main(argv: Sequence[str]) -> int:
    options = _parse(argv)
    services = read_services(options.file, gpus=len(local_gpus()))
    if options.api_keys_file is not None:
        _tell_of_keys(options.api_keys_file)
    state = choose_state_dir(options.state_dir)
    _is_running(state, options)  # before a model is fetched, which may take an hour
    with local_services(services, is_plain=options.detach) as local:
        with state.changing(_tell_of_waiting):
            is_new = _ensure_supervisor(state, options)
            is_foreground = is_new and not options.detach
            client = ControlClient(connect(state), Apply(services=local, stop_on_disconnect=is_foreground))
        return _follow(client, state, options, is_new)


def _follow(client: ControlClient, state: StateDir, options: argparse.Namespace, is_new: bool) -> int:
    """Show the fleet until it is ready, and in the foreground until it ends."""
    is_foreground = is_new and not options.detach
    before = signal.signal(signal.SIGTERM, _interrupt)
    shown = progress()
    try:
        status = _wait_until_settled(client, state, shown, options.timeout, is_left=not is_foreground)
        shown.close()
        print(summary(status), flush=True)
        if not is_foreground:
            return OK
        print("Ctrl-C stops the fleet", flush=True)
        _stay(client, status)
        raise CommandError("the fleet ended; `argosy logs supervisor` shows why")
    except KeyboardInterrupt:
        shown.close()
        if is_new:
            stop_fleet(state, GRACE_S)
        else:
            print(with_state_dir("the fleet keeps running; `argosy down` stops it", options.state_dir))
        return INTERRUPTED
    except CommandError:
        shown.close()
        if is_foreground:
            stop_fleet(state, 0.0)
        raise
    finally:
        client.close()
        signal.signal(signal.SIGTERM, before)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="argosy up",
        description="Start the fleet of a manifest on this machine, or change a running one.",
    )
    parser.add_argument(
        *("-f", "--file"),
        action="append",
        required=True,
        metavar="FILE",
        help="manifest; - is standard input; repeatable; what is in none of them is removed",
    )
    parser.add_argument(
        "-d", "--detach", action="store_true", help="return when the fleet is ready and leave it running"
    )
    parser.add_argument("--port", type=port, help=f"where the router listens on 127.0.0.1 ({DEFAULT_PORT})")
    parser.add_argument(
        "--api-keys-file",
        type=_keys_file,
        metavar="FILE",
        help="require of clients a key of this file, a key with its terms per line as for `argosy router`; it is read "
        "again when it changes",
    )
    parser.add_argument(
        "--timeout",
        type=positive_seconds,
        default=600.0,
        metavar="S",
        help="give up waiting after S (%(default)s)",
    )
    add_state_dir(parser)
    return parser.parse_args(argv)


def _keys_file(name: str) -> Path:
    """The absolute path of a file that can be read now; the router opens it from another directory."""
    path = Path(name).expanduser().absolute()
    try:
        path.open("rb").close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path}: {error.strerror}") from None
    return path


def _tell_of_keys(path: Path) -> None:
    """Name the lines whose keys the router refuses; it says so in its log only, since it takes the rest of the file."""
    from argosy_router.auth.key_file import ApiKeys

    problems = ApiKeys((), None).problems_of(path)
    for problem in problems[:_MOST_PROBLEMS]:
        print(f"{path}: {problem}", file=sys.stderr)
    if more := problems[_MOST_PROBLEMS:]:
        print(f"{path}: {len(more)} more lines cannot be used", file=sys.stderr)
    if problems:
        print(
            "the router refuses these keys, and reads the file again when it changes",
            file=sys.stderr,
            flush=True,
        )


def _tell_of_waiting() -> None:
    print("another `argosy up` starts or changes this fleet; waiting for it", file=sys.stderr, flush=True)


def _ensure_supervisor(state: StateDir, options: argparse.Namespace) -> bool:
    """Start a supervisor unless one is running; return whether it was started."""
    if _is_running(state, options):
        return False
    env = {API_KEY_ENV: os.environ.get(API_KEY_ENV, "")}
    arguments = ["--port", str(options.port or DEFAULT_PORT)]
    if options.api_keys_file is not None:
        arguments += ["--api-keys-file", str(options.api_keys_file)]
    start_supervisor(state, arguments, env)
    return True


def _is_running(state: StateDir, options: argparse.Namespace) -> bool:
    """Return whether a supervisor is running.

    Raises:
        UsageError: it is, and its router has another port or other keys for clients.
        CommandError: it is not, and another program has the port.
    """
    state.create()
    connection = state.connect()
    wanted_port, keys_file = options.port, options.api_keys_file
    if connection is None:
        router_port = wanted_port or DEFAULT_PORT
        if not is_port_free(router_port):
            raise CommandError(f"port {router_port} of 127.0.0.1 is taken; choose another with --port PORT")
        return False
    client = ControlClient(connection, Watch())
    status = client.next_status()
    client.close()
    if status and wanted_port is not None and not status.router.url.endswith(f":{wanted_port}"):
        raise UsageError(
            f"the fleet already listens on {status.router.url}; `argosy down` first to change the port"
        )
    api_key = os.environ.get(API_KEY_ENV, "")
    required = status.router.api_key_fingerprint if status else None
    if api_key and required is not None and required != state.fingerprint(api_key):
        present = "another key" if required else "no key"
        raise UsageError(
            f"the fleet already runs, and requires {present} of clients, not the one in {API_KEY_ENV}; `argosy down` "
            f"first to change the key, or unset {API_KEY_ENV}"
        )
    present_file = status.router.api_keys_file if status else None
    if keys_file is not None and present_file is not None and str(keys_file) != present_file:
        present = f"the keys of {present_file}" if present_file else "no keys of a file"
        raise UsageError(
            f"the fleet already runs with {present}, not those of {keys_file}; `argosy down` first to change the file, "
            "or edit the one that it reads"
        )
    return True


def _wait_until_settled(
    client: ControlClient, state: StateDir, shown: Progress, timeout_s: float, *, is_left: bool
) -> FleetStatus:
    """Wait until the fleet is ready.

    Args:
        is_left: whether the fleet goes on if it does not become ready.

    Raises:
        CommandError: it does not; a UsageError, if it cannot.
    """
    deadline = time.monotonic() + timeout_s
    restarts: dict[str, int] | None = None
    while True:
        try:
            status = client.next_status(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            left = (
                "; the fleet keeps trying: `argosy ps` shows why, `argosy down` stops it" if is_left else ""
            )
            raise CommandError(f"not ready after {timeout_s:g} s{left}; --timeout S waits longer") from None
        if status is None:
            raise CommandError("the fleet was stopped; `argosy logs supervisor` shows why")
        if restarts is None:
            restarts = {replica.name: replica.restarts for replica in _replicas(status)}
        shown.show(status)
        if status.is_settled:
            return status
        if failure := _failure(status, restarts):
            raise _not_started(failure, tail(state.log_file(failure.name), _TAIL_LINES), is_left)


def _not_started(failure: Failure, log_end: str, is_left: bool) -> CommandError:
    """Return the error for a replica or router that does not start: wrong usage if another manifest is needed."""
    said = [line for line in log_end.splitlines() if not line.startswith(NOTE_PREFIX)]
    fields = flags_as_fields(said[-1]) if said else ""
    text = (
        f"{failure.name} does not start: {failure.reason}{f' ({fields})' if fields else ''}; above is the end of its "
        f"log, `argosy logs {failure.name}` prints all of it"
    )
    is_hopeless = failure.reason.startswith(_HOPELESS)
    if is_left:
        text += "; the fleet does not try it again" if is_hopeless else "; the fleet keeps trying"
        text += ": `argosy up` with a corrected manifest changes it, `argosy down` stops it"
    return (UsageError if is_hopeless else CommandError)(text, details=log_end)


def _failure(status: FleetStatus, restarts_before: dict[str, int]) -> Failure | None:
    for replica in _replicas(status):
        if replica.phase != "BackOff" or not replica.is_current:
            continue
        failures = replica.restarts - restarts_before.get(replica.name, 0) + 1
        if failures >= _MOST_FAILURES or replica.reason.startswith(_HOPELESS):
            return Failure(replica.name, replica.reason.partition(";")[0])
    router = status.router
    if (
        not router.is_ready
        and router.pid is None
        and (router.restarts >= _MOST_FAILURES or "taken" in router.reason)
    ):
        return Failure(LOG_NAME, router.reason)
    return None


def _stay(client: ControlClient, status: FleetStatus) -> None:
    """Print changes until the supervisor ends."""
    lines = PlainProgress(status)
    while (status_now := client.next_status()) is not None:
        lines.show(status_now)


def _replicas(status: FleetStatus) -> list[ReplicaStatus]:
    return [replica for service in status.services for replica in service.replicas]


def summary(status: FleetStatus) -> str:
    """Summarize the ready models. A canary may have its service's model name, so both names are shown."""
    models = []
    for service in status.services:
        _, _, name = service.key.partition("/")
        called = service.model if service.model == name else f"{service.model} ({name})"
        models.append(f"  {called}  {service.routable}/{service.desired} replicas")
    return "\n".join((f"ready: {status.router.url}/v1", *models))


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
