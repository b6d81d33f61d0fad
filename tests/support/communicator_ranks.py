"""Ranks that call every collective, each in a process of its own.

    python communicator_ranks.py CONFIGS

CONFIGS is a list of `ParallelConfig` as JSON. The program forks all ranks of one config after the other. Ranks are
numbered over all engine cores, which share experts if there are several. What they got is one line of JSON on standard
output.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import torch

from argosy_engine.distributed.parallel_config import ParallelConfig
from argosy_engine.distributed.parallel_state import Communicator, init_parallel_state


def run_ranks(*configs: ParallelConfig) -> list[list[dict[str, object]]]:
    """Run all ranks of each config and return what each got."""
    package = Path(sys.modules["argosy_engine"].__path__[0]).parent
    protocol = Path(sys.modules["argosy_protocol"].__path__[0]).parent
    done = subprocess.run(
        [sys.executable, __file__, msgspec.json.encode(configs).decode()],
        stdout=subprocess.PIPE,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (package, protocol)))},
    )
    return msgspec.json.decode(done.stdout, type=list[list[dict[str, object]]])


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


def fork_ranks(config: ParallelConfig) -> list[Any]:
    """Run all ranks of a config, which find each other by a memory file, and return what each got."""
    rendezvous = os.memfd_create("rendezvous")
    answers = [os.memfd_create("answer") for _ in range(config.group_size)]
    pids = []
    for index, answer in enumerate(answers):
        if (pid := os.fork()) == 0:
            os.write(answer, msgspec.json.encode(results_of(config, index, rendezvous)))
            os._exit(0)
        pids.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * config.group_size
    return [msgspec.json.decode(os.pread(answer, os.fstat(answer).st_size, 0)) for answer in answers]


def results_of(config: ParallelConfig, index: int, rendezvous: int) -> dict[str, object]:
    torch.set_num_threads(1)
    core, rank = divmod(index, config.world_size)
    state = init_parallel_state(config, rank, torch.device("cpu"), f"file:///proc/self/fd/{rendezvous}", core)
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
    return got


def main() -> None:
    configs = msgspec.json.decode(sys.argv[1], type=list[ParallelConfig])
    sys.stdout.buffer.write(msgspec.json.encode([fork_ranks(config) for config in configs]))


if __name__ == "__main__":
    main()
