"""InputProcessor: OpenAI requests to core requests. Every check of a request's content is made here, before the core.

Runs in the API process; tokenising is the only part that takes time and may run in a thread.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from xxhash import xxh3_64_intdigest

from argosy_engine.config import ResolvedConfig
from argosy_engine.core.messages import ChunkEnd, EngineCoreRequest
from argosy_engine.errors import InvalidRequest, PromptTooLong, RequestFailed
from argosy_engine.frontend.chat_parser import END_THINK, THINK
from argosy_engine.frontend.chat_template import ChatTemplate
from argosy_engine.frontend.chunk_map import map_chunks, map_token_chunks
from argosy_engine.frontend.control_tokens import ControlTokens
from argosy_engine.frontend.prompt_lanes import stop_if_abandoned
from argosy_engine.frontend.structured_outputs import structured_outputs
from argosy_engine.frontend.tokenizer import Encoded, Tokenizer
from argosy_engine.models.config import read_json
from argosy_engine.sample.interface import load_logits_processors
from argosy_engine.sample.params import MAX_BAD_WORDS_TOKENS, RepetitionDetectionParams, SamplingParams
from argosy_engine.structured.manager import GrammarRequest
from argosy_engine.structured.reasoning import Reasoning, reasoning_after
from argosy_protocol.chunks import chain_seed
from argosy_protocol.openai import (
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    GenerationRequest,
    unsupported,
)
from argosy_protocol.prompt_view import Segment, SegmentKind, prompt_view

logger = logging.getLogger("argosy.frontend")

_SEED_MASK = (1 << 63) - 1


class Prompt(NamedTuple):
    token_ids: list[int]
    chunk_ends: list[ChunkEnd]
    reasoning: Reasoning | None = None
    """Around what the model may think before its answer."""


class InputProcessor:
    def __init__(self, config: ResolvedConfig) -> None:
        path = Path(config.model_path)
        self.config = config
        self.tokenizer = Tokenizer(path)
        self.template = ChatTemplate.load(path)
        self._control_tokens = ControlTokens(self.tokenizer.control_tokens)
        self.defaults = _generation_defaults(path)
        self._logits_processors = load_logits_processors(config.logits_processors)
        self._num_unseeded = 0
        """Choices that got a seed of the engine's sequence."""
        self._think_ids = [
            self.tokenizer.encode(marker, add_special_tokens=False).ids for marker in (THINK, END_THINK)
        ]

    @property
    def has_thinking(self) -> bool:
        return self.template is not None and self.template.has_thinking

    def chat_prompt(self, request: ChatCompletionRequest) -> Prompt:
        """Renders and tokenises a chat.

        Raises:
            InvalidRequest: the template cannot take the messages, or the model has no template.
        """
        (segments,) = prompt_view(request)
        text, cuts = self._chat_text(request, segments)
        self._check_length(len(cuts) + 1)  # each piece is one token at least
        prompt = self._text_prompt(text, segments, request, add_special_tokens=False, cuts=cuts)
        if not self.has_thinking:
            return prompt
        return prompt._replace(reasoning=reasoning_after(text, THINK, END_THINK, *self._think_ids))

    def _chat_text(self, request: ChatCompletionRequest, segments: list[Segment]) -> tuple[str, list[int]]:
        """The rendered chat, and where its tokens are cut. What is too long is refused before it is looked at."""
        if self.template is None:
            raise InvalidRequest("this model has no chat template; use /v1/completions", param="messages")
        if request.continue_final_message:
            raise InvalidRequest("continue_final_message is not supported", param="continue_final_message")
        # Templates may drop what an assistant said or thought, but not what it was told.
        self._check_characters(
            sum(len(text) for m in request.messages if m.role != "assistant" for text in _texts(m))
        )
        if not self._control_tokens.concern(segments):
            return self.template.render(request), []
        rendered = self.template.render(request, self._control_tokens.hide)
        self._check_characters(len(rendered))
        return self._control_tokens.reveal(rendered)

    def chat_tokens(self, request: ChatCompletionRequest) -> list[int]:
        """The tokens of a chat's prompt, also of one that is too long for the model.

        Raises:
            InvalidRequest: as `chat_prompt`.
        """
        (segments,) = prompt_view(request)
        text, cuts = self._chat_text(request, segments)
        return self.encode(text, add_special_tokens=False, cuts=cuts).ids

    def completion_prompts(self, request: CompletionRequest) -> list[Prompt]:
        """Tokenises each prompt of the batch."""
        prompts = request.prompts()
        for prompt in prompts:
            if isinstance(prompt, str):
                self._check_characters(len(prompt))
        return [
            self._text_prompt(prompt, segments, request, add_special_tokens=True)
            if isinstance(prompt, str)
            else self._token_prompt(prompt, segments, request)
            for prompt, segments in zip(prompts, prompt_view(request), strict=True)
        ]

    def text_prompt(self, text: str, *, add_special_tokens: bool = True) -> Prompt:
        """A plain text, for offline use."""
        segment = SegmentKind.TEXT, text.encode("utf-8", "surrogatepass")
        return self._text_prompt(text, [segment], GenerationRequest(), add_special_tokens=add_special_tokens)

    def _text_prompt(
        self,
        text: str,
        segments: list[Segment],
        request: GenerationRequest,
        *,
        add_special_tokens: bool,
        cuts: Sequence[int] = (),
    ) -> Prompt:
        encoded = self.encode(text, add_special_tokens=add_special_tokens, cuts=cuts)
        self._check_length(len(encoded))
        stop_if_abandoned()
        return Prompt(encoded.ids, map_chunks(segments, self._seed(request), text, encoded.ends))

    def encode(self, text: str, *, add_special_tokens: bool, cuts: Sequence[int] = ()) -> Encoded:
        """
        Raises:
            PromptTooLong: no model's token is so long that this could be a prompt.
            InvalidRequest: it is not text.
        """
        self._check_characters(len(text))
        stop_if_abandoned()
        try:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens, cuts=cuts)
        except UnicodeEncodeError:
            raise InvalidRequest("the prompt contains lone surrogates, which are not text") from None

    def _token_prompt(
        self, token_ids: list[int], segments: list[Segment], request: GenerationRequest
    ) -> Prompt:
        self.check_token_ids(token_ids)
        return Prompt(list(token_ids), map_token_chunks(segments, self._seed(request)))

    def _check_characters(self, count: int) -> None:
        """
        Raises:
            PromptTooLong: no model's token is so long that a text of so many characters could be a prompt.
        """
        limit = self.config.max_model_len
        if count > limit and count > (most := limit * self.tokenizer.max_token_chars):
            raise PromptTooLong(
                f"this model's maximum context length is {limit} tokens, which are {most} characters at most, "
                f"the prompt has {count}; shorten it",
                param="prompt",
            )

    def _check_length(self, count: int) -> None:
        limit = self.config.max_model_len
        if count >= limit:
            raise PromptTooLong(
                f"this model's maximum context length is {limit} tokens, the prompt has {count}; shorten it",
                param="prompt",
            )

    def check_token_ids(self, token_ids: Sequence[int], param: str = "prompt") -> None:
        if (token_ids and not 0 <= max(token_ids) < self.config.vocab_size) or (
            token_ids and min(token_ids) < 0
        ):
            raise InvalidRequest(
                f"token ids must be below the vocabulary size {self.config.vocab_size}", param=param
            )

    def sampling_params(self, request: GenerationRequest) -> SamplingParams:
        """The request's parameters over the model's generation config.

        Raises:
            InvalidRequest: out of bounds, or asks for something this engine does not do.
        """
        field = unsupported(request)
        if field is not None:
            raise InvalidRequest(f"{field} is not supported by this engine", param=field)
        stop = request.stop
        return SamplingParams(
            n=request.n or 1,
            temperature=self._default("temperature", request.temperature, 1.0),
            top_p=self._default("top_p", request.top_p, 1.0),
            top_k=self._default("top_k", request.top_k, 0),
            min_p=self._default("min_p", request.min_p, 0.0),
            seed=request.seed,
            presence_penalty=request.presence_penalty or 0.0,
            frequency_penalty=request.frequency_penalty or 0.0,
            repetition_penalty=self._default("repetition_penalty", request.repetition_penalty, 1.0),
            logit_bias=request.logit_bias or None,
            allowed_token_ids=_tuple(request.allowed_token_ids),
            bad_words=tuple(request.bad_words or ()),
            max_tokens=_max_tokens(request),
            min_tokens=request.min_tokens or 0,
            stop=(stop,) if isinstance(stop, str) else tuple(stop or ()),
            stop_token_ids=tuple(request.stop_token_ids or ()),
            ignore_eos=request.ignore_eos,
            repetition_detection=_repetition_detection(request),
            include_stop_str_in_output=request.include_stop_str_in_output,
            skip_special_tokens=request.skip_special_tokens,
            structured_outputs=structured_outputs(request),
            extra_args=request.vllm_xargs,
            **self._logprobs(request),
        )

    def core_requests(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        cache_salt: str | None = None,
        priority: int = 0,
        resume: Sequence[Sequence[int]] = (),
        tenant: str = "",
    ) -> list[EngineCoreRequest]:
        """The messages for the core, one per choice, with internal ids, a bounded `max_tokens` and a seed each.

        Args:
            resume: per choice the output of an earlier run that it continues.
            tenant: whose request it is (`headers.TENANT`).

        Raises:
            PromptTooLong: prompt plus output would exceed the model's context.
            InvalidRequest: the prompt is empty, a token id is beyond the vocabulary, the structured output cannot be
                enforced, or a priority is given to an engine that does not schedule by it.
        """
        if priority and self.config.scheduling_policy != "priority":
            raise InvalidRequest(
                "priority needs an engine started with --scheduling-policy priority", param="priority"
            )
        params, grammar = self._for_core(prompt, params), None
        if params.structured_outputs is not None:
            grammar = GrammarRequest(params.structured_outputs.spec(), prompt.reasoning)
            params = params.replace(structured_outputs=None)
        requests = []
        for choice in range(params.n):
            seed = self._next_seed() if params.seed is None else (params.seed + choice) & _SEED_MASK
            output = list(resume[choice]) if resume else []
            self.check_token_ids(output, "resume")
            if len(output) > (params.max_tokens or 0):
                raise InvalidRequest("resume has more tokens than max_tokens", param="resume")
            requests.append(
                EngineCoreRequest(
                    request_id=secrets.token_hex(12),
                    prompt_token_ids=prompt.token_ids,
                    # The prompt is the same for all choices, and so are its log probabilities.
                    sampling_params=params.replace(
                        n=1, seed=seed, prompt_logprobs=None if choice else params.prompt_logprobs
                    ),
                    arrival_time=time.time(),
                    cache_salt=cache_salt,
                    priority=priority,
                    chunk_ends=prompt.chunk_ends,
                    resume_token_ids=output,
                    grammar=grammar,
                    tenant=tenant,
                )
            )
        return requests

    def _next_seed(self) -> int:
        """For a choice that has none: the engine's own sequence where `--seed` began one."""
        if self.config.seed is None:
            return secrets.randbits(63)
        self._num_unseeded += 1
        return xxh3_64_intdigest(self._num_unseeded.to_bytes(8, "little"), self.config.seed) & _SEED_MASK

    def _for_core(self, prompt: Prompt, params: SamplingParams) -> SamplingParams:
        """Parameters with every token id checked, bad words as tokens and `max_tokens` within the context."""
        count, limit = len(prompt.token_ids), self.config.max_model_len
        if not count:
            raise InvalidRequest("the prompt is empty", param="prompt")
        self._check_length(count)
        room = limit - count
        if params.max_tokens is not None and params.max_tokens > room:
            raise PromptTooLong(
                f"this model's maximum context length is {limit} tokens: {count} in the prompt and "
                f"{params.max_tokens} for the output exceed it",
                param="max_tokens",
            )
        for name, token_ids in params.token_ids().items():
            self.check_token_ids(token_ids, name)
        self._check_extra_args(params)
        return params.replace(
            max_tokens=params.max_tokens or room,
            bad_words=(),
            bad_words_token_ids=self._bad_words(params.bad_words),
            logprobs=self._num_logprobs("logprobs", params.logprobs),
            prompt_logprobs=self._num_logprobs("prompt_logprobs", params.prompt_logprobs),
        )

    def _num_logprobs(self, name: str, count: int | None) -> int | None:
        """Alternatives per token, within the engine's `--max-logprobs`."""
        vocab_size, limit = self.config.vocab_size, self.config.max_logprobs
        if count is None:
            return None
        count = vocab_size if count < 0 else count
        if limit >= 0 and count > limit:
            raise InvalidRequest(
                f"{name} must be at most {limit}, the engine's --max-logprobs; {count} were asked for",
                param=name,
            )
        return min(count, vocab_size)

    def _logprobs(self, request: GenerationRequest) -> dict[str, Any]:
        """`logprobs` and `prompt_logprobs` of SamplingParams."""
        if isinstance(request, ChatCompletionRequest):
            if request.top_logprobs and not request.logprobs:
                raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
            top_logprobs = self._num_logprobs("top_logprobs", request.top_logprobs)
            logprobs = (top_logprobs or 0) if request.logprobs else None
            return {"logprobs": logprobs, "prompt_logprobs": request.prompt_logprobs}
        assert isinstance(request, CompletionRequest)
        prompt = request.prompt_logprobs
        if prompt is None and request.echo:
            prompt = request.logprobs
        return {"logprobs": request.logprobs, "prompt_logprobs": prompt}

    def _check_extra_args(self, params: SamplingParams) -> None:
        """Asks the logits processors that a request uses; one that nobody uses would be ignored silently."""
        is_used = False
        for processor in self._logits_processors:
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

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Each word as the tokens it has at the start of a text, and as those after a space where these differ."""
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            bare, spaced = (
                tuple(self.tokenizer.encode(prefix + word.lstrip(), add_special_tokens=False).ids)
                for prefix in ("", " ")
            )
            found[bare] = None
            if spaced[:1] != bare[:1] and len(spaced) == len(bare):
                found[spaced] = None
        token_ids = tuple(ids for ids in found if ids)
        if sum(map(len, token_ids)) > MAX_BAD_WORDS_TOKENS:
            raise InvalidRequest(
                f"bad_words have more than {MAX_BAD_WORDS_TOKENS} tokens together", param="bad_words"
            )
        return token_ids

    def _seed(self, request: GenerationRequest) -> int:
        return chain_seed(self.config.model_name, cache_salt=request.cache_salt or "")

    def _default(self, name: str, value: Any, fallback: Any) -> Any:
        return value if value is not None else self.defaults.get(name, fallback)


def _generation_defaults(path: Path) -> dict[str, Any]:
    """Sampling parameters of generation_config.json, where it says to sample."""
    file = path / "generation_config.json"
    config = read_json(file) if file.is_file() else {}
    if config.get("do_sample") is False:
        return {"temperature": 0.0}
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    return {name: config[name] for name in names if config.get(name) is not None}


def _texts(message: ChatMessage) -> list[str]:
    """A message's content."""
    if isinstance(message.content, str):
        return [message.content]
    texts = (part.get("text") for part in message.content or ())
    return [text for text in texts if isinstance(text, str)]


def _tuple(token_ids: list[int] | None) -> tuple[int, ...] | None:
    return None if token_ids is None else tuple(token_ids)


def _max_tokens(request: GenerationRequest) -> int | None:
    if isinstance(request, ChatCompletionRequest):
        return request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    assert isinstance(request, CompletionRequest)
    if request.max_tokens is None:
        return 16
    # Scoring a prompt: the token is made and not shown.
    return 1 if request.is_scoring else request.max_tokens


def _repetition_detection(request: GenerationRequest) -> RepetitionDetectionParams | None:
    asked = request.repetition_detection
    if asked is None:
        return None
    return RepetitionDetectionParams(asked.max_pattern_size, asked.min_pattern_size, asked.min_count)
