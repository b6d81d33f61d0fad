"""Model source: makes the model that a user named a directory on this machine, by fetching it where it is remote.

It owns the step before the core starts: core and workers read directories and fetch nothing. Protocols and the store
are `argosy_fetcher.pull`'s. Invariant: a model that the engine does not serve is refused before any weight is fetched.

`budget_table` shows what memory the model then takes, for `argosy doctor`, `argosy serve` and `LLMEngine`'s log.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from argosy_engine.checkpoint.gguf_folder import gguf_file, gguf_folder, hold_folder, write_gguf_headers
from argosy_engine.checkpoint.model_folder import hold_stored_model, resolve_model
from argosy_engine.config import EngineArgs
from argosy_engine.errors import ConfigError, FetchFailed
from argosy_engine.models.config_file import check_fetched_config
from argosy_engine.resolved_config import MemoryBudget, sampling_defaults
from argosy_engine.sizing.resources import choose_dtype, visible_gpus
from argosy_fetcher.errors import FetchError, NoSpace, TransientError
from argosy_fetcher.progress import Progress, ProgressDisplay, progress_display
from argosy_fetcher.source_uri import SourceUri, from_argument

if TYPE_CHECKING:
    from argosy_fetcher.pull import PulledModel
    from argosy_fetcher.store_index import StoredModel

T = TypeVar("T")


def is_remote(args: EngineArgs) -> bool:
    """Whether the model has to be fetched, or found in the store.

    Raises:
        ConfigError: the model's name is malformed.
    """
    return _uri(args).is_remote


@contextmanager
def local_model(args: EngineArgs, display: ProgressDisplay | None = None) -> Iterator[EngineArgs]:
    """Yield arguments whose model is on this machine, and which serve it under the name that the user gave.

    Args:
        display: shows the fetch; a bar or lines on standard error if left out.

    Raises:
        ConfigError: the model does not exist, is hidden from the credentials, or cannot be served.
        FetchFailed: the source or the network does not answer, or the disk is full.
    """
    if not _takes_long(args):
        yield _checked(args)
        return
    with display or progress_display() as progress:
        folder, held = _make_local(args, progress)
    with held:
        yield _checked(_localized(args, folder))


@asynccontextmanager
async def local_model_async(
    args: EngineArgs, display: ProgressDisplay | None = None
) -> AsyncIterator[EngineArgs]:
    """As `local_model`, while the event loop goes on. Cancelling it ends the fetch, which the next one continues."""
    if not _takes_long(args):
        yield _checked(args)
        return
    with display or progress_display() as progress:
        make = partial(_make_local, args, progress)
        folder, held = await _in_daemon_thread(make, lambda made: made[1].close())
    with held:
        yield _checked(_localized(args, folder))


def _takes_long(args: EngineArgs) -> bool:
    """Whether the model has to be fetched or widened."""
    return is_remote(args) or gguf_file(args.model) is not None


def _checked(args: EngineArgs) -> EngineArgs:
    """Return the arguments. A wrong path, and wrong sampling parameters beside the model, are told before torch is
    imported."""
    sampling_defaults(resolve_model(args.model), args.request_defaults)
    return args


@contextmanager
def model_headers(args: EngineArgs, display: ProgressDisplay | None = None) -> Iterator[Path]:
    """Yield a directory with the model's config and the headers of its weights, which are all that is read of a remote
    model unless the store has it.

    Raises:
        ConfigError, FetchFailed: as `local_model`.
    """
    uri = _uri(args)
    if (file := gguf_file(args.model)) is not None:
        with tempfile.TemporaryDirectory(prefix="argosy-headers-") as directory:
            _write_headers(file, args, Path(directory))
            yield Path(directory)
        return
    if not uri.is_remote:
        yield resolve_model(args.model)
        return
    from argosy_fetcher.pull import find_model, pull_headers

    with _fetch_errors():
        stored = find_model(uri, download_dir=args.download_dir)
    if stored is not None and not uri.is_gguf:
        with hold_stored_model(stored.path) or nullcontext():
            yield stored.path
        return
    with tempfile.TemporaryDirectory(prefix="argosy-headers-") as directory:
        with display or progress_display() as progress:
            if uri.is_gguf:
                _write_remote_gguf_headers(uri, stored, args, Path(directory), progress)
            else:
                check = partial(check_fetched_config, uri.name, use=args.model_use)
                with _fetch_errors():
                    pull_headers(uri, Path(directory), progress=progress, check_config=check)
        yield Path(directory)


def _write_remote_gguf_headers(
    uri: SourceUri, stored: StoredModel | None, args: EngineArgs, folder: Path, progress: Progress
) -> None:
    """Write the headers of a hub's GGUF file, of which its own header is all that is fetched.

    Raises:
        ConfigError, FetchFailed: as `local_model`.
    """
    from argosy_fetcher.pull import pull_headers, stored_gguf

    with ExitStack() as held:
        with _fetch_errors():
            if stored is None:
                path = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="argosy-headers-")))
                pull_headers(uri, path, progress=progress)
            else:
                path = stored.path
                held.enter_context(hold_stored_model(path) or nullcontext())
            file = stored_gguf(uri, path)
        _write_headers(file, args, folder)


def _write_headers(file: Path, args: EngineArgs, folder: Path) -> None:
    write_gguf_headers(file, folder, _stored_dtype(args), has_tokenizer=args.tokenizer_path is None)


def _uri(args: EngineArgs) -> SourceUri:
    """
    Raises:
        ConfigError: the model's name or its revision is malformed, or a local model has a revision.
    """
    with _fetch_errors():
        uri = from_argument(args.model)
        if args.revision is None:
            return uri
        if not uri.is_remote:
            raise ConfigError(
                f"--revision {args.revision}: {args.model!r} is on this machine and has no revisions"
            )
        return uri.at_revision(args.revision)


def _make_local(
    args: EngineArgs, progress: Progress, cancelled: threading.Event | None = None
) -> tuple[Path, ExitStack]:
    """Fetch the model, and widen it if it is a GGUF file.

    Returns:
        The folder that is loaded, and what keeps it and its file from being removed until it is closed.
    """
    with ExitStack() as held:
        if (file := gguf_file(args.model)) is None:
            model = _pull(args, progress, cancelled)
            held.callback(model.close)
            if not (uri := _uri(args)).is_gguf:
                return model.path, held.pop_all()
            from argosy_fetcher.pull import stored_gguf

            with _fetch_errors():
                file = stored_gguf(uri, model.path)
        folder = gguf_folder(
            file,
            _stored_dtype(args),
            has_tokenizer=args.tokenizer_path is None,
            note=progress.note,
            cancelled=cancelled,
        )
        held.enter_context(hold_folder(folder))
        return folder, held.pop_all()


def _pull(args: EngineArgs, progress: Progress, cancelled: threading.Event | None) -> PulledModel:
    from argosy_fetcher.pull import find_model, is_offline, pull_model

    uri = _uri(args)
    if uri.is_gguf and not is_offline(os.environ):
        with _fetch_errors():
            stored = find_model(uri, download_dir=args.download_dir)
        if stored is None:  # refused now, if at all
            with tempfile.TemporaryDirectory(prefix="argosy-headers-") as directory:
                _write_remote_gguf_headers(uri, None, args, Path(directory), progress)
    with _fetch_errors():
        return pull_model(
            uri,
            progress=progress,
            download_dir=args.download_dir,
            check_config=partial(check_fetched_config, uri.name, use=args.model_use),
            has_weights=args.load_format != "dummy",
            cancelled=cancelled,
        )


def _localized(args: EngineArgs, path: Path) -> EngineArgs:
    return msgspec.structs.replace(
        args,
        model=str(path),
        tokenizer=None if args.tokenizer == args.model else args.tokenizer,
        served_model_name=args.served_model_name or (args.canonical_name,),
        revision=None,
        download_dir=None,
    )


@contextmanager
def _fetch_errors() -> Iterator[None]:
    """Raise the fetcher's errors as the engine's."""
    try:
        yield
    except (TransientError, NoSpace) as error:
        raise FetchFailed(str(error)) from error
    except FetchError as error:
        raise ConfigError(str(error)) from error


def _stored_dtype(args: EngineArgs) -> str:
    """Return the dtype to which a GGUF file is widened: the engine's."""
    device = "cuda" if args.device != "cpu" and visible_gpus() else "cpu"
    return choose_dtype(args.dtype, "bfloat16", device)


async def _in_daemon_thread(job: Callable[..., T], discard: Callable[[T], None] = lambda result: None) -> T:
    """Run a job in a thread that does not keep the process from ending, as those of the loop's executor would.

    Args:
        job: takes `cancelled`, an event.
        discard: takes the result if nobody waits for it any more.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    cancelled = threading.Event()

    def settle(results: list[T], error: BaseException | None) -> None:
        for result in results:
            if future.cancelled():
                discard(result)
            else:
                future.set_result(result)
        if error is not None and not future.cancelled():
            future.set_exception(error)

    def run() -> None:
        results: list[T] = []
        failure: BaseException | None = None
        try:
            results.append(job(cancelled=cancelled))
        except BaseException as error:
            failure = error
        with suppress(RuntimeError):  # the loop is closed: the process ends
            loop.call_soon_threadsafe(settle, results, failure)

    threading.Thread(target=run, name="fetch model", daemon=True).start()
    try:
        return await future
    finally:
        cancelled.set()


_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def size(num_bytes: int) -> str:
    """Format a number of bytes with a binary unit."""
    for unit, name in _UNITS:
        if num_bytes >= unit:
            return f"{num_bytes / unit:.2f} {name}"
    return f"{num_bytes} B"


def budget_table(*budgets: MemoryBudget) -> str:
    """Format the budget in five lines, or six for a model with states, numbers right-aligned.

    Args:
        budgets: those of all data-parallel ranks, of which the smallest is shown.
    """
    budget = min(budgets, key=lambda each: each.num_blocks)
    if budget.device == "cuda":
        share = f"{budget.utilization:g} of {size(budget.total_bytes)}, {size(budget.available_bytes)} free at start"
    else:
        share = f"{budget.utilization:g} of what weights leave of {size(budget.available_bytes)}"
    kind = "peak of the largest step" + ("" if budget.device == "cuda" else ", estimated")
    workers = f"on each of {budget.num_workers} workers, as below" if budget.num_workers > 1 else ""
    reason = share if budget.limited_by == "memory" else f"set by {budget.limited_by}"
    rows = [
        ("weights", size(budget.weights_bytes), workers),
        ("activations", size(budget.activation_bytes), kind),
    ]
    if not budget.request_blocks and not budget.num_states:
        rows.append(("KV cache", "none", "an encoder computes each prompt whole"))
        return _lines(rows, len(budgets))
    rows += [
        (
            "KV cache",
            size(budget.kv_cache_bytes),
            f"{budget.num_blocks} blocks of {budget.block_size}; {reason}",
        ),
        (
            "capacity",
            str(budget.kv_cache_tokens),
            f"tokens, {size(budget.block_bytes // budget.block_size)} each",
        ),
        ("concurrency", f"{budget.max_concurrency:.1f}", f"requests of {budget.max_model_len} tokens"),
    ]
    if budget.state_bytes:
        kept = f"of {size(budget.state_bytes)}, one of each request that runs, the others of cached prefixes"
        rows.insert(3, ("states", str(budget.num_states - 1), kept))
    return _lines(rows, len(budgets))


def _lines(rows: Sequence[tuple[str, str, str]], num_ranks: int) -> str:
    lines = [f"  {name:<14}{value:>12}  {note}".rstrip() for name, value, note in rows]
    return "\n".join(lines if num_ranks == 1 else [f"  each of {num_ranks} data-parallel ranks:", *lines])
