"""Truncation of prompts: `truncate_prompt_tokens` and `truncation_side`, with vLLM's meaning.

Owns: how many tokens stay, and on which side. Must not know: how a prompt is rendered.
"""

from __future__ import annotations

from typing import NamedTuple

from argosy_engine.errors import InvalidRequest
from argosy_protocol.openai import ChatCompletionRequest, GenerationRequest


class Truncation(NamedTuple):
    """How a prompt that is too long is shortened."""

    num_tokens: int
    keeps_start: bool
    """Whether the first tokens stay, and not the last ones."""
    keeps_special: bool = False
    """Whether tokens that the tokenizer adds to a text, such as the one that begins it, stay and count."""

    def trimmed(self, text: str, max_characters: int) -> str:
        """Return the part of a text that can have the tokens that stay, so that no more is tokenised.

        Args:
            max_characters: those of the longest prompt.
        """
        return text[:max_characters] if self.keeps_start else text[max(len(text) - max_characters, 0) :]

    def kept(self, token_ids: list[int], num_added: tuple[int, int] = (0, 0)) -> list[int]:
        """Return the tokens that stay.

        Args:
            num_added: tokens at the start and at the end that the tokenizer has added to the text.
        """
        first, last = num_added if self.keeps_special else (0, 0)
        room = self.num_tokens - first - last
        if first + last and room >= 0:
            return token_ids[:first] + token_ids[len(token_ids) - last - room :]
        if self.keeps_start:
            return token_ids[: self.num_tokens]
        return token_ids[max(len(token_ids) - self.num_tokens, 0) :]


def truncation_of(
    request: GenerationRequest, max_model_len: int, *, least_output: int = 1
) -> Truncation | None:
    """Return the truncation that a request asks for, or None. The output has the room that `max_tokens` asks for, and
    at least `least_output` tokens.

    Raises:
        InvalidRequest: prompt and output would exceed the model's context.
    """
    asked = request.truncate_prompt_tokens
    if asked is None:
        return None
    if isinstance(request, ChatCompletionRequest) and request.max_completion_tokens is not None:
        num_outputs = request.max_completion_tokens
    else:
        num_outputs = request.max_tokens or 0
    room = max_model_len - max(num_outputs, least_output)
    if room < 1:
        raise InvalidRequest(
            f"max_tokens ({num_outputs}) leaves no room for a prompt in this model's context of {max_model_len} tokens",
            param="max_tokens",
        )
    if asked > max_model_len - num_outputs:
        less = " less max_tokens" if num_outputs else ""
        raise InvalidRequest(
            f"truncate_prompt_tokens must be at most {max_model_len - num_outputs}, this model's context length{less}; "
            f"it is {asked}",
            param="truncate_prompt_tokens",
        )
    side = request.truncation_side
    return Truncation(
        room if asked < 0 else min(asked, room), keeps_start=side == "right", keeps_special=side is None
    )
