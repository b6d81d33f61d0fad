"""ResponseEvents: the output items of one response, and the events that tell of them, in OpenAI's order.

    response.created, in the background response.queued, and response.in_progress
    for each output item: response.output_item.added, then
        of a message: content_part.added, output_text.delta ..., output_text.done, content_part.done
        of reasoning: content_part.added, reasoning_text.delta ..., reasoning_text.done, content_part.done
        of a call: function_call_arguments.delta ..., function_call_arguments.done
        of a custom tool's call: custom_tool_call_input.delta ..., custom_tool_call_input.done
        of a search for tools: nothing
      and response.output_item.done
    response.completed, response.incomplete or response.failed

A whole answer is made by the same calls as a streamed one, so that both have the same items. Text is parsed as a
chat's, by the chat's own format. Only what changes from token to token is encoded for each token.

Invariant: `sequence_number` counts the events from 0.
"""

from __future__ import annotations

import json
import re
import time
from typing import Any, Final

import msgspec

from argosy_engine.api.endpoints.chat import ChatFormat
from argosy_engine.frontend.output_processor import GenerationOutput
from argosy_engine.frontend.tokenizer import Tokenizer
from argosy_protocol.errors import ApiError
from argosy_protocol.json_limits import is_too_deep
from argosy_protocol.openai import Delta, TokenLogprob, ToolCall
from argosy_protocol.responses import (
    ID_PREFIX,
    CallItem,
    CustomToolCallItem,
    FunctionCallItem,
    IncompleteDetails,
    InputTokensDetails,
    ItemStatus,
    OutputItem,
    OutputMessage,
    OutputText,
    RawMessage,
    ReasoningItem,
    ReasoningText,
    ReasoningTokensDetails,
    ResponseFailure,
    ResponseObject,
    ResponseUsage,
    ToolSearchCallItem,
)
from argosy_protocol.responses_chat import CUSTOM_ARGUMENT, ResponseTools

_HEAD: Final = re.compile(rf'\s*\{{\s*"{CUSTOM_ARGUMENT}"\s*:\s*"')

_BEGINNING: Final = f'{{"{CUSTOM_ARGUMENT}":'

_PLAIN: Final = re.compile(r'[^"\\]+')

_ESCAPES: Final = {
    '"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t",
}  # fmt: skip

_CODE: Final = re.compile(r"[0-9a-fA-F]{4}")

_HALF: Final = re.compile("[\ud800-\udfff]")

_MAX_HEAD: Final = 256
"""Characters before the text; more are read when the call has ended."""

_REPLACEMENT: Final = "\ufffd"
"""In place of half a surrogate pair."""


_encode = msgspec.json.encode

_decode_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode

_replace = msgspec.structs.replace

_MESSAGE, _REASONING, _CALL = "message", "reasoning", "function_call"

_PREFIXES = {_MESSAGE: "msg", _REASONING: "rs"}

_CALL_PREFIXES = {"function": "fc", "custom": "ctc", "tool_search": "tsc"}

_NO_ARGUMENTS = msgspec.Raw(b"{}")

_TEXT_EVENTS = {_MESSAGE: "output_text", _REASONING: "reasoning_text"}

_NO_LOGPROBS = b"[]"

_DEPTH_OF_ITEMS = 8
"""More than the levels in which requests and answers have an item."""

_ERROR_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
"""OpenAI's codes by status; every other failure is a `server_error`."""


class RawMessages:
    """Prompt and output as the model reads and writes them, for requests that ask to see them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.output_ids: list[int] = []

    def message(self, token_ids: list[int]) -> RawMessage:
        return RawMessage(
            message=self._tokenizer.decode(token_ids, skip_special_tokens=False), tokens=token_ids
        )


class ResponseEvents:
    """
    Args:
        chat_format: parses the text.
        begun: the response without output.
        tools: which tools the chat's functions stand for.
        raw: collects the output as tokens, if the request asks for them.
    """

    def __init__(
        self,
        chat_format: ChatFormat,
        begun: ResponseObject,
        tools: ResponseTools,
        raw: RawMessages | None = None,
    ) -> None:
        self._raw = raw
        self._tools = tools
        self._chat_format = chat_format
        self.response = begun
        """The response as of the last event that shows it whole."""
        self._owner = begun.id.removeprefix(ID_PREFIX)
        self._number = 0
        self._items: list[OutputItem] = []
        self._open: str | None = None
        self._id = ""
        """Id of the last item."""
        self._call: CallItem | None = None
        """The open call, without its arguments."""
        self._custom_input = CustomToolInput()
        """That of the open call, if it is a custom tool's."""
        self._head = b""
        """A delta of the open item up to its sequence number."""
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        """Those of the open message's text."""
        self._waiting: list[TokenLogprob] = []
        """Those of tokens whose text has not come yet."""
        self._num_unshown = 0
        """How many of these, the last ones, the engine has shown no text of."""
        self._was_reasoning = chat_format.is_reasoning

    @property
    def is_over(self) -> bool:
        """Whether the response has ended."""
        return self.response.status not in ("queued", "in_progress")

    def begin(self) -> list[bytes]:
        """Let the response be in progress, and return the first events."""
        events = [self._state("created")]
        if self.response.status == "queued":
            events.append(self._state("queued"))
            self.response = _replace(self.response, status="in_progress")
        return [*events, self._state("in_progress")]

    def of(self, output: GenerationOutput) -> list[bytes]:
        """Return the events that an output adds, each with the blank line after it; after the last output the response
        is over."""
        events: list[bytes] = []
        if self._raw is not None:
            self._raw.output_ids += output.token_ids
        choice = self._chat_format.delta(output)
        delta = Delta() if choice is None else choice.delta
        entries = choice.logprobs.content if choice is not None and choice.logprobs is not None else []
        self._wait_for_text(entries, delta)
        self._num_unshown = output.num_unshown
        calls = delta.tool_calls
        if calls and calls[0].id is None:
            self._add_arguments(events, calls[0].function.arguments)
            calls = calls[1:]
        if delta.reasoning:
            self._add(events, _REASONING, delta.reasoning)
        if delta.content:
            self._add(events, _MESSAGE, delta.content)
        for call in calls:
            self._add_call(events, call)
        if output.finish_reason is not None:
            self._end(events, output)
        return events

    def failed(self, error: ApiError) -> list[bytes]:
        """End the response by an error, and return the events."""
        events = [] if self._number else self.begin()
        self._close(events, "incomplete")
        failure = ResponseFailure(_ERROR_CODES.get(error.http_status, "server_error"), error.message)
        self.response = _replace(self.response, status="failed", error=failure, output=self._items)
        return [*events, self._state("failed")]

    def cancelled(self) -> ResponseObject:
        """End the response because its client wants no more of it; no event tells of that."""
        self._close([], "incomplete")
        self.response = _replace(self.response, status="cancelled", output=self._items)
        return self.response

    def _wait_for_text(self, entries: list[TokenLogprob], delta: Delta) -> None:
        """Keep the log probabilities of tokens that belong to a message's text, perhaps to that of a later output."""
        was_reasoning, self._was_reasoning = self._was_reasoning, self._chat_format.is_reasoning
        if delta.reasoning or delta.tool_calls or was_reasoning or self._was_reasoning:
            self._waiting = []
        if not (was_reasoning or self._was_reasoning):
            self._waiting += entries

    def _add(self, events: list[bytes], kind: str, text: str) -> None:
        if self._open != kind:
            self._begin(events, kind)
        logprobs = _NO_LOGPROBS
        if kind == _MESSAGE and (shown := self._shown()):
            self._logprobs += shown
            logprobs = _encode(shown)
        self._texts.append(text)
        head, number, self._number = self._head, self._number, self._number + 1
        if kind == _MESSAGE:
            events.append(b'%b%d,"logprobs":%b,"delta":%b}\n\n' % (head, number, logprobs, _encode(text)))
        else:
            events.append(b'%b%d,"delta":%b}\n\n' % (head, number, _encode(text)))

    def _shown(self) -> list[TokenLogprob]:
        """Take the log probabilities of the tokens whose text has come."""
        num_shown = max(len(self._waiting) - self._num_unshown, 0)
        shown, self._waiting = self._waiting[:num_shown], self._waiting[num_shown:]
        return shown

    def _begin(self, events: list[bytes], kind: str) -> None:
        self._close(events, "completed")
        self._open, self._texts, self._logprobs = kind, [], []
        self._id = self._next_id(_PREFIXES[kind])
        self._head = (
            b'event: response.%b.delta\ndata: {"type":"response.%b.delta","item_id":"%b","output_index":%d,'
            b'"content_index":0,"sequence_number":'
        ) % (_TEXT_EVENTS[kind].encode(), _TEXT_EVENTS[kind].encode(), self._id.encode(), len(self._items))
        item = self._text_item("in_progress")
        part = item.content[0]
        events.append(self._item_event("added", _replace(item, content=[])))
        events.append(self._event("content_part.added", content_index=0, part=part))

    def _add_call(self, events: list[bytes], call: ToolCall) -> None:
        """Add a call as an item of its own, which is open while its arguments may go on."""
        self._close(events, "completed")
        tool = self._tools.called(call.function.name or "")
        self._open, self._texts, self._id = _CALL, [], self._next_id(_CALL_PREFIXES[tool.kind])
        fields: dict[str, Any] = {"id": self._id, "status": "in_progress", "call_id": call.id or ""}
        if tool.namespace is not None:
            fields["namespace"] = tool.namespace
        match tool.kind:
            case "function":
                self._call = FunctionCallItem(name=tool.name, arguments="", **fields)
            case "custom":
                self._call = CustomToolCallItem(name=tool.name, input="", **fields)
                self._custom_input = CustomToolInput()
            case "tool_search":
                self._call = ToolSearchCallItem(arguments=_NO_ARGUMENTS, **fields)
        events.append(self._item_event("added", self._call))
        if call.function.arguments:
            self._add_arguments(events, call.function.arguments)

    def _add_arguments(self, events: list[bytes], arguments: str) -> None:
        self._texts.append(arguments)
        if isinstance(self._call, FunctionCallItem):
            events.append(self._event("function_call_arguments.delta", delta=arguments))
        elif isinstance(self._call, CustomToolCallItem):
            self._add_input(events, self._custom_input.feed(arguments))

    def _add_input(self, events: list[bytes], text: str) -> None:
        if text:
            events.append(self._event("custom_tool_call_input.delta", delta=text))

    def _close(self, events: list[bytes], status: ItemStatus) -> None:
        """End the open item."""
        if self._open is None:
            return
        item: OutputItem
        if self._call is not None:
            item = self._ended_call(events, self._call, status)
        else:
            item = self._text_item(status)
            part = item.content[0]
            done = {"content_index": 0, "text": part.text}
            if isinstance(part, OutputText):
                done["logprobs"] = part.logprobs
            events.append(self._event(f"{_TEXT_EVENTS[self._open]}.done", **done))
            events.append(self._event("content_part.done", content_index=0, part=part))
        events.append(self._item_event("done", item))
        self._items.append(item)
        self._open = self._call = None

    def _ended_call(self, events: list[bytes], call: CallItem, status: ItemStatus) -> CallItem:
        """Return the open call with its arguments, which count as complete if they are."""
        arguments = "".join(self._texts)
        is_whole = _is_object(arguments)
        if is_whole:
            status = "completed"
        if isinstance(call, FunctionCallItem):
            events.append(self._event("function_call_arguments.done", name=call.name, arguments=arguments))
            return _replace(call, status=status, arguments=arguments)
        if isinstance(call, CustomToolCallItem):
            self._add_input(events, self._custom_input.end())
            text = self._custom_input.text
            events.append(self._event("custom_tool_call_input.done", input=text))
            return _replace(call, status=status, input=text)
        return _replace(call, status=status, arguments=_searched(arguments) if is_whole else _NO_ARGUMENTS)

    def _end(self, events: list[bytes], output: GenerationOutput) -> None:
        is_cut = output.finish_reason == "length"
        if self._raw is not None:
            shown = [self._raw.message(self._raw.output_ids)]
            self.response = _replace(self.response, output_messages=shown)
        if self._open == _MESSAGE:
            self._logprobs += self._shown()  # of tokens without a text, such as a part of a character
        self._close(events, "incomplete" if is_cut else "completed")
        self.response = _replace(
            self.response,
            status="incomplete" if is_cut else "completed",
            completed_at=None if is_cut else int(time.time()),
            incomplete_details=IncompleteDetails("max_output_tokens") if is_cut else None,
            output=self._items,
            usage=self._usage(output),
        )
        events.append(self._state(self.response.status))

    def _usage(self, output: GenerationOutput) -> ResponseUsage:
        return ResponseUsage(
            input_tokens=output.num_prompt_tokens,
            input_tokens_details=InputTokensDetails(output.num_cached_tokens),
            output_tokens=output.num_output_tokens,
            output_tokens_details=ReasoningTokensDetails(self._chat_format.num_reasoning_tokens),
            total_tokens=output.num_prompt_tokens + output.num_output_tokens,
        )

    def _text_item(self, status: ItemStatus) -> OutputMessage | ReasoningItem:
        """Return the open message or reasoning as it is by now."""
        text = "".join(self._texts)
        if self._open == _REASONING:
            return ReasoningItem(id=self._id, status=status, content=[ReasoningText(text)])
        content = OutputText(text=text, logprobs=self._logprobs)
        return OutputMessage(id=self._id, status=status, content=[content])

    def _next_id(self, prefix: str) -> str:
        return f"{prefix}_{self._owner}_{len(self._items)}"

    def _state(self, kind: str) -> bytes:
        return self._numbered(kind, {"response": self.response})

    def _item_event(self, kind: str, item: OutputItem) -> bytes:
        return self._numbered(f"output_item.{kind}", {"output_index": len(self._items), "item": item})

    def _event(self, kind: str, **fields: Any) -> bytes:
        """Return an event about the last item."""
        return self._numbered(kind, {"item_id": self._id, "output_index": len(self._items), **fields})

    def _numbered(self, kind: str, fields: dict[str, Any]) -> bytes:
        kind = f"response.{kind}"
        number, self._number = self._number, self._number + 1
        data = _encode({"type": kind, "sequence_number": number, **fields})
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


def _is_object(arguments: str) -> bool:
    try:
        _decode_object(arguments)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return False
    return True


def _searched(arguments: str) -> msgspec.Raw:
    """Return the arguments of a search on one line, as events have them; none if a request that replays them would be
    refused for them."""
    raw = arguments.encode()
    try:
        msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError):  # a number that is out of range
        return _NO_ARGUMENTS
    if is_too_deep(b"[" * _DEPTH_OF_ITEMS + raw + b"]" * _DEPTH_OF_ITEMS):
        return _NO_ARGUMENTS
    return msgspec.Raw(msgspec.json.format(raw, indent=-1))


class CustomToolInput:
    """The text that a model gives a custom tool in one call, read from a function's arguments while it writes them.

    The function has one argument, `input`, a text (`responses_chat`). So its characters are those of a JSON string,
    which is read piece by piece. A model may write something else: then the text comes when the call has ended.

    Invariant: the text is the pieces joined, however the arguments were cut, and it can be encoded as UTF-8.
    """

    def __init__(self) -> None:
        self._arguments: list[str] = []
        self._pending = ""
        """What is not read yet: the head, or the beginning of an escape."""
        self._state = "head"
        self._high: str | None = None
        """The first half of a surrogate pair."""
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._pieces)

    def feed(self, arguments: str) -> str:
        """Return what more of the arguments adds to the text."""
        if self._state == "over":
            return ""
        self._pending += arguments
        if self._state != "text":
            self._arguments.append(arguments)
        if self._state == "head":
            self._read_head()
        return self._kept(self._read_text()) if self._state == "text" else ""

    def end(self) -> str:
        """Return what the text ends with, once there are no more arguments."""
        if self._state == "text":
            rest = self._half()  # an escape that was cut off is no part of it
        elif self._state == "over":
            rest = ""
        else:
            rest = _text_of("".join(self._arguments))
        self._state = "over"
        return self._kept(rest)

    def _kept(self, text: str) -> str:
        if text:
            self._pieces.append(text)
        return text

    def _read_head(self) -> None:
        head = _HEAD.match(self._pending)
        if head is not None:
            self._state, self._pending = "text", self._pending[head.end() :]
            self._arguments.clear()
        elif len(self._pending) > _MAX_HEAD:
            self._state, self._pending = "unread", ""

    def _read_text(self) -> str:
        """Read the text as far as it is certain; what follows its end is ignored."""
        given, at, made = self._pending, 0, []
        while at < len(given):
            plain = _PLAIN.match(given, at)
            if plain is not None:
                made.append(self._half() + _encodable(plain[0]))
                at = plain.end()
            elif given[at] == '"':
                made.append(self._half())
                self._state, at = "over", len(given)
            else:
                length = 6 if given.startswith("u", at + 1) else 2
                if len(given) < at + length and not _is_no_code(given[at + 2 :], length):
                    break
                at += self._read_escape(given, at, made)
        self._pending = given[at:]
        return "".join(made)

    def _read_escape(self, given: str, at: int, made: list[str]) -> int:
        """Read an escape, and return its length; one that JSON does not have stands for itself."""
        code = _CODE.match(given, at + 2) if given[at + 1] == "u" else None
        if code is None:
            sign = given[at + 1]
            made.append(self._half() + _ESCAPES.get(sign, f"\\{sign}"))
            return 2
        sign = chr(int(code[0], 16))
        if "\ud800" <= sign <= "\udbff":
            made.append(self._half())
            self._high = sign
        elif "\udc00" <= sign <= "\udfff":
            high, self._high = self._high, None
            pair = None if high is None else (high + sign).encode("utf-16", "surrogatepass").decode("utf-16")
            made.append(pair or _REPLACEMENT)
        else:
            made.append(self._half() + sign)
        return 6

    def _half(self) -> str:
        """Return what stands for a first half that no second one follows."""
        high, self._high = self._high, None
        return "" if high is None else _REPLACEMENT


def _is_no_code(rest: str, length: int) -> bool:
    """Whether the characters of an escape that is not whole yet cannot be those of a code."""
    return length == 6 and re.fullmatch(r"[0-9a-fA-F]*", rest) is None


def _encodable(text: str) -> str:
    return _HALF.sub(_REPLACEMENT, text)


def _text_of(arguments: str) -> str:
    """Return the input that arguments of any form give: the argument `input`, else the only text, else all of it; none
    if they were cut off before the text."""
    if len(arguments) <= _MAX_HEAD and _BEGINNING.startswith("".join(arguments.split())):
        return ""
    try:
        given: Any = json.loads(arguments)
    except (ValueError, RecursionError):
        return _encodable(arguments)
    if isinstance(given, dict):
        if isinstance(given.get(CUSTOM_ARGUMENT), str):
            given = given[CUSTOM_ARGUMENT]
        elif len(given) == 1 and isinstance(only := next(iter(given.values())), str):
            given = only
    return _encodable(given if isinstance(given, str) else arguments)
