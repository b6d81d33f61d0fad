"""gpt-oss: the reasoning is a message in the `analysis` channel of OpenAI's Harmony format.

The marks tell a grammar where it begins. The output itself is read by `HarmonyParser`.
"""

from __future__ import annotations

from argosy_engine.parsers.reasoning_parsers.abstract_reasoning_parser import ReasoningParser


class GptOssReasoningParser(ReasoningParser):
    start = "<|channel|>analysis<|message|>"
    end = "<|start|>assistant<|channel|>final<|message|>"
    end_before_calls = "<|start|>assistant"
    message_ends = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
