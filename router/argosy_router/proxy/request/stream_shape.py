"""Stream shapes: which streams another replica can continue, and when such a stream is complete.

Token ids do not tell how to continue a beam search, nor n > 1 with `echo` and `logprobs`, where a choice's first chunk
repeats what only the first choice computes.
"""

from __future__ import annotations

from typing import NamedTuple

from argosy_protocol.openai import ChatCompletionRequest, CompletionRequest


class StreamShape(NamedTuple):
    """What a complete stream consists of."""

    choices: int
    has_usage: bool
    """Whether a last chunk reports the usage."""
    has_echo: bool = False
    """Whether choices begin with the prompt, perhaps in several chunks, of which only the last has token ids."""
    is_message: bool = False
    """Whether its events are those of Anthropic's API."""


def resumable_shape(
    request: ChatCompletionRequest | CompletionRequest, *, is_message: bool = False
) -> StreamShape | None:
    """Return the shape of the stream that answers `request`; None if it is no stream or cannot be continued.

    Args:
        is_message: `request` is the chat that a Messages request stands for.

    Raises:
        BadRequest: the prompts of a batch are of different kinds, or too many.
    """
    if not request.stream or request.use_beam_search:
        return None
    choices = request.n or 1
    has_echo = False
    if isinstance(request, CompletionRequest):
        has_echo = request.echo
        if choices > 1 and request.echo and request.logprobs is not None:
            return None
        choices *= len(request.prompts())
    options = request.stream_options
    return StreamShape(choices, options is not None and options.include_usage, has_echo, is_message)
