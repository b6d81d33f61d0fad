"""What one answer may hold: a short request must not have an answer of gigabytes.

A choice repeats what it says of its prompt, as vLLM's answers do, and an answer that is sent whole is held until all of
its choices have ended. Neither bound concerns an answer of one choice, whose size follows from the context length and
`--max-logprobs`, which the operator of the engine has chosen.
"""

from __future__ import annotations

from collections.abc import Sequence

from argosy_engine.frontend.request_params import asks_max_tokens
from argosy_engine.messages.core_messages import EngineCoreRequest
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
    if isinstance(request, CompletionRequest):  # the answer to a chat has those of its prompt once
        _check_prompts(core_requests, n, request)
    if core_requests[0].sampling_params.logprobs is not None:
        if request.stream:
            _check_events(core_requests, request)
        else:
            _bound_logprobs(core_requests, request)


def _check_prompts(core_requests: Sequence[EngineCoreRequest], n: int, request: CompletionRequest) -> None:
    num_tokens = n * sum(len(leader.prompt_token_ids) for leader in core_requests[::n])
    num_logprobs = core_requests[0].sampling_params.prompt_logprobs
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


def _width(core_requests: Sequence[EngineCoreRequest]) -> int:
    """Log probabilities for each token of all choices."""
    return len(core_requests) * (1 + (core_requests[0].sampling_params.logprobs or 0))


def _most_tokens(core_requests: Sequence[EngineCoreRequest]) -> int:
    return max(core.sampling_params.max_tokens or 0 for core in core_requests)


def _check_events(core_requests: Sequence[EngineCoreRequest], request: GenerationRequest) -> None:
    """Check what the events of a stream may hold, each of which waits for `stream_interval` tokens."""
    room = MAX_VALUES // _width(core_requests)
    if min(request.stream_interval or 1, _most_tokens(core_requests)) > max(1, room):
        raise BadRequest(
            f"events of this stream may have more than {MAX_VALUES} log probabilities: set stream_interval to at most "
            f"{max(1, room)}",
            param="stream_interval",
        )


def _bound_logprobs(core_requests: Sequence[EngineCoreRequest], request: GenerationRequest) -> None:
    width = _width(core_requests)
    room, asked = MAX_VALUES // width, _most_tokens(core_requests)
    if asked <= room:
        return
    if asks_max_tokens(request) or room < max(_MIN_DEFAULT, core_requests[0].sampling_params.min_tokens):
        limit = f"set max_tokens to at most {room}, " if room else ""
        raise BadRequest(
            f"the answer may have {width * asked} log probabilities, at most {MAX_VALUES} in "
            f"several choices that are not streamed: {limit}stream the answer, or reduce the choices, logprobs or "
            "top_logprobs",
            param="max_tokens",
        )
    for core in core_requests:
        params = core.sampling_params
        core.sampling_params = params.replace(max_tokens=min(params.max_tokens or room, room))
