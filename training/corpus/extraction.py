"""Fields of a text, or of a request, as one line of JSON."""

# ruff: noqa: E501  (tables of phrasings read best unwrapped)

import json
import random
from collections.abc import Callable
from typing import Any

from . import records, words
from .conversation import Turn, phrase
from .grammar import capital, pick

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


_AS_JSON = "[as JSON|as JSON|in JSON|as a JSON object|in JSON format|as json|as valid JSON]"
_VERB = "[Extract|Get|Pull out|Find|Give me|Return|Take|List|Output|Write|Show me|Tell me|I need|Please give me|Please extract|Please return|I want|Collect|Name]"
_FREE = (
    _VERB + " {k} " + _AS_JSON + " [from|of|out of] [this|the|the following|this text|this sentence|the text below|the text|the sentence|what follows]:[ |\n]{t}",
    _VERB + " {k} [from|of|out of] [this|the following|this text|this sentence|the text] " + _AS_JSON + ":[ |\n]{t}",
    _VERB + " {k} " + _AS_JSON + "[:|.|: |.\nText:|. Text:|. Input:|\n\n] {t}", "{t}[ |\n|\n\n]" + _VERB + " {k} " + _AS_JSON + "[.||, please.| please]",
    _VERB + " a JSON object with {k}[:|.| from:| for:| of:] {t}", "{t}[ |\n]" + _VERB + " a JSON [object|document|] with [|the keys |the fields ]{k}[.||, please.]",
    "[What is|What are|Which are] {k} [here|in this text|in the text|in this sentence|of this]? [Answer|Reply|Respond] in JSON. {t}", "{t} [What is|What are] {k}? [Answer|Reply|Respond] [in|with] JSON[ only|].",
    "[Convert|Turn|Transform|Put|Change|Write] [this|the text|the following|it|this sentence] [to|into|in|as] JSON with [the keys|the fields|] {k}[:|.] {t}", "{t}[ |\n][Convert|Turn|Transform|Put] [this|it|that] [to|into] JSON with [the keys|the fields|] {k}.",
    "[|Please ][answer|reply|respond] [in|with|only with] JSON with [the fields|the keys|] {k}[:|.] {t}", "{t} [Answer|Reply|Respond] in JSON with {k}[ only|].", "JSON [only|only, please|please]: {k}. [|Text: ]{t}", "[json|JSON] with {k}: {t}", "{t} -> JSON with {k}", "As JSON[| please|, please], keys {k}: {t}",
    "[Read this|Look at this|Here is a text|Text|Take this sentence]: {t}[ |\n]" + _VERB + " {k} " + _AS_JSON + ".", "[Read this|Look at this]: '{t}' " + _VERB + " {k} " + _AS_JSON + ".", "\"{t}\" " + _VERB + " {k} " + _AS_JSON + ".", _VERB + " {k} " + _AS_JSON + " from \"{t}\"",
    "{s} Fill [this|it|that] in [for|with|from|using]: {t}", "Fill in {s}[:| from this:| with this text:| for:] {t}", "{t} [Fill in|Complete|Use this form:] {s}", "[Use|Answer in|Reply in|Return] the [form|format|shape] {s}[:|.] {t}", "{t}[ |\n][Answer|Reply|Return it] like this: {s}", "Text: {t}[ |\n]Format: {s}",
)  # fmt: skip
"""Demands that people phrase freely; `{k}` names the keys, `{s}` shows them in braces."""


def _keys(rng: random.Random, keys: list[str]) -> str:
    style = rng.randrange(8)
    if style == 0 or len(keys) == 1:
        return rng.choice((", ".join(keys), f"the {keys[0]}")) if len(keys) == 1 else ", ".join(keys)
    if style == 1:
        mark = rng.choice(('"', '"', "'", "`"))
        marked = [f"{mark}{k}{mark}" for k in keys]
        return rng.choice((", ".join(marked), ", ".join(marked[:-1]) + " and " + marked[-1]))
    if style == 2:
        return ", ".join(f"the {k}" for k in keys[:-1]) + f" and the {keys[-1]}"
    if style == 3:
        return rng.choice((" & ", "/", ", ", " and ")).join(keys)
    joined = ", ".join(keys[:-1]) + " and " + keys[-1]
    return "the " + joined if style <= 5 else joined


def _skeleton(rng: random.Random, found: dict[str, Any]) -> str:
    """The keys in braces, with marks for the values."""
    kind = rng.randrange(4)
    if kind == 0:
        return "{" + ", ".join(f'"{key}": ?' for key in found) + "}"
    if kind == 1:
        return "{" + ", ".join(f'"{key}": "..."' for key in found) + "}"
    if kind == 2:
        types = {int: "number", bool: "boolean"}
        return (
            "{"
            + ", ".join(f'"{key}": {types.get(type(value), "string")}' for key, value in found.items())
            + "}"
        )
    return "{" + ", ".join(f'"{key}"' for key in found) + "}"


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


_ALIKE = ({"date", "day"}, {"city", "country", "place"}, {"title", "name"}, {"name", "person"}, {"quantity", "count"}, {"item", "thing"}, {"code", "id", "number"})  # fmt: skip
"""Names under which one text may be asked for the same value: none of a group is null while another is stated."""


def _alike(name: str) -> set[str]:
    """The name, and those that may mean the same."""
    return {name}.union(*(group for group in _ALIKE if name in group))


def free(rng: random.Random) -> Turn:
    """Fields of a freely phrased record as one line of JSON; null for a field that the text lacks."""
    text, stated, absent, askable = records.sample(rng)
    if rng.random() < 0.15:
        more, others, _, more_askable = records.sample(rng)
        if not more_askable & (askable | set(absent)):
            text, stated = f"{text.rstrip('.')}. {more}", stated | others
            askable |= more_askable
    found = dict(stated)
    order = list(found)
    if rng.random() < 0.4:
        rng.shuffle(order)
    if len(order) > 1 and rng.random() < 0.3:
        order = order[: rng.randint(1, len(order) - 1)]
    if rng.random() < 0.22:
        lacking = rng.choice(absent) if absent and rng.random() < 0.8 else rng.choice(list(_FIELDS))
        if not _alike(lacking) & (askable | set(stated)):
            order.insert(rng.randint(0, len(order)), lacking)
    chosen = {key: found.get(key) for key in order}
    demand = pick(rng, _FREE)
    if rng.random() < 0.12:
        demand = demand[0].lower() + demand[1:]
    user = demand.format(k=_keys(rng, order), t=text, s=_skeleton(rng, chosen))
    reply = json.dumps(chosen, ensure_ascii=False)
    return Turn(
        "json",
        capital(user) if rng.random() < 0.3 else user,
        reply,
        f"The fields are {', '.join(order)}.",
        key=reply,
    )


def sample(rng: random.Random) -> Turn:
    """One request for JSON."""
    return free(rng) if rng.random() < 0.55 else _listed(rng)


def _listed(rng: random.Random) -> Turn:
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
    if rng.random() < 0.15:
        absent = rng.choice([k for k in _FIELDS if not _alike(k) & set(stated)])
        found[absent] = None
        asked.append(absent)
    user = phrase(rng, rng.choice(_DEMANDS), polite=False).format(k=_keys(rng, asked), t=text)
    reply = json.dumps(found, ensure_ascii=False)
    return Turn("json", user, reply, f"The fields are {', '.join(asked)}.", key=reply)
