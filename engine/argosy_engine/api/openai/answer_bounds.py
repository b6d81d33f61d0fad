"""What one answer may hold: a short request must not have an answer of gigabytes.

A choice repeats what it says of its prompt, as vLLM's answers do, and an answer that is sent whole is held until all of
its choices have ended. Neither bound concerns an answer of one choice, whose size follows from the context length and
`--max-logprobs`, which the operator of the engine has chosen.
"""

from __future__ import annotations

from collections.abc import Sequence

from argosy_engine.frontend.request_params import asks_max_tokens
from argosy_engine.messages.core_messages import EngineCoreRequest
from argosy_protocol.chat_batch import BatchChatCompletionRequest
from argosy_protocol.errors import BadRequest
from argosy_protocol.openai import CompletionRequest, GenerationRequest

MAX_VALUES = 1 << 22
"""Tokens of prompts and log probabilities: of the latter 200 MB of JSON, and 800 MB while it is made."""
_MIN_DEFAULT = 1024
"""Tokens of a choice below which a default of `max_tokens` is not lowered any further."""


def bound_answer(core_requests: Sequence[EngineCoreRequest], n: int, request: GenerationRequest) -> None:
    """Check the size of an answer, and lower `max_tokens` to it if the client has not set it.

    Args:
        core_requests: `n` for each prompt, of which the first asks for the log probabilities of the prompt.

    Raises:
        BadRequest: the answer would be, or may become, too large.
    """
    if len(core_requests) < 2:
        return
    params = core_requests[0].sampling_params
    _check_prompts(
        n * sum(len(leader.prompt_token_ids) for leader in core_requests[::n]),
        params.prompt_logprobs,
        request,
    )
    if params.logprobs is None:
        return
    width = len(core_requests) * (1 + params.logprobs)
    asked = max(core.sampling_params.max_tokens or 0 for core in core_requests)
    if request.stream:
        _check_events(width, asked, request)
        return
    room = _room(width, asked, request, params.min_tokens)
    if room == asked:
        return
    for core in core_requests:
        params = core.sampling_params
        core.sampling_params = params.replace(max_tokens=min(params.max_tokens or room, room))


def bound_beams(
    prompts: Sequence[int], beam_width: int, max_tokens: int, logprobs: int | None, request: GenerationRequest
) -> int:
    """Check the size of what a beam search holds until it has ended, for a streamed answer as well, which has each of
    its choices in one piece.

    Args:
        prompts: the tokens of each prompt.
        max_tokens: the most that a beam may generate.
        logprobs: alternatives to each token that the client asks for; None without log probabilities.

    Returns:
        `max_tokens`, or less if the client has not set it.

    Raises:
        BadRequest: the answer would be, or may become, too large.
    """
    num_beams = len(prompts) * beam_width
    if num_beams < 2:
        return max_tokens
    _check_prompts(sum(prompts) * (request.n or 1), None, request)
    return max_tokens if logprobs is None else _room(num_beams * (1 + logprobs), max_tokens, request)


def _check_prompts(num_tokens: int, num_logprobs: int | None, request: GenerationRequest) -> None:
    """Check the tokens of prompts, each repeated by each of its choices, and their log probabilities."""
    if not isinstance(request, CompletionRequest):
        return  # the answer to a chat has its prompt once
    if num_logprobs is not None:
        total, what, param = num_tokens * (1 + num_logprobs), "log probabilities", "prompt_logprobs"
        remedy = "send fewer prompts, or reduce n, prompt_logprobs or logprobs"
    elif request.echo or request.return_token_ids:
        total, what, param = num_tokens, "tokens", "echo" if request.echo else "return_token_ids"
        remedy = f"send fewer prompts, reduce n, or leave {param} out"
    else:
        return
    if total > MAX_VALUES:
        raise BadRequest(
            f"the answer would have {total} {what} of prompts, at most {MAX_VALUES} in several choices: {remedy}",
            param=param,
        )


def _check_events(width: int, asked: int, request: GenerationRequest) -> None:
    """Check what the events of a stream may hold, each of which waits for `stream_interval` tokens.

    Args:
        width: log probabilities for each token of all choices.
        asked: `max_tokens`.
    """
    room = MAX_VALUES // width
    if min(request.stream_interval or 1, asked) > max(1, room):
        raise BadRequest(
            f"events of this stream may have more than {MAX_VALUES} log probabilities: set stream_interval to at most "
            f"{max(1, room)}",
            param="stream_interval",
        )


def _room(width: int, asked: int, request: GenerationRequest, min_tokens: int = 0) -> int:
    """Return the most tokens of a choice: `asked`, or what fits if the client has not set `max_tokens`.

    Args:
        width: log probabilities for each token of all choices.
    """
    room = MAX_VALUES // width
    if asked <= room:
        return asked
    if asks_max_tokens(request) or room < max(_MIN_DEFAULT, min_tokens):
        may_stream = not (request.use_beam_search or isinstance(request, BatchChatCompletionRequest))
        remedies = (f"set max_tokens to at most {room}, " if room else "") + (
            "stream the answer, " if may_stream else ""
        )
        raise BadRequest(
            f"the answer may have {width * asked} log probabilities, at most {MAX_VALUES} in several choices"
            f"{' that are not streamed' if may_stream else ''}: {remedies}{'or ' if remedies else ''}reduce the "
            "choices, logprobs or top_logprobs",
            param="max_tokens",
        )
    return room
