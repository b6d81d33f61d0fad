"""Serving: OpenAI requests to generations and back: chat completions and completions, streamed and not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import TypeVar

from argosy_engine.api.beam_search import beam_search
from argosy_engine.api.completion_parts import CompletionParts
from argosy_engine.api.logprobs import LogprobsFormat
from argosy_engine.core.messages import EngineCoreRequest
from argosy_engine.errors import EngineBusy, EngineDead, InvalidRequest, PromptTooLong, RequestFailed
from argosy_engine.frontend.async_llm import AsyncLLM
from argosy_engine.frontend.chat_parser import ChatParser, ParsedCall
from argosy_engine.frontend.outputs import GenerationOutput
from argosy_engine.frontend.processor import Prompt
from argosy_engine.protocol.errors import (
    ApiError,
    BadRequest,
    ContextLengthExceeded,
    InternalError,
    NotFound,
    Unavailable,
)
from argosy_engine.protocol.openai import (
    MAX_CHOICES,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    Completion,
    CompletionChoice,
    CompletionRequest,
    Delta,
    FunctionCall,
    GenerationRequest,
    ModelCard,
    ModelList,
    PromptTokensDetails,
    ResponseMessage,
    ToolCall,
    Usage,
    UsageNote,
)
from argosy_engine.sample.token_logprobs import TokenLogprobs

_Request = TypeVar("_Request")
_Result = TypeVar("_Result")

_INLINE_CHARS = 16384
"""Prompts up to this size are tokenised in place (a few milliseconds at most); longer ones in a thread."""


class Serving:
    """
    Args:
        names: model names clients may use; the first is the canonical one.
    """

    def __init__(self, llm: AsyncLLM, names: Sequence[str]) -> None:
        self.llm = llm
        self.names = tuple(names)
        self._started = int(time.time())

    def models(self) -> ModelList:
        limit = self.llm.config.max_model_len
        return ModelList(
            data=[
                ModelCard(id=name, created=self._started, root=self.names[0], max_model_len=limit)
                for name in self.names
            ]
        )

    def check_model(self, name: str) -> str:
        """The name to answer with; an empty name means the canonical one, as in vLLM.

        Raises:
            NotFound: this engine does not serve that model.
        """
        if not name:
            return self.names[0]
        if name not in self.names:
            raise NotFound(
                f"the model {name[:128]!r} does not exist here", param="model", code="model_not_found"
            )
        return name

    # Chat

    async def chat(self, request: ChatCompletionRequest, request_id: str) -> ChatCompletion:
        name = self.check_model(request.model)
        prompt = await self._chat_prompt(request)
        merged = await self._generate([prompt], request)
        parsers, logprobs = self._parsers(request, prompt, len(merged)), self._logprobs(request)
        choices = []
        for output, parser in zip(merged, parsers, strict=True):
            parsed = parser.feed(output.text, is_last=True)
            calls = self._tool_calls(parsed.calls, request_id, output.index, 0, is_delta=False)
            message = ResponseMessage(
                role="assistant",
                content=parsed.content if parsed.content or not calls else None,
                reasoning=parsed.reasoning or None,
                tool_calls=calls,
            )
            choices.append(
                ChatChoice(
                    index=output.index,
                    message=message,
                    finish_reason=_chat_finish(output.finish_reason, parser),
                    stop_reason=output.stop_reason,
                    logprobs=logprobs.chat(output.logprobs) if request.logprobs else None,
                    token_ids=output.token_ids if request.return_token_ids else None,
                )
            )
        return ChatCompletion(
            id=f"chatcmpl-{request_id}",
            created=int(time.time()),
            model=name,
            choices=choices,
            usage=_usage(merged, len(merged)),
            prompt_token_ids=prompt.token_ids if request.return_token_ids else None,
            prompt_logprobs=logprobs.prompt(merged[0].prompt_logprobs or [])
            if request.prompt_logprobs is not None
            else None,
        )

    async def chat_stream(
        self, request: ChatCompletionRequest, request_id: str, *, resumable: bool = False
    ) -> AsyncGenerator[ChatCompletionChunk | UsageNote, None]:
        """
        Args:
            resumable: every chunk carries the token ids by which another engine can continue the stream, and the
                last item is the usage, in one form or the other.
        """
        name = self.check_model(request.model)
        prompt = await self._chat_prompt(request)
        requests = self._core_requests([prompt], request)
        parsers, logprobs = self._parsers(request, prompt, len(requests)), self._logprobs(request)
        totals, finished = _totals(requests), _finished(request)
        stream_id, created = f"chatcmpl-{request_id}", _created(request)
        with_ids, usage_options = request.return_token_ids or resumable, request.stream_options

        def chunk(
            choices: list[ChatChunkChoice], usage: Usage | None = None, is_first: bool = False
        ) -> ChatCompletionChunk:
            return ChatCompletionChunk(
                id=stream_id,
                created=created,
                model=name,
                choices=choices,
                usage=usage,
                prompt_token_ids=prompt.token_ids if is_first and request.return_token_ids else None,
            )

        is_first = request.resume is None
        async with aclosing(self.llm.generate(requests, request.n or 1, finished)) as stream:
            async for outputs in stream:
                if is_first:
                    # Not before the first token: until then an error has a status, and a router may still retry.
                    is_first = False
                    role = Delta(role="assistant", content="")
                    roles = [
                        ChatChunkChoice(index=index, delta=role, token_ids=[] if with_ids else None)
                        for index in range(len(requests))
                    ]
                    yield chunk(roles, is_first=True)
                for output in outputs:
                    _book(totals[output.index], output)
                    if output.index in finished:
                        continue
                    parser = parsers[output.index]
                    parser.feed(output.resumed_text)
                    num_calls = parser.num_calls
                    parsed = parser.feed(output.text, is_last=output.finish_reason is not None)
                    delta = Delta(
                        content=parsed.content or None,
                        reasoning=parsed.reasoning or None,
                        tool_calls=self._tool_calls(
                            parsed.calls, request_id, output.index, num_calls, is_delta=True
                        ),
                    )
                    finish = _chat_finish(output.finish_reason, parser)
                    if delta == _EMPTY_DELTA and finish is None and not with_ids and not output.logprobs:
                        continue
                    choice = ChatChunkChoice(
                        index=output.index,
                        delta=delta,
                        finish_reason=finish,
                        stop_reason=output.stop_reason,
                        logprobs=logprobs.chat(output.logprobs) if output.logprobs else None,
                        token_ids=output.token_ids if with_ids else None,
                    )
                    continuous = usage_options is not None and usage_options.continuous_usage_stats
                    yield chunk([choice], _usage(totals, len(totals)) if continuous else None)
        if usage_options is not None and usage_options.include_usage:
            yield chunk([], _usage(totals, len(totals)))
        elif resumable:
            yield UsageNote(_usage(totals, len(totals)))

    async def _chat_prompt(self, request: ChatCompletionRequest) -> Prompt:
        self.llm.admission.check(request.n or 1)
        size = sum(len(message.content or "") for message in request.messages)
        return await self._off_loop(size, self.llm.processor.chat_prompt, request)

    def _parsers(self, request: ChatCompletionRequest, prompt: Prompt, count: int) -> list[ChatParser]:
        has_tools = bool(request.tools) and request.tool_choice != "none"
        thinks = self.llm.processor.has_thinking
        is_open = prompt.reasoning is not None and prompt.reasoning.is_open
        return [
            ChatParser(
                parse_reasoning=thinks,
                parse_calls=has_tools,
                is_reasoning=is_open,
                calls_end_reasoning=request.tool_choice in (None, "auto"),
            )
            for _ in range(count)
        ]

    def _tool_calls(
        self, calls: Sequence[ParsedCall], request_id: str, choice: int, first: int, *, is_delta: bool
    ) -> tuple[ToolCall, ...]:
        """Call ids are a function of the request's id, so that a resumed stream repeats them."""
        return tuple(
            ToolCall(
                id=f"call_{request_id}_{choice}_{number}",
                type="function",
                index=number if is_delta else None,
                function=FunctionCall(name=call.name, arguments=call.arguments),
            )
            for number, call in enumerate(calls, first)
        )

    # Completions

    async def completion(self, request: CompletionRequest, request_id: str) -> Completion:
        name = self.check_model(request.model)
        prompts = await self._completion_prompts(request)
        merged = await self._generate(prompts, request)
        n = request.n or 1
        for output in merged:  # each prompt's log probabilities came with its first choice
            output.prompt_logprobs = merged[output.index // n * n].prompt_logprobs
        parts = self._completion_parts(request, prompts, [()] * len(merged))
        choices = [parts.choice(output, is_first=True) for output in merged]
        return Completion(
            id=f"cmpl-{request_id}", created=int(time.time()), model=name, choices=choices, usage=_usage(merged, n)
        )  # fmt: skip

    async def completion_stream(
        self, request: CompletionRequest, request_id: str, *, resumable: bool = False
    ) -> AsyncGenerator[Completion | UsageNote, None]:
        """
        Args:
            resumable: every chunk carries the token ids by which another engine can continue the stream, and the
                last item is the usage, in one form or the other.
        """
        name = self.check_model(request.model)
        prompts = await self._completion_prompts(request)
        requests = self._core_requests(prompts, request)
        n = request.n or 1
        resumed = [core_request.resume_token_ids for core_request in requests]
        parts = self._completion_parts(request, prompts, resumed, with_ids=resumable)
        totals, finished = _totals(requests), _finished(request)
        stream_id, created, usage_options = f"cmpl-{request_id}", _created(request), request.stream_options
        continuous = usage_options is not None and usage_options.continuous_usage_stats
        unseen = {index for index, item in enumerate(requests) if not item.resume_token_ids}
        prompt_logprobs: dict[int, list[TokenLogprobs] | None] = {}

        def chunk(choices: list[CompletionChoice], usage: Usage | None = None) -> Completion:
            return Completion(id=stream_id, created=created, model=name, choices=choices, usage=usage)

        async with aclosing(self.llm.generate(requests, n, finished)) as stream:
            async for outputs in stream:
                for output in outputs:
                    if output.index in finished:
                        _book(totals[output.index], output)
                        continue
                    is_first = output.index in unseen
                    unseen.discard(output.index)
                    if is_first:
                        leader = output.index // n * n
                        prompt_logprobs.setdefault(leader, output.prompt_logprobs)
                        output.prompt_logprobs = prompt_logprobs[leader]
                    choice = parts.choice(output, is_first=is_first)
                    _book(totals[output.index], output)
                    if choice.text or choice.finish_reason or choice.logprobs or choice.token_ids is not None:
                        yield chunk([choice], _usage(totals, n) if continuous else None)
        if usage_options is not None and usage_options.include_usage:
            yield chunk([], _usage(totals, n))
        elif resumable:
            yield UsageNote(_usage(totals, n))

    async def _completion_prompts(self, request: CompletionRequest) -> list[Prompt]:
        self.llm.admission.check(request.n or 1)
        size = sum(len(prompt) for prompt in request.prompts())
        return await self._off_loop(size, self.llm.processor.completion_prompts, request)

    def _completion_parts(
        self,
        request: CompletionRequest,
        prompts: Sequence[Prompt],
        resumed: Sequence[Sequence[int]],
        *,
        with_ids: bool = False,
    ) -> CompletionParts:
        return CompletionParts(
            request, self.llm.processor.tokenizer, prompts, resumed, with_ids=with_ids or request.return_token_ids
        )  # fmt: skip

    # Both

    async def _generate(
        self, prompts: Sequence[Prompt], request: GenerationRequest
    ) -> list[GenerationOutput]:
        """Every choice of every prompt, whole."""
        if request.use_beam_search:
            return await beam_search(self.llm, prompts, request)
        return await self._collect(self._core_requests(prompts, request), request)

    def _core_requests(
        self, prompts: Sequence[Prompt], request: GenerationRequest
    ) -> list[EngineCoreRequest]:
        n = request.n or 1
        count = len(prompts) * n
        if count > MAX_CHOICES:
            raise BadRequest(f"{len(prompts)} prompts times n={n} exceed {MAX_CHOICES} choices", param="n")
        resumed = (
            [choice.token_ids for choice in request.resume.choices] if request.resume is not None else []
        )
        if resumed and len(resumed) != count:
            raise BadRequest(f"resume must have one entry for each of {count} choices", param="resume")
        if request.use_beam_search:
            raise BadRequest("use_beam_search cannot be streamed", param="stream")
        if request.stream and request.prompt_logprobs is not None:
            raise BadRequest("prompt_logprobs cannot be streamed", param="prompt_logprobs")
        params = self.llm.processor.sampling_params(request)
        return [
            core_request
            for index, prompt in enumerate(prompts)
            for core_request in self.llm.processor.core_requests(
                prompt,
                params,
                cache_salt=request.cache_salt,
                priority=request.priority,
                resume=resumed[index * n : index * n + n],
            )
        ]

    def _logprobs(self, request: GenerationRequest) -> LogprobsFormat:
        return LogprobsFormat(self.llm.processor.tokenizer, as_token_ids=request.return_tokens_as_token_ids)

    async def _collect(
        self, requests: list[EngineCoreRequest], request: GenerationRequest
    ) -> list[GenerationOutput]:
        merged = [GenerationOutput(index) for index in range(len(requests))]
        async with aclosing(self.llm.generate(requests, request.n or 1)) as stream:
            async for outputs in stream:
                for output in outputs:
                    merged[output.index].merge(output)
        return merged

    @staticmethod
    async def _off_loop(size: int, function: Callable[[_Request], _Result], request: _Request) -> _Result:
        """Runs the tokenising of a long prompt in a thread: it releases the GIL, so other streams keep flowing."""
        if size <= _INLINE_CHARS:
            return function(request)
        return await asyncio.to_thread(function, request)


_EMPTY_DELTA = Delta()


def _created(request: GenerationRequest) -> int:
    """Unix time for an answer's chunks; a resumed stream keeps its own."""
    return int(time.time()) if request.resume is None else request.resume.created


def _finished(request: GenerationRequest) -> frozenset[int]:
    """Choices of a resumed stream that its reader has seen the end of."""
    if request.resume is None:
        return frozenset()
    return frozenset(index for index, choice in enumerate(request.resume.choices) if choice.finished)


def _totals(requests: Sequence[EngineCoreRequest]) -> list[GenerationOutput]:
    """Counts to begin with: those of the stream that is resumed."""
    return [
        GenerationOutput(index, num_output_tokens=len(request.resume_token_ids))
        for index, request in enumerate(requests)
    ]


def _book(total: GenerationOutput, output: GenerationOutput) -> None:
    """Keeps the counts for usage without keeping the text."""
    total.num_prompt_tokens = output.num_prompt_tokens
    total.num_cached_tokens = output.num_cached_tokens
    total.num_output_tokens = output.num_output_tokens


def _usage(outputs: Sequence[GenerationOutput], n: int) -> Usage:
    """Each prompt counts once, however many choices it has."""
    prompts = outputs[::n]
    prompt_tokens = sum(output.num_prompt_tokens for output in prompts)
    completion_tokens = sum(output.num_output_tokens for output in outputs)
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(sum(output.num_cached_tokens for output in prompts)),
    )


def _chat_finish(reason: str | None, parser: ChatParser) -> str | None:
    """A length stop stays a length stop, even after a call: the client must see that text is missing."""
    return "tool_calls" if reason == "stop" and parser.num_calls else reason


def to_api_error(error: Exception) -> ApiError:
    """The client's view of an engine error; anything unexpected is a plain 500 without details."""
    match error:
        case ApiError():
            return error
        case PromptTooLong():
            return ContextLengthExceeded(str(error), param=error.param)
        case InvalidRequest():
            return BadRequest(str(error), param=error.param)
        case EngineBusy():
            return Unavailable(f"{error}; retry later", retry_after_s=error.retry_after_s)
        case RequestFailed():
            return InternalError(str(error))
        case EngineDead():
            return Unavailable("the engine is not running; retry", retry_after_s=1.0)
        case _:
            return InternalError("internal error")
