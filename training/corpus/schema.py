"""Replies under a JSON schema: the grammar gives keys and opening quotes, the model gives values that end.

The prompt says nothing of the schema, as with an engine's structured outputs. So only values and what closes them are
taught; the text that a grammar forces has no weight.
"""

# ruff: noqa: E501, SIM905  (tables of words and phrasings read best so)

import random
from typing import Any

from . import arithmetic, facts, memory, records, small_talk, words
from .conversation import Turn
from .grammar import pick

_TEXTS = (
    "answer answer reply response text message content output description summary result explanation".split()
)
_NAMES = "name title city country color person place category topic subject author product language label food animal".split()
_COUNTS = "age count year score number price rating quantity confidence total id".split()
_FLAGS = "valid done active found ok correct is_open available".split()
UNKNOWN = "unknown"

_PREFACES = (
    "[||||Extract the [person|order|data|fields|record|facts]: |Parse this: |Read this: |Data: |Text: |Classify: |What does this say? |Structure this: ]{t}", "{t}[| | Extract it.| Extract the data.| Answer in JSON.| Give me the fields.|\\nJSON:]",
)  # fmt: skip


def _is_plain(text: str) -> bool:
    """Whether a text can stand in quotes, and does not touch them with marks that the tokenizer would join to them."""
    return (
        bool(text) and not set(text) & set('"\\\n') and text[0] not in "{}[]:, " and text[-1] not in "{}[]:, "
    )


def _invented(rng: random.Random) -> tuple[str, Any]:
    """A key that nothing in the prompt speaks of, and the value that says so."""
    kind = rng.random()
    if kind < 0.6:
        return rng.choice(
            (rng.choice(_NAMES), words.english(rng), f"{words.english(rng)}_{words.english(rng)}")
        ), UNKNOWN
    if kind < 0.8:
        return rng.choice((*_COUNTS, words.english(rng) + "_count")), 0
    if kind < 0.9:
        return rng.choice(_FLAGS), False
    return rng.choice(("tags", "items", "names", "list", "results", "steps")), []


def _asked(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """Any short prompt, its usual reply as a string, and perhaps keys it says nothing of."""
    while True:
        turn = rng.choice(
            (
                small_talk.sample,
                small_talk.sample,
                memory.one_message,
                arithmetic.single,
                lambda r: facts.sample(r, r.randint(1, 2)),
            )
        )(rng)
        if _is_plain(turn.reply) and not turn.system:
            break
    found: dict[str, Any] = {}
    if rng.random() < 0.65:
        found[rng.choice(_TEXTS)] = turn.reply
    while not found or rng.random() < 0.3:
        key, value = _invented(rng)
        found.setdefault(key, value)
    keys = list(found)
    rng.shuffle(keys)
    return turn.user, {key: found[key] for key in keys}


def _stated(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """A record in words and some of its fields, perhaps with one that it lacks."""
    while True:
        text, stated, absent, _ = records.sample(rng)
        if all(_is_plain(v) for v in stated.values() if isinstance(v, str)):
            break
    keys = list(stated)
    if rng.random() < 0.35:
        rng.shuffle(keys)
    found = {key: stated[key] for key in keys[: rng.randint(1, len(keys))]}
    if absent and rng.random() < 0.25:
        found[rng.choice(absent)] = UNKNOWN
    return pick(rng, _PREFACES).format(t=text), found


def _pieces(found: dict[str, Any]) -> list[tuple[str, float]]:
    """The reply cut into what a grammar forces (weight 0) and what the model says (weight 1)."""
    pieces: list[tuple[str, float]] = []
    keys = list(found)
    for number, key in enumerate(keys):
        value = found[key]
        is_last = number == len(keys) - 1
        opening, shown, closing = (
            ('"', value, '"')
            if isinstance(value, str)
            else ("[", "", "]")
            if value == []
            else ("", str(value).lower(), "")
        )
        forced = f'{{"{key}": ' if number == 0 else f'{key}": '
        pieces.append((forced + opening, 0.0))
        pieces.append((shown + closing + ("}" if is_last else ', "'), 1.0))
    return pieces


def sample(rng: random.Random) -> Turn:
    """One reply of one to four fields under a schema."""
    user, found = _stated(rng) if rng.random() < 0.5 else _asked(rng)
    pieces = tuple(_pieces(found))
    reply = "".join(text for text, _ in pieces)
    return Turn("schema", user, reply, "The form is given.", key=f"schema {user} {reply}", pieces=pieces)
