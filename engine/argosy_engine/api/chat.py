"""Chat completions: requests to generations and back, streamed and not."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from argosy_engine.api.logprobs import LogprobsFormat
from argosy_engine.api.serving import (
    Serving,
    book,
    created_at,
    empty_totals,
    finished_choices,
    formatted,
    num_shown,
    usage_of,
)
from argosy_engine.frontend.chat_parser import ChatParser, ParsedCall
from argosy_engine.frontend.outputs import GenerationOutput
from argosy_engine.frontend.processor import Prompt
from argosy_protocol.openai import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    Delta,
    FunctionCall,
    ResponseMessage,
    ToolCall,
    Usage,
)

_EMPTY_DELTA = Delta()


async def chat(
    serving: Serving, request: ChatCompletionRequest, request_id: str, size: int
) -> ChatCompletion:
    """
    Args:
        size: of the request's body, in bytes.
    """
    name = serving.check_model(request.model)
    prompt = await _prompt(serving, request, size)
    merged = await serving.generate([prompt], request)
    parsers, logprobs = _parsers(serving, request, prompt, len(merged)), serving.logprobs(request)

    def response() -> ChatCompletion:
        return ChatCompletion(
            id=f"chatcmpl-{request_id}",
            created=int(time.time()),
            model=name,
            choices=[
                _choice(request, request_id, output, parser, logprobs)
                for output, parser in zip(merged, parsers, strict=True)
            ],
            usage=usage_of(merged, len(merged)),
            prompt_token_ids=prompt.token_ids if request.return_token_ids else None,
            prompt_logprobs=logprobs.prompt(merged[0].prompt_logprobs or [])
            if request.prompt_logprobs is not None
            else None,
        )

    return await formatted(sum(map(num_shown, merged)), response)


def _choice(
    request: ChatCompletionRequest,
    request_id: str,
    output: GenerationOutput,
    parser: ChatParser,
    logprobs: LogprobsFormat,
) -> ChatChoice:
    """One whole choice."""
    parsed = parser.feed(output.text, is_last=True)
    calls = _tool_calls(parsed.calls, request_id, output.index, 0, is_delta=False)
    message = ResponseMessage(
        role="assistant",
        content=parsed.content if parsed.content or not calls else None,
        reasoning=parsed.reasoning or None,
        tool_calls=calls,
    )
    return ChatChoice(
        index=output.index,
        message=message,
        finish_reason=_chat_finish(output.finish_reason, parser),
        stop_reason=output.stop_reason,
        logprobs=logprobs.chat(output.logprobs) if request.logprobs else None,
        token_ids=output.token_ids if request.return_token_ids else None,
    )


async def chat_stream(
    serving: Serving, request: ChatCompletionRequest, request_id: str, size: int, *, resumable: bool = False
) -> AsyncGenerator[ChatCompletionChunk, None]:
    """
    Args:
        size: of the request's body, in bytes.
        resumable: every chunk carries the token ids by which another engine can continue the stream.
    """
    name = serving.check_model(request.model)
    prompt = await _prompt(serving, request, size)
    requests = serving.core_requests([prompt], request)
    parsers, logprobs = _parsers(serving, request, prompt, len(requests)), serving.logprobs(request)
    totals, finished = empty_totals(requests), finished_choices(request)
    stream_id, created = f"chatcmpl-{request_id}", created_at(request)
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
    async with aclosing(serving.llm.generate(requests, request.n or 1, finished)) as stream:
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
                book(totals[output.index], output)
                if output.index in finished:
                    continue
                parser = parsers[output.index]
                parser.feed(output.resumed_text)
                num_calls = parser.num_calls
                parsed = parser.feed(output.text, is_last=output.finish_reason is not None)
                delta = Delta(
                    content=parsed.content or None,
                    reasoning=parsed.reasoning or None,
                    tool_calls=_tool_calls(parsed.calls, request_id, output.index, num_calls, is_delta=True),
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
                yield chunk([choice], usage_of(totals, len(totals)) if continuous else None)
    if usage_options is not None and usage_options.include_usage:
        yield chunk([], usage_of(totals, len(totals)))


async def _prompt(serving: Serving, request: ChatCompletionRequest, size: int) -> Prompt:
    serving.llm.admission.check(request.n or 1)
    return await serving.lanes.run(size, serving.llm.processor.chat_prompt, request)


def _parsers(
    serving: Serving, request: ChatCompletionRequest, prompt: Prompt, count: int
) -> list[ChatParser]:
    has_tools = bool(request.tools) and request.tool_choice != "none"
    thinks = serving.llm.processor.has_thinking
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
    calls: Sequence[ParsedCall], request_id: str, choice: int, first: int, *, is_delta: bool
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


def _chat_finish(reason: str | None, parser: ChatParser) -> str | None:
    """A length stop stays a length stop, even after a call: the client must see that text is missing."""
    return "tool_calls" if reason == "stop" and parser.num_calls else reason
