"""Model of prompt lengths: estimates tokens from bytes, by a ratio learnt from the usage that answers report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from argosy_router.native.hashing import chunk_tokens
from argosy_router.prompts.prompt_hash import Prompt

PRIOR_BYTES_PER_TOKEN: Final = 4.0
"""English prose with a large vocabulary; corrected by the first answers' usage."""
_LEARNING_RATE: Final = 0.05
_MIN_TEXT_BYTES: Final = 256
"""In shorter prompts the chat template's tokens distort the ratio."""


class PromptLengthModel:
    """Estimates the lengths of one service's prompts."""

    def __init__(self) -> None:
        self.bytes_per_token = PRIOR_BYTES_PER_TOKEN

    def tokens(self, prompt: Prompt) -> int:
        """Estimate the tokens of the whole prompt."""
        return tokens_of(prompt, self.bytes_per_token)

    def chunk_ends(self, prompt: Prompt) -> Sequence[int]:
        """Estimate the prompt tokens up to the end of each chunk."""
        if prompt.chunk_tokens:
            return prompt.chunk_tokens
        per_token = 4.0 if prompt.token_ids else self.bytes_per_token
        return chunk_tokens(prompt.segment_bytes, per_token)

    def learn(self, prompt: Prompt, prompt_tokens: int) -> None:
        """Adapt the ratio to a prompt's true length. Prompts with token ids or media, and those that may be cut, are
        ignored, because their tokens do not follow from bytes."""
        self.bytes_per_token = learnt(self.bytes_per_token, prompt, prompt_tokens)


def tokens_of(prompt: Prompt, bytes_per_token: float) -> int:
    """Estimate the tokens of the whole prompt by this ratio."""
    return prompt.token_ids + int(prompt.text_bytes / bytes_per_token) + 1


def learnt(bytes_per_token: float, prompt: Prompt, prompt_tokens: int) -> float:
    """Return the ratio adapted to a prompt's true length, as `PromptLengthModel.learn` says."""
    is_text = not (prompt.token_ids or prompt.has_media or prompt.is_cut)
    if prompt.text_bytes < _MIN_TEXT_BYTES or not is_text or prompt_tokens <= 0:
        return bytes_per_token
    ratio = min(16.0, max(0.25, prompt.text_bytes / prompt_tokens))
    return bytes_per_token + _LEARNING_RATE * (ratio - bytes_per_token)
