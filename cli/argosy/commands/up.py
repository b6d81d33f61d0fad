"""`argosy up` and `argosy down`: start the fleet of a manifest on this machine, change a running one, and stop it.

Models are fetched into this machine's store before any replica is told of them, and their replicas get a directory, so
that an engine that starts again needs neither network nor credentials.

Invariants: an invalid manifest, or a model that cannot be fetched or divided among the devices, changes nothing; of two
at once, the second applies its manifest to the fleet that the first has started, or is refused. When `down` returns 0,
no process of the fleet is left, even if none was running before.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Final, NamedTuple

from msgspec.structs import replace

from argosy.commands.models import check_local_model, engine_check, fetch_errors
from argosy.errors import INTERRUPTED, OK, CommandError, UsageError
from argosy.local.child_process import DEFAULT_PORT, NOTE_PREFIX, ROUTER_API_KEY_ENV, is_port_free, local_gpus
from argosy.local.control import (
    ROUTER_LOG,
    Apply,
    ControlClient,
    FleetStatus,
    ReplicaStatus,
    StateDir,
    Stop,
    Watch,
    choose_state_dir,
    connect,
    start_supervisor,
    tail,
)
from argosy.local.manifests import read_services
from argosy.terminal import (
    LiveProgress,
    Parser,
    PlainProgress,
    add_state_dir,
    port,
    positive_seconds,
    progress,
    with_state_dir,
)
from argosy_fetcher.errors import UnsupportedModel
from argosy_fetcher.progress import LineDisplay, ProgressDisplay, progress_display
from argosy_fetcher.pull import PulledModel, pull_model
from argosy_fetcher.source_uri import SourceUri, parse
from argosy_resource.engine_command import flags_as_fields
from argosy_resource.types import InferenceService

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


def up(argv: Sequence[str]) -> int:
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
    from argosy_router.auth.api_keys import ApiKeys

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
    env = {ROUTER_API_KEY_ENV: os.environ.get(ROUTER_API_KEY_ENV, "")}
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
    api_key = os.environ.get(ROUTER_API_KEY_ENV, "")
    required = status.router.api_key_fingerprint if status else None
    if api_key and required is not None and required != state.fingerprint(api_key):
        present = "another key" if required else "no key"
        raise UsageError(
            f"the fleet already runs, and requires {present} of clients, not the one in {ROUTER_API_KEY_ENV}; "
            f"`argosy down` first to change the key, or unset {ROUTER_API_KEY_ENV}"
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
    client: ControlClient,
    state: StateDir,
    shown: PlainProgress | LiveProgress,
    timeout_s: float,
    *,
    is_left: bool,
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
        return Failure(ROUTER_LOG, router.reason)
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


GRACE_S: Final = 10.0


def down(argv: Sequence[str]) -> int:
    parser = Parser(prog="argosy down", description="Stop the fleet on this machine.")
    parser.add_argument(
        "--grace",
        type=positive_seconds,
        default=GRACE_S,
        metavar="S",
        help="how long running requests may take to finish (%(default)s)",
    )
    add_state_dir(parser)
    options = parser.parse_args(argv)
    state = choose_state_dir(options.state_dir)
    if not stop_fleet(state, options.grace):
        print(f"no fleet is running in {state.root}")
    return OK


def stop_fleet(state: StateDir, grace_s: float) -> bool:
    """Stop the fleet and wait until it is gone; False if there was none."""
    connection = state.connect()
    if connection is None:
        return False
    client = ControlClient(connection, Stop(grace_s=grace_s))
    shown = progress()
    try:
        while (status := client.next_status()) is not None:
            shown.show(status)
    finally:
        shown.close()
        client.close()
    print("the fleet is stopped", flush=True)
    return True


@contextmanager
def local_services(
    services: Sequence[InferenceService], *, is_plain: bool = False
) -> Iterator[tuple[InferenceService, ...]]:
    """Yield the services with directories as the sources of what they serve. Until the end nobody can remove these.

    Args:
        is_plain: show lines, although there is a terminal.

    Raises:
        UsageError: a source is malformed, or a model of this machine cannot be loaded.
        CommandError: a model cannot be fetched.
    """
    with ExitStack() as held, fetch_errors():
        models: dict[SourceUri, PulledModel] = {}
        for service in filter(_is_served, services):  # all before the first fetch, which may take an hour
            _check_local(service)
        for service in services:
            uri = parse(service.spec.model.source)
            if uri.is_remote and uri not in models and _is_served(service):
                with _display(is_plain) as shown:
                    check = engine_check(uri, **service.spec.parallelism.layout)
                    models[uri] = pull_model(uri, progress=shown, check_config=check)
                held.callback(models[uri].close)
        local = tuple(_localized(service, models) for service in services)
        for service in filter(_is_served, local):  # a model that was in the store, or of several services
            _check_local(service)
        kept = held.pop_all()
    with kept:
        yield local


def _check_local(service: InferenceService) -> None:
    source = service.spec.model.source
    if parse(source).is_remote:
        return
    try:
        check_local_model(source, **service.spec.parallelism.layout)
    except UnsupportedModel as error:
        fields = flags_as_fields(str(error))
        text = f"{error} ({fields})" if fields else str(error)
        raise UsageError(f"{service.key}: {text}; nothing was changed") from error


def _is_served(service: InferenceService) -> bool:
    return service.spec.replicas > 0 and not service.spec.paused


def _localized(service: InferenceService, models: dict[SourceUri, PulledModel]) -> InferenceService:
    found = models.get(parse(service.spec.model.source))
    if found is None:
        return service
    model = replace(service.spec.model, source=f"file://{found.path}", secret_ref=None, cache=None)
    return replace(service, spec=replace(service.spec, model=model))


def _display(is_plain: bool) -> ProgressDisplay:
    return LineDisplay(_write) if is_plain else progress_display()


def _write(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
