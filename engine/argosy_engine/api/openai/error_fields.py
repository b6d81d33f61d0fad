"""Error fields: the request field that an error is about, by the name that the client used.

The engine has one name for what clients can say in several ways: a prompt arrives as `messages` or `input`, a shape of
the output as `response_format`, a beam width as `n`.

Owns: the translation of `param`. Must not know: what was wrong.
"""

from __future__ import annotations

from argosy_engine.frontend.structured_output_request import format_field
from argosy_engine.structured.structured_outputs_params import KINDS
from argosy_protocol.errors import ApiError
from argosy_protocol.openai import ChatCompletionRequest, CompletionRequest, GenerationRequest
from argosy_protocol.pooling import PoolingFields, PromptFields
from argosy_protocol.scoring import ScoringFields
from argosy_protocol.tokenization import DetokenizeRequest, TextTokenizeRequest

RequestBody = GenerationRequest | PoolingFields | TextTokenizeRequest | DetokenizeRequest


def name_field(error: ApiError, request: RequestBody) -> ApiError:
    """Return the error with the request's own name of the field, in `param` and at the start of the message."""
    given = error.param
    if given is None or (asked := _asked(given, request)) == given:
        return error
    error.param = asked
    if error.message.startswith(f"{given} "):
        error.message = asked + error.message.removeprefix(given)
    return error


def _asked(field: str, request: RequestBody) -> str:
    """Return the field of `request` that the engine calls `field`."""
    match field:
        case "prompt":
            return _prompt(request)
        case "extra_args":
            return "vllm_xargs"
    if isinstance(request, PoolingFields):
        return _prompt(request) if field == "n" else field
    if not isinstance(request, GenerationRequest):
        return field
    match field:
        case "n":  # the limit on choices; with one choice per prompt, there are too many prompts
            return field if (request.n or 1) > 1 else _prompt(request)
        case "beam_width":
            return _beam_width(request)
        case "max_tokens" if isinstance(request, ChatCompletionRequest):
            return "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
        case "grammar":
            return _shape(request)
    return field


def _prompt(request: RequestBody) -> str:
    if isinstance(request, ChatCompletionRequest):
        return "messages"
    if isinstance(request, PromptFields):
        return "messages" if request.messages is not None else "input"
    if isinstance(request, ScoringFields):
        return request.names()[1]
    return "prompt"


def _beam_width(request: GenerationRequest) -> str:
    if isinstance(request, CompletionRequest) and request.best_of is not None:
        return "best_of"
    return "n"


def _shape(request: GenerationRequest) -> str:
    """Return the field that requests a structured output."""
    asked = request.structured_outputs
    if asked is None:
        return "tools" if request.response_format is None else format_field(request)
    kinds = [kind for kind in KINDS if asked.get(kind)] if isinstance(asked, dict) else []
    return f"structured_outputs.{kinds[0]}" if len(kinds) == 1 else "structured_outputs"
