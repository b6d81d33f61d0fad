"""LaunchedGroups: the groups of a process that a launcher such as torchrun has started.

The program may use torch.distributed itself: if it has initialised it, its process group stays as it is, and ours are
further groups; otherwise we initialise it (`env://`), and it stays so until the program ends. All processes make all
groups, in the same order.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist

from argosy_engine.distributed.communicator import Communicator, GroupCommunicator, LocalCommunicator
from argosy_engine.distributed.engine_copies import EngineCopies
from argosy_engine.distributed.launch_environment import LaunchEnvironment
from argosy_engine.distributed.parallel_config import ParallelConfig
from argosy_engine.distributed.parallel_state import ParallelState
from argosy_engine.errors import ConfigError

HOST_TIMEOUT = timedelta(minutes=40)
"""Above `engine_copies.TIMEOUT_S`, which says more."""
NCCL_TIMEOUT = timedelta(minutes=10)
"""After this time torch ends a process whose peer does not join a collective. All copies have agreed on the step
before, so that they only wait for computations, or at the start for weights."""


class LaunchedGroups:
    """The groups of one process. Waits until all processes that the launcher has started have made theirs.

    Raises (from the constructor):
        ConfigError: the program has initialised torch.distributed for other ranks than the launcher's.
    """

    def __init__(self, config: ParallelConfig, launch: LaunchEnvironment) -> None:
        self.launch = launch
        self._config = config
        self.core, self.rank = divmod(launch.rank, config.world_size)
        """Data-parallel rank, and rank among the workers of this engine core."""
        self._made: list[dist.ProcessGroup] = []
        self._communicators: list[_Communicator] = []
        _initialise(launch)
        everyone = range(config.world_size)
        ((ranks, control),) = self._new_groups([everyone], "gloo", None)
        self.copies = EngineCopies(control, ranks)

    def parallel_state(self, device: torch.device) -> ParallelState:
        """Make the groups that exchange tensors on a device: over NCCL on CUDA, over gloo on a CPU."""
        config = self._config
        world = self._join([list(range(config.world_size))], device)
        return ParallelState(
            config,
            self.rank,
            tensor=world if config.pipeline == 1 else self._join(config.tensor_groups(), device),
            pipeline=world if config.tensor == 1 else self._join(config.pipeline_groups(), device),
            world=world,
            device=device,
            leave=self.leave,
        )

    def leave(self) -> None:
        """Leave the groups that exchange tensors, whose connections close. May be called twice."""
        for communicator in self._communicators:
            communicator.close()
        self._communicators = []
        while self._made:
            dist.destroy_process_group(self._made.pop())

    def _join(self, groups: list[list[int]], device: torch.device) -> Communicator:
        if len(groups[0]) == 1:
            return LocalCommunicator()
        is_cuda = device.type == "cuda"
        made = self._new_groups(groups, "nccl" if is_cuda else "gloo", device if is_cuda else None)
        ((_, group),) = made
        communicator = _Communicator(group)
        self._made.append(group)
        self._communicators.append(communicator)
        return communicator

    def _new_groups(
        self, groups: Iterable[Iterable[int]], backend: str, device: torch.device | None
    ) -> list[tuple[list[int], dist.ProcessGroup]]:
        """Make groups of every engine core, and return the ranks and the group of those that this process is in.

        Args:
            groups: ranks within an engine core.
        """
        config = self._config
        mine = []
        for core in range(config.data):
            for members in groups:
                ranks = [core * config.world_size + rank for rank in members]
                group = dist.new_group(
                    ranks,
                    timeout=HOST_TIMEOUT if device is None else NCCL_TIMEOUT,
                    backend=backend,
                    device_id=device if self.launch.rank in ranks else None,
                )
                if self.launch.rank in ranks:
                    assert isinstance(group, dist.ProcessGroup)
                    mine.append((ranks, group))
        return mine


class _Communicator(GroupCommunicator):
    def close(self) -> None:
        """Drop the group, which ends only when nothing refers to it; layers still refer to this object."""
        del self._group


def _initialise(launch: LaunchEnvironment) -> None:
    if dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (launch.rank, launch.world_size):
            raise ConfigError(
                f"torch.distributed has rank {dist.get_rank()} of {dist.get_world_size()} in this program, and the "
                f"launcher's RANK is {launch.rank} of WORLD_SIZE {launch.world_size}; initialise it with env://, or "
                "not at all"
            )
        return
    if launch.local_world_size == launch.world_size:  # one machine
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method="env://",
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=HOST_TIMEOUT,
    )
