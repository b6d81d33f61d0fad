"""Defaults that depend on the device, for the flags whose default in `config` is None.

A device is given as torch names it: `cpu`, `cuda` or `cuda:0`.
"""

from __future__ import annotations

from argosy_engine.config import EngineArgs

MAX_NUM_MIXED_PREFILL_TOKENS_ON_CPU = 256
"""On a CPU prompt tokens take so long that each chunk delays the decoding requests noticeably. Chunks of 512 are 5 to
11 % faster per token and double that delay."""

MEMORY_UTILIZATION_ON_CUDA = 0.9

MEMORY_UTILIZATION_ON_CPU = 0.4
"""Lets a laptop run two replicas and a browser beside them."""


def max_num_mixed_prefill_tokens(args: EngineArgs, device: str) -> int | None:
    """Return `--max-num-mixed-prefill-tokens`; None means no limit."""
    return args.max_num_mixed_prefill_tokens or (
        MAX_NUM_MIXED_PREFILL_TOKENS_ON_CPU if device == "cpu" else None
    )


def memory_utilization(args: EngineArgs, device: str) -> float:
    """Return `--gpu-memory-utilization`, whose meaning depends on the device as well (`sizing.kv_cache_sizing`)."""
    return args.gpu_memory_utilization or (
        MEMORY_UTILIZATION_ON_CPU if device == "cpu" else MEMORY_UTILIZATION_ON_CUDA
    )


def async_scheduling(args: EngineArgs, device: str) -> bool:
    """Return `--async-scheduling`.

    By default everywhere but on a CPU worker in the core's own process (uni, external_launcher), which computes a step
    while it launches it, so that there is nothing to overlap, and with a pipeline, whose steps overlap anyway.
    """
    if args.pipeline_parallel_size > 1:
        return False
    if args.async_scheduling is None:
        return device != "cpu" or args.executor_backend not in ("uni", "external_launcher")
    return args.async_scheduling
