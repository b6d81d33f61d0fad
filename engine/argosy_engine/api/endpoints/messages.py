"""Anthropic's /v1/messages and /v1/messages/count_tokens: Messages requests answered as the chats that they stand for.

The chat (`argosy_protocol.anthropic`) is rendered, generated and parsed as any other; here is what a message says
otherwise: its blocks, the reason why it ended, its usage, and the order of its events. Errors about the chat are named
by `name_field` of that module, where they become responses.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, Final

import msgspec
from fastapi import FastAPI, Request

from argosy_engine.api.endpoints.chat import ChatFormat
from argosy_engine.api.endpoints.choice_stream import formatted, token_id_comment
from argosy_engine.api.endpoints.exchange import (
    add_unseen_images,
    check_resume,
    context_of,
    message_answer,
    message_stream_answer,
    report_skipped,
    request_id_of,
    resumption_of,
    serving_of,
)
from argosy_engine.api.http.http_responses import WatchedResponse, read_body
from argosy_engine.api.served_engine import Engine, OpenAIServing
from argosy_engine.frontend.output_processor import GenerationOutput
from argosy_engine.frontend.renderer import Renderer, TokenizedPrompt
from argosy_engine.messages import EngineCoreRequest
from argosy_protocol.anthropic import (
    MESSAGE_STOP,
    Message,
    MessagesRequest,
    MessageUsage,
    OutputTokensDetails,
    ResumedMessage,
    TextBlock,
    ThinkingBlock,
    TokenCount,
    ToolUseBlock,
    as_chat,
    decode_count_tokens_request,
    decode_messages_request,
)
from argosy_protocol.json_limits import is_too_deep
from argosy_protocol.openai import ChatCompletionRequest, Delta, ToolCall
from argosy_protocol.skipped_content import MESSAGES_KINDS, Skipped

SIGNATURE = "unsigned"
"""Signature of thinking blocks. Anthropic's server verifies its own; ours reads every block, and clients refuse to send
one back that has none."""

_decode_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_NO_ARGUMENTS: Final = msgspec.Raw(b"{}")
_NO_DELTA = Delta()


class MessageFormat:
    """
    Args:
        model: the name to answer with.
        max_tokens: as the client asked; `chat` has no more than the prompt leaves room for.
        report_tools: as a `ChatFormat`'s.
    """

    def __init__(
        self,
        renderer: Renderer,
        chat: ChatCompletionRequest,
        request_id: str,
        model: str,
        prompt: TokenizedPrompt,
        max_tokens: int | None,
        report_tools: Callable[[bool], None] | None = None,
    ) -> None:
        self._chat_format = ChatFormat(
            renderer, chat, request_id, model, prompt, 1, report_tools=report_tools
        )
        self._id = f"msg_{request_id}"
        self._model = model
        self._max_tokens = max_tokens or 0

    def delta(self, output: GenerationOutput) -> Delta:
        """Return what an output adds to the message: reasoning, content and calls."""
        choice = self._chat_format.delta(output)
        return _NO_DELTA if choice is None else choice.delta

    def beginning(self, output: GenerationOutput) -> Message:
        """Return the message without content, as a stream begins with it; `output` is the first one."""
        return Message(
            id=self._id, model=self._model, content=[], usage=self.usage(output, num_output_tokens=0)
        )

    def message(self, output: GenerationOutput) -> Message:
        """Format a complete output."""
        answer = self._chat_format.response([output]).choices[0].message
        content: list[TextBlock | ThinkingBlock | ToolUseBlock] = []
        if answer.reasoning:
            content.append(ThinkingBlock(answer.reasoning, SIGNATURE))
        if answer.content:
            content.append(TextBlock(answer.content))
        for call in answer.tool_calls:
            function = call.function
            content.append(ToolUseBlock(call.id or "", function.name or "", _object(function.arguments)))
        stop_reason, stop_sequence = self.stop(output)
        return Message(
            id=self._id,
            model=self._model,
            content=content,
            stop_reason=stop_reason,
            stop_sequence=stop_sequence,
            usage=self.usage(output, output.num_output_tokens),
        )

    def stop(self, output: GenerationOutput) -> tuple[str, str | None]:
        """Return why the message ended with `output`, and the stop sequence that ended it."""
        if output.finish_reason == "length":
            is_asked = output.num_output_tokens >= self._max_tokens
            return ("max_tokens" if is_asked else "model_context_window_exceeded"), None
        if isinstance(output.stop_reason, str):
            return "stop_sequence", output.stop_reason
        return ("tool_use" if self._chat_format.num_calls else "end_turn"), None

    def usage(self, output: GenerationOutput, num_output_tokens: int) -> MessageUsage:
        """Return the usage up to `output`."""
        num_cached = output.num_cached_tokens
        return MessageUsage(
            input_tokens=output.num_prompt_tokens - num_cached,
            cache_read_input_tokens=num_cached,
            output_tokens=num_output_tokens,
            output_tokens_details=OutputTokensDetails(self._chat_format.num_reasoning_tokens),
        )


def _object(arguments: str) -> msgspec.Raw:
    """Return a call's arguments as a JSON object, as the model wrote it; empty if it is none, or nested deeper than a
    request may be."""
    try:
        text = arguments.encode()
        if is_too_deep(text):
            return _NO_ARGUMENTS
        _decode_object(text)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return _NO_ARGUMENTS
    return msgspec.Raw(text)


_PING = b'event: ping\ndata: {"type":"ping"}'
_MESSAGE_START = b'event: message_start\ndata: {"type":"message_start","message":%b}'
_START = b'event: content_block_start\ndata: {"type":"content_block_start","index":%d,"content_block":%b}'
_DELTA = (
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":'
)
_STOP = b'event: content_block_stop\ndata: {"type":"content_block_stop","index":%d}'
_END = (
    b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"%b","stop_sequence":%b},'
    b'"usage":%b}'
)

_encode = msgspec.json.encode
_TEXT, _THINKING, _TOOL_USE = "text", "thinking", "tool_use"
_EMPTY = {_TEXT: b'{"type":"text","text":""}', _THINKING: b'{"type":"thinking","thinking":"","signature":""}'}
_DELTAS = {
    _TEXT: (b"text_delta", b"text"),
    _THINKING: (b"thinking_delta", b"thinking"),
    _TOOL_USE: (b"input_json_delta", b"partial_json"),
}


class MessageEvents:
    """The events of a streamed message, in Anthropic's order.

        message_start, then for each content block content_block_start, its deltas and content_block_stop, at last
        message_delta with stop_reason and usage, and message_stop. One ping follows the first content_block_start.

    The events of one output are made together, as bytes. Which tokens they stand for comes with the last one of them;
    so a router that has only some of them knows that it cannot let another engine continue, except after message_delta,
    when nothing is missing but message_stop.

    Invariant: the text of blocks is a function of the token ids and the request. A resumed stream goes on in the block
    that the client has open.

    Args:
        resume: the part that the client has; None for a stream that begins.
    """

    def __init__(self, message_format: MessageFormat, resume: ResumedMessage | None = None) -> None:
        self._format = message_format
        self._has_begun = resume is not None
        self._num_blocks = 0 if resume is None else resume.num_blocks
        self._open: str | None = None
        self._delta = b""
        """A delta of the open block up to its text: in most events only the text is new."""
        if resume is not None and resume.open_block is not None:
            self._set_open(resume.open_block)

    def of(self, output: GenerationOutput) -> list[bytes]:
        """Return the events that an output adds, each without the blank line after it."""
        events: list[bytes] = []
        if not self._has_begun:
            self._has_begun = True
            events.append(_MESSAGE_START % _encode(self._format.beginning(output)))
        delta = self._format.delta(output)
        calls = delta.tool_calls
        if calls and calls[0].id is None:
            events.append(b"%b%b}}" % (self._delta, _encode(calls[0].function.arguments)))
            calls = calls[1:]
        if delta.reasoning:
            self._add(events, _THINKING, delta.reasoning)
        if delta.content:
            self._add(events, _TEXT, delta.content)
        for call in calls:
            self._add_call(events, call)
        if output.finish_reason is not None:
            self._close(events)
            reason, sequence = self._format.stop(output)
            usage = self._format.usage(output, output.num_output_tokens)
            events.append(_END % (reason.encode(), _encode(sequence), _encode(usage)))
            events.append(MESSAGE_STOP.removesuffix(b"\n\n"))
        return events

    def _add(self, events: list[bytes], kind: str, text: str) -> None:
        if self._open != kind:
            self._begin(events, kind, _EMPTY[kind])
        events.append(b"%b%b}}" % (self._delta, _encode(text)))

    def _add_call(self, events: list[bytes], call: ToolCall) -> None:
        """Add a call as a block of its own, which is open while its arguments may go on."""
        block: dict[str, Any] = {"type": _TOOL_USE, "id": call.id, "name": call.function.name, "input": {}}
        self._begin(events, _TOOL_USE, _encode(block))
        if call.function.arguments:
            events.append(b"%b%b}}" % (self._delta, _encode(call.function.arguments)))

    def _begin(self, events: list[bytes], kind: str, block: bytes) -> None:
        self._close(events)
        events.append(_START % (self._num_blocks, block))
        self._num_blocks += 1
        if self._num_blocks == 1:
            events.append(_PING)
        self._set_open(kind)

    def _set_open(self, kind: str) -> None:
        self._open = kind
        self._delta = _DELTA % (self._num_blocks - 1, *_DELTAS[kind])

    def _close(self, events: list[bytes]) -> None:
        if self._open is None:
            return
        index = self._num_blocks - 1
        if self._open == _THINKING:
            signature = _DELTA % (index, b"signature_delta", b"signature")
            events.append(b"%b%b}}" % (signature, _encode(SIGNATURE)))
        events.append(_STOP % index)
        self._open = None


def with_id_comments(events: Sequence[bytes], token_ids: Sequence[int]) -> bytes:
    """Join the events of one output, each with a comment of the token ids that the client has with it; the comment
    alone if there are no events."""
    if not events:
        return token_id_comment(0, token_ids)
    part = token_id_comment(0, ())
    lines = [b"%b\n%b" % (part, event) for event in events[:-1]]
    lines.append(b"%b\n%b" % (token_id_comment(0, token_ids), events[-1]))
    return b"\n\n".join(lines)


async def create_message(
    serving: OpenAIServing, chat: ChatCompletionRequest, request_id: str, size: int
) -> Message:
    """Answer with one message.

    Args:
        chat: what the request stands for.
        size: of the request's body, in bytes.

    Raises:
        ApiError, EngineError: see `exchange.to_api_error`.
    """
    prompt, requests, answer = await _prepare(serving, chat, request_id, size, is_stream=False)
    (output,) = await serving.generate([prompt], requests, chat)
    return await formatted(len(output.token_ids), answer.message, output)


async def stream_message(
    serving: OpenAIServing,
    chat: ChatCompletionRequest,
    request: MessagesRequest,
    request_id: str,
    size: int,
    *,
    has_id_comments: bool = False,
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a message, those of one output together, without the last line end.

    Args:
        chat: what `request` stands for.
        size: of the request's body, in bytes.
        has_id_comments: the events carry the token ids by which another engine can continue the stream in comments.

    Raises:
        ApiError, EngineError: see `exchange.to_api_error`.
    """
    _, requests, answer = await _prepare(serving, chat, request_id, size, is_stream=True)
    events = MessageEvents(answer, request.resume)
    async with aclosing(serving.llm.generate(requests)) as stream:
        async for outputs in stream:
            for output in outputs:
                added = await formatted(len(output.token_ids), events.of, output)
                if has_id_comments:
                    yield with_id_comments(added, output.token_ids)
                elif added:
                    yield b"\n\n".join(added)


async def _prepare(
    serving: OpenAIServing, chat: ChatCompletionRequest, request_id: str, size: int, *, is_stream: bool
) -> tuple[TokenizedPrompt, list[EngineCoreRequest], MessageFormat]:
    model, max_tokens = serving.check_model(chat.model), chat.max_tokens
    prompt, requests = await serving.prepare_bounded_chat(chat, size)
    report = serving.tool_report(chat, "other", is_stream=is_stream)
    answer = MessageFormat(serving.llm.renderer, chat, request_id, model, prompt, max_tokens, report)
    return prompt, requests, answer


def add_message_routes(app: FastAPI, engine: Engine) -> None:
    """Add the routes to `app`."""

    @app.post("/v1/messages")
    async def messages(request: Request) -> WatchedResponse:
        raw = await read_body(request)
        body = decode_messages_request(raw)
        skipped = Skipped(MESSAGES_KINDS)
        chat = as_chat(body, skipped)
        add_unseen_images(engine, skipped, chat, "image")
        check_resume(request, chat)
        context = context_of(engine, request, chat)
        lines = report_skipped(engine, "messages", skipped)
        if body.stream:
            with_ids = resumption_of(request)["has_id_comments"]
            events = stream_message(
                context.serving, chat, body, context.response_id, len(raw), has_id_comments=with_ids
            )
            return message_stream_answer(engine, events, context.request_id, request.url.path, lines)
        answer = create_message(context.serving, chat, context.response_id, len(raw))
        return message_answer(engine, answer, context.request_id, request.url.path, lines)

    @app.post("/v1/messages/count_tokens")
    async def counted_tokens(request: Request) -> WatchedResponse:
        raw = await read_body(request)
        skipped = Skipped(MESSAGES_KINDS)
        chat = as_chat(decode_count_tokens_request(raw), skipped)
        add_unseen_images(engine, skipped, chat, "image")
        lines = report_skipped(engine, "messages", skipped)
        serving = serving_of(engine, request)

        async def answer() -> TokenCount:
            return TokenCount(await serving.count_tokens(chat, len(raw)))

        return message_answer(engine, answer(), request_id_of(request, None), request.url.path, lines)
