"""Prompts that training must never see: those of `newcomer_prompts.json`, compared by letters and digits alone."""

import json
import re
from functools import cache
from pathlib import Path

from .conversation import Conversation

_LIST = Path(__file__).parents[1] / "newcomer_prompts.json"
_OTHER = re.compile(r"[^a-z0-9]+")


def _plain(text: str) -> str:
    return _OTHER.sub(" ", text.lower()).strip()


@cache
def _prompts() -> dict[str, list[list[str]]]:
    """What the user says in each reserved prompt, by its last message."""
    found: dict[str, list[list[str]]] = {}
    for case in json.loads(_LIST.read_text()):
        said = [_plain(message) for message in case["messages"] if isinstance(message, str)]
        found.setdefault(said[-1], []).append(said)
    return found


def is_reserved(conversation: Conversation) -> bool:
    """Whether a conversation's user says, in a row, what the user of a reserved prompt says."""
    said = [_plain(m["content"]) for m in conversation.messages if m["role"] == "user"]
    return any(
        said[end - len(prompt) : end] == prompt
        for end in range(1, len(said) + 1)
        for prompt in _prompts().get(said[end - 1], ())
        if len(prompt) <= end
    )
