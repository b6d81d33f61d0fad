"""What a model that reads text gets of the content parts in a chat's history.

Clients send the whole conversation with each request, and so also what other models have answered and tools have
returned. A part of it that is no text leaves a note, or nothing; only the user's newest message is refused for one.

Must not know: templates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from argosy_protocol.openai import ChatMessage
from argosy_protocol.skipped_content import CHAT_KINDS, IMAGE_NOTE, Skipped

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
