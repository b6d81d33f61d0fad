"""Ranks of one group as threads of this process, which exchange tensors directly. One runs at a time.

For what a rank computes. Processes and their connections: `communicator_ranks`. All workers of an engine:
`thread_workers`.
"""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from argosy_engine.distributed.parallel_state import Communicator, LocalCommunicator

T = TypeVar("T")

TIMEOUT_S = 60.0


class ThreadCommunicator(LocalCommunicator):
    """Sums and concatenates the tensors of all threads. They take turns: a thread waits only in a collective."""

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self._group = group
        self.rank, self.size = rank, len(group.tensors)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        total, *others = self._exchange(x)
        total = total.clone()
        for other in others:
            total += other
        self.barrier()  # all have read x
        return x.copy_(total)

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        gathered = torch.cat(self._exchange(x), dim)
        self.barrier()
        return gathered

    def reduce_scatter(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return self.all_reduce(x.clone()).chunk(self.size, dim)[self.rank]

    def broadcast(self, x: torch.Tensor, source: int) -> torch.Tensor:
        sent = self._exchange(x)[source]
        if self.rank != source:
            x.copy_(sent)
        self.barrier()
        return x

    def send(self, x: torch.Tensor, destination: int) -> None:
        self._group.sent[self.rank, destination].put(x.clone())

    def receive(self, x: torch.Tensor, source: int) -> torch.Tensor:
        self._group.turn.release()
        try:
            received = self._group.sent[source, self.rank].get(timeout=TIMEOUT_S)
        finally:
            self._group.turn.acquire()
        return x.copy_(received)

    def barrier(self) -> None:
        self._group.turn.release()
        try:
            self._group.barrier.wait(TIMEOUT_S)
        finally:
            self._group.turn.acquire()

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        self._group.tensors[self.rank] = x
        self.barrier()
        assert len({each.shape for each in self._group.tensors}) == 1
        return list(self._group.tensors)


class ThreadGroup:
    """What the threads of a group share.

    Args:
        turn: held by the thread that runs, of all groups that have it.
    """

    def __init__(self, size: int, turn: threading.Lock) -> None:
        self.tensors = [torch.empty(0)] * size
        self.turn = turn
        self.barrier = threading.Barrier(size)
        self.sent: defaultdict[tuple[int, int], queue.SimpleQueue[torch.Tensor]] = defaultdict(
            queue.SimpleQueue
        )
        """By source and destination."""


def run_threads(size: int, function: Callable[[Communicator], T]) -> list[T]:
    """Call a function for every rank of a group and return the results by rank."""
    group = ThreadGroup(size, threading.Lock())

    def run(rank: int) -> T:
        with group.turn, torch.inference_mode():
            try:
                return function(ThreadCommunicator(group, rank))
            except BaseException:
                group.barrier.abort()
                raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))
