"""Gemma 4: `<|channel>thought` and a line break, up to `<channel|>`."""

from __future__ import annotations

from argosy_engine.parsers.reasoning_parsers.abstract_reasoning_parser import ReasoningParser


class Gemma4ReasoningParser(ReasoningParser):
    start = "<|channel>thought\n"
    end = "<channel|>"
    tokens = ("<|channel>",)
