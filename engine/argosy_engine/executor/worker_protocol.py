"""What an executor and its workers' processes have in common: kinds of messages, how the workers find each other, and
why they have ended.

A message is one byte for its kind, then msgpack. A worker whose peer has ended fails as well, in a collective
operation, with an error that names nobody. So those that were killed are the reason; if none was, those that failed by
themselves (`death_of`).
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import struct
from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple, Protocol

from msgspec import Struct

from argosy_engine.errors import ConfigError, EngineDead, EngineError
from argosy_engine.osproc import paused_collector
from argosy_protocol.program.process import BoundedFormatter

logger = logging.getLogger("argosy.executor")

INIT = b"\x00"
"""`EngineArgs`: make the worker and load the model. The first message; every rank answers with `WorkerInfo`."""
EXECUTE = b"\x01"
"""`SchedulerOutput`: run a step. Only one rank answers, with `ModelRunnerOutput`; on the others only a failure does."""
SAMPLE = b"\x02"
"""`GrammarBitmask` or None, for the previous step, which awaits it and is answered only now."""
CALL = b"\x03"
"""`CollectiveRpc`: call a method of the worker. Every rank answers."""
LEND = b"\x04"
"""`Round`: compute the experts for a step of other engine cores. No rank answers, but for a failure."""

DONE = b"\x00"
"""Answer: the result."""
FAILED = b"\x01"
"""Answer: `WorkerFailure` of a call; the worker goes on."""
DIED = b"\x02"
"""Last message: `WorkerFailure` of the start or of a step, with which the worker's process ends."""
PROGRESS = b"\x03"
"""`LoadStep`, before the answer to `INIT` or to a call that loads weights."""


class WorkerFailure(Struct, array_like=True):
    """Error of a worker's start, step or call."""

    message: str
    is_config_error: bool = False
    is_in_collective: bool = False
    """Whether it may have failed only because another worker has ended."""
    traceback: str = ""
    """Of an error that ends the worker, bounded."""


class MessageReader(Protocol):
    """A worker's end of the way from the core."""

    def get(self) -> bytes:
        """Wait for the next message."""
        ...


class MessageWriter(Protocol):
    """A worker's end of the way to the core."""

    def send(self, message: bytes) -> None:
        """Send a message.

        Raises:
            OSError: the core has ended.
        """
        ...


_SIOCGIFADDR = 0x8915
_ADDRESS = slice(20, 24)
"""Of a `struct ifreq`."""


class Rendezvous(NamedTuple):
    """How a worker's process finds the others, for torch.distributed.

    On one machine they inherit a memory file. Over several, rank 0 serves torch's store on a socket that listens
    already, so that no port is chosen and bound later. Neither the store nor what workers exchange is authenticated.
    """

    init_method: str
    """For `init_parallel_state`."""
    own_host: str = ""
    """Address of its machine in the network of the workers; empty: all are on this machine."""
    store: int = -1
    """Descriptor of the socket on which rank 0 serves the store; -1: nobody here serves one."""
    inherited: tuple[int, ...] = ()
    """Descriptors that the process inherits."""


def tcp_url(host: str, port: int) -> str:
    """Return the `init_method` of workers on several machines."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def join_network(host: str, port: int, own_host: str, store: int = -1) -> object:
    """Prepare torch.distributed in a worker's process.

    The variables tell torch that nobody has to start a store; a launcher of processes would set them.

    Args:
        host, port: where rank 0 serves the store.
        own_host: address of this machine, by which gloo and NCCL choose the network interface.
        store: descriptor of the listening socket to serve the store on; -1: another process does.

    Returns what must live as long as the process.
    """
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": host, "MASTER_PORT": str(port)}
    interface = interface_of(own_host)
    if interface is not None:  # the name of a machine may stand for an address that others cannot reach
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if interface == "lo":
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    if store < 0:
        return None
    with paused_collector():
        import torch.distributed as dist

    return dist.TCPStore(  # type: ignore[attr-defined]
        host, port, None, True, wait_for_workers=False, master_listen_fd=store
    )


def interface_of(address: str) -> str | None:
    """Return the network interface that has an IPv4 address; None if there is none (Linux only)."""
    try:
        wanted = socket.inet_aton(address)
    except OSError:  # IPv6
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # it has no address
                continue
            if found[_ADDRESS] == wanted:
                return name
    return None


_COLLECTIVES = ("argosy_engine.distributed.parallel_state.GroupCommunicator.", "torch.distributed")
"""Beginnings of the names of functions that exchange data with other workers, at the start as well."""


class WorkerEnd(NamedTuple):
    """The end of one worker."""

    who: str
    """Its name and process id."""
    how: str
    """How its process exited."""
    failure: WorkerFailure | None
    """Its last message; None if it had no time for one."""


def failure_of(error: Exception) -> WorkerFailure:
    """Describe an error of this worker's process that ends it."""
    if isinstance(error, ConfigError):  # meant for the person who started the engine
        return WorkerFailure(str(error), is_config_error=True)
    frames = error.__traceback__
    return WorkerFailure(
        f"{type(error).__name__}: {error}",
        is_in_collective=_is_in_collective(frames),
        traceback=BoundedFormatter().formatException((type(error), error, frames)),
    )


def _is_in_collective(frames: TracebackType | None) -> bool:
    while frames is not None:
        frame = frames.tb_frame
        if f"{frame.f_globals.get('__name__')}.{frame.f_code.co_qualname}".startswith(_COLLECTIVES):
            return True
        frames = frames.tb_next
    return False


def death_of(ends: Sequence[WorkerEnd]) -> EngineError:
    """Return the error to raise when workers have ended, and log it: a line, and the tracebacks that tell its reason.

    Args:
        ends: those that are known, by rank. There is one at least.
    """
    killed = [f"{end.who} ended: {end.how}" for end in ends if end.failure is None]
    failed = [(end.who, end.failure) for end in ends if end.failure is not None]
    for _, failure in failed:
        if failure.is_config_error:
            return ConfigError(failure.message)
    own = [(who, failure) for who, failure in failed if not failure.is_in_collective]
    causes = own or failed
    reason = "; ".join(killed or [f"{who} failed: {failure.message}" for who, failure in causes])
    logger.error("%s", reason)
    tracebacks = (
        {} if killed else {failure.message: (who, failure.traceback) for who, failure in causes[::-1]}
    )
    for who, traceback in tracebacks.values():
        logger.error("%s failed\n%s", who, traceback)
    for who, failure in failed:
        if killed or failure.is_in_collective:
            logger.debug("%s then failed: %s", who, failure.message)
    return EngineDead(reason)
