"""Factory of the StructuredOutputManager: connects it with the compile queue and the fork server's client."""

from __future__ import annotations

import os
from collections.abc import Collection

from argosy_engine.structured.compile_queue import CompileQueue
from argosy_engine.structured.grammar_client import GrammarClient
from argosy_engine.structured.grammar_messages import GrammarServerArgs
from argosy_engine.structured.manager import StructuredOutputManager

_MAX_COMPILE_THREADS = 8


def create_structured_output_manager(
    model_path: str, vocab_size: int, eos_token_ids: Collection[int], cache_bytes: int
) -> StructuredOutputManager:
    """Make the manager for a model. It compiles on half of the cores, in a process that is not started yet."""
    num_threads = max(1, min(_MAX_COMPILE_THREADS, len(os.sched_getaffinity(0)) // 2))
    client = GrammarClient(GrammarServerArgs(model_path, vocab_size, sorted(eos_token_ids), num_threads))
    queue = CompileQueue(client, num_threads=num_threads, cache_bytes=cache_bytes)
    return StructuredOutputManager(queue, vocab_size, eos_token_ids)
