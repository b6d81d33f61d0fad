"""GLM-4.5 to GLM-4.7: `<think>...</think>`, which the model opens."""

from __future__ import annotations

from argosy_engine.parsers.reasoning_parsers.abstract_reasoning_parser import ReasoningParser


class Glm45ReasoningParser(ReasoningParser):
    pass
