"""Fill in the middle: prompts for a text between a prefix (`prompt`) and a `suffix`, for models that were trained so.

Owns: the forms, by the special tokens that a tokenizer has. Must not know: requests.
"""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple


class FillInMiddle(NamedTuple):
    """A form of prompts: `start`, the prefix, `hole`, the suffix, `end`; the model writes the middle after it."""

    start: str
    hole: str
    end: str

    def prompt(self, prefix: str, suffix: str) -> str:
        return f"{self.start}{prefix}{self.hole}{suffix}{self.end}"


_FORMS = (
    FillInMiddle("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen 2.5 Coder, Qwen 3, CodeGemma
    FillInMiddle("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite Code
    FillInMiddle("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek Coder, DeepSeek V3
)


def fill_in_middle(tokens: Container[str]) -> FillInMiddle | None:
    """Return the form whose tokens a tokenizer has; None if the model cannot fill in.

    Args:
        tokens: texts of the added tokens.
    """
    return next((form for form in _FORMS if all(token in tokens for token in form)), None)
