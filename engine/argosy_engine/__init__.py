"""Argosy's inference engine: vLLM V1's architecture, one concept per module.

`LLM`, `LLMEngine`, `AsyncLLM`, `SamplingParams`, `StructuredOutputsParams` and `EngineArgs` are the public names. They
load on first use, because importing `argosy_engine.protocol` must not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from argosy_engine.config import EngineArgs
    from argosy_engine.frontend.async_llm import AsyncLLM
    from argosy_engine.frontend.llm import LLM
    from argosy_engine.frontend.llm_engine import LLMEngine
    from argosy_engine.sample.params import SamplingParams
    from argosy_engine.structured.params import StructuredOutputsParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "EngineArgs",
    "LLMEngine",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]

_PUBLIC = {
    "LLM": "argosy_engine.frontend.llm",
    "LLMEngine": "argosy_engine.frontend.llm_engine",
    "AsyncLLM": "argosy_engine.frontend.async_llm",
    "EngineArgs": "argosy_engine.config",
    "SamplingParams": "argosy_engine.sample.params",
    "StructuredOutputsParams": "argosy_engine.structured.params",
}


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        from importlib import import_module

        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'argosy_engine' has no attribute {name!r}")
