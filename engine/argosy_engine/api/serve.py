"""`argosy serve MODEL`: the API server process, from the command line to the last drained request.

With `--api-server-count` it is the first of several (`api_process`). With `--headless` it has no API server: it runs
the workers of a machine that is not an engine's first (`serve_node`). The model is fetched while the machine waits for
the first one; then the workers run until either ends.
"""

from __future__ import annotations

import asyncio
import dataclasses
import faulthandler
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

import uvloop
from starlette.types import ASGIApp

from argosy_engine.api.api_process import ProcessGroup
from argosy_engine.api.app import (
    accepted_keys,
    build_app,
    describe_server_on_signal,
    given_keys,
    make_engine,
    make_http_server,
    make_request_spans,
    refresh_certificate,
)
from argosy_engine.api.engine_flag_parser import EngineFlagParser
from argosy_engine.api.http.asgi_layers import FollowedKeys
from argosy_engine.api.http.http_server import ServerCertificate
from argosy_engine.api.observability.hot_prefixes import GetReport, http_prefixes, warm_up
from argosy_engine.api.served_engine import Engine
from argosy_engine.api.server_args import ServerArgs
from argosy_engine.config import EngineArgs
from argosy_engine.core.proc.core_handle import ALONE, LoadWatch
from argosy_engine.errors import ConfigError, EngineDead, FetchFailed, LoadStalled
from argosy_engine.executor.node_agent import JoiningNode, NodeAgent
from argosy_engine.executor.node_channel import NodeChannel, read_keys
from argosy_engine.frontend.async_llm import AsyncLLM
from argosy_engine.frontend.model_source import budget_table, is_remote, local_model_async
from argosy_engine.messages import LoadStep
from argosy_engine.osproc import (
    MIN_FREE_DESCRIPTORS,
    dump_stacks_on_signal,
    raise_descriptor_limit,
    require_free_descriptors,
)
from argosy_engine.resolved_config import ResolvedConfig
from argosy_engine.sizing.kv_cache_sizing import check_model
from argosy_engine.sizing.resources import check_gpus
from argosy_fetcher.progress import ProgressDisplay, progress_display
from argosy_protocol.program.flags import InvalidValue
from argosy_protocol.program.listen import CannotListen, UnixListener, listen, listen_unix
from argosy_protocol.program.process import configure_logging, return_freed_memory

logger = logging.getLogger("argosy.api")


_node_logger = logging.getLogger("argosy.node")


EXIT_ADDRESS = 3
"""Exit code if the address is not available, as in the router."""

EXIT_STALLED = 4
"""Exit code if the load of the model stalled (`--load-stall-timeout`)."""

EXIT_INTERRUPTED = 130

EXIT_CODES = (
    "Exit codes: 0 stopped by a signal, 1 the engine died or the model cannot be fetched now, 2 wrong usage or a model "
    "that cannot be served, 3 the address is taken, 4 the load of the model stalled, 130 Ctrl-C before the model was "
    "loaded."
)

_MIN_DESCRIPTORS = 128
"""Minimum number of free descriptors. Half are for connections; the server and its core use 30, and a few more while
the core starts."""

_MAX_PHASE = 200
"""Length of a line of progress in the answers of /ready."""

_LAST_BYTES_S = 5.0
"""Time after the drain in which clients can read what has been sent."""

_DEAD_LAST_BYTES_S = 0.5
"""As `_LAST_BYTES_S`, of an engine that died: what its clients have yet to read is an error, and its end is awaited by
whatever starts it again."""

QUIET_S = 2.0
"""Loads that end within this time are not worth a line."""

LINE_EVERY_S = 10.0


GRACE_S = 15.0
"""How long a start that has stalled may take to end in the usual way, which says more and leaves no files."""


def build_parser() -> EngineFlagParser:
    """Make the parser of the server's and the engine's flags."""
    parser = EngineFlagParser("argosy serve", "Serve one model behind an OpenAI API.", EXIT_CODES)
    parser.add_config(ServerArgs, "server")
    parser.add_engine_flags()
    parser.add_vllm_flags()
    return parser


def parse_args(argv: Sequence[str] | None) -> tuple[ServerArgs, EngineArgs]:
    """Parse the server's and the engine's arguments. If they are invalid, print one line and exit with code 2."""
    parser = build_parser()
    options = parser.parse_args(argv)
    args = parser.engine_args(options)
    try:
        server_args = parser.build(ServerArgs, options)
        server_args.check()
        check_headless(args, is_headless=server_args.headless)
    except (InvalidValue, ConfigError) as error:
        parser.error(str(error))
    parser.check_vllm_flags(options, args)
    return server_args, args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the server and return the exit code, as `EXIT_CODES` says."""
    started = time.perf_counter()
    dump_stacks_on_signal()
    options, args = parse_args(argv)
    configure_logging(options.log_level.upper())
    try:
        args.check_core_process()
        num_descriptors = raise_descriptor_limit()
        return_freed_memory()
        if options.headless:
            return asyncio.run(serve_node(args, options.shutdown_timeout))
        require_free_descriptors(_MIN_DESCRIPTORS + MIN_FREE_DESCRIPTORS * (args.data_parallel_size - 1))
        # Before the load, which takes long.
        tls = None if options.certificate is None else ServerCertificate(options.certificate)
        sockets: list[socket.socket] = []
        if options.uds is None:
            sockets += listen(options.host, options.port)
        else:
            sockets.append(listen_unix(options.uds))
        try:
            return uvloop.run(_serve(options, args, started, num_descriptors, sockets, tls))
        finally:
            _remove_files(sockets)
    except ConfigError as error:
        print(f"argosy serve: {error}", file=sys.stderr)
        return 2
    except CannotListen as error:
        print(f"argosy serve: {error}", file=sys.stderr)
        return EXIT_ADDRESS
    except FetchFailed as error:
        print(f"argosy serve: {error}", file=sys.stderr)
        return 1
    except LoadStalled as error:
        print(f"argosy serve: {error}", file=sys.stderr)
        return EXIT_STALLED
    except EngineDead as error:
        what = f"node {args.node_rank}" if options.headless else "the engine core"
        print(f"argosy serve: {what} died: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    finally:
        gc.freeze()  # or the interpreter would look for cycles in all that is imported, when nobody needs the memory


async def _serve(
    options: ServerArgs,
    args: EngineArgs,
    started: float,
    num_descriptors: int,
    sockets: list[socket.socket],
    tls: ServerCertificate | None,
) -> int:
    """Serve until the engine is drained, and return the exit code.

    Args:
        sockets: listening sockets, which are closed at the end.
        tls: makes the server speak HTTPS.
    """
    spans = make_request_spans(options, args)
    engine = make_engine(options, args, spans)
    app = build_app(engine)
    num_descriptors -= MIN_FREE_DESCRIPTORS * (args.data_parallel_size - 1)  # of further cores
    server = make_http_server(app, options, num_descriptors, tls, engine.on_slow_client)
    processes: ProcessGroup | None = None
    if options.api_server_count > 1:
        processes = engine.peers = ProcessGroup(options, args, sockets, engine.started)
    stop, hurry = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    interrupted = asyncio.Event()

    def stop_by(number: int) -> None:
        if number == signal.SIGINT and not stop.is_set():
            interrupted.set()
        (hurry if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop_by, number)
    describe_server_on_signal(loop, engine, lambda: _started(engine, processes))
    serving = asyncio.create_task(server.serve(sockets), name="http")
    url = _url(options, sockets[0])
    refreshing = asyncio.create_task(refresh_certificate(options, tls), name="certificate")
    warming = None if processes is not None else report_source(options, args)
    loading = asyncio.create_task(
        _load(engine, args, stop, started, url, app, processes, warming), name="load"
    )
    stopping = asyncio.create_task(stop.wait(), name="stop")
    losing = asyncio.create_task(_lost(processes), name="end of an API process")
    ends = {stopping, serving, losing}
    try:
        await asyncio.wait({loading, *ends}, return_when=asyncio.FIRST_COMPLETED)
        if losing.done():
            return 1
        if loading.done():
            loading.result()  # raises if the model cannot be loaded, which ends the server
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if losing.done() or (serving.done() and not stop.is_set()):
            return 1  # the reason is logged
        if interrupted.is_set() and not loading.done():
            return EXIT_INTERRUPTED
        await drain(engine, options.shutdown_timeout, hurry)
        return 1 if engine.llm is not None and engine.llm.is_dead else 0
    finally:
        for task in (loading, stopping, refreshing, losing):
            task.cancel()
        is_dead = losing.done() or (engine.llm is not None and engine.llm.is_dead)
        last_bytes_s = _DEAD_LAST_BYTES_S if is_dead else _LAST_BYTES_S
        await asyncio.gather(loading, stopping, refreshing, losing, return_exceptions=True)
        _remove_files(sockets)
        server.stop(last_bytes_s)
        ending = [] if processes is None else [asyncio.create_task(processes.stop(last_bytes_s))]
        await engine.close()
        await asyncio.gather(serving, *ending, return_exceptions=True)
        if spans is not None:
            await asyncio.to_thread(spans.close)


def _remove_files(sockets: Sequence[socket.socket]) -> None:
    """Remove the files of Unix domain sockets."""
    for each in sockets:
        if isinstance(each, UnixListener):
            each.unlink()


def _url(options: ServerArgs, listening: socket.socket) -> str:
    """Return the server's address, for the log."""
    if options.uds is not None:
        return f"unix:{options.uds}"
    scheme = "http" if options.ssl_certfile is None else "https"
    host = f"[{options.host}]" if ":" in options.host else options.host
    return f"{scheme}://{host}:{int(listening.getsockname()[1])}"


async def _lost(processes: ProcessGroup | None) -> None:
    """Wait until another API process has ended by itself."""
    await (asyncio.Event() if processes is None else processes.ended).wait()


def _started(engine: Engine, processes: ProcessGroup | None) -> list[int]:
    """Return the processes that this one has started."""
    pids = [] if processes is None else processes.pids
    return pids + (engine.llm.client.pids if engine.llm is not None and not engine.llm.is_dead else [])


async def _load(
    engine: Engine,
    args: EngineArgs,
    stop: asyncio.Event,
    started: float,
    url: str,
    app: ASGIApp,
    processes: ProcessGroup | None,
    warming: GetReport | None,
) -> None:
    phases = [("api server imports", time.perf_counter() - started)]

    def show(line: str) -> None:
        logger.info("%s", line)
        if not engine.is_draining:
            engine.phase = f"fetching the model: {line[:_MAX_PHASE]}"

    def show_step(step: LoadStep) -> None:
        if not engine.is_draining:
            engine.phase = f"loading the model: {step}"
        load_log.note(step)
        start_watch.advanced(step)

    if processes is not None:
        await processes.open(app)
    display: ProgressDisplay | None = None
    if is_remote(args):
        engine.phase, display = "fetching the model", progress_display(show)
    before = time.perf_counter()
    async with local_model_async(args, display) as local:
        if display is not None:
            phases.append(("fetch", time.perf_counter() - before))
        engine.phase, load_log = "loading the model", LoadLog()
        group = ALONE if processes is None else processes.client_group
        with StartWatch(args.load_stall_timeout, EXIT_STALLED) as start_watch:
            llm = await AsyncLLM.start(local, dataclasses.replace(group, on_load_step=show_step))
            llm.on_dead = stop.set
            if processes is not None:
                try:
                    await processes.wait_until_ready()
                except BaseException:
                    await llm.close()
                    raise
    if processes is not None:
        url += f" with {processes.size} processes"
    engine.attach(llm, is_warming_up=warming is not None)
    gc.freeze()  # what is loaded by now stays: the collector need not look at it again and again
    if warming is not None:
        before = time.perf_counter()
        try:
            await warm_up(llm, warming, engine.options.warm_up_timeout)
        finally:
            engine.warmed_up()
        phases.append(("warm-up", time.perf_counter() - before))
    _print_start_up(llm.config, url, phases, time.perf_counter() - started)


def report_source(options: ServerArgs, args: EngineArgs) -> GetReport | None:
    """Who tells the prefixes to warm up with; None for no warm-up. The replicas of a service have the same keys."""
    peer = options.warm_up_from or os.environ.get("ARGOSY_WARM_UP_FROM", "")
    if not peer or not args.enable_prefix_caching or not options.warm_up_timeout:
        return None
    accepted = accepted_keys(options)
    followed = accepted.found if isinstance(accepted, FollowedKeys) else ()
    admin = [*options.admin_api_key, *os.environ.get("ARGOSY_ADMIN_API_KEY", "").split(",")]
    return http_prefixes(peer, *(key for key in (*admin, *followed, *given_keys(options)) if key))


async def drain(engine: Engine, timeout_s: float, hurry: asyncio.Event) -> None:
    """Let running requests finish until the timeout or a second signal, then abort the rest.

    Meanwhile /ready answers 503 (`draining`), /health 200, and new requests get 503 with a retry hint.
    """
    drained = asyncio.create_task(engine.drain(), name="drain")
    hurried = asyncio.create_task(hurry.wait(), name="second signal")
    if engine.num_live and timeout_s:
        logger.info(
            "stopping: waiting up to %g s for %d requests; another signal (Ctrl-C) aborts them",
            timeout_s,
            engine.num_live,
        )
    await asyncio.wait({drained, hurried}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    if not drained.done():
        logger.warning(
            "%s; %d requests aborted",
            "told twice to stop" if hurry.is_set() else f"drain timed out after {timeout_s:g} s",
            engine.num_live,
        )
    for task in (drained, hurried):
        task.cancel()
    await asyncio.gather(drained, hurried, return_exceptions=True)


def _print_start_up(
    config: ResolvedConfig, url: str, phases: Sequence[tuple[str, float]], total_s: float
) -> None:
    """Print the model, its memory budget and the durations of the start-up phases to standard error.

    Args:
        phases: those before the core was started.
    """
    rows = [*phases, *config.startup_phases]
    rows.append(("processes, tokenizer, hand-over", max(total_s - sum(seconds for _, seconds in rows), 0.0)))
    lines = [f"  {name:<34}{seconds:8.2f} s" for name, seconds in rows]
    print(
        "\n".join(
            [
                f"{config.model_name}: {config.architecture}, {config.dtype} on {config.device}",
                budget_table(*config.memory_of_ranks),
                *lines,
                f"  {'ready':<34}{total_s:8.2f} s",
                f"listening on {url}",
            ]
        ),
        file=sys.stderr,
        flush=True,
    )


class LoadLog:
    """Log lines that say how far the load of a model is, which `argosy why` reads.

    Invariant: a load that is short logs nothing, and one that is long a line for each phase and one each
    `LINE_EVERY_S`, however many steps it has.

    Args:
        clock: seconds that never go back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._said_at = self._began
        self._said = ""

    def note(self, step: LoadStep) -> None:
        """Log the step if a line is due."""
        now = self._clock()
        if now - self._began < QUIET_S:
            return
        if step.phase != self._said or now - self._said_at >= LINE_EVERY_S:
            self._said, self._said_at = step.phase, now
            logger.info("loading the model: %s", step)


class StartWatch:
    """Ends the process, with the stacks of its threads, if its start stalls within the context, after its cores have
    loaded the model. The cores end with it, as with any end of their parent.

    The client of the cores watches their loads (`core.proc.core_handle`), but not its own process: a read of a lost
    volume, as of the tokenizer's file, blocks the event loop. Hence a thread, which needs the interpreter's lock: what
    reads files during the start must give it up.

    Args:
        timeout_s: how long the start may be without progress; 0: for ever.
        exit_code: the process's.
    """

    def __init__(self, timeout_s: float, exit_code: int, grace_s: float = GRACE_S) -> None:
        self._watch = LoadWatch(timeout_s)
        self._exit_code = exit_code
        self._grace_s = grace_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="start watch")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def advanced(self, step: LoadStep) -> None:
        """Note that the start has advanced."""
        self._watch.advanced(step)

    def _run(self) -> None:
        while not self._ended.wait(self._watch.remaining_s):
            if self._watch.is_stalled and not self._ended.wait(self._grace_s) and self._watch.is_stalled:
                faulthandler.dump_traceback()
                print(f"argosy serve: {self._watch.stalled()}", file=sys.stderr, flush=True)
                os._exit(self._exit_code)


def check_headless(args: EngineArgs, *, is_headless: bool) -> None:
    """Check that the machine has the API server if it is the first one, and only then.

    Raises:
        ConfigError: --headless and --node-rank do not fit.
    """
    if is_headless and not args.node_rank:
        raise ConfigError(
            "--headless is for the nodes of an engine that are not its first: give --nnodes and --node-rank, or leave "
            "it out"
        )
    if args.node_rank and not is_headless:
        raise ConfigError(
            f"--node-rank {args.node_rank} needs --headless: the API server and the engine core are on node 0"
        )


async def serve_node(args: EngineArgs, stop_timeout_s: float) -> int:
    """Join the first machine, run the workers and return the exit code. Call it in the main thread.

    Args:
        stop_timeout_s: see `NodeAgent`.

    Raises:
        ConfigError: the first machine refuses this one, or the model cannot be served.
        FetchFailed: the model's source or the network does not answer.
        EngineDead: the first machine has not answered in time.
    """
    joining = JoiningNode(args, read_keys(args))
    check_gpus(args)

    def show(line: str) -> None:
        _node_logger.info("%s", line)
        joining.report(f"fetching the model: {line}")

    async with AsyncExitStack() as stack:
        stack.callback(joining.cancel)
        joined = asyncio.ensure_future(_in_daemon_thread(joining))
        fetched = asyncio.ensure_future(
            stack.enter_async_context(
                local_model_async(args, progress_display(show) if is_remote(args) else None)
            )
        )
        fetched.add_done_callback(lambda _: joining.begin_deadline())
        try:
            await asyncio.wait({joined, fetched}, return_when=asyncio.FIRST_EXCEPTION)
            for task in (fetched, joined):
                if task.done():
                    task.result()
        finally:
            for task in (joined, fetched):
                task.cancel()
            await asyncio.gather(joined, fetched, return_exceptions=True)
        local = fetched.result()
        check_model(local)
        return NodeAgent(local, joined.result(), stop_timeout_s).run()


async def _in_daemon_thread(joining: JoiningNode) -> NodeChannel:
    """Join in a thread that does not keep the process from ending."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[NodeChannel] = loop.create_future()

    def settle(channel: NodeChannel | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if channel is not None:
            future.set_result(channel)
        elif error is not None:
            future.set_exception(error)

    def run() -> None:
        channel: NodeChannel | None = None
        failure: BaseException | None = None
        try:
            channel = joining.join()
        except BaseException as error:
            failure = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, channel, failure)

    threading.Thread(target=run, name="join", daemon=True).start()
    return await future


if __name__ == "__main__":
    sys.exit(main())
