"""Factory for structured outputs: connects the manager, the compile queue and the compiling process."""

from __future__ import annotations

import os
from collections.abc import Collection

from argosy_engine.core.grammar_client import GrammarProcess
from argosy_engine.core.grammar_process import GrammarProcessArgs
from argosy_engine.structured.compile_queue import CompileQueue
from argosy_engine.structured.manager import StructuredOutputManager

_MAX_COMPILE_THREADS = 8


def structured_outputs(
    model_path: str, vocab_size: int, eos_token_ids: Collection[int], cache_bytes: int
) -> StructuredOutputManager:
    """Make the manager for a model. It compiles on half of the cores and loads nothing before the first grammar."""
    num_threads = max(1, min(_MAX_COMPILE_THREADS, len(os.sched_getaffinity(0)) // 2))
    process = GrammarProcess(GrammarProcessArgs(model_path, vocab_size, sorted(eos_token_ids), num_threads))
    queue = CompileQueue(process, num_threads=num_threads, cache_bytes=cache_bytes)
    return StructuredOutputManager(queue, vocab_size, eos_token_ids)
