"""ParallelState: this process's place among the workers that compute together, and its groups.

These are the workers of an engine core or, if the cores share experts, those of all cores. They find each other as
`init_method` says, a URL of torch.distributed: a file that the executor makes for them on one machine, `env://` if
torchrun has started them. Connections of processes on one machine stay on the loopback interface. A process whose peer
ends gets an error from gloo and none from NCCL, so the executor watches the processes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from argosy_engine.distributed.parallel_config import ParallelConfig


class Communicator(Protocol):
    """Collectives of a group. Every process gets the same bits.

    Ranks are those within the group. All of its processes call the same collectives in the same order, with tensors of
    the same shapes and dtypes. On CUDA a collective is queued on the device like any other operation; nothing waits for
    it.
    """

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


TIMEOUT = timedelta(minutes=30)
"""How long a process waits for its peers, which may still be reading their weights. Whether they live is not found out
by this: the executor sees the end of a worker at once."""

_MAX_REASON_BYTES = 1024


@dataclass(frozen=True, slots=True)
class ParallelState:
    """The groups that this process is a member of."""

    config: ParallelConfig
    rank: int
    """Among the workers of the engine core."""
    tensor: Communicator
    """Ranks that share this process's layers."""
    pipeline: Communicator
    """Ranks that hold the layers before and after this process's."""
    world: Communicator
    """All workers that compute together."""
    device: torch.device
    leave: Callable[[], None] | None = None
    """Leaves the groups, if the program has others; default: it has none."""
    data: Communicator = field(default_factory=LocalCommunicator)
    """Ranks of all engine cores that hold the same part of the layers, and other experts."""
    data_rank: int = 0
    """Of the engine core, if the cores share experts."""

    def least(self, *values: int) -> list[int]:
        """Return the least of each value over all workers, which agree by it on what each has found out. For start-up:
        it waits for all of them."""
        if self.world.size == 1:
            return list(values)
        return self.world.all_gather(torch.tensor([values], device=self.device), dim=0).amin(dim=0).tolist()

    def first_failure(self, reason: str | None) -> str | None:
        """Return why the first worker by rank has failed, if one has; otherwise None. It waits for all of them.

        Args:
            reason: why this worker has failed; its first 1,024 bytes count.
        """
        (found,) = first_failures([reason], self.world, self.device)
        return found

    def destroy(self) -> None:
        """Leave the groups. No collective may be running."""
        if self.leave is not None:
            self.leave()
        elif self.world.size > 1 and dist.is_initialized():
            dist.destroy_process_group()


def first_failures(
    reasons: Sequence[str | None], ranks: Communicator, device: torch.device
) -> list[str | None]:
    """Return of several things why each has failed, on the first rank by number on which it has; None where it has on
    none. It waits for all ranks, which have to ask about the same things.

    Args:
        reasons: why each has failed on this rank; the first 1,024 bytes count.
    """
    if ranks.size == 1:
        return list(reasons)
    by_rank = ranks.all_gather(packed_reasons(reasons)[None].to(device), dim=0).cpu()
    found = [unpacked_reasons(each) for each in by_rank]
    return [next((each for each in of_one if each is not None), None) for of_one in zip(*found, strict=True)]


def packed_reasons(reasons: Sequence[str | None]) -> torch.Tensor:
    """Return reasons as a tensor to exchange, uint8 [N, 1024], on the CPU; None is zeros."""
    texts = [b"" if each is None else (each or "unknown").encode()[:_MAX_REASON_BYTES] for each in reasons]
    padded = bytearray().join(each.ljust(_MAX_REASON_BYTES, b"\0") for each in texts)
    return torch.frombuffer(padded, dtype=torch.uint8).view(len(texts), _MAX_REASON_BYTES)


def unpacked_reasons(packed: torch.Tensor) -> list[str | None]:
    """Return the reasons of a tensor [N, 1024] on the CPU."""
    found: list[str | None] = [None] * len(packed)
    for index in packed.any(dim=-1).nonzero().flatten().tolist():
        found[index] = bytes(packed[index].tolist()).rstrip(b"\0").decode(errors="replace")
    return found


def single_process() -> ParallelState:
    """Return the state of the only worker of an engine core."""
    alone = LocalCommunicator()
    return ParallelState(ParallelConfig(), 0, alone, alone, alone, torch.device("cpu"))


def init_parallel_state(
    config: ParallelConfig,
    rank: int,
    device: torch.device,
    init_method: str,
    data_rank: int = 0,
    timeout_s: int | None = None,
) -> ParallelState:
    """Join the groups of a rank. Waits until all workers that compute together have called it.

    Args:
        rank: among the workers of the engine core.
        data_rank: of the engine core; matters only if the cores share experts.
        init_method: how the processes find each other: `file:///PATH`, `env://` or `tcp://HOST:PORT`.
        timeout_s: how long the processes wait for each other; default: `TIMEOUT`.
    """
    if config.group_size == 1:
        return single_process()
    if init_method.startswith("file:"):  # one machine
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    timeout = TIMEOUT if timeout_s is None else timedelta(seconds=timeout_s)
    is_cuda = device.type == "cuda"
    group_rank = config.group_rank(rank, data_rank)
    dist.init_process_group(
        "nccl" if is_cuda else "gloo",
        init_method=init_method,
        rank=group_rank,
        world_size=config.group_size,
        timeout=timeout,
        device_id=device if is_cuda else None,
    )
    world = dist.group.WORLD
    assert world is not None
    return ParallelState(
        config,
        rank,
        tensor=_join(group_rank, config.tensor_groups(), world, timeout),
        pipeline=_join(group_rank, config.pipeline_groups(), world, timeout),
        world=GroupCommunicator(world),
        device=device,
        data=_join(group_rank, config.data_groups(), world, timeout),
        data_rank=data_rank if config.shares_experts else 0,
    )


def _join(rank: int, groups: list[list[int]], world: dist.ProcessGroup, timeout: timedelta) -> Communicator:
    """Make all groups of one dimension, as every process must, and return this rank's."""
    mine: Communicator = LocalCommunicator()
    for ranks in groups:
        if len(ranks) == world.size():
            return GroupCommunicator(world)
        if len(ranks) > 1:
            group = dist.new_group(ranks, timeout=timeout)
            if rank in ranks:
                assert isinstance(group, dist.ProcessGroup)
                mine = GroupCommunicator(group)
    return mine
