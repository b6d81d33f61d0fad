"""ClientGroup: the clients of the same engine cores, one in each API process, of which the first starts the cores.

Owns: what the clients share, and where each binds its sockets. Must not know: processes, and how they are told.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from argosy_engine.messages.load_step import OnLoadStep, ignore_step
from argosy_engine.osproc.shared_counters import SharedCounters


def _tell_nobody(rank: int, directory: Path) -> None:
    pass


@dataclass(frozen=True)
class ClientGroup:
    """The group as one of its processes sees it."""

    size: int = 1
    """Number of API processes."""
    index: int = 0
    """This one."""
    counters: SharedCounters | None = None
    """Numbers of requests that the processes tell each other; None if there is only one process. Columns:
    `num_columns`."""
    on_core_started: Callable[[int, Path], None] = _tell_nobody
    """Called in the first process with the rank of a core and the directory for the other clients' sockets, which it
    waits for."""
    on_load_step: OnLoadStep = ignore_step
    """Called in the first process while the cores load."""


ALONE = ClientGroup()
"""The only API process of an engine."""


def num_balancer_columns(data_parallel_size: int) -> int:
    """Return how many columns `RankBalancer` has, which come first."""
    return 2 * data_parallel_size


def num_columns(data_parallel_size: int) -> int:
    """Return how many columns there are: the balancer's, and those of the limits on queues, in total and by rank."""
    return num_balancer_columns(data_parallel_size) + 2 * (1 + data_parallel_size)


def client_addresses(directory: Path, index: int = 0) -> tuple[str, str]:
    """Return the addresses of a client's input and output socket."""
    number = str(index or "")
    return f"ipc://{directory}/input{number}", f"ipc://{directory}/output{number}"
