"""/v1/chat/completions and /v1/chat/completions/batch: chats become generations, and outputs choices or deltas.

Deltas are a function of the token ids and the request alone, so that a resumed stream continues as one that was not
interrupted. Other APIs' answers (`messages`, `response_events`) parse their text by `ChatFormat` as well.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Sequence
from functools import partial

import msgspec
from fastapi import FastAPI, Request
from msgspec import UNSET
from msgspec.structs import replace

from argosy_engine.api.endpoints.choice_stream import (
    ChoiceFormat,
    DirectWriter,
    EventTemplate,
    LogprobsFormat,
    Prepared,
    created_at,
    encode_event,
    is_sent,
    stream_choices,
    usage_of,
    whole_response,
)
from argosy_engine.api.endpoints.exchange import (
    Endpoint,
    apply_flags,
    check_resume,
    context_of,
    json_answer,
    report_skipped,
    resumption_of,
    stream_answer,
)
from argosy_engine.api.http.http_responses import WatchedResponse, read_body
from argosy_engine.api.served_engine import Engine, OpenAIServing
from argosy_engine.frontend.admission import stop_if_abandoned
from argosy_engine.frontend.media.processor import ChatImages
from argosy_engine.frontend.output_processor import GenerationOutput
from argosy_engine.frontend.renderer import Renderer, TokenizedPrompt
from argosy_engine.parsers.chat_parser import ChatParser
from argosy_engine.parsers.harmony_parser import HarmonyParser
from argosy_engine.parsers.parsed_output import Parsed, ParsedCall
from argosy_engine.parsers.tool_parsers.abstract_tool_parser import ToolParser
from argosy_engine.structured.grammar_state import Reasoning
from argosy_http.bounded_protocol import client_connection
from argosy_protocol.openai import (
    BatchChatCompletionRequest,
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
    decode_batch_request,
    decode_request,
)
from argosy_protocol.skipped_content import skipped_parts

_MAX_TOKENS_BEFORE = 8
"""Tokens, such as white space, that a model may write before it opens its reasoning."""


_EMPTY_DELTA = Delta()


class CallIds:
    """The ids of the tool calls of one choice, of which no two are equal.

    Some models write the ids themselves, and repeat them. A client refers to a call by its id alone.

    Args:
        choice: index of the choice.
    """

    def __init__(self, tool_parser: ToolParser, request_id: str, choice: int) -> None:
        self._tool_parser = tool_parser
        self._request_id = request_id
        self._choice = choice
        self._taken: set[str] = set()
        self._fresh = 0
        """Number from which on ids were not tried instead of repeated ones."""

    def add(self, number: int, call: ParsedCall) -> str:
        """Return the id of the choice's next call: the model's if it wrote one that no call before has.

        It is a function of the calls so far and the request's id, so that a resumed stream repeats it.
        """
        call_id = self._tool_parser.call_id(self._request_id, self._choice, number, call)
        if call_id in self._taken:
            call_id = self._other(number, call._replace(id="")) or call_id
        self._taken.add(call_id)
        return call_id

    def _other(self, number: int, call: ParsedCall) -> str | None:
        """Return an id that is not taken; None if the parser's ids do not depend on the number."""
        self._fresh = max(self._fresh, number)
        for _ in range(len(self._taken) + 1):
            call_id = self._tool_parser.call_id(self._request_id, self._choice, self._fresh, call)
            self._fresh += 1
            if call_id not in self._taken:
                return call_id
        return None


class ReasoningCounter:
    """Counts the tokens of one choice's reasoning, for `completion_tokens_details`.

    It reads token ids, so that the count does not depend on how they come. As in vLLM the markers do not count. Calls
    may end the reasoning without its end marker, which only the parser of the text finds: then its text is counted
    instead, as where the markers are sentences (`ChatFormat`).

    Args:
        reasoning: the markers; None if the model cannot reason after this prompt.
        message_ends: tokens that end a message of reasoning, after which others may come; empty if there is only one,
            which the markers' end marker ends.
    """

    def __init__(self, reasoning: Reasoning | None, message_ends: Collection[int] = ()) -> None:
        self.count = 0
        """Tokens of the reasoning so far."""
        self._start = list(reasoning.start_ids) if reasoning is not None else []
        self._end = list(reasoning.end_ids) if reasoning is not None else []
        self._message_ends = message_ends
        self._is_open = reasoning is not None and reasoning.is_open
        self._is_done = not self._end
        self._tail: list[int] = []
        """Last tokens, in which a marker may be complete."""
        self._num_before = 0

    @property
    def is_open(self) -> bool:
        """Whether the tokens so far end within the reasoning."""
        return self._is_open and not self._is_done

    def end(self, count: int) -> None:
        """Set the count of an open reasoning, which has ended before its last tokens."""
        self.count, self._is_done = min(self.count, count), True

    def add(self, token_ids: Iterable[int]) -> None:
        """Count the next tokens of the choice."""
        if self._is_done:
            return
        for token_id in token_ids:
            marker = self._end if self._is_open else self._start
            self._tail = [*self._tail, token_id][-len(marker) :]
            is_complete = self._tail == marker
            if not self._is_open:
                self._num_before += 1
                self._is_open = is_complete
                is_late = self._num_before >= _MAX_TOKENS_BEFORE + len(marker)
                self._is_done = is_late and not is_complete and not self._message_ends
            elif token_id in self._message_ends:
                self._is_open, self._tail = False, [token_id]
            else:
                self.count += 1
                if is_complete:
                    self.count -= min(self.count, len(marker))
                    self._is_done = True
            if is_complete:
                self._tail = []
            if self._is_done:
                return


class ChatFormat(ChoiceFormat[ChatChunkChoice, ChatCompletionChunk, ChatCompletion]):
    """
    Args:
        model: the name to answer with.
        num_choices: number of choices of the prompt.
        with_ids: every chunk carries its `token_ids`, even if the client does not ask for them.
        report_tools: called at the end of each choice with whether it calls a tool, if the request has tools.
    """

    def __init__(
        self,
        renderer: Renderer,
        request: ChatCompletionRequest,
        request_id: str,
        model: str,
        prompt: TokenizedPrompt,
        num_choices: int,
        *,
        with_ids: bool = False,
        report_tools: Callable[[bool], None] | None = None,
    ) -> None:
        self._request = request
        self._report_tools = report_tools
        self._request_id = request_id
        self._id = f"chatcmpl-{request_id}"
        self._model = model
        self._created = created_at(request)
        self._prompt = prompt
        self._with_ids = request.return_token_ids or with_ids
        self._echoed = _last_answer(request) if request.echo else ""
        self._logprobs = LogprobsFormat(
            renderer.tokenizer,
            as_token_ids=bool(request.return_tokens_as_token_ids),
            shows_all=bool(request.logprob_token_ids),
        )
        self._max_calls = 1 if request.parallel_tool_calls is False else None
        self._names_call = isinstance(request.tool_choice, dict)
        self._parsers = [renderer.chat_parser(request, prompt) for _ in range(num_choices)]
        tool_parser = renderer.tool_parser(request)
        self._call_ids = [
            CallIds(tool_parser, request_id, choice)
            for choice in range(num_choices)
            if tool_parser is not None
        ]
        """One for each choice; none if the request has no tools."""
        self._tokenizer = renderer.tokenizer
        self._is_prose = renderer.parsers.reasoning_parser.is_prose
        """Whether sentences mark the reasoning, whose tokens are not always the same: its text is counted."""
        marks = None if self._is_prose else prompt.reasoning
        self._counters = [ReasoningCounter(marks, renderer.message_end_ids) for _ in range(num_choices)]
        self._templates: dict[tuple[int, bool], EventTemplate] = {}
        self._thoughts: list[list[str]] = [[] for _ in range(num_choices)]
        """Texts of reasoning that is not over, and that a call or, if it is prose, a sentence may end."""
        if request.resume is not None:
            for counter, resumed in zip(self._counters, request.resume.choices, strict=True):
                counter.add(resumed.token_ids)

    @property
    def num_reasoning_tokens(self) -> int:
        return sum(counter.count for counter in self._counters)

    @property
    def is_reasoning(self) -> bool:
        """Whether the tokens of a choice so far end within its reasoning."""
        if self._is_prose:
            return any(self._thoughts)
        return any(counter.is_open for counter in self._counters)

    @property
    def num_calls(self) -> int:
        """Tool calls of all choices so far."""
        return sum(parser.num_calls for parser in self._parsers)

    def opening(self, usage: Usage | None) -> ChatCompletionChunk | None:
        """Return the chunk with the roles of all choices; None for a resumed stream, whose client has them already."""
        if self._request.resume is not None:
            return None
        role = Delta(role="assistant", content=self._echoed)
        roles = [
            ChatChunkChoice(index=index, delta=role, token_ids=[] if self._with_ids else None)
            for index in range(len(self._parsers))
        ]
        return ChatCompletionChunk(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=roles,
            usage=usage,
            prompt_token_ids=self._prompt.token_ids if self._request.return_token_ids else None,
            prompt_text=UNSET if self._prompt.text is None else self._prompt.text,
        )

    def delta(self, output: GenerationOutput) -> ChatChunkChoice | None:
        return self._chunk_choice(output, *self._parse_output(output))

    def events(self, output: GenerationOutput) -> Sequence[bytes]:
        parsed, num_calls = self._parse_output(output)
        if output.finish_reason is None and not (
            self._with_ids or self._request.logprobs or parsed.calls or parsed.arguments
        ):
            reasoning = parsed.reasoning if self._request.include_reasoning else ""
            if not (reasoning and parsed.content):
                text = parsed.content or reasoning
                template = self._template(output.index, is_reasoning=bool(reasoning))
                return (template.event(text),) if text else ()
        choice = self._chunk_choice(output, parsed, num_calls)
        return [encode_event(self.chunk([each])) for each in self._with_end_apart(choice, output)]

    def deltas(self, output: GenerationOutput) -> Sequence[ChatChunkChoice]:
        return self._with_end_apart(self.delta(output), output)

    def _with_end_apart(
        self, choice: ChatChunkChoice | None, output: GenerationOutput
    ) -> Sequence[ChatChunkChoice]:
        if choice is None:
            return ()
        if choice.finish_reason is None or choice.delta == _EMPTY_DELTA:
            return (choice,)
        end = replace(choice, delta=_EMPTY_DELTA, logprobs=None, token_ids=[] if self._with_ids else None)
        if is_sent(self._request, output):
            return (end,)
        return replace(choice, finish_reason=None, stop_reason=None), end

    def _template(self, choice: int, *, is_reasoning: bool) -> EventTemplate:
        """Return the template of events that add reasoning, or content, to a choice, and nothing else."""
        template = self._templates.get((choice, is_reasoning))
        if template is None:
            delta = Delta(reasoning="") if is_reasoning else Delta(content="")
            chunk = self.chunk([ChatChunkChoice(index=choice, delta=delta)])
            template = EventTemplate(chunk, "reasoning" if is_reasoning else "content")
            self._templates[choice, is_reasoning] = template
        return template

    def _parse_output(self, output: GenerationOutput) -> tuple[Parsed, int]:
        """Parse what an output adds to its choice; return it, and the number of the choice's calls before."""
        self._counters[output.index].add(output.token_ids)
        if output.resumed_text:
            resumed = self._parse(output.index, output.resumed_text)
            self._tool_calls(resumed, output.index, 0, is_delta=True)
        num_calls = self._parsers[output.index].num_calls
        return self._parse(output.index, output.text, output.finish_reason), num_calls

    def _chunk_choice(
        self, output: GenerationOutput, parsed: Parsed, num_calls: int
    ) -> ChatChunkChoice | None:
        """Format what an output adds to its choice; None if it adds nothing that clients see.

        Args:
            num_calls: number of the choice's calls before this output.
        """
        delta = Delta(
            content=parsed.content or None,
            reasoning=(self._request.include_reasoning and parsed.reasoning) or None,
            tool_calls=self._tool_calls(parsed, output.index, num_calls, is_delta=True),
        )
        finish_reason = self._finish_reason(output, self._parsers[output.index])
        logprobs = output.logprobs if self._request.logprobs else None
        if delta == _EMPTY_DELTA and finish_reason is None and not self._with_ids and not logprobs:
            return None
        return ChatChunkChoice(
            index=output.index,
            delta=delta,
            finish_reason=finish_reason,
            stop_reason=output.stop_reason,
            logprobs=self._logprobs.chat(logprobs) if logprobs else None,
            token_ids=output.token_ids if self._with_ids else None,
        )

    def chunk(self, choices: list[ChatChunkChoice], usage: Usage | None = None) -> ChatCompletionChunk:
        return ChatCompletionChunk(
            id=self._id, created=self._created, model=self._model, choices=choices, usage=usage
        )

    def response(self, outputs: Sequence[GenerationOutput]) -> ChatCompletion:
        request = self._request
        prompt_logprobs = None
        if request.prompt_logprobs is not None:
            prompt_logprobs = self._logprobs.prompt(outputs[0].prompt_logprobs or [])
        return ChatCompletion(
            id=self._id,
            created=int(time.time()),
            model=self._model,
            choices=[self._choice(output) for output in outputs],
            usage=usage_of(outputs, len(outputs), self.num_reasoning_tokens),
            prompt_token_ids=self._prompt.token_ids if request.return_token_ids else None,
            prompt_text=UNSET if self._prompt.text is None else self._prompt.text,
            prompt_logprobs=prompt_logprobs,
        )

    def _choice(self, output: GenerationOutput) -> ChatChoice:
        """Format a complete choice."""
        request, parser = self._request, self._parsers[output.index]
        self._counters[output.index].add(output.token_ids)
        parsed = self._parse(output.index, output.text, output.finish_reason or "stop")
        calls = self._tool_calls(parsed, output.index, 0, is_delta=False)
        content = self._echoed + parsed.content
        message = ResponseMessage(
            role="assistant",
            content=content if content or not calls else None,
            refusal=None,
            annotations=(),
            reasoning=(self._request.include_reasoning and parsed.reasoning) or None,
            tool_calls=calls,
        )
        return ChatChoice(
            index=output.index,
            message=message,
            finish_reason=self._finish_reason(output, parser),
            stop_reason=output.stop_reason,
            logprobs=self._logprobs.chat(output.logprobs) if request.logprobs else None,
            token_ids=output.token_ids if request.return_token_ids else None,
        )

    def _parse(self, choice: int, text: str, finish_reason: str | None = None) -> Parsed:
        """Parse more text of a choice, whose tokens are counted."""
        parser, counter = self._parsers[choice], self._counters[choice]
        is_last = finish_reason is not None
        parsed = parser.feed(text, is_last, is_finished=finish_reason == "stop")
        if is_last and self._report_tools is not None:
            self._report_tools(parser.num_calls > 0)
        thoughts = self._thoughts[choice]
        if self._is_prose:
            thoughts += [parsed.reasoning] if parsed.reasoning else []
            if thoughts and (is_last or parsed.content or parsed.calls):
                counter.count = self._num_tokens(thoughts)
                thoughts.clear()
        elif self._call_ids and counter.is_open:
            thoughts.append(parsed.reasoning)
            if is_last and parser.num_calls:
                counter.end(self._num_tokens(thoughts))
        return parsed

    def _num_tokens(self, texts: list[str]) -> int:
        return len(self._tokenizer.encode("".join(texts), add_special_tokens=False).ids)

    def _tool_calls(self, parsed: Parsed, choice: int, first: int, *, is_delta: bool) -> tuple[ToolCall, ...]:
        """Format what was added to a choice's last call, and its next calls; without `parallel_tool_calls` only the
        first call counts, as in vLLM.

        Args:
            first: number of calls so far.
        """
        if not self._call_ids:
            return ()
        calls = parsed.calls
        if self._max_calls is not None:
            calls = calls[: max(0, self._max_calls - first)]
        continued: tuple[ToolCall, ...] = ()
        if parsed.arguments and (self._max_calls is None or first <= self._max_calls):
            continued = (ToolCall(index=first - 1, function=FunctionCall(arguments=parsed.arguments)),)
        return continued + tuple(
            ToolCall(
                id=self._call_ids[choice].add(number, call),
                type="function",
                index=number if is_delta else None,
                function=FunctionCall(name=call.name, arguments=call.arguments),
            )
            for number, call in enumerate(calls, first)
        )

    def _finish_reason(self, output: GenerationOutput, parser: ChatParser | HarmonyParser) -> str | None:
        """Return the finish reason. It stays `length` even after a tool call: the client must see that text is missing.
        After a call that the request named it is `stop`, as in OpenAI's API."""
        reason = output.finish_reason
        return "tool_calls" if reason == "stop" and parser.num_calls and not self._names_call else reason


def _last_answer(request: ChatCompletionRequest) -> str:
    """Return the text of the last message if it is the assistant's; an empty one otherwise."""
    last = request.messages[-1]
    if last.role != "assistant":
        return ""
    if isinstance(last.content, str):
        return last.content
    return "\n".join(part["text"] for part in last.content or () if isinstance(part.get("text"), str))


async def chat(
    serving: OpenAIServing, request: ChatCompletionRequest, request_id: str, size: int
) -> ChatCompletion:
    """Answer a chat with one response.

    Args:
        size: of the request's body, in bytes.
    """
    prompts, requests, chat_format = await _prepare(serving, request, request_id, size)
    return await whole_response(await serving.generate(prompts, requests, request), chat_format)


def chat_stream(
    serving: OpenAIServing,
    request: ChatCompletionRequest,
    request_id: str,
    size: int,
    *,
    resumable: bool = False,
    has_id_comments: bool = False,
    direct: DirectWriter | None = None,
) -> AsyncGenerator[bytes, None]:
    """Answer a chat with the events of a stream of chunks.

    Args:
        size: of the request's body, in bytes.
        resumable: the stream carries the token ids by which another engine can continue it.
        has_id_comments: it carries them in comments, unless the client asks for them in the chunks.
        direct: where events can be written while the stream is waited for.
    """
    has_id_comments = has_id_comments and not request.return_token_ids
    with_ids = resumable and not has_id_comments
    prepare = partial(_prepare, serving, request, request_id, size, with_ids=with_ids)
    return stream_choices(serving, request, prepare, has_id_comments=has_id_comments, direct=direct)


async def _prepare(
    serving: OpenAIServing,
    request: ChatCompletionRequest,
    request_id: str,
    size: int,
    *,
    with_ids: bool = False,
) -> Prepared[ChatChunkChoice, ChatCompletionChunk, ChatCompletion]:
    model, renderer = serving.check_model(request.model), serving.llm.renderer
    prompts, requests = await serving.prepare(
        lambda chat, images: [renderer.render_chat(chat, images)], request, size
    )
    chat_format = ChatFormat(
        renderer,
        request,
        request_id,
        model,
        prompts[0],
        request.n or 1,
        with_ids=with_ids,
        report_tools=serving.tool_report(request, "chat_completions", is_stream=bool(request.stream)),
    )
    return Prepared(prompts, requests, chat_format)


async def chat_batch(
    serving: OpenAIServing, request: BatchChatCompletionRequest, request_id: str, size: int
) -> ChatCompletion:
    """Answer a batch of chats.

    Args:
        size: of the request's body, in bytes.

    Raises:
        ApiError, EngineError: see `exchange.to_api_error`.
    """
    model = serving.check_model(request.model)
    renderer, chats = serving.llm.renderer, request.chats()

    def render(_: BatchChatCompletionRequest, images: ChatImages | None) -> list[TokenizedPrompt]:
        prompts = []
        for chat in chats:
            stop_if_abandoned()
            prompts.append(renderer.render_chat(chat, images))
        return prompts

    def formatted(prompts: Sequence[TokenizedPrompt], outputs: Sequence[GenerationOutput]) -> ChatCompletion:
        choices: list[ChatChoice] = []
        num_reasoning_tokens = 0
        for index, (chat, prompt, output) in enumerate(zip(chats, prompts, outputs, strict=True)):
            output.index = 0
            chat_format = ChatFormat(renderer, chat, request_id, model, prompt, 1)
            answer = chat_format.response([output])
            choices.append(msgspec.structs.replace(answer.choices[0], index=index))
            num_reasoning_tokens += chat_format.num_reasoning_tokens
        return msgspec.structs.replace(
            answer,
            choices=choices,
            usage=usage_of(outputs, 1, num_reasoning_tokens),
            prompt_token_ids=None,
            prompt_text=msgspec.UNSET,
        )

    prompts, requests = await serving.prepare(render, request, size)
    outputs = await serving.generate(prompts, requests, request)
    return await asyncio.to_thread(formatted, prompts, outputs)


def add_chat_routes(app: FastAPI, engine: Engine) -> Endpoint:
    """Add the routes to `app`; return the endpoint of single chats."""

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> WatchedResponse:
        raw = await read_body(request)
        body = decode_request("chat/completions", raw)
        assert isinstance(body, ChatCompletionRequest)
        check_resume(request, body)
        apply_flags(engine.options, body)
        context = context_of(engine, request, body)
        skipped = skipped_parts(body.messages)
        if "image_url" in skipped.content and engine.sees_images:
            del skipped.content["image_url"]
        report_skipped(engine, "chat_completions", skipped)
        if body.stream:
            chunks = chat_stream(
                context.serving,
                body,
                context.response_id,
                len(raw),
                direct=client_connection(request.scope),
                **resumption_of(request),
            )
            return stream_answer(engine, chunks, context.request_id, body)
        answer = chat(context.serving, body, context.response_id, len(raw))
        return json_answer(engine, answer, context.request_id, body, request)

    @app.post("/v1/chat/completions/batch")
    async def chat_completions_batch(request: Request) -> WatchedResponse:
        raw = await read_body(request)
        body = decode_batch_request(raw)
        apply_flags(engine.options, body)
        context = context_of(engine, request, body)
        answer = chat_batch(context.serving, body, context.response_id, len(raw))
        return json_answer(engine, answer, context.request_id, body)

    return chat_completions
