"""`argosy router`: read flags, environment and configuration file, and run the router until it is stopped.

On SIGUSR1 the router writes to standard error what it is doing, without interrupting anything: a separate thread first
writes the stacks of all threads, so that they appear even if the event loop hangs; once the loop turns, its tasks and
the current requests follow.
"""

# Not compiled: runs once, at the start.

from __future__ import annotations

import argparse
import asyncio
import contextlib
import faulthandler
import logging
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from argosy_protocol.program.flags import FlagParser, InvalidValue, decode_path
from argosy_protocol.program.process import (
    ShortCollections,
    configure_logging,
    describe_tasks,
    return_freed_memory,
)
from argosy_router.config import ConfigError, RouterConfig
from argosy_router.http.limits import SPARE_DESCRIPTORS, default_connections, open_files_limit
from argosy_router.observability.lines import LineHandler, LineWriter

log = logging.getLogger(__name__)
EXIT_USAGE = 2
EXIT_ADDRESS = 3
MOVED = frozenset(
    f"--{name}"
    for name in (
        *("storage", "storage-max-bytes", "storage-max-objects", "storage-ttl"),
        *("max-file-bytes", "batch-max-requests", "batch-max-inflight"),
    )
)
"""Flags that routers had."""


def build_parser() -> FlagParser:
    """Build the parser with all flags, grouped."""
    parser = FlagParser(
        "argosy router",
        "One OpenAI endpoint in front of many engines, routed by what they have cached.",
        epilog="Environment: ARGOSY_ROUTER_API_KEY (one key, like --api-key), ARGOSY_FLEET_KEY (engines' keys derive "
        "from it), ARGOSY_REPLICA_KEY (like --replica-key). Exit codes: 0 drained, 2 usage, 3 address not available.",
    )
    parser.add_config(RouterConfig)
    return parser


def config_of(
    arguments: argparse.Namespace, environment: Mapping[str, str], parser: FlagParser | None = None
) -> RouterConfig:
    """Build and check the configuration.

    Args:
        arguments: as parsed by a parser of `build_parser`.

    Raises:
        ConfigError: a value is out of bounds, or values contradict each other or are not safe together.
    """
    try:
        config = (parser or build_parser()).build(RouterConfig, arguments, environment, dec_hook=decode_path)
    except InvalidValue as error:
        raise ConfigError(str(error)) from None
    is_given = getattr(arguments, "server.max_connections") is not None
    connections = _max_connections(config.server.max_connections if is_given else None)
    config = replace(config, server=replace(config.server, max_connections=connections))
    config.check()
    return config


def _max_connections(asked: int | None) -> int:
    """The connection limit: as asked, or by default derived from the open file limit.

    Raises:
        ConfigError: the process may not open enough files.
    """
    available = open_files_limit()
    if asked is None:
        return default_connections(available)
    needed = 2 * asked + SPARE_DESCRIPTORS
    if needed > available:
        raise ConfigError(
            f"--max-connections {asked} needs {needed} open files and this process may have {available}: "
            "ask for fewer, or raise the limit (ulimit -n)"
        )
    return asked


def main(argv: Sequence[str] | None = None) -> int:
    """Run the router; return the exit code."""
    with signal_held():
        return _main(argv)


def _main(argv: Sequence[str] | None) -> int:
    parser = build_parser()
    for argument in sys.argv[1:] if argv is None else argv:
        if (flag := argument.partition("=")[0]) in MOVED:
            parser.error(
                f"{flag} is a flag of `argosy batch` now, which keeps files, batches and responses: start that, and "
                "name it by --batch-url (docs/batch.md)"
            )
    arguments = parser.parse_args(argv)
    stderr = LineWriter(2)
    try:
        _raise_file_limit()
        return_freed_memory()
        config = config_of(arguments, os.environ, parser)
        configure_logging(config.log_level.upper(), LineHandler(stderr))
        with ShortCollections():
            return _run(config, stderr)
    except (ConfigError, ValueError) as error:
        print(f"argosy router: {error}", file=sys.stderr)
        return EXIT_USAGE
    except OSError as error:  # CannotListen above all
        print(f"argosy router: {error}", file=sys.stderr)
        return EXIT_ADDRESS
    finally:
        stderr.close()


def _run(config: RouterConfig, stderr: LineWriter) -> int:
    import uvloop

    from argosy_router.server import Router

    async def serve() -> None:
        router = Router(config, stderr=stderr)
        describe_on_signal(asyncio.get_running_loop(), router.describe)
        await router.run()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())
    return 0


def _raise_file_limit() -> None:
    """Raise the open file limit to the hard one: each request takes two descriptors, and the usual soft limit of 1024
    exists only for `select`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@contextlib.contextmanager
def signal_held() -> Iterator[None]:
    """Block SIGUSR1, whose default action would kill the process, until `describe_on_signal` waits for it. Threads
    that are started inside the block inherit the mask and never receive it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def describe_on_signal(loop: asyncio.AbstractEventLoop, describe: Callable[[], str]) -> None:
    """Start answering the signal. Call it inside `signal_held`. `describe`: returns the state of the router; called in
    the event loop, its exceptions are logged."""

    def tell() -> None:
        try:
            log.warning("%s\n%s", describe(), describe_tasks(loop))
        except Exception:
            log.exception("the state could not be described")

    threading.Thread(target=_wait, args=(loop, tell), daemon=True, name="diagnostics").start()


def _wait(loop: asyncio.AbstractEventLoop, tell: Callable[[], None]) -> None:
    while not loop.is_closed():
        signal.sigwait({signal.SIGUSR1})
        with contextlib.suppress(OSError):  # the reader is gone
            os.write(2, b"argosy router, process %d: stacks of all threads\n" % os.getpid())
            faulthandler.dump_traceback(2, all_threads=True)
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            loop.call_soon_threadsafe(tell)


if __name__ == "__main__":
    sys.exit(main())
