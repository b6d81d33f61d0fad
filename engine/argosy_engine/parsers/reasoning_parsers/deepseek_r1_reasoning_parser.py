"""DeepSeek R1: `<think>...</think>`, of which the model may leave out the first mark."""

from __future__ import annotations

from argosy_engine.parsers.reasoning_parsers.abstract_reasoning_parser import ReasoningParser


class DeepSeekR1ReasoningParser(ReasoningParser):
    starts_open = True
