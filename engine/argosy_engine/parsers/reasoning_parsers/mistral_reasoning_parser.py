"""Mistral (Magistral): `[THINK]...[/THINK]`, which are special tokens."""

from __future__ import annotations

from argosy_engine.parsers.reasoning_parsers.abstract_reasoning_parser import ReasoningParser


class MistralReasoningParser(ReasoningParser):
    start = "[THINK]"
    end = "[/THINK]"
