"""What of a request no model here reads: left out of the chat or replaced by a note, and counted by its kind.

Agents send their whole history with each request, blocks of other servers included, and what other models have answered
and tools have returned; one that is refused would end the session. So history is never refused for a block that is not
known; of a chat only the user's newest message is refused for one.

Invariant: there are few kinds, whatever clients send; any other counts as `other`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Struct

from argosy_protocol.openai import ChatMessage

_Read = TypeVar("_Read")

OTHER: Final = "other"
MAX_UNREADABLE: Final = 4096
"""Values of one request that turn out to be of another form; finding out takes microseconds for each."""
IMAGE_NOTE: Final = "[image that the model does not get]"
"""What a model that sees no images reads in place of one."""
OR_NOTE: Final = "or_note"
"""Field of an image in a chat that stands for a request of another API: a model that sees none gets the note, even in
the user's newest message."""

RESPONSES_KINDS: Final = frozenset(
    (
        *("additional_tools", "agent_message", "apply_patch_call", "apply_patch_call_output"),
        *(
            "code_interpreter_call",
            "compaction",
            "compaction_trigger",
            "computer_call",
            "computer_call_output",
        ),
        *(
            "configuration_update",
            "context_compaction",
            "computer_screenshot",
            "custom_tool_call_output",
            "file_search_call",
        ),
        *("function_call_output", "image_generation_call", "input_audio", "input_file", "input_image"),
        *("local_shell_call", "local_shell_call_output", "mcp_approval_request", "mcp_approval_response"),
        *("mcp_call", "mcp_list_tools", "program", "program_output", "reasoning", "shell_call"),
        *("shell_call_output", "tool", "tool_search_call", "tool_search_output", "web_search_call"),
    )
)
"""Items and content parts of /v1/responses that are skipped, perhaps in part; `tool` is one that came in an item."""
MESSAGES_KINDS: Final = frozenset(
    (
        *("advisor_tool_result", "bash_code_execution_tool_result", "browser_state"),
        *("code_execution_tool_result", "compaction", "container_upload", "document", "image"),
        *("mcp_tool_result", "mcp_tool_use", "search_result", "server_tool_use"),
        *("text_editor_code_execution_tool_result", "tool_reference", "tool_search_tool_result"),
        *("web_fetch_tool_result", "web_search_tool_result"),
    )
)
"""Content blocks of /v1/messages that are skipped, or of which a note says that they were."""
CHAT_KINDS: Final = frozenset(("audio", "file", "image_url", "input_audio", "video_url"))
"""Content parts of /v1/chat/completions."""
TOOL_KINDS: Final = frozenset(
    (
        *("advisor", "apply_patch", "bash", "code_execution", "code_interpreter", "computer"),
        *("computer_use_preview", "file_search", "image_generation", "local_shell", "mcp", "mcp_toolset"),
        *("memory", "programmatic_tool_calling", "shell", "str_replace_based_edit_tool"),
        *("text_editor", "tool_search", "tool_search_tool_bm25", "tool_search_tool_regex"),
        *("web_fetch", "web_search", "web_search_preview"),
    )
)
"""Tools that only the servers of OpenAI or Anthropic run, or only their models know."""

SKIPPED_KINDS: Final = {
    "chat_completions": CHAT_KINDS,
    "messages": MESSAGES_KINDS,
    "responses": RESPONSES_KINDS,
}
"""By API."""


FIELDS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
RAWS: Final = msgspec.json.Decoder(list[msgspec.Raw])


class _Typed(Struct):
    type: Any = None


_TYPE: Final = msgspec.json.Decoder(_Typed)


def can_decode(decoder: msgspec.json.Decoder[Any], value: msgspec.Raw) -> bool:
    """Whether a value is what a decoder takes."""
    try:
        decoder.decode(value)
    except msgspec.ValidationError:
        return False
    return True


def only_type(value: msgspec.Raw, read: Container[str]) -> msgspec.Raw | None:
    """Return an object with the type of `value` alone, in place of one of a kind that nobody here reads; None if it is
    one of those that are read, or has no type."""
    kind = _TYPE.decode(value).type
    if not isinstance(kind, str) or kind in read:
        return None
    return msgspec.Raw(msgspec.json.encode({"type": kind[:64] or "unknown"}))


class Skipped:
    """Collects what the translation of one request leaves out.

    Args:
        kinds: those that are counted by name.
    """

    def __init__(self, kinds: frozenset[str] = RESPONSES_KINDS) -> None:
        self._kinds = kinds
        self._num_unreadable = 0
        self.content: Counter[str] = Counter()
        """Blocks, items and parts of the history."""
        self.tools: Counter[str] = Counter()
        """Tools of the request that the model is not told of."""

    def add(self, kind: str, count: int = 1) -> None:
        if count:
            self.content[kind if kind in self._kinds else OTHER] += count

    def read(self, value: Any, kind: type[_Read], name: str) -> _Read | None:
        """Convert a value of the history; None if it is not of the kind, or too many were not, and it is skipped.

        Args:
            name: by which it counts then.
        """
        if self._num_unreadable < MAX_UNREADABLE:
            try:
                return msgspec.convert(value, kind)
            except msgspec.ValidationError:
                self._num_unreadable += 1
        self.add(name)
        return None

    def add_tool(self, kind: str) -> None:
        self.tools[kind if kind in TOOL_KINDS else OTHER] += 1

    @property
    def dropped_tools(self) -> str:
        """The kinds of the tools, as a header says them; empty without any."""
        return ", ".join(sorted(self.tools))


_NOTES: Final = {
    "audio": "[audio that the model does not get]",
    "file": "[file that the model does not get]",
    "image_url": IMAGE_NOTE,
    "input_audio": "[audio that the model does not get]",
    "video_url": "[video that the model does not get]",
}
_REPLAYED_ROLES: Final = frozenset(("assistant", "function", "tool"))


def newest_message(messages: Sequence[ChatMessage]) -> int:
    """Return the index of the user's last message; the number of messages if there is none."""
    for index in range(len(messages) - 1, -1, -1):
        if messages[index].role == "user":
            return index
    return len(messages)


def is_replayed(message: ChatMessage, index: int, newest: int) -> bool:
    """Whether a message is one that its client has from elsewhere, or has sent before.

    Args:
        newest: `newest_message`.
    """
    return index < newest or message.role in _REPLAYED_ROLES


def replayed_text(part: Mapping[str, Any]) -> str | None:
    """Return what a model reads of a part that is of no type `text`; None if nothing."""
    kind = part.get("type")
    refusal = part.get("refusal")
    if kind == "refusal" and isinstance(refusal, str):
        return refusal
    return _NOTES.get(kind) if isinstance(kind, str) else None


def image_part(url: str, detail: str | None = None, *, or_note: bool) -> dict[str, Any]:
    """Return a chat's part with an image.

    Args:
        or_note: see `OR_NOTE`.
    """
    image = {"url": url} | ({"detail": detail} if detail else {})
    return {"type": "image_url", "image_url": image} | ({OR_NOTE: True} if or_note else {})


def num_noted_images(messages: Sequence[ChatMessage]) -> int:
    """Return how many images of a chat leave a note if its model sees none."""
    contents = (message.content for message in messages if isinstance(message.content, list))
    return sum(part.get(OR_NOTE) is True for content in contents for part in content)


def skipped_parts(messages: Sequence[ChatMessage]) -> Skipped:
    """Return which parts of a chat's history its model does not get."""
    skipped = Skipped(CHAT_KINDS)
    newest = newest_message(messages)
    for index, message in enumerate(messages):
        if not isinstance(message.content, list) or not is_replayed(message, index, newest):
            continue
        for part in message.content:
            kind = part.get("type")
            if kind not in ("refusal", "text"):
                skipped.add(str(kind))
    return skipped
