"""GPUs of this machine, and their assignment to replicas.

Owns: finding NVIDIA devices without loading CUDA, and `CUDA_VISIBLE_DEVICES`. Must not know: processes.
Invariant: no GPU belongs to two replicas. As in a cluster, a replica sees only as many GPUs as `spec.resources.gpu`
requests.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path


def local_gpus(env: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> tuple[int, ...]:
    """Indices of the GPUs; those listed in `CUDA_VISIBLE_DEVICES` if that is set."""
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(int(part) for part in visible.split(",") if part.strip().isdigit())
    names = (re.fullmatch(r"nvidia(\d+)", path.name) for path in devices.glob("nvidia*"))
    return tuple(sorted(int(name[1]) for name in names if name))


def choose_gpus(gpus: Collection[int], taken: Collection[int], count: int) -> tuple[int, ...] | None:
    """Choose `count` free GPUs; None if there are too few."""
    free = sorted(set(gpus) - set(taken))
    return tuple(free[:count]) if len(free) >= count else None


def gpu_env(gpus: Collection[int]) -> dict[str, str]:
    """Environment variables that make exactly these GPUs visible to a process."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(str(gpu) for gpu in gpus)}
