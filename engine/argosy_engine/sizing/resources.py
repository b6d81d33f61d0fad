"""What this machine has, without torch: CPU features, GPUs, memory, and the share of a data-parallel rank in them.

`argosy doctor` and the worker both use it, so that they agree. NVML is called through ctypes, because its library comes
with the driver. Sizes are in bytes; memory is bounded by the limits of this process.

Rank r of an engine with `world_size` workers per core gets the GPUs [r * world_size, (r + 1) * world_size) of those
that are visible. On a CPU all workers of all ranks share cores and memory equally.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from argosy_engine.config import EngineArgs
from argosy_engine.errors import ConfigError


class DeviceMemory(Struct, frozen=True):
    """Memory of the device that an engine would run on."""

    device: str
    """`cpu` or `cuda`."""
    name: str
    total_bytes: int
    available_bytes: int


def cpu_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> DeviceMemory:
    """Return the host's memory, or the tightest cgroup's limit and headroom if that is less.

    Page cache that the kernel would drop on demand counts as available, in the cgroup as on the host.

    Raises:
        ConfigError: /proc/meminfo is unreadable.
    """
    info = _fields(proc / "meminfo")
    try:
        total, available = info["MemTotal:"] * 1024, info["MemAvailable:"] * 1024
    except KeyError:
        raise ConfigError(f"{proc}/meminfo does not tell the memory; give --kv-cache-memory-bytes") from None
    for limit, used in _cgroup_limits(proc, cgroups):
        total, available = min(total, limit), min(available, max(limit - used, 0))
    return DeviceMemory("cpu", _cpu_name(proc), total, available)


def _cgroup_limits(proc: Path, cgroups: Path) -> Iterator[tuple[int, int]]:
    """Yield (limit, bytes in use that cannot be dropped) of this process's memory cgroup and each of its parents."""
    for line in _text(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, limit, usage, cache = cgroups, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root, limit = cgroups / "memory", "memory.limit_in_bytes"
            usage, cache = "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        folder = root / path.lstrip("/")
        # In a container the path may be the host's, which is not mounted here; then the root is our own cgroup.
        for place in dict.fromkeys((folder, *folder.parents, root)):
            if not place.is_relative_to(root):
                continue
            bound, used = _text(place / limit).strip(), _text(place / usage).strip()
            if bound.isdigit() and used.isdigit():
                droppable = _fields(place / "memory.stat").get(cache, 0)
                yield int(bound), max(int(used) - droppable, 0)


def _fields(file: Path) -> dict[str, int]:
    """Parse lines of the form `name number ...`."""
    pairs = (line.split() for line in _text(file).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) >= 2 and pair[1].isdigit()}


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


def _cpu_name(proc: Path) -> str:
    for line in _text(proc / "cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "CPU"


def has_bf16_instructions(proc: Path = Path("/proc")) -> bool:
    """Whether the CPU multiplies bf16 natively. Otherwise oneDNN emulates it, several times slower than float32."""
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(_text(proc / "cpuinfo").split())


def choose_dtype(asked: str, of_checkpoint: str, device: str) -> str:
    """Return `float32`, `bfloat16` or `float16`: as asked for, else the checkpoint's if the device is fast at it."""
    if asked != "auto":
        return asked
    dtype = of_checkpoint if of_checkpoint in ("bfloat16", "float16") else "float32"
    if device == "cpu" and dtype != "float32":
        return "bfloat16" if has_bf16_instructions() else "float32"
    return dtype


class _NvmlMemory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def visible_gpus() -> list[str]:
    """Return the GPUs visible to this process, as CUDA_VISIBLE_DEVICES names them: indices, or what that names."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    with _nvml() as nvml:
        count = ctypes.c_uint(0)
        if nvml is None or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return []
    if visible is None:
        return [str(index) for index in range(count.value)]
    named = [name.strip() for name in visible.split(",") if name.strip()]
    return named[: named.index("-1")] if "-1" in named else named


def gpu_memory() -> DeviceMemory | None:
    """Return the first GPU visible to this process; None without driver or GPU, or if CUDA_VISIBLE_DEVICES hides it."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    first = (visible or "0").split(",")[0].strip()
    if visible == "" or first == "-1":
        return None
    with _nvml() as nvml:
        if nvml is None:
            return None
        handle = ctypes.c_void_p()
        if first.isdigit():
            found = nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(first)), ctypes.byref(handle))
        else:
            found = nvml.nvmlDeviceGetHandleByUUID(first.encode(), ctypes.byref(handle))
        memory, name = _NvmlMemory(), ctypes.create_string_buffer(96)
        if found != 0 or nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) != 0:
            return None
        nvml.nvmlDeviceGetName(handle, name, ctypes.c_uint(len(name)))
        return DeviceMemory("cuda", name.value.decode(errors="replace"), memory.total, memory.free)


@contextlib.contextmanager
def _nvml() -> Iterator[Any]:
    """Yield NVIDIA's management library while it is initialised; None without a driver."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        yield None
        return
    if nvml.nvmlInit_v2() != 0:
        yield None
        return
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


MIN_CPU_WORKERS = 8
CPU_WORKERS_PER_CORE = 4
"""On a CPU an engine may have so many workers for each core that it may use, and at least `MIN_CPU_WORKERS`."""
_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")


def rank_args(args: EngineArgs) -> EngineArgs:
    """Return the arguments of each rank: with its share of the cores, unless the number of threads is given."""
    if args.data_parallel_size == 1 or args.threads is not None:
        return args
    num_workers = args.parallel_config.num_workers
    return msgspec.structs.replace(args, threads=max(1, len(os.sched_getaffinity(0)) // num_workers))


def rank_environment(args: EngineArgs, rank: int) -> Mapping[str, str]:
    """Return the environment of a rank's processes, in which torch sees the rank's GPUs only.

    Raises:
        ConfigError: there are GPUs, but fewer than workers.
    """
    gpus = check_gpus(args)
    if not gpus:
        return os.environ
    own = gpus[rank * args.parallel_config.world_size : (rank + 1) * args.parallel_config.world_size]
    return {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(own)}


def check_gpus(args: EngineArgs) -> list[str]:
    """Return the GPUs to divide between the workers of all ranks on this machine; empty on a CPU, for one worker, or if
    a Ray cluster places the workers.

    Raises:
        ConfigError: there are GPUs, but fewer than workers; or there is none, and far more workers than cores.
    """
    num_workers = args.parallel_config.local_workers
    if args.parallel_config.num_workers == 1 or (
        args.executor_backend == "ray" and os.environ.get("RAY_ADDRESS")
    ):
        return []
    gpus = [] if args.device == "cpu" else visible_gpus()
    here = f" on node {args.node_rank}" if args.nnodes > 1 else ""
    flags = [f"--{name.replace('_', '-')}" for name in _SIZES if getattr(args, name) > 1]
    most = max(MIN_CPU_WORKERS, CPU_WORKERS_PER_CORE * len(os.sched_getaffinity(0)))
    if not gpus and args.device != "cuda" and num_workers > most:
        raise ConfigError(
            f"the engine needs {num_workers} workers{here}, and this machine's CPU takes at most {most}; use a smaller "
            f"{' or '.join(flags)}"
        )
    if gpus and len(gpus) < num_workers:
        raise ConfigError(
            f"the engine needs {num_workers} GPUs{here}, one for each worker, and {len(gpus)} are visible; use a "
            f"smaller {' or '.join(flags)}, or --device cpu"
        )
    return gpus


def worker_memory(args: EngineArgs, memory: DeviceMemory) -> DeviceMemory:
    """Return the memory that a worker may plan with: on a CPU an equal share of what is available, else its GPU's."""
    num_workers = args.parallel_config.local_workers
    if memory.device != "cpu" or num_workers == 1:
        return memory
    return msgspec.structs.replace(memory, available_bytes=memory.available_bytes // num_workers)
