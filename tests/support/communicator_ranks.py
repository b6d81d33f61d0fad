"""One rank that calls every collective, in a process of its own.

    python communicator_ranks.py TENSOR PIPELINE DATA RANK FD

Ranks are numbered over all engine cores, which share experts if there are several.

FD is a memory file that all ranks inherit and find each other by. What the rank got is one line of JSON on standard
output.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import torch

from argosy_engine.distributed.communicator import Communicator
from argosy_engine.distributed.parallel_config import ParallelConfig
from argosy_engine.distributed.parallel_state import init_parallel_state


def run_ranks(config: ParallelConfig) -> list[dict[str, object]]:
    """Run all ranks of a config and return what each got."""
    package = Path(sys.modules["argosy_engine"].__path__[0]).parent
    protocol = Path(sys.modules["argosy_protocol"].__path__[0]).parent
    fd = os.memfd_create("rendezvous")
    try:
        processes = [
            subprocess.Popen(
                [
                    sys.executable,
                    __file__,
                    *map(str, (config.tensor, config.pipeline, config.data, rank, fd)),
                ],
                stdout=subprocess.PIPE,
                pass_fds=(fd,),
                env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (package, protocol)))},
            )
            for rank in range(config.group_size)
        ]
    finally:
        os.close(fd)
    outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * config.group_size
    return [msgspec.json.decode(output) for output in outputs]


def collectives(group: Communicator, base: float, dtype: torch.dtype) -> dict[str, object]:
    """Call every collective on tensors [2, 2 * size] of rank and place, which are small enough to add up exactly."""
    size = group.size
    x = (torch.arange(4 * size).view(2, 2 * size) + base + 16 * group.rank).to(dtype)
    got = {
        "all_reduce": group.all_reduce(x.clone()),
        "all_gather": group.all_gather(x),
        "all_gather_rows": group.all_gather(x, dim=0),
        "all_gather_strided": group.all_gather(x.t(), dim=1),
        "reduce_scatter": group.reduce_scatter(x),
        "reduce_scatter_rows": group.reduce_scatter(x.t(), dim=0),
        "broadcast": group.broadcast(x.clone(), source=size - 1),
    }
    if size > 1:
        after, before = (group.rank + 1) % size, (group.rank - 1) % size
        if group.rank == 0:
            group.send(x, after)
        got["received"] = group.receive(torch.empty_like(x), before)
        if group.rank != 0:
            group.send(x, after)
    group.barrier()
    return {name: tensor.tolist() for name, tensor in got.items()}


def main() -> None:
    tensor, pipeline, data, index, fd = map(int, sys.argv[1:])
    torch.set_num_threads(1)
    config = ParallelConfig(tensor=tensor, pipeline=pipeline, data=data, enable_expert_parallel=data > 1)
    core, rank = divmod(index, config.world_size)
    state = init_parallel_state(config, rank, torch.device("cpu"), f"file:///proc/self/fd/{fd}", core)
    with torch.inference_mode():
        got: dict[str, object] = {
            name: {
                "rank": group.rank,
                "size": group.size,
                **{str(dtype): collectives(group, base, dtype) for dtype in (torch.float32, torch.bfloat16)},
            }
            for name, group, base in (
                ("tensor", state.tensor, 64 * config.placement(rank).pipeline + 128 * core),
                ("pipeline", state.pipeline, 64 * config.placement(rank).tensor + 128 * core),
                ("data", state.data, 64 * rank),
                ("world", state.world, 0),
            )
        }
    got["least"] = state.least(index, 5 - index)
    state.destroy()
    sys.stdout.buffer.write(msgspec.json.encode(got))


if __name__ == "__main__":
    main()
