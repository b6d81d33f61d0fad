"""Conversations as text with a loss weight per span; produces the same text as the chat template.

Invariant (tested): the concatenated spans of a conversation that is not dense equal what
`chat_template.jinja` makes of its messages.
"""

import json
from typing import Any, NamedTuple

from .conversation import Conversation, Message

PROMPT_WEIGHT = 0.1
IM_START, IM_END = "<|im_start|>", "<|im_end|>"

DECISION_WEIGHT = 6.0
"""Of a reply's first token where tools are offered: it decides between a call and an answer."""


class Span(NamedTuple):
    """Text and the loss weight of its tokens."""

    text: str
    weight: float
    first: float | None = None
    """Weight of the first token, where it differs."""


_TOOLS_HEAD = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
_TOOLS_TAIL = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def reply_text(message: Message) -> str:
    """The assistant's visible text: content, then its tool calls."""
    parts = [message["content"]] if message["content"] else []
    for call in message.get("tool_calls", ()):
        function = call["function"]
        parts.append(
            f'<tool_call>\n{{"name": "{function["name"]}", "arguments": {_json(function["arguments"])}}}\n</tool_call>'
        )
    return "\n".join(parts)


def _head(conversation: Conversation) -> str:
    first = conversation.messages[0]
    system = first["content"] if first["role"] == "system" else ""
    if conversation.tools:
        tools = "".join("\n" + _json(tool) for tool in conversation.tools)
        lead = system + "\n\n" if system else ""
        return f"{IM_START}system\n{lead}{_TOOLS_HEAD}{tools}{_TOOLS_TAIL}{IM_END}\n"
    return f"{IM_START}system\n{system}{IM_END}\n" if system else ""


def _block(message: Message) -> tuple[str, bool]:
    thought = message.get("reasoning_content", "")
    return f"<think>\n{thought}\n</think>\n\n", bool(thought)


def spans(conversation: Conversation) -> list[Span]:
    """The whole conversation, final assistant turn (or, dense, every one) weighted 1."""
    messages = conversation.messages
    made: list[Span] = []
    head = _head(conversation)
    if head:
        made.append(Span(head, PROMPT_WEIGHT))
    last_query = max(i for i, m in enumerate(messages) if m["role"] == "user")
    for index, message in enumerate(messages):
        role = message["role"]
        if role == "user":
            made.append(Span(f"{IM_START}user\n{message['content']}{IM_END}\n", PROMPT_WEIGHT))
        elif role == "tool":
            opens = messages[index - 1]["role"] != "tool"
            closes = messages[index + 1]["role"] != "tool"
            text = f"\n<tool_response>\n{message['content']}\n</tool_response>"
            made.append(Span(f"{IM_START}user{text}" if opens else text, PROMPT_WEIGHT))
            if closes:
                made.append(Span(f"{IM_END}\n", PROMPT_WEIGHT))
        elif role == "assistant":
            made.append(Span(f"{IM_START}assistant\n", PROMPT_WEIGHT))
            block, is_thinking = _block(message)
            is_last = index == len(messages) - 1
            shown = conversation.dense or is_last or (index > last_query and is_thinking)
            if shown:
                made.append(Span(block, 1.0 if is_thinking else 0.0))
            decides = conversation.tools and messages[index - 1]["role"] == "user"
            first = (DECISION_WEIGHT if decides else 1.0) if shown else 0.0
            if "pieces" in message:
                *parts, (last, weight) = message["pieces"]
                made += [Span(text, part) for text, part in parts]
                made.append(Span(last + IM_END, weight))
            else:
                made.append(Span(reply_text(message) + IM_END, 1.0, first))
            made.append(Span("\n", 0.0))
    return made
