"""How many KV blocks fit: memory in, blocks out. Pure functions over sizes in bytes."""

from __future__ import annotations

from pathlib import Path

from argosy_engine.config import EngineArgs
from argosy_engine.errors import ConfigError

CPU_SHARE = 0.4
"""Of the memory that is available at start: a laptop runs two replicas and a browser beside them."""

MIB = 1 << 20


def available_cpu_memory() -> int:
    """Bytes this process may still use: the smaller of MemAvailable and the cgroup's headroom."""
    available = _meminfo_available()
    for limit_file, usage_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        limit, usage = _read_int(limit_file), _read_int(usage_file)
        if limit is not None and usage is not None:
            available = min(available, max(limit - usage, 0))
    return available


def num_kv_blocks(args: EngineArgs, *, block_bytes: int, free_bytes: int, max_model_len: int) -> int:
    """Number of blocks including the null block.

    Args:
        block_bytes: of one block over all layers.
        free_bytes: memory left for the cache after weights and activations.

    Raises:
        ConfigError: not even one request of full length fits; the message says which length would.
    """
    if args.num_gpu_blocks_override is not None:
        return args.num_gpu_blocks_override
    budget = args.kv_cache_memory_bytes if args.kv_cache_memory_bytes is not None else free_bytes
    useful = args.max_num_seqs * -(-max_model_len // args.block_size) + 1
    num_blocks = min(budget // block_bytes, useful)
    if (num_blocks - 1) * args.block_size < max_model_len:
        fits = max((num_blocks - 1) * args.block_size, 0)
        raise ConfigError(
            f"a request of --max-model-len {max_model_len} tokens needs "
            f"{-(-max_model_len // args.block_size) * block_bytes / MIB:.0f} MiB of KV cache, there are "
            f"{budget / MIB:.0f} MiB; use --max-model-len {fits} or less, or a larger --kv-cache-memory-bytes"
        )
    return num_blocks


def _meminfo_available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ConfigError("/proc/meminfo has no MemAvailable; give --kv-cache-memory-bytes")


def _read_int(path: str) -> int | None:
    try:
        text = Path(path).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
