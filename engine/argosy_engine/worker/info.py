"""WorkerInfo: what a worker reports when it has started. In its own module, so that the core need not import torch."""

from __future__ import annotations

from msgspec import Struct

from argosy_engine.config import MemoryBudget
from argosy_engine.models.config import ModelConfig
from argosy_engine.worker.kv_cache_interface import KVCacheGroup


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
