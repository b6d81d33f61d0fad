"""WorkerInfo: what a worker reports once it has started, before its first step."""

from __future__ import annotations

from msgspec import Struct

from argosy_engine.attention.kv_cache_spec import KVCacheGroup
from argosy_engine.model_configs.model_config import ModelConfig
from argosy_engine.resolved_config import MemoryBudget


class WorkerInfo(Struct, frozen=True, kw_only=True):
    """Model, device and memory that a worker has determined at its start."""

    model_path: str
    model_fingerprint: str
    config: ModelConfig
    device: str
    dtype: str
    memory: MemoryBudget
    kv_cache_groups: tuple[KVCacheGroup, ...]
    phases: tuple[tuple[str, float], ...]
    seed: int | None = None
    """Seed for an engine without `--seed`, if copies of it must draw the same tokens."""
