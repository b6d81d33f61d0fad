"""Communicator: the collectives of one group of processes.

Ranks are those within the group. All of its processes call the same collectives in the same order, with tensors of the
same shapes and dtypes. On CUDA a collective is queued on the device like any other operation; nothing waits for it.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist


class Communicator(Protocol):
    """Collectives of a group. Every process gets the same bits."""

    rank: int
    size: int

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Add the tensors of all processes, in place; returns x."""
        ...

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Concatenate the tensors of all processes along a dimension, by rank."""
        ...

    def reduce_scatter(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Add the tensors of all processes and return this rank's part along a dimension, which divides evenly."""
        ...

    def broadcast(self, x: torch.Tensor, source: int) -> torch.Tensor:
        """Overwrite the tensors of all processes with that of the source; returns x."""
        ...

    def send(self, x: torch.Tensor, destination: int) -> None:
        """Send a tensor to one process, which calls `receive`."""
        ...

    def receive(self, x: torch.Tensor, source: int) -> torch.Tensor:
        """Overwrite x with the tensor that a process sends; returns x."""
        ...

    def barrier(self) -> None:
        """Wait until every process has called this. For start-up; it waits for the device."""
        ...


class LocalCommunicator:
    """The group of one process: nothing is exchanged."""

    rank = 0
    size = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return x

    def reduce_scatter(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return x

    def broadcast(self, x: torch.Tensor, source: int) -> torch.Tensor:
        return x

    def send(self, x: torch.Tensor, destination: int) -> None:
        raise AssertionError("there is no other process")

    def receive(self, x: torch.Tensor, source: int) -> torch.Tensor:
        raise AssertionError("there is no other process")

    def barrier(self) -> None:
        pass


class GroupCommunicator:
    """A group of torch.distributed, of several processes: NCCL on CUDA, gloo on a CPU."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x, group=self._group)
        return x

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        # Parts are gathered along the first dimension, where each is contiguous, and moved from there.
        parts = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        dist.all_gather_into_tensor(parts, x.contiguous(), group=self._group)
        dim %= x.dim()
        if dim == 0:
            return parts
        shape = (*x.shape[:dim], self.size * x.shape[dim], *x.shape[dim + 1 :])
        return parts.view(self.size, *x.shape).movedim(0, dim).reshape(shape)

    def reduce_scatter(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        ordered = x.movedim(dim, 0).contiguous()
        part = x.new_empty((ordered.shape[0] // self.size, *ordered.shape[1:]))
        dist.reduce_scatter_tensor(part, ordered, group=self._group)
        return part.movedim(0, dim)

    def broadcast(self, x: torch.Tensor, source: int) -> torch.Tensor:
        dist.broadcast(x, group=self._group, group_src=source)
        return x

    def send(self, x: torch.Tensor, destination: int) -> None:
        dist.send(x.contiguous(), group=self._group, group_dst=destination)

    def receive(self, x: torch.Tensor, source: int) -> torch.Tensor:
        dist.recv(x, group=self._group, group_src=source)
        return x

    def barrier(self) -> None:
        dist.barrier(group=self._group)
