"""Qwen3: `<think>...</think>`, which the prompt or the model opens."""

from __future__ import annotations

from argosy_engine.parsers.reasoning_parsers.abstract_reasoning_parser import ReasoningParser


class Qwen3ReasoningParser(ReasoningParser):
    pass
