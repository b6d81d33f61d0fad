"""`argosy models`: the models in this machine's store; and what each command that fetches one has in common.

Only results go to standard output (a path, a table), so that `$(argosy models pull MODEL)` is a directory. In a pod
`pull --progress-port` does more than at a terminal: it serves its progress, leaves the container's termination message,
says what to change in a manifest, ends at SIGTERM, and tells of another process that fetches the model and makes no
progress. `prune --tree` keeps a node's cache within its limits, once or in rounds.

Must not know: how models are fetched, kept or removed (`argosy_fetcher`).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any, Final

from argosy.diagnosis import is_unreachable
from argosy.errors import OK, CommandError, UsageError, ends_at_sigterm
from argosy.terminal import (
    Parser,
    add_output,
    age,
    age_seconds,
    percent_or_bytes,
    port,
    positive_seconds,
    print_json,
    size_bytes,
    table,
)
from argosy_fetcher.disk import IDLE_AFTER_S, FreeSpace
from argosy_fetcher.errors import (
    AccessDenied,
    FetchError,
    InvalidSource,
    ModelHidden,
    ModelTooLarge,
    NoSpace,
    TransientError,
)
from argosy_fetcher.progress import Progress, printable, progress_display, size_text
from argosy_fetcher.progress_server import ProgressMeter, ProgressServer
from argosy_fetcher.pull import PulledModel, find_model, open_store, pull_model, stored_gguf
from argosy_fetcher.source_uri import SourceUri, from_argument
from argosy_fetcher.sources.registry import DIRECTORY_ENV, name_in_store, read_directory
from argosy_fetcher.store import Store
from argosy_fetcher.store_index import StoredModel, equal_revisions, source_directory
from argosy_fetcher.store_tree import PruneLimits, TreePruned, prune_tree
from argosy_protocol.program.listen import CannotListen
from argosy_protocol.reports import duration_text

MIN_FREE_ENV: Final = "ARGOSY_MIN_FREE"
_HEADER: Final = ("MODEL", "REVISION", "SIZE", "USED", "STATE")
_MIN_ABBREVIATION: Final = 7
"""Characters of an abbreviated revision, as git's."""
_MAX_LEFT_BYTES: Final = 50 << 30
"""Bound of the share of a disk that `pull --min-free` leaves."""
_SHOWN_REVISION: Final = 12
_OTHER_NAMES: Final = {
    "ls": "list",
    "show": "list",
    "delete": "rm",
    "remove": "rm",
    "download": "pull",
    "fetch": "pull",
    "get": "pull",
    "clean": "prune",
}
"""What other programs call our commands."""


def main(argv: Sequence[str]) -> int:
    if argv and argv[0] in _OTHER_NAMES:
        raise UsageError(
            f"{argv[0]!r} is not a command; did you mean `argosy models {_OTHER_NAMES[argv[0]]}`?"
        )
    options = build_parser().parse_args(argv or ("list",))
    run: Callable[[argparse.Namespace], int] = options.run
    with fetch_errors():
        return run(options)


def build_parser() -> Parser:
    """Make the parser with its subcommands."""
    parser = Parser(
        prog="argosy models",
        description="List, fetch and remove the models in this machine's store. Without a command: list.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True, help="list, pull, path, rm or prune")
    text = "List the models in the store, what interrupted fetches have left, and what other programs have damaged."
    add_output(_command(commands, _list, "list", "list the models", text))
    _add_pull(commands)
    text = "Print the directory of a model that the store has, or its GGUF file. Makes no request."
    _add_model(_command(commands, _path, "path", "print a model's directory", text))
    text = "Remove a model: all its revisions, unless one is given. A model that an engine uses stays."
    _add_model(_command(commands, _rm, "rm", "remove a model", text))
    _add_prune(commands)
    usages = [command.format_usage().removeprefix("usage: ") for command in commands.choices.values()]
    parser.epilog = "usages:\n" + "".join(f"  {' '.join(usage.split())}\n" for usage in usages)
    return parser


def _command(
    commands: argparse._SubParsersAction[Parser],
    run: Callable[[argparse.Namespace], int],
    name: str,
    short: str,
    description: str,
) -> Parser:
    parser = commands.add_parser(name, help=short, description=description)
    parser.add_argument(
        "--download-dir",
        metavar="DIR",
        help="the store's directory ($ARGOSY_MODELS_DIR, else a folder of the user's cache)",
    )
    parser.set_defaults(run=run)
    return parser


def _add_pull(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = _command(
        commands,
        _pull,
        "pull",
        "fetch a model",
        "Fetch a model unless the store has it, and print its directory, or the path of a GGUF file.",
    )
    _add_model(parser)
    parser.add_argument(
        "--refresh",
        action="store_true",
        help="ask the source again what the revision is now; a branch is otherwise pinned at its first use",
    )
    parser.add_argument(
        "--make-room",
        action="store_true",
        help=f"remove models that nobody uses if the disk is full, but none used within ${MIN_AGE_ENV} (1h)",
    )
    parser.add_argument(
        "--min-free",
        type=percent_or_bytes,
        default=os.environ.get(MIN_FREE_ENV),
        metavar="FREE",
        help=f"leave so much of the disk: 50G, or 15%% of it but at most 50 GiB (${MIN_FREE_ENV}, else 64M)",
    )
    parser.add_argument(
        "--max-size", type=size_bytes, metavar="SIZE", help="fetch no model that is larger: 60G"
    )
    parser.add_argument(
        "--progress-port",
        type=port,
        metavar="PORT",
        help="report the progress at http://*:PORT/progress, for a cluster's operator",
    )
    parser.add_argument(
        "--any-architecture",
        action="store_true",
        help="fetch models that our engine does not serve, too, for another engine",
    )
    parser.add_argument(
        "--link",
        type=Path,
        metavar="PATH",
        help="make PATH a symbolic link to the directory, for an engine that does not know the store",
    )


def _add_prune(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = _command(
        commands,
        _prune,
        "prune",
        "remove models by age and size",
        "Remove the models that were not used for longest. A model that an engine uses stays.",
    )
    parser.add_argument(
        "--tree",
        metavar="DIR",
        help=f"prune all stores at DIR/*/* as one, and no model that was used within ${MIN_AGE_ENV} (1h)",
    )
    parser.add_argument(
        "--every",
        type=positive_seconds,
        metavar="S",
        help="with --tree: again every S seconds, until SIGTERM",
    )
    parser.add_argument(
        "--max-size", type=size_bytes, metavar="SIZE", help="remove until the store has at most SIZE: 500G"
    )
    parser.add_argument(
        "--max-age", type=age_seconds, metavar="AGE", help="remove what was not used for AGE: 30d, 12h"
    )
    parser.add_argument(
        "--min-free",
        type=percent_or_bytes,
        metavar="FREE",
        help="with --tree: remove until so much of the disk is free: 20%%, 100G",
    )


def _add_model(parser: Parser) -> None:
    parser.add_argument(
        "model",
        help="ORG/NAME of a Hugging Face hub, ORG/NAME:QUANT for a GGUF file, or hf://, s3://, gs://, oci://, https://",
    )
    parser.add_argument("--revision", metavar="REV", default="", help="branch, tag, commit or digest")


def _list(options: argparse.Namespace) -> int:
    store = open_store(options.download_dir)
    models = [
        *((model, "complete") for model in store.list()),
        *((model, "partial") for model in store.list_partial()),
        *((model, "damaged") for model in store.list_damaged()),
    ]
    if options.output == "json":
        rows = [_as_json(model, state) for model, state in models]
        print_json(rows)
        return OK
    now = time.time()
    print(table(_HEADER, [_row(model, state, now) for model, state in models]))
    return OK


def _row(model: StoredModel, state: str, now: float) -> tuple[str, ...]:
    used = age(max(0.0, now - model.last_used_at))
    return model.source, _short(model.revision), size_text(model.size), f"{used} ago", state


def _as_json(model: StoredModel, state: str) -> dict[str, Any]:
    return {
        "source": model.source,
        "revision": model.revision,
        "requested_revisions": model.requested_revisions,
        "path": str(model.path),
        "size": model.size,
        "last_used_at": model.last_used_at,
        "complete": state == "complete",
        "state": state,
    }


def _pull(options: argparse.Namespace) -> int:
    uri = _remote(options)
    with progress_display() as shown:
        if options.progress_port is None:
            model = _pulled(uri, options, shown)
        else:
            with pod_fetch(str(uri), options.progress_port, shown) as meter:
                model = _pulled(uri, options, meter)
                revision = _short(model.revision)
                write_termination_message(f"{model.source} revision {revision}: {meter.outcome()}")
    model.close()
    path = _served_path(uri, model.path)
    if options.link is not None:
        _link(options.link, path)
    print(path)
    return OK


def _served_path(uri: SourceUri, directory: Path) -> Path:
    """Return what an engine is given: the model's directory, or its GGUF file."""
    return stored_gguf(uri, directory) if uri.is_gguf else directory


def _link(link: Path, target: Path) -> None:
    """Make a symbolic link, also in the place of an older one, so that there is always one of the two."""
    made = link.with_name(f".{link.name}.{os.getpid()}")
    try:
        made.symlink_to(target.resolve())
        made.replace(link)
    except OSError as error:
        with suppress(OSError):
            made.unlink()
        raise CommandError(
            f"cannot make the link {link}: {error.strerror}; give a path in a writable folder"
        ) from None


def _pulled(uri: SourceUri, options: argparse.Namespace, progress: Progress) -> PulledModel:
    return pull_model(
        uri,
        progress=progress,
        download_dir=options.download_dir,
        check_config=None if options.any_architecture else engine_check(uri),
        refresh=options.refresh,
        make_room_after=_seconds_of(MIN_AGE_ENV, _MIN_AGE_S) if options.make_room else None,
        min_free=_free_space(options.min_free, _MAX_LEFT_BYTES),
        max_bytes=options.max_size,
        idle_after_s=lock_idle_after(),
    )


def _free_space(value: float | int | None, max_bytes: int | None = None) -> FreeSpace:
    match value:
        case None:
            return FreeSpace()
        case float():
            return FreeSpace(percent=value, max_bytes=max_bytes)
        case _:
            return FreeSpace(num_bytes=value)


def _path(options: argparse.Namespace) -> int:
    uri = _remote(options)
    found = find_model(uri, download_dir=options.download_dir)
    if found is None:
        raise CommandError(f"{uri} is not in the store; `argosy models pull {uri}` fetches it")
    print(_served_path(uri, found.path))
    return OK


def _rm(options: argparse.Namespace) -> int:
    uri = _remote(options)
    store = open_store(options.download_dir)
    found = _matching(store, uri)
    if not found:
        raise CommandError(f"{uri} is not in the store; `argosy models list` shows what is")
    for model in found:
        store.remove(model)
        _tell_removed(model)
    return OK


def _matching(store: Store, uri: SourceUri) -> list[StoredModel]:
    """Return the models, complete or not, that a source and its revision, if it has one, mean."""
    names = {uri.name}
    with suppress(FetchError):  # a package that is not installed
        names.add(name_in_store(uri)[0])
    names |= {source_directory(name) for name in names}  # what stands for a name that cannot be read any more
    return [
        model
        for model in (*store.list(), *store.list_partial(), *store.list_damaged())
        if model.source in names and (not uri.revision or _is_revision(model, uri.revision))
    ]


def _is_revision(model: StoredModel, wanted: str) -> bool:
    pins = equal_revisions(model.source, wanted)
    if wanted == model.revision or not pins.isdisjoint(model.requested_revisions):
        return True
    plain = _plain(wanted)
    return len(plain) >= _MIN_ABBREVIATION and _plain(model.revision).startswith(plain)


def _plain(revision: str) -> str:
    return revision.removeprefix("sha256:").removeprefix("sha256-")


def _short(revision: str) -> str:
    return _plain(revision)[:_SHOWN_REVISION]


def _prune(options: argparse.Namespace) -> int:
    if options.min_free is not None and options.tree is None:
        raise UsageError("--min-free needs --tree DIR")
    if options.max_size is None and options.max_age is None and options.min_free is None:
        raise UsageError("give --max-size SIZE, --max-age AGE or both")
    if options.every is not None and options.every < 1.0:
        raise UsageError("--every must be at least 1 second")
    if options.tree is not None:
        min_free = None if options.min_free is None else _free_space(options.min_free)
        limits = PruneLimits(
            options.max_size, options.max_age, _seconds_of(MIN_AGE_ENV, _MIN_AGE_S), min_free
        )
        return prune_repeatedly(Path(options.tree), limits, every_s=options.every)
    if options.every is not None:
        raise UsageError("--every needs --tree DIR")
    pruned = open_store(options.download_dir).prune(max_bytes=options.max_size, max_age=options.max_age)
    for model in pruned.removed:
        _tell_removed(model)
    for model in pruned.in_use:
        print(f"{model.source} at {_short(model.revision)} is in use and stays", file=sys.stderr)
    print(f"freed {size_text(pruned.freed_bytes)}")
    return OK


def _tell_removed(model: StoredModel) -> None:
    print(f"removed {model.source} at {_short(model.revision)} ({size_text(model.size)})")


def _remote(options: argparse.Namespace) -> SourceUri:
    """
    Raises:
        UsageError: the model is on this machine already.
    """
    uri = from_argument(options.model)
    if uri.is_remote:
        return uri.at_revision(options.revision)
    if uri.scheme == "file":
        raise UsageError(_not_a_repository(options.model))
    raise UsageError(f"{uri.scheme}:// models are not kept in the store")


def _not_a_repository(model: str) -> str:
    if Path(model).expanduser().exists():
        return f"{model!r} is a directory of this machine; write hf://ORG/NAME for a repository of that name"
    name, at, revision = model.partition("@")
    if "/" not in name:
        return (
            f"{model!r} has no organisation: write ORG/{name}{at}{revision}, as the hub's page of the model shows it, "
            "such as Qwen/Qwen3-0.6B"
        )
    return f"{model!r} is neither ORG/NAME of a hub nor another source; see `argosy models pull --help`"


TERMINATION_LOG: Final = Path("/dev/termination-log")
"""The kubelet mounts it, and shows its content as the container's termination message (`terminationMessagePath`)."""

_MAX_KEYS: Final = 8
"""Keys of a Secret that a message names."""

LOCK_IDLE_ENV: Final = "ARGOSY_LOCK_IDLE"


def lock_idle_after() -> float:
    """Return the seconds that another process which fetches the model may go without progress, before that is told.

    Raises:
        UsageError: the environment's value is no duration, or none that is longer than 0.
    """
    if not (seconds := _seconds_of(LOCK_IDLE_ENV, IDLE_AFTER_S)):
        raise UsageError(f"{LOCK_IDLE_ENV} must be longer than 0; 10m is the default")
    return seconds


def _seconds_of(variable: str, default: float) -> float:
    """Return the duration in an environment variable.

    Raises:
        UsageError: its value is none.
    """
    if not (value := os.environ.get(variable)):
        return default
    try:
        return age_seconds(value)
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"{variable}: {value[:40]!r} {error}") from None


@contextmanager
def pod_fetch(source: str, port: int, shown: Progress) -> Iterator[ProgressMeter]:
    """Yield a `Progress` that a port reports while the context lasts, and in which SIGTERM ends the process.

    Args:
        source: the model as the user wrote it.
        shown: is told everything as well.

    Raises:
        CommandError: the port is taken, or not permitted.
        FetchError, TransientError: as in the context, with what to do in a cluster. It is the termination message too.
    """
    meter = ProgressMeter(source, shown)
    try:
        # A fetch may be killed at any moment, and continues from its journal.
        with (
            ends_at_sigterm("stopped by SIGTERM; what has arrived is kept"),
            ProgressServer(port, meter.report),
        ):
            yield meter
    except CannotListen as error:
        raise CommandError(str(error)) from None
    except (FetchError, TransientError) as error:
        told = type(error)(f"{error}{_remedy_in_a_cluster(error)}")
        write_termination_message(printable(str(told)))
        raise told from error


def _remedy_in_a_cluster(error: Exception) -> str:
    """What to do in a manifest, where the error says what to do on a machine; empty if that is the same."""
    match error:
        case ModelTooLarge():
            return "; raise spec.model.cache.sizeLimit"
        case NoSpace():
            return "; in a cluster, give the claim more room, or the model another spec.model.cache"
        case AccessDenied() | ModelHidden():
            return f"; in a cluster, {_secret()}"
        case TransientError() if is_unreachable(str(error)):
            return (
                "; in a cluster, look at its DNS and at the egress that NetworkPolicies allow, or name a mirror in the "
                "Secret of spec.model.secretRef"
            )
    return ""


def _secret() -> str:
    """Where credentials belong: a Secret, and the keys that the mounted one has."""
    directory = os.environ.get(DIRECTORY_ENV)
    if not directory:
        return "credentials are keys of the Secret that spec.model.secretRef names; none is named"
    keys = sorted(read_directory(Path(directory)))
    more = len(keys) - _MAX_KEYS
    shown = ", ".join(keys[:_MAX_KEYS]) + (f" and {more} more" if more > 0 else "")
    return f"credentials are keys of the Secret of spec.model.secretRef; it has {shown}"


def write_termination_message(message: str, path: Path = TERMINATION_LOG) -> None:
    """Leave a message for `kubectl describe pod` and the operator, if this is a container of a pod."""
    with suppress(OSError), path.open("r+") as file:  # never creates it
        file.write(message)
        file.truncate()


MIN_AGE_ENV: Final = "ARGOSY_CACHE_MIN_AGE"
_MIN_AGE_S: Final = 3600.0
"""A model must not have been used for so long before others may take its place."""
_FIRST_WAIT_S: Final = 3600.0


def prune_repeatedly(tree: Path, limits: PruneLimits, *, every_s: float | None) -> int:
    """Prune once, or again and again until SIGTERM. Then the first round removes nothing by age: after a machine was
    off for weeks, those who hold models need a while to start, and the round after it sees who does.

    Raises:
        CommandError: the tree cannot be read.
    """
    with ends_at_sigterm("stopped by SIGTERM"):
        for number in count():
            is_first = every_s is not None and number == 0
            started = time.time()
            try:
                pruned = prune_tree(tree, replace(limits, max_age=None) if is_first else limits)
            except OSError as error:
                raise CommandError(
                    f"cannot read {tree}: {error.strerror or error}; name the directory with --tree that has the "
                    "stores of namespaces"
                ) from error
            _print(pruned, started)
            if every_s is None:
                return OK
            time.sleep(min(every_s, _FIRST_WAIT_S) if is_first else every_s)
    raise AssertionError("the rounds do not end")


def _print(pruned: TreePruned, now: float) -> None:
    for model in pruned.removed:
        unused_for = duration_text(max(0.0, now - model.last_used_at))
        print(f"removed {model} ({size_text(model.size)}, unused for {unused_for})")
    for model in pruned.in_use:
        print(f"{model} is in use and stays")
    for model, reason in pruned.failed:
        print(f"cannot remove {model}: {reason}; check its owner and permissions")
    freed = size_text(sum(model.size for model in pruned.removed))
    print(f"freed {freed}; {size_text(pruned.kept_bytes)} are left", flush=True)


_ENGINE_CHECKS: Final = "argosy_engine.models.config_file"
"""The engine's refusals of models that it does not serve. Named, not imported, because the command line does not depend
on the engine, which need not be installed."""


def engine_check(uri: SourceUri, **layout: int) -> Callable[[dict[str, Any]], None] | None:
    """Return the engine's check of a config.json; None if the engine cannot be imported.

    Args:
        layout: the devices among which the model is divided, as in `spec.parallelism`.
    """
    check = _engine_function("check_fetched_config")
    return None if check is None else partial(check, uri.name, **layout)


def check_local_model(source: str, **layout: int) -> None:
    """Check a model that is on this machine, if the engine can be imported.

    Args:
        layout: see `engine_check`.

    Raises:
        UnsupportedModel: the engine could not load it.
    """
    if (check := _engine_function("check_local_model")) is not None:
        check(source, **layout)


def _engine_function(name: str) -> Callable[..., None] | None:
    try:
        return getattr(import_module(_ENGINE_CHECKS), name)
    except ModuleNotFoundError:
        return None


@contextmanager
def fetch_errors() -> Iterator[None]:
    """Raise the fetcher's errors as those of a command, each on one line.

    Raises:
        UsageError: the source is malformed.
        CommandError: the model cannot be fetched.
    """
    try:
        yield
    except InvalidSource as error:
        raise UsageError(printable(str(error))) from error
    except (FetchError, TransientError) as error:
        raise CommandError(printable(str(error))) from error
