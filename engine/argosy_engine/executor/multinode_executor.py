"""MultiNodeExecutor: a `MultiprocExecutor` whose last workers are on other machines.

Each machine has the same number of workers: the first ones are this machine's, those of the others are behind a
`NodeGroup`. Answers of all come out of sockets, so that nothing else differs. Design: vLLM's `MultiprocExecutor` with
--nnodes, whose messages between machines are pickled.
"""

from __future__ import annotations

import logging
import os
import socket

import msgspec

from argosy_engine.config import EngineArgs
from argosy_engine.distributed.process_name import worker_name
from argosy_engine.errors import EngineDead, EngineError
from argosy_engine.executor.multiproc_executor import MultiprocExecutor
from argosy_engine.executor.node_group import NodeGroup
from argosy_engine.executor.node_key import read_keys
from argosy_engine.executor.rendezvous import Rendezvous, tcp_url
from argosy_engine.executor.worker_messages import INIT
from argosy_engine.messages.load_step import OnLoadStep, ignore_step
from argosy_engine.messages.worker_info import WorkerInfo

logger = logging.getLogger("argosy.core")


def node_args(args: EngineArgs) -> EngineArgs:
    """Return the arguments of the workers on this machine, which share its cores."""
    threads = args.threads or max(len(os.sched_getaffinity(0)) // args.parallel_config.local_workers, 1)
    return msgspec.structs.replace(args, threads=threads)


class MultiNodeExecutor(MultiprocExecutor):
    """Executor of machine 0.

    Args:
        args: arguments of the engine.
        on_load_step: see `make_executor`.

    Raises (from the constructor):
        ConfigError: there is no key, or this machine cannot listen for the others.
    """

    def __init__(self, args: EngineArgs, on_load_step: OnLoadStep = ignore_step) -> None:
        config = args.parallel_config
        keys = read_keys(args)
        far = range(config.local_workers, config.world_size)
        pairs = [socket.socketpair() for _ in far]
        super().__init__(
            args, config.world_size, elsewhere=[ours for ours, _ in pairs], on_load_step=on_load_step
        )
        self._pairs = pairs
        feeds = dict(zip(far, (theirs for _, theirs in pairs), strict=True))
        self._nodes = NodeGroup(args, keys, feeds, on_load_step)

    def start(self) -> WorkerInfo:
        config = self._args.parallel_config
        if config.tensor > config.local_workers:
            logger.warning(
                "--tensor-parallel-size %d spans several nodes: each layer waits for the network",
                config.tensor,
            )
        logger.info("waiting for %d nodes at %s", config.nodes - 1, self._nodes.host)
        try:
            self._nodes.wait_until_ready()
        except EngineDead as error:
            self._nodes.close(str(error))
            raise
        family = socket.AF_INET6 if ":" in self._nodes.host else socket.AF_INET
        with socket.create_server((self._nodes.host, 0), family=family) as store:
            port = store.getsockname()[1]
            url = tcp_url(self._nodes.host, port)
            self._workers.start(Rendezvous(url, own_host=self._nodes.host, store=store.fileno()))
        self._nodes.start_workers(port)
        super()._send(INIT + self._encode(node_args(self._args)))  # the others have their own arguments
        try:
            return self._worker_info()
        except EngineError as error:
            self._nodes.close(str(error))
            raise

    def shutdown(self) -> None:
        self._nodes.close("" if self._death is None else str(self._death))
        super().shutdown()
        for ours, _ in self._pairs:
            ours.close()

    def _send(self, message: bytes) -> None:
        self._nodes.put(message)  # first, since it has the longer way
        super()._send(message)

    def _who(self, rank: int) -> str:
        if rank < self._args.parallel_config.local_workers:
            return super()._who(rank)
        node = rank // self._args.parallel_config.local_workers
        return f"{worker_name(self._args.parallel_config, rank)} ({self._nodes.describe_node(node)})"

    def _describe_exit(self, rank: int) -> str:
        if rank < self._args.parallel_config.local_workers:
            return super()._describe_exit(rank)
        return self._nodes.describe_exit(rank)
