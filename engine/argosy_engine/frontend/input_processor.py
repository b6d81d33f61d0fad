"""InputProcessor: makes the core's requests from prompts and an API request (vLLM: `v1/engine/input_processor.py`).

What a request becomes on its way: `to_sampling_params` merges its fields with the defaults of the model's generation
config; `structured_outputs` translates response_format, structured_outputs and tool_choice, of which a required tool
call wins over `response_format`, as in vLLM, and another two are refused; `process_inputs` makes a request for each
choice, bounded by the model's context; `bound_answer` bounds what one answer may hold.

Requests that the core could not run are rejected here, in the API process. It may be called in any thread.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
from xxhash import xxh3_64_intdigest

from argosy_engine.errors import InvalidRequest, PromptTooLong, RequestFailed
from argosy_engine.frontend.media.processor import MediaProcessor
from argosy_engine.frontend.renderer import Renderer, TokenizedPrompt
from argosy_engine.messages import EngineCoreRequest
from argosy_engine.params import MAX_BAD_WORDS_TOKENS, RepetitionDetectionParams, SamplingParams
from argosy_engine.resolved_config import ResolvedConfig, SamplingDefaults, sampling_defaults
from argosy_engine.sample.logits_processor import LogitsProcessor, load_logits_processors
from argosy_engine.structured.manager import GrammarRequest
from argosy_engine.structured.structural_tag import (
    HERMES_CALLS,
    ToolCallForm,
    check_tools,
    tool_call_tag,
)
from argosy_engine.structured.structured_outputs_params import KINDS, StructuredOutputsParams
from argosy_protocol.errors import BadRequest
from argosy_protocol.json_limits import message_and_field
from argosy_protocol.openai import (
    BatchChatCompletionRequest,
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
    unsupported,
)

logger = logging.getLogger("argosy.frontend")

_SEED_MASK = (1 << 63) - 1

_KEPT_PARAMS = 256
"""Sampling parameters that are kept. Clients send the same ones with most requests."""


class InputProcessor:
    """
    Args:
        media: loads the images of chats; None: one is started if the model sees.

    Raises (from the constructor):
        ConfigError: the model directory lacks a file, or a logits processor cannot be loaded.
    """

    def __init__(self, config: ResolvedConfig, media: MediaProcessor | None = None) -> None:
        self.config = config
        self.renderer = Renderer(
            config, config.parsers, config.tokenizer, least_output=int(config.pooling is None)
        )
        self.media = media or MediaProcessor.of(config, has_mistral_tokenizer=self.renderer.writes_by_mistral)
        """Loads the images of chats; None if the model gets none."""
        if self.media is not None:
            self.renderer.set_images(self.media.info)
        self._sampling_defaults = sampling_defaults(Path(config.model_path), config.request_defaults)
        self._logits_processors = load_logits_processors(config.logits_processors)
        self._unseeded = itertools.count(1)
        """Numbers of the choices that get a seed from the engine's own sequence."""
        self._numbers = itertools.count()
        """Numbers of the requests of a core with copies, which all have to give a request the same id."""
        self._last_bad_words: tuple[Sequence[str], tuple[tuple[int, ...], ...]] = ((), ())
        """Words tokenised last, which the prompts of a call have in common, and their tokens."""
        self._kept_params: dict[tuple[Any, ...], SamplingParams] = {}
        """Valid parameters by the fields that they were made of (`params_key`), and the number of prompts."""

    def sampling_params(self, request: GenerationRequest, num_prompts: int = 1) -> SamplingParams:
        """Return the request's parameters over the model's generation config (`to_sampling_params`).

        They may be those of other requests, too: copy them to change them.
        """
        key = num_prompts, params_key(request)
        try:
            kept = self._kept_params.get(key)
        except TypeError:  # a list or a mapping is among the fields
            return self._sampling_params(request, num_prompts)
        if kept is None:
            kept = self._sampling_params(request, num_prompts)
            if kept.structured_outputs is not None:
                return kept  # its fields take any JSON value, of which True and 1 are equal
            if len(self._kept_params) >= _KEPT_PARAMS:
                self._kept_params.clear()
            self._kept_params[key] = kept
        return kept

    def _sampling_params(self, request: GenerationRequest, num_prompts: int) -> SamplingParams:
        if (
            isinstance(request, ChatCompletionRequest)
            and request.tools
            and request.tool_choice in (None, "auto")
            and not self.config.parsers.enable_auto_tool_choice
        ):
            raise InvalidRequest(
                '"auto" tool choice requires --enable-auto-tool-choice, which this engine was started without',
                param="tool_choice",
            )
        calls = self.renderer.parsers.tool_parser.call_form
        params = to_sampling_params(request, self._sampling_defaults, self.config, num_prompts, calls)
        kept = self.renderer.parsed_token_ids(request)
        return params.replace(kept_special_token_ids=kept) if kept else params

    def process_inputs(
        self,
        prompt: TokenizedPrompt,
        params: SamplingParams,
        *,
        cache_salt: str | None = None,
        priority: int = 0,
        resume: Sequence[Sequence[int]] = (),
        tenant: str = "",
        data_parallel_rank: int | None = None,
        asks_max_tokens: bool = True,
        is_pooling: bool = False,
    ) -> list[EngineCoreRequest]:
        """Make the core's requests, one per choice, each with an internal id, a bounded `max_tokens` and a seed.

        Args:
            resume: for each choice, the output of an earlier run that it continues.
            tenant: the request's tenant (`headers.TENANT`).
            data_parallel_rank: core that computes them; None: the one with the least work.
            asks_max_tokens: whether `max_tokens` is refused if it exceeds the room that the prompt leaves, rather than
                lowered, as a default is.
            is_pooling: whether nothing is generated.

        Raises:
            PromptTooLong: prompt plus output would exceed the model's context.
            InvalidRequest: the model does not generate, the prompt is empty, a token id is beyond the vocabulary, the
                structured output cannot be enforced, a priority is given to an engine that does not schedule by it, or
                there is no such rank.
        """
        if not is_pooling:
            check_generates(self.config)
        if data_parallel_rank is not None:
            self._check_rank(data_parallel_rank)
        if priority and self.config.scheduling_policy != "priority":
            raise InvalidRequest(
                "priority needs an engine started with --scheduling-policy priority", param="priority"
            )
        params, grammar = self._resolve(prompt, params, asks_max_tokens=asks_max_tokens), None
        if params.structured_outputs is not None:
            grammar = GrammarRequest(params.structured_outputs.spec(), prompt.reasoning)
            params = params.replace(structured_outputs=None)
        requests = []
        for choice in range(params.n):
            seed = self._next_seed() if params.seed is None else (params.seed + choice) & _SEED_MASK
            output = list(resume[choice]) if resume else []
            self.renderer.check_token_ids(output, "resume")
            if len(output) > (params.max_tokens or 0):
                raise InvalidRequest("resume has more tokens than max_tokens", param="resume")
            requests.append(
                EngineCoreRequest(
                    request_id=self._new_id(),
                    prompt_token_ids=prompt.token_ids,
                    # The prompt is the same for all choices, and so are its log probabilities.
                    sampling_params=params.replace(
                        n=1, seed=seed, prompt_logprobs=None if choice else params.prompt_logprobs
                    ),
                    arrival_time=time.time(),
                    cache_salt=cache_salt,
                    priority=priority,
                    chunk_ends=prompt.chunk_ends,
                    mm_features=list(prompt.mm_features),
                    resume_token_ids=output,
                    grammar=grammar,
                    tenant=tenant,
                    data_parallel_rank=data_parallel_rank,
                )
            )
        return requests

    def close(self) -> None:
        """End the process that handles images, if there is one."""
        if self.media is not None:
            self.media.close()

    def _new_id(self) -> str:
        return f"{next(self._numbers):024x}" if self.config.has_copies else secrets.token_hex(12)

    def _check_rank(self, rank: int) -> None:
        num_ranks = self.config.data_parallel_size
        if not 0 <= rank < num_ranks:
            raise InvalidRequest(
                f"data_parallel_rank {rank} is out of range: this engine has {num_ranks} (--data-parallel-size), "
                "numbered from 0",
                param="data_parallel_rank",
            )

    def _next_seed(self) -> int:
        """Return the seed of a choice without one: the next of the engine's own sequence, if `--seed` is set."""
        if self.config.seed is None:
            return secrets.randbits(63)
        number = next(self._unseeded)
        return xxh3_64_intdigest(number.to_bytes(8, "little"), self.config.seed) & _SEED_MASK

    def _resolve(
        self, prompt: TokenizedPrompt, params: SamplingParams, *, asks_max_tokens: bool
    ) -> SamplingParams:
        """Return the parameters with checked token ids, bad words as tokens and `max_tokens` within the context."""
        count, limit = len(prompt.token_ids), self.config.max_model_len
        if not count:
            raise InvalidRequest("the prompt is empty", param="prompt")
        self.renderer.check_length(count)
        room = limit - count
        max_tokens = room if params.max_tokens is None else params.max_tokens
        if not asks_max_tokens:
            max_tokens = min(max_tokens, room)
        if max_tokens > room:
            raise PromptTooLong(
                f"this model's maximum context length is {limit} tokens: {count} in the prompt and "
                f"{max_tokens} for the output exceed it; ask for at most {room} here",
                param="max_tokens",
            )
        for name, token_ids in params.token_ids().items():
            self.renderer.check_token_ids(token_ids, name)
        check_extra_args(params, self._logits_processors)
        chosen = tuple(dict.fromkeys(params.logprob_token_ids or ())) or None
        return params.replace(
            max_tokens=max_tokens,
            bad_words=(),
            bad_words_token_ids=self._bad_words(params.bad_words),
            thinking_marks=prompt.thinking_marks,
            logprobs=len(chosen) if chosen else num_logprobs("logprobs", params.logprobs, self.config),
            logprob_token_ids=chosen,
            prompt_logprobs=num_logprobs("prompt_logprobs", params.prompt_logprobs, self.config),
        )

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Tokenise each word as at the start of a text, and as after a space if the tokens differ."""
        last_words, last_token_ids = self._last_bad_words
        if words == last_words:
            return last_token_ids
        encode = self.renderer.tokenizer.encode
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            bare, spaced = (
                tuple(encode(prefix + word.lstrip(), add_special_tokens=False).ids) for prefix in ("", " ")
            )
            found[bare] = None
            if spaced[:1] != bare[:1] and len(spaced) == len(bare):
                found[spaced] = None
        token_ids = tuple(ids for ids in found if ids)
        if sum(map(len, token_ids)) > MAX_BAD_WORDS_TOKENS:
            raise InvalidRequest(
                f"bad_words have more than {MAX_BAD_WORDS_TOKENS} tokens together", param="bad_words"
            )
        self._last_bad_words = words, token_ids
        return token_ids


def check_generates(config: ResolvedConfig) -> None:
    """
    Raises:
        InvalidRequest: the model is served for pooling.
    """
    if config.pooling is not None:
        served = "embeddings" if config.pooling.task == "embed" else "classification"
        raise InvalidRequest(
            f"{config.model_name} is served for pooling ({served}) and does not generate; ask a model that generates. "
            "Of a decoder with an output head, --runner generate makes one"
        )


def check_extra_args(params: SamplingParams, logits_processors: Sequence[type[LogitsProcessor]]) -> None:
    """Let the logits processors that a request uses validate it.

    Raises:
        InvalidRequest: one of them rejects it, or it has arguments that none of them uses.
        RequestFailed: one of them failed.
    """
    is_used = False
    for processor in logits_processors:
        try:
            if processor.is_used_by(params):
                is_used = True
                processor.validate_params(params)
        except ValueError as error:
            raise InvalidRequest(str(error), param="vllm_xargs") from None
        except Exception as error:
            logger.exception("logits processor %s cannot validate a request", processor.__qualname__)
            raise RequestFailed(
                f"logits processor {processor.__qualname__} failed on this request"
            ) from error
    if params.extra_args and not is_used:
        raise InvalidRequest(
            f"no logits processor of this engine uses {', '.join(sorted(params.extra_args))[:200]}",
            param="vllm_xargs",
        )


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


def params_key(request: GenerationRequest) -> tuple[Any, ...]:
    """Return all fields on which the request's sampling parameters may depend. Requests with the same key have the same
    parameters; a key with a list or a mapping in it cannot be hashed."""
    return _key_of(type(request))(request)


@cache
def _key_of(kind: type[GenerationRequest]) -> Callable[[GenerationRequest], tuple[Any, ...]]:
    fields = (field.name for field in msgspec.structs.fields(kind))
    return attrgetter("__class__", *(name for name in fields if name not in _OTHER_FIELDS))


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


_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "structural_tag": "structural_tag",
}
"""vLLM's former names. vLLM ignores them now; they are rejected here, because the output would be unconstrained."""

SCHEMA_FIELD = "response_format.json_schema.schema"

MAX_GRAMMAR_TEXT_OF_A_CALL = 16 << 20
"""Characters of a grammar times sequences of a call. Each sequence is a message of its own to the core. The largest
grammar of one kind is 1.3 million characters; the largest schemas of real tool catalogues fit 300 times."""


def structured_outputs(
    request: GenerationRequest, num_sequences: int = 1, tool_calls: ToolCallForm = HERMES_CALLS
) -> StructuredOutputsParams | None:
    """Return the structured output that the request asks for, or None.

    Args:
        num_sequences: sequences of the call, each of which has this output.
        tool_calls: how the model writes calls.

    Raises:
        InvalidRequest: malformed, too large for so many sequences, more than one structured output, or a tool choice
            without such a tool.
    """
    for name, kind in _GUIDED.items():
        if getattr(request, name) is not None:
            raise InvalidRequest(f"{name} is not supported: use structured_outputs.{kind}", name)
    asked = {
        "response_format": _of_response_format(request.response_format),
        "structured_outputs": _of_field(request.structured_outputs),
        "tool_choice": _of_tool_choice(request, tool_calls)
        if isinstance(request, ChatCompletionRequest)
        else None,
    }
    if asked["tool_choice"] is not None:
        asked["response_format"] = None  # it is about the text of an answer, and a required call has none
    given = {name: params for name, params in asked.items() if params is not None}
    if len(given) > 1:
        names = " and ".join(given)
        raise InvalidRequest(f"{names} cannot be combined", next(reversed(given)))
    for name, params in given.items():
        try:
            spec = params.spec()
        except InvalidRequest as error:
            if name == "structured_outputs":
                raise
            where = format_field(request) if name == "response_format" else name
            raise InvalidRequest(_named(str(error), where), where) from None
        if len(spec.text) * num_sequences > MAX_GRAMMAR_TEXT_OF_A_CALL:
            raise InvalidRequest(
                f"a grammar of {len(spec.text)} characters for each of {num_sequences} sequences exceeds "
                f"{MAX_GRAMMAR_TEXT_OF_A_CALL} in all; send fewer prompts or choices at once",
                name,
            )
        return params
    return None


def format_field(request: GenerationRequest) -> str:
    """Return the field of a request's `response_format` that has what is compiled."""
    kind = (request.response_format or {}).get("type")
    return SCHEMA_FIELD if kind == "json_schema" else "response_format"


def _named(message: str, where: str) -> str:
    """Return a message of `StructuredOutputsParams` with the client's field in place of the kind of grammar."""
    kind, colon, rest = message.partition(": ")
    return f"{where}: {rest}" if colon and kind in KINDS else message


def _of_field(value: Any) -> StructuredOutputsParams | None:
    if value is None:
        return None
    try:
        return msgspec.convert(value, StructuredOutputsParams)
    except msgspec.ValidationError as error:
        message, field = message_and_field(error)
        raise InvalidRequest(
            message, f"structured_outputs.{field}" if field else "structured_outputs"
        ) from None


def _of_response_format(value: dict[str, Any] | None) -> StructuredOutputsParams | None:
    match ({"type": "text"} if value is None else value).get("type"):
        case "text":
            return None
        case "json_object":
            return StructuredOutputsParams(json_object=True)
        case "json_schema":
            assert value is not None
            schema = value.get("json_schema")
            if not isinstance(schema, dict) or not isinstance(schema.get("schema"), dict):
                raise InvalidRequest(
                    "response_format needs json_schema.schema, an object", "response_format.json_schema"
                )
            if not isinstance(name := schema.get("name"), str) or not name:
                raise InvalidRequest(
                    "response_format.json_schema.name must be a text that is not empty",
                    "response_format.json_schema.name",
                )
            return StructuredOutputsParams(json=schema["schema"])
        case "structural_tag":
            return StructuredOutputsParams(structural_tag=value)
        case kind:
            raise InvalidRequest(
                "response_format.type must be text, json_object, json_schema or structural_tag, "
                f"not {str(kind)[:64]!r}",
                "response_format.type",
            )


def _of_tool_choice(request: ChatCompletionRequest, calls: ToolCallForm) -> StructuredOutputsParams | None:
    """Return the grammar of the calls that a tool choice requires; `auto` and `none` require none."""
    choice = request.tool_choice
    check_tools(request.tools or ())
    if choice in (None, "auto", "none"):
        return None
    name = None
    if isinstance(choice, dict) and choice.get("type", "function") == "function":
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
    if choice != "required" and not isinstance(name, str):
        raise InvalidRequest(
            "tool_choice must be 'auto', 'none', 'required' or "
            "{'type': 'function', 'function': {'name': ...}}", "tool_choice"
        )  # fmt: skip
    if not request.tools:
        raise InvalidRequest("tool_choice needs tools", "tool_choice")
    parallel = request.parallel_tool_calls is not False
    relaxed: set[str] = set()
    tag = tool_call_tag(request.tools, name=name, parallel=parallel, form=calls, relaxed=relaxed)
    return StructuredOutputsParams.of_checked_tag(tag, relaxed)


MAX_VALUES = 1 << 22
"""Tokens of prompts and log probabilities: of the latter 200 MB of JSON, and 800 MB while it is made."""

MAX_CALL_MEDIA_BYTES = 1 << 30
"""Tensors of images in all requests of a call, each of which is sent to the core with its own copy."""

_MIN_DEFAULT = 1024
"""Tokens of a choice below which a default of `max_tokens` is not lowered any further."""


def bound_answer(core_requests: Sequence[EngineCoreRequest], n: int, request: GenerationRequest) -> None:
    """Check the size of an answer, and lower `max_tokens` to it if the client has not set it.

    A short request must not have an answer of gigabytes. A choice repeats what it says of its prompt, as vLLM's answers
    do, and an answer that is sent whole is held until all of its choices have ended. An answer of one choice is not
    bounded here: its size follows from the context length and `--max-logprobs`, which the engine's operator has chosen.

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


def check_images(prompts: Sequence[TokenizedPrompt | EngineCoreRequest], copies: int = 1) -> None:
    """Check the size of a call's images, of which each request has a copy.

    Args:
        prompts: of the call, or its requests.
        copies: requests of each of them that are computed at a time: beams.

    Raises:
        InvalidRequest: they are too large in all.
    """
    total = copies * sum(feature.num_bytes for prompt in prompts for feature in prompt.mm_features)
    if total > MAX_CALL_MEDIA_BYTES:
        raise InvalidRequest(
            f"the images of all choices become {total >> 20} MiB of patches, at most {MAX_CALL_MEDIA_BYTES >> 20} are "
            "taken; reduce n, or send fewer or smaller images",
            param="n" if len(prompts) * copies > 1 else "messages",
        )


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
