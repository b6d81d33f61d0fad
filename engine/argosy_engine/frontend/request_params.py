"""Sampling parameters of an API request: merges its fields with the defaults of the model's generation config."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from operator import attrgetter
from typing import Any

import msgspec

from argosy_engine.errors import InvalidRequest
from argosy_engine.frontend.structured_output_request import structured_outputs
from argosy_engine.params.sampling_params import RepetitionDetectionParams, SamplingParams
from argosy_engine.request_defaults import SamplingDefaults
from argosy_engine.resolved_config import ResolvedConfig
from argosy_engine.structured.structural_tag import HERMES_CALLS, ToolCallForm
from argosy_protocol.openai import ChatCompletionRequest, CompletionRequest, GenerationRequest, unsupported

_REMEDIES = {
    "best_of": "without use_beam_search",
    "length_penalty": "without use_beam_search",
    "functions": "by this engine; use tools",
    "function_call": "by this engine; use tool_choice",
    "modalities": "by this engine, except for text",
    "verbosity": "by this engine; give 'medium'",
    "logits_processors": "in requests; the engine's flag --logits-processors has them",
    "guided_whitespace_pattern": "by this engine; use structured_outputs, with disable_any_whitespace",
}
"""Fields that `unsupported` names -> how the message about them goes on, where there is a remedy."""
_OTHER_FIELDS = frozenset(
    (
        *("model", "messages", "prompt", "suffix", "stream", "stream_options", "user", "request_id"),
        *("prompt_cache_key", "session_id", "cache_salt", "chat_template"),
    )
)
"""Fields on which sampling parameters do not depend, and which differ from request to request."""
_COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` for /v1/completions."""
MAX_ALLOWED_IDS_OF_A_CALL = 1 << 20
"""Entries of `allowed_token_ids` times sequences of a call. Each sequence is a message of its own to the core."""


def to_sampling_params(
    request: GenerationRequest,
    defaults: SamplingDefaults,
    config: ResolvedConfig,
    num_prompts: int = 1,
    tool_calls: ToolCallForm = HERMES_CALLS,
) -> SamplingParams:
    """Make the request's sampling parameters.

    Args:
        defaults: those of the generation config and the flags.
        num_prompts: prompts of the call, each of which has `n` sequences with these parameters.
        tool_calls: how the model writes the calls that `tool_choice` requires.

    Raises:
        InvalidRequest: a value is out of bounds, or a feature is not supported.
    """
    field = unsupported(request)
    if field is not None:
        raise InvalidRequest(
            f"{field} is not supported {_REMEDIES.get(field, 'by this engine')}", param=field
        )

    def value(name: str, neutral: float) -> Any:
        given = getattr(request, name)
        return given if given is not None else defaults.values.get(name, neutral)

    stop, num_sequences = request.stop, num_prompts * (request.n or 1)
    return SamplingParams(
        n=request.n or 1,
        temperature=value("temperature", 1.0),
        top_p=value("top_p", 1.0),
        top_k=value("top_k", 0),
        min_p=value("min_p", 0.0),
        seed=request.seed,
        presence_penalty=value("presence_penalty", 0.0),
        frequency_penalty=value("frequency_penalty", 0.0),
        repetition_penalty=value("repetition_penalty", 1.0),
        logit_bias=request.logit_bias or None,
        allowed_token_ids=_allowed_token_ids(request.allowed_token_ids, config.vocab_size, num_sequences),
        bad_words=tuple(request.bad_words or ()),
        max_tokens=_max_tokens(request, defaults),
        min_tokens=request.min_tokens or 0,
        stop=(stop,) if isinstance(stop, str) else tuple(stop or ()),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=request.ignore_eos,
        repetition_detection=_repetition_detection(request),
        include_stop_str_in_output=request.include_stop_str_in_output,
        skip_special_tokens=request.skip_special_tokens,
        spaces_between_special_tokens=request.spaces_between_special_tokens,
        structured_outputs=structured_outputs(request, num_sequences, tool_calls),
        thinking_token_budget=None if request.thinking_token_budget == -1 else request.thinking_token_budget,
        stream_interval=(request.stream_interval or 1) if request.stream else 1,
        extra_args=request.vllm_xargs,
        **_logprobs(request, config),
    )


def params_key(request: GenerationRequest) -> tuple[Any, ...]:
    """Return all fields on which the request's sampling parameters may depend. Requests with the same key have the same
    parameters; a key with a list or a mapping in it cannot be hashed."""
    return _key_of(type(request))(request)


@cache
def _key_of(kind: type[GenerationRequest]) -> Callable[[GenerationRequest], tuple[Any, ...]]:
    fields = (field.name for field in msgspec.structs.fields(kind))
    return attrgetter("__class__", *(name for name in fields if name not in _OTHER_FIELDS))


def num_logprobs(name: str, count: int | None, config: ResolvedConfig) -> int | None:
    """Return the number of alternatives per token; -1 requests the whole vocabulary.

    Args:
        name: the parameter's name, for the error.

    Raises:
        InvalidRequest: more than the engine's `--max-logprobs`.
    """
    vocab_size, limit = config.vocab_size, config.max_logprobs
    if count is None:
        return None
    wanted = vocab_size if count < 0 else count
    if limit >= 0 and wanted > limit:
        asked = (
            f"{count} were asked for"
            if count >= 0
            else f"{count} asks for the whole vocabulary, {vocab_size}"
        )
        raise InvalidRequest(
            f"{name} must be at most {limit}, the engine's --max-logprobs; {asked}", param=name
        )
    return min(wanted, vocab_size)


def _logprobs(request: GenerationRequest, config: ResolvedConfig) -> dict[str, Any]:
    """Return `logprobs`, `logprob_token_ids` and `prompt_logprobs` of SamplingParams."""
    chosen = tuple(request.logprob_token_ids or ()) or None
    if isinstance(request, ChatCompletionRequest):
        if request.top_logprobs and not request.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
        if chosen and not request.logprobs:
            raise InvalidRequest("logprob_token_ids needs logprobs to be true", param="logprob_token_ids")
        top_logprobs = num_logprobs("top_logprobs", request.top_logprobs, config)
        logprobs = (top_logprobs or 0) if request.logprobs else None
        return {
            "logprobs": logprobs,
            "logprob_token_ids": chosen,
            "prompt_logprobs": request.prompt_logprobs,
        }
    assert isinstance(request, CompletionRequest)
    if chosen and request.logprobs is None:
        raise InvalidRequest("logprob_token_ids needs logprobs", param="logprob_token_ids")
    prompt = request.prompt_logprobs
    if prompt is None and request.echo:
        prompt = request.logprobs
    return {"logprobs": request.logprobs, "logprob_token_ids": chosen, "prompt_logprobs": prompt}


def _max_tokens(request: GenerationRequest, defaults: SamplingDefaults) -> int | None:
    if isinstance(request, ChatCompletionRequest):
        given = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
        asked = defaults.max_tokens if given is None else given
    else:
        assert isinstance(request, CompletionRequest)
        asked = _COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
        if request.is_scoring:
            return 1  # the generated token is not shown
    limit = defaults.max_tokens_limit
    if limit is None:
        return asked
    return limit if asked is None else min(asked, limit)


def asks_max_tokens(request: GenerationRequest) -> bool:
    """Whether `max_tokens` is the client's, and no default, which ends at the model's context."""
    if isinstance(request, ChatCompletionRequest) and request.max_completion_tokens is not None:
        return True
    return request.max_tokens is not None


def _allowed_token_ids(
    given: list[int] | None, vocab_size: int, num_sequences: int
) -> tuple[int, ...] | None:
    """Return the different ids, in order. `InputProcessor` refuses those beyond the vocabulary."""
    if given is None:
        return None
    if len(given) > vocab_size:
        raise InvalidRequest(
            f"allowed_token_ids has {len(given)} entries, but the vocabulary only {vocab_size} tokens; "
            "name each token once",
            param="allowed_token_ids",
        )
    allowed = tuple(sorted(set(given)))
    if len(allowed) * num_sequences > MAX_ALLOWED_IDS_OF_A_CALL:
        raise InvalidRequest(
            f"{len(allowed)} ids in allowed_token_ids for each of {num_sequences} sequences exceed "
            f"{MAX_ALLOWED_IDS_OF_A_CALL} in all; send fewer prompts or choices at once",
            param="allowed_token_ids",
        )
    return allowed


def _repetition_detection(request: GenerationRequest) -> RepetitionDetectionParams | None:
    asked = request.repetition_detection
    if asked is None:
        return None
    return RepetitionDetectionParams(asked.max_pattern_size, asked.min_pattern_size, asked.min_count)
