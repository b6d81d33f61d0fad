"""Argosy's inference engine: vLLM V1's architecture, one concept per module.

The names in `__all__` are the public ones. They load on first use, so that the command line does not wait for torch.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from argosy_protocol import __version__

if TYPE_CHECKING:
    from argosy_engine.config import EngineArgs
    from argosy_engine.frontend.async_llm import AsyncLLM
    from argosy_engine.frontend.beam_search import BeamSearchParams
    from argosy_engine.frontend.llm import LLM, LLMEngine
    from argosy_engine.params import SamplingParams
    from argosy_engine.sample.logits_processor import LogitsProcessor
    from argosy_engine.structured.structured_outputs_params import StructuredOutputsParams

# torch's OpenMP threads would spin for milliseconds after each operator, on the cores that compute the next kernel.
# libgomp reads this once, when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "EngineArgs",
    "LLMEngine",
    "LogitsProcessor",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]

_PUBLIC = {
    "LLM": "argosy_engine.frontend.llm",
    "LLMEngine": "argosy_engine.frontend.llm",
    "AsyncLLM": "argosy_engine.frontend.async_llm",
    "BeamSearchParams": "argosy_engine.frontend.beam_search",
    "EngineArgs": "argosy_engine.config",
    "LogitsProcessor": "argosy_engine.sample.logits_processor",
    "SamplingParams": "argosy_engine.params",
    "StructuredOutputsParams": "argosy_engine.structured.structured_outputs_params",
}


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        from importlib import import_module

        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'argosy_engine' has no attribute {name!r}")
