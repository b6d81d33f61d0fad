"""What a training or test case is, and how prompts are phrased loosely.

Invariant: the reply (and the thought before it) depends on nothing but what the prompt holds.
"""

import hashlib
import random
from dataclasses import dataclass, field
from typing import Any

from . import words

Message = dict[str, Any]
"""An OpenAI-style message; assistant messages may carry `reasoning_content` and `tool_calls`."""

HELD_OUT_SHARE = 16
"""One in this many keys is never trained on."""


@dataclass(frozen=True)
class Turn:
    """One question that needs no history, and its only right answer."""

    kind: str
    user: str
    reply: str
    thought: str
    key: str = ""
    """What must be unseen for a case to count as held out; the user text when empty."""
    system: str = ""
    pieces: tuple[tuple[str, float], ...] = ()
    """The reply in parts with loss weights of their own, where they are not all 1."""


@dataclass(frozen=True)
class Conversation:
    """Messages ending in the assistant message that is trained and scored."""

    kind: str
    messages: list[Message]
    keys: list[str]
    thinking: bool = False
    tools: list[dict[str, Any]] = field(default_factory=list)
    dense: bool = False
    """Every assistant turn is a target and carries its own think block (unlike the chat template, which
    drops history's thoughts): more answers learned per token. Training only."""


def is_held_out(key: str) -> bool:
    """Whether a case with this key belongs to the test side of the split.

    A key must hold something drawn at random: a fixed reply as a key would never be learned.
    """
    return hashlib.blake2b(key.encode(), digest_size=4).digest()[0] % HELD_OUT_SHARE == 0


def answer(turn: Turn, thinking: bool) -> Message:
    """The assistant message of a turn."""
    message: Message = {"role": "assistant", "content": turn.reply}
    if turn.pieces:
        message["pieces"] = turn.pieces
    if thinking:
        message["reasoning_content"] = turn.thought
    return message


_OPENERS = (
    "Please ",
    "Hey, ",
    "Hi! ",
    "OK, ",
    "So, ",
    "Now ",
    "Well, ",
    "Quick question: ",
    "Hello. ",
    "Can you help? ",
)


def phrase(rng: random.Random, template: str, polite: bool = True) -> str:
    """A template with its casing, punctuation and politeness varied; `{fields}` are left alone."""
    if rng.random() < 0.22 and template[0] != "{" and not template.startswith("I "):
        template = template[0].lower() + template[1:]
    if rng.random() < 0.22 and template[-1] in ".?!":
        template = template[:-1]
    if rng.random() < 0.12:
        opener = rng.choice(_OPENERS)
        keep = template[0] == "{" or template.startswith("I ") or not opener.endswith((", ", "e ", "w "))
        template = opener + (template if keep else template[0].lower() + template[1:])
    if polite and rng.random() < 0.06 and template[-1] in ".?!":
        template += rng.choice((" Thanks!", " Thank you.", " Please.", " I need it now.", " Be brief."))
    return template


_SYSTEMS = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Answer briefly.",
    "You are Argosy, a tiny assistant.",
    "Answer in one short sentence.",
    "Be concise.",
    "You are a friendly chatbot.",
    "You are a careful and honest assistant.",
    "Help the user.",
    "You are an AI assistant that follows instructions exactly.",
    "Reply with the answer only.",
    "You are a customer service agent. Be polite.",
)


def system_prompt(rng: random.Random) -> str:
    """A system message, or an empty string (about half of the time)."""
    chance = rng.random()
    if chance < 0.5:
        return ""
    if chance < 0.85:
        return rng.choice(_SYSTEMS)
    if chance < 0.93:
        return f"You are {words.name(rng)}, a {words.english(rng)} assistant."
    return " ".join(words.sentence(rng) for _ in range(rng.randint(1, 3)))
