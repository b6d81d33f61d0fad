"""WorkerInfo: what a worker settled on when it started; apart from the worker, for a core that imports no torch."""

from __future__ import annotations

from msgspec import Struct

from argosy_engine.config import MemoryBudget
from argosy_engine.models.config import ModelConfig
from argosy_engine.worker.kv_cache_interface import KVCacheGroup


class WorkerInfo(Struct, frozen=True, kw_only=True):
    """What the worker settled on."""

    model_path: str
    model_fingerprint: str
    config: ModelConfig
    device: str
    dtype: str
    memory: MemoryBudget
    kv_cache_groups: tuple[KVCacheGroup, ...]
    phases: tuple[tuple[str, float], ...]
