"""Names of the processes of an engine, in logs, messages and lists of processes. They are vLLM's.

`EngineCore` and `Worker` are followed by their place in each dimension that has several: `EngineCore_DP1`,
`Worker_TP0`, `Worker_DP1_PP0_TP1`. The API server has no name; if it has several processes, those that the first one
starts are `ApiServer_1`, `ApiServer_2` and so on.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from argosy_engine.distributed.parallel_config import ParallelConfig

_MAX_TITLE = 15
_name = ""


def core_name(config: ParallelConfig, data_rank: int) -> str:
    return "EngineCore" + (f"_DP{data_rank}" if config.data > 1 else "")


def api_server_name(index: int) -> str:
    """Return the name of an API process, counted from 1, that the first one has started."""
    return f"ApiServer_{index}"


def worker_name(config: ParallelConfig, rank: int) -> str:
    """Return the name of a worker of the engine core that runs in this process."""
    parts = ["Worker", *_name.split("_")[1:]]
    if rank < config.world_size:
        place = config.placement(rank)
        parts += [f"PP{place.pipeline}"] if config.pipeline > 1 else []
        parts += [f"TP{place.tensor}"] if config.tensor > 1 else []
    else:  # a worker class of the user, on more ranks than the model is divided into
        parts.append(f"rank{rank}")
    return "_".join(parts)


def is_first(name: str) -> bool:
    """Whether a process says what all others of its kind would say as well: of several only the first does."""
    return all(part.endswith("0") and not part[-2].isdigit() for part in name.split("_")[1:])


def process_name() -> str:
    """Return this process's name; empty in the API server, and in a process with a core of its own."""
    return _name


def name_process(name: str) -> None:
    """Name this process. The system shows as much of it as fits (`ps -o comm`); the command line has all of it."""
    global _name
    _name = name
    title = name if len(name) <= _MAX_TITLE else name.partition("_")[2]
    with contextlib.suppress(OSError):  # another system than Linux
        Path("/proc/self/comm").write_text(title[:_MAX_TITLE], encoding="ascii")
