"""WorkerInfo: what a worker settled on when it started; apart from the worker, for a core that imports no torch."""

from __future__ import annotations

from msgspec import Struct

from argosy_engine.config import MemoryBudget
from argosy_engine.models.config import ModelConfig


class WorkerInfo(Struct, frozen=True, kw_only=True):
    """What the worker settled on."""

    model_path: str
    model_fingerprint: str
    config: ModelConfig
    device: str
    dtype: str
    memory: MemoryBudget
    phases: tuple[tuple[str, float], ...]
