"""Seed-OSS: `<seed:think>...</seed:think>`."""

from __future__ import annotations

from argosy_engine.parsers.reasoning_parsers.abstract_reasoning_parser import ReasoningParser


class SeedOssReasoningParser(ReasoningParser):
    start = "<seed:think>"
    end = "</seed:think>"
