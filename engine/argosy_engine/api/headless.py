"""`argosy serve MODEL --headless`: the workers of a machine that is not an engine's first. It has no API server.

The model is fetched while the machine waits for the first one; then the workers run until either ends.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from contextlib import AsyncExitStack

from argosy_engine.config import EngineArgs
from argosy_engine.errors import ConfigError
from argosy_engine.executor.node_agent import JoiningNode, NodeAgent
from argosy_engine.executor.node_channel import NodeChannel
from argosy_engine.executor.node_key import read_keys
from argosy_engine.frontend.model_source import is_remote, local_model_async
from argosy_engine.sizing.kv_cache_sizing import check_model
from argosy_engine.sizing.rank_resources import check_gpus
from argosy_fetcher.progress_display import progress_display

logger = logging.getLogger("argosy.node")


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
        logger.info("%s", line)
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
