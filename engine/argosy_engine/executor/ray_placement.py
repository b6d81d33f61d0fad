"""Places of workers on the nodes of a Ray cluster: which worker gets which rank. Pure: it knows no Ray."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct


class WorkerPlace(Struct, frozen=True, array_like=True):
    """What an actor tells about itself."""

    node_id: str
    host: str
    """Address of its node."""
    port: int
    """Where it listens, for torch.distributed if it becomes rank 0."""
    pid: int
    num_cores: int
    """Cores that its process may use."""
    version: str
    """Argosy's."""


def order_ranks(nodes: Sequence[str], *, driver: str, tensor: int) -> list[int]:
    """Return the index of the worker that becomes each rank, so that few tensor-parallel groups span several nodes.

    Each node is divided into as many whole groups as it has workers for, the driver's node first; what remains forms
    the last groups.

    Args:
        nodes: node of each worker.
        driver: node of the engine core.
        tensor: ranks of a tensor-parallel group.
    """
    workers: dict[str, list[int]] = {driver: []}
    for index, node in enumerate(nodes):
        workers.setdefault(node, []).append(index)
    whole: list[int] = []
    rest: list[int] = []
    for indices in workers.values():
        count = len(indices) // tensor * tensor
        whole += indices[:count]
        rest += indices[count:]
    return whole + rest


def spanning_groups(nodes: Sequence[str], tensor: int) -> list[list[int]]:
    """Return the ranks of the tensor-parallel groups that span several nodes.

    Args:
        nodes: node of each rank.
    """
    groups = [list(range(first, first + tensor)) for first in range(0, len(nodes), tensor)]
    return [group for group in groups if len({nodes[rank] for rank in group}) > 1]


def threads_per_worker(places: Sequence[WorkerPlace]) -> list[int]:
    """Return the number of CPU threads of each worker: workers on one machine share its cores."""
    hosts = [place.host for place in places]
    return [max(place.num_cores // hosts.count(place.host), 1) for place in places]
