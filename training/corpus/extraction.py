"""Fields of a text, or of a request, as one line of JSON."""

# ruff: noqa: E501  (tables of phrasings read best unwrapped)

import json
import random
from collections.abc import Callable
from typing import Any

from . import words
from .conversation import Turn, phrase

Made = tuple[Any, str]
"""A field's value and the clause that states it, about a person or a thing."""


def _name_of(rng: random.Random) -> Made:
    who = words.name(rng)
    return who, rng.choice(
        (f"The name is {who}.", f"My name is {who}.", f"I am {who}.", f"This is {who}.", f"Name: {who}.")
    )


def _clause(
    label: str, value: Callable[[random.Random], Any], *shapes: str
) -> tuple[str, Callable[[random.Random], Made]]:
    def make(rng: random.Random) -> Made:
        made = value(rng)
        shown = ("yes" if made else "no") if isinstance(made, bool) else made
        return made, rng.choice((*shapes, "The {l} is {v}.", "{L}: {v}.")).format(
            v=shown, l=label, L=label.capitalize()
        )

    return label, make


_FIELDS: dict[str, Callable[[random.Random], Made]] = dict((
    ("name", _name_of),
    _clause("age", lambda r: r.randint(1, 99), "I am {v} years old.", "The age is {v}.", "She is {v} years old.", "He is {v}."),
    _clause("city", words.place, "I live in {v}.", "She lives in {v}.", "He comes from {v}.", "We are in {v}."),
    _clause("job", lambda r: r.choice((*words.JOBS, words.english(r))), "I work as a {v}.", "She works as a {v}.", "He is a {v}."),
    _clause("email", lambda r: f"{words.any_word(r).lower()}@{words.english(r)}.{r.choice(('com', 'org'))}", "Write to {v}.", "My email is {v}."),
    _clause("phone", lambda r: str(r.randint(10000, 9999999)), "Call {v}.", "My phone number is {v}."),
    _clause("color", lambda r: r.choice((*words.COLOURS, words.any_word(r).lower())), "It is {v}.", "I like {v}."),
    _clause("price", lambda r: r.randint(1, 999), "It costs {v} dollars.", "The price is {v} euros."),
    _clause("quantity", lambda r: r.randint(1, 99), "I want {v} of them.", "We need {v} pieces."),
    _clause("item", lambda r: r.choice((r.choice(words.THINGS), words.any_word(r).lower())), "I want a {v}.", "Please send a {v}."),
    _clause("date", lambda r: f"{r.choice(words.MONTHS)} {r.randint(1, 28)}", "It is on {v}.", "We meet on {v}."),
    _clause("day", lambda r: r.choice(words.DAYS), "Come on {v}.", "It happens on {v}."),
    _clause("time", lambda r: f"{r.randint(0, 23)}:{r.choice('0134')}{r.choice('05')}", "It starts at {v}.", "We meet at {v}."),
    _clause("country", lambda r: words.pseudo_word(r).capitalize(), "I am from {v}.", "We are in {v}."),
    _clause("pet", lambda r: r.choice((*words.ANIMALS, words.any_word(r).lower())), "I have a {v}.", "The pet is a {v}."),
    _clause("code", words.code, "The code is {v}.", "Use code {v}."),
    _clause("title", lambda r: words.any_word(r).capitalize(), "The title is {v}.", "It is called {v}."),
    _clause("year", lambda r: r.randint(1400, 2030), "It was made in {v}.", "In {v} it began."),
    _clause("active", lambda r: r.random() < 0.5, "Active: {v}."),
    _clause("paid", lambda r: r.random() < 0.5, "Paid: {v}."),
))  # fmt: skip

_DEMANDS = (
    "Extract {k} as JSON: {t}", "Extract {k} as JSON.\n{t}", "Return {k} as JSON: {t}", "Give me {k} as JSON. {t}", "{t} Extract {k} as JSON.",
    "{t}\n\nReturn a JSON object with {k}.", "From the text, extract {k} in JSON format.\nText: {t}", "{t} Give me {k} as JSON.",
    "Turn this into JSON with the keys {k}: {t}", "Read the text and answer in JSON with {k}.\n{t}", "JSON with {k}, please: {t}",
    "Find {k} in this text and reply with JSON: {t}", "Parse this: {t} Output JSON with {k}.", "Write {k} as a JSON object: {t}",
    "Fill in the fields {k} as JSON. {t}", "Extract the fields {k}.\n{t}", "Make JSON with {k} from: {t}", "{t}\nAs JSON: {k}",
)  # fmt: skip


def _keys(rng: random.Random, keys: list[str]) -> str:
    style = rng.randrange(4)
    if style == 0 or len(keys) == 1:
        return ", ".join(keys)
    if style == 1:
        return ", ".join(f'"{k}"' for k in keys)
    joined = ", ".join(keys[:-1]) + " and " + keys[-1]
    return "the " + joined if style == 2 else joined


def _random_field(rng: random.Random) -> tuple[str, Made]:
    key = words.any_word(rng).lower()
    chance = rng.random()
    made: Any = (
        rng.randint(0, 9999) if chance < 0.3 else rng.choice((words.any_word, words.code, words.name))(rng)
    )
    if isinstance(made, str) and made.isdigit():
        made = int(made)
    clause = rng.choice(
        (f"The {key} is {made}.", f"{key}: {made}.", f"{key} = {made}.", f"{key.capitalize()} is {made}.")
    )
    return key, (made, clause)


def sample(rng: random.Random) -> Turn:
    """Some fields of a text as JSON, in the order asked for; null when the text lacks one."""
    count = rng.choices((1, 2, 3, 4, 5), (18, 34, 28, 14, 6))[0]
    stated: dict[str, Made] = {}
    while len(stated) < count:
        if rng.random() < 0.65:
            key = rng.choice(list(_FIELDS))
            stated.setdefault(key, _FIELDS[key](rng))
        else:
            key, made = _random_field(rng)
            stated.setdefault(key, made)
    text = " ".join(clause for _, clause in stated.values())
    if rng.random() < 0.1:
        text += " " + words.sentence(rng)
    asked = list(stated)
    if rng.random() < 0.3:
        rng.shuffle(asked)
    if len(asked) > 1 and rng.random() < 0.25:
        asked.pop()
    found = {key: stated[key][0] for key in asked}
    if rng.random() < 0.06:
        absent = rng.choice([k for k in _FIELDS if k not in stated])
        found[absent] = None
        asked.append(absent)
    user = phrase(rng, rng.choice(_DEMANDS), polite=False).format(k=_keys(rng, asked), t=text)
    reply = json.dumps(found, ensure_ascii=False)
    return Turn("json", user, reply, f"The fields are {', '.join(asked)}.", key=reply)
