"""Types of prompts for offline use, as in vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from operator import index
from typing import Any, TypeAlias, TypedDict

from argosy_engine.errors import InvalidRequest


class TextPrompt(TypedDict):
    prompt: str


class TokensPrompt(TypedDict):
    prompt_token_ids: Sequence[int]


PromptType: TypeAlias = str | Sequence[int] | TextPrompt | TokensPrompt
"""Token ids: any sequence of integers, such as a list, a tuple or a numpy array."""

_FORMS = "a prompt is a text, a list of token ids, or a dict with 'prompt' or 'prompt_token_ids'"


def as_list(prompts: Any) -> list[Any]:
    """Return one prompt, or several, as a list, without checking the types."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    try:
        prompts = list(prompts)
    except TypeError:
        raise InvalidRequest(f"{_FORMS}, not {type(prompts).__name__}", param="prompt") from None
    return [prompts] if prompts and isinstance(prompts[0], Integral) else prompts


def text_of(prompt: PromptType) -> str | None:
    """Return the text of a valid prompt; None if it has token ids only."""
    text: Any = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return text if isinstance(text, str) else None


def text_or_token_ids(prompt: PromptType) -> str | list[int]:
    """Return a prompt's text or token ids, whichever type it has.

    Raises:
        InvalidRequest: it has none of these types.
    """
    given: Any = prompt
    if isinstance(prompt, Mapping):
        keys = set(prompt)
        if not keys or not keys <= {"prompt", "prompt_token_ids"}:
            raise InvalidRequest(
                f"{_FORMS}; this one has {', '.join(sorted(map(repr, keys)))}", param="prompt"
            )
        given = prompt.get("prompt_token_ids", prompt.get("prompt"))
    if isinstance(given, str):
        return given
    try:
        if any(isinstance(token_id, bool) for token_id in given):
            raise TypeError
        return [index(token_id) for token_id in given]
    except TypeError:
        raise InvalidRequest(_FORMS, param="prompt") from None
