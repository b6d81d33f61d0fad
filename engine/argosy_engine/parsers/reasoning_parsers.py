"""Reasoning parsers: the marks that families of models write around their reasoning, by vLLM's names."""

from __future__ import annotations

from typing import ClassVar


class ReasoningParser:
    """Reasoning between two markers, before the answer."""

    start: ClassVar[str] = "<think>"
    end: ClassVar[str] = "</think>"
    other_starts: ClassVar[tuple[str, ...]] = ()
    other_ends: ClassVar[tuple[str, ...]] = ()
    """Texts that models write in the place of `start` and `end`."""
    is_prose: ClassVar[bool] = False
    """Whether the markers are sentences, which a tokenizer may divide in several ways: no grammar waits for them."""
    tokens: ClassVar[tuple[str, ...]] = ()
    """Special tokens within the markers, if these have other text."""
    end_before_calls: ClassVar[str | None] = None
    """What ends the reasoning before calls that a grammar requires, if it is not `end`."""
    message_ends: ClassVar[tuple[str, ...]] = ()
    """Tokens that end a message of reasoning, if there may be several; their tokens are counted by these."""
    text_end: ClassVar[str | None] = None
    """What ends the reasoning in an output's text, if grammars wait for more than that."""
    answer_marks: ClassVar[tuple[str, ...]] = ()
    """Marks around the answer, which are dropped with the newlines around them."""
    starts_open: ClassVar[bool] = False
    """Whether an output without the start marker begins with reasoning, unless the prompt has closed it."""


class Qwen3ReasoningParser(ReasoningParser):
    """Qwen3: `<think>...</think>`, which the prompt or the model opens."""


class DeepSeekR1ReasoningParser(ReasoningParser):
    """DeepSeek R1: `<think>...</think>`, of which the model may leave out the first mark."""

    starts_open = True


class Glm45ReasoningParser(ReasoningParser):
    """GLM-4.5 to GLM-4.7: `<think>...</think>`, which the model opens."""


class Ernie45ReasoningParser(ReasoningParser):
    """ERNIE 4.5 Thinking: `<think>...</think>`, after which the answer may stand in `<response>` and `</response>`."""

    answer_marks = ("<response>", "</response>")


class GraniteReasoningParser(ReasoningParser):
    """Granite 3.2: `Here is my thought process:` and `Here is my response:`, or `Here's` in both."""

    start = "Here is my thought process:"
    end = "Here is my response:"
    other_starts = ("Here's my thought process:",)
    other_ends = ("Here's my response:",)
    is_prose = True


class CohereCommand3ReasoningParser(ReasoningParser):
    """Command R7B and Command A: `<|START_THINKING|>...<|END_THINKING|>`, before calls a plan; the answer stands
    between `<|START_RESPONSE|>` and `<|END_RESPONSE|>`."""

    start = "<|START_THINKING|>"
    end = "<|END_THINKING|>"
    answer_marks: ClassVar[tuple[str, ...]] = ("<|START_RESPONSE|>", "<|END_RESPONSE|>")
    tokens = answer_marks


class CohereCommand4ReasoningParser(CohereCommand3ReasoningParser):
    """Cohere's later models: the answer stands between `<|START_TEXT|>` and `<|END_TEXT|>`."""

    answer_marks = ("<|START_TEXT|>", "<|END_TEXT|>")
    tokens = answer_marks


class SolarOpenReasoningParser(ReasoningParser):
    """Solar Open: `<|think|>` to `<|end|>`; the answer is a message of its own, as calls are."""

    start = "<|think|>"
    end = "<|end|><|begin|>assistant<|content|>"
    text_end = "<|end|>"
    end_before_calls = "<|end|><|begin|>assistant"
    answer_marks = ("<|begin|>assistant", "<|content|>", "<|end|>", "<|flush|>")
    tokens = ("<|begin|>", "<|content|>", "<|end|>", "<|flush|>")


class SeedOssReasoningParser(ReasoningParser):
    """Seed-OSS: `<seed:think>...</seed:think>`."""

    start = "<seed:think>"
    end = "</seed:think>"


class MistralReasoningParser(ReasoningParser):
    """Mistral (Magistral): `[THINK]...[/THINK]`, which are special tokens."""

    start = "[THINK]"
    end = "[/THINK]"


class Gemma4ReasoningParser(ReasoningParser):
    """Gemma 4: `<|channel>thought` and a line break, up to `<channel|>`."""

    start = "<|channel>thought\n"
    end = "<channel|>"
    tokens = ("<|channel>",)


class GptOssReasoningParser(ReasoningParser):
    """gpt-oss: the reasoning is a message in the `analysis` channel of OpenAI's Harmony format.

    The marks tell a grammar where it begins. The output itself is read by `HarmonyParser`.
    """

    start = "<|channel|>analysis<|message|>"
    end = "<|start|>assistant<|channel|>final<|message|>"
    end_before_calls = "<|start|>assistant"
    message_ends = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
