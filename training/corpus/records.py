"""Records as people write them: sentences that state some fields of a person, an order, an event and so on.

A field has a value and the names by which one may ask for it. A sentence states the fields it has braces for.
"""

# ruff: noqa: E501  (tables of words and phrasings read best so)

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import words
from .grammar import capital, pick

_FIELD = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class Field:
    """How a field is drawn, and what it may be called."""

    names: tuple[str, ...]
    value: Callable[[random.Random], Any]


def _word(rng: random.Random) -> str:
    return words.any_word(rng).lower()


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_PLACE = Field(_names("city city city town place location"), words.place)
_PERSON = Field(_names("name name name person who customer contact user guest client"), words.name)
_DAY = Field(
    _names("day day date when"),
    lambda r: r.choice(
        (r.choice(words.DAYS), r.choice(words.DAYS), f"{r.choice(words.MONTHS)} {r.randint(1, 28)}")
    ),
)
_TIME = Field(
    _names("time time hour start"), lambda r: f"{r.randint(0, 23)}:{r.choice('012345')}{r.choice('05')}"
)
_ITEM = Field(
    _names("item item product thing article goods"),
    lambda r: r.choice((r.choice(words.THINGS), words.english(r))),
)
_ITEMS = Field(
    _names("item item product thing article what"),
    lambda r: r.choice((r.choice(words.THINGS) + "s", r.choice(words.FOODS), words.english(r) + "s")),
)
_COUNT = Field(_names("quantity quantity amount count number"), lambda r: r.randint(2, 60))
_PRICE = Field(_names("price price cost amount"), lambda r: r.randint(1, 900))
_AGE = Field(_names("age age age years"), lambda r: r.randint(3, 99))
_JOB = Field(
    _names("job job profession occupation work"),
    lambda r: r.choice((r.choice(words.JOBS), r.choice(words.JOBS), words.english(r))),
)
_COLOUR = Field(_names("colour color color"), lambda r: r.choice((*words.COLOURS, words.english(r))))
_COUNTRY = Field(
    _names("country country land nation"),
    lambda r: r.choice(
        (
            r.choice(
                _names("France Italy Spain Japan Norway Peru Kenya Canada Egypt India Greece Poland Chile")
            ),
            words.pseudo_word(r).capitalize(),
        )
    ),
)
_EMAIL = Field(
    _names("email email mail email_address"),
    lambda r: f"{words.any_word(r).lower()}@{words.english(r)}.{r.choice(('com', 'org', 'net'))}",
)
_PHONE = Field(_names("phone phone phone_number number"), lambda r: str(r.randint(10000, 9999999)))
_TITLE = Field(_names("title"), lambda r: words.any_word(r).capitalize())
_YEAR = Field(_names("year year"), lambda r: r.randint(1850, 2026))
_CODE = Field(_names("id code number order_id reference"), words.code)

RECORDS: tuple[tuple[dict[str, Field], tuple[str, ...]], ...] = (
    ({"n": _PERSON, "a": _AGE, "c": _PLACE, "j": _JOB, "k": _COUNTRY, "e": _EMAIL, "p": _PHONE}, (
        "{n} is {a}[ years old|] and lives in {c}.", "{n}, {a}, [works as a|is a] {j}[|| in {c}].", "{n} lives in {c}[|| and works as a {j}].", "[My name is|I am|I'm] {n}, I am {a}[ years old|] and I live in {c}.", "[I'm|I am|This is|My name is] {n} from {c}.",
        "{n} ({a}) comes from {k}.", "You can [reach|contact|call] {n} [at|on|under] {p}.", "[Write to|Mail] {n} at {e}.", "{n}'s email is {e}[| and the phone number is {p}].", "{n} is a {a} year old {j}[| from {c}].", "[The|Our|My] {j} {n} is {a}.",
        "{n} [was born in|comes from|is from] {k}[| and is {a}].", "In {c} lives {n}[|, a {j}].", "{n} moved to {c} in {k}.", "Contact: {n}, {p}, {e}", "{n} is {a}.", "{n} lives in {c}.", "I met {n} in {c}[|, who is {a}|, a {j}].", "The {j} is called {n}.", "{a} year old {n} lives in {c}.", "{n} lives in {c}, {k}.",
    )),
    ({"n": _PERSON, "q": _COUNT, "i": _ITEMS, "c": _PLACE, "d": _DAY, "p": _PRICE, "o": _CODE}, (
        "{n} [ordered|bought|wants|needs|sold|received] {q} {i}[|| on {d}| for {p} euros].", "Order[|:| {o}:] {q} {i} for {n}[|| in {c}].", "[Please send|Send|Ship|Deliver] {q} {i} to {n}[|| in {c}|, {c}].", "{n} from {c} bought {q} {i}[| for {p} dollars].", "I [want|need|would like|order] {q} {i}[| by {d}|, my name is {n}].",
        "{q} {i} for {n}, please.", "{n}: {q} {i}", "On {d} {n} [ordered|bought] {q} {i}.", "We sold {q} {i} to {n}.", "{n} paid {p} euros for {q} {i}.", "Order {o} is for {n}.", "{q} {i} go to {c}.",
    )),
    ({"i": _ITEM, "p": _PRICE, "f": _COLOUR, "s": _PLACE}, (
        "[The|A|One|This] {i} costs {p} [euros|dollars|pounds].", "{p} [euros|dollars] for a {f} {i}.", "This {f} {i} is {p} [dollars|euros].", "The {i} is {f}[| and costs {p} euros].", "[My|The|Our|Her] {i} is {f}.", "I [bought|have|sell|own] a {f} {i}[| for {p} euros| in {s}].", "{i}, {f}, {p} euros", "You pay {p} dollars for the {i}.", "We sell a {i} in {s}.",
    )),
    ({"n": Field(_names("person name with guest who"), words.name), "w": Field(_names("event event what title subject"), lambda r: r.choice((r.choice(_names("meeting party lunch dinner lesson concert exam interview match call visit")), words.english(r)))), "d": _DAY, "t": _TIME, "c": _PLACE}, (
        "The {w} with {n} is on {d}[| at {t}|, {t}][|| in {c}].", "[Our|The|My] {w} [is|starts|will be] on {d} at {t}[|| in {c}].", "{w}: {d}, {t}[|, {c}]", "We meet {n} at {t}[| on {d}][| in {c}].", "On {d} at {t} I have a {w}[| with {n}].", "{n} comes on {d}[| at {t}].", "The {w} in {c} [begins|starts] at {t}.", "Come to {c} on {d}.", "{n} [invited me|asks us] to the {w} on {d}.",
    )),
    ({"f": Field(_names("from origin start departure source"), words.place), "t": Field(_names("to destination target arrival"), words.place), "d": _DAY, "h": _TIME, "n": _PERSON}, (
        "[a|the|my] [train|bus|flight|ship] from {f} to {t}[|| at {h}| on {d}]", "I [fly|travel|drive|go|went] from {f} to {t}[|| on {d}].", "[Take|Book] the [train|bus|flight] from {f} to {t}[| for {n}].", "From {f} we go to {t}[| on {d}].", "{n} travels from {f} to {t}[| on {d}].", "On {d} the ship leaves {f} for {t}.",
    )),
    ({"c": _PLACE, "k": _COUNTRY, "y": _YEAR, "n": Field(_names("person who visitor traveller"), words.name)}, (
        "I [flew|went|moved|travelled] to {c} in {k}[| with {n}].", "{c} is a [city|town] in {k}.", "{c}, {k}", "We live in {c}, {k}.", "{n} visited {c} in {k} in {y}.", "In {y} I was in {c}.", "Greetings from {c} in {k}!",
    )),
    ({"t": _TITLE, "y": _YEAR, "n": Field(_names("author artist writer director"), words.name), "l": Field(_names("language language"), lambda r: r.choice(_names("English French German Spanish Italian Latin Greek")))}, (
        "The [film|book|song|play|game|album] {t} [came out|appeared|was made|was written] in {y}.", "{n} wrote the [book|song|play] {t}[| in {y}].", "\"{t}\" is a [book|film|song] by {n}[| from {y}].", "{t} ({y}) by {n}", "In {y} {n} published {t}.", "The book {t} is in {l}.", "{n} wrote {t} in {l}.",
    )),
    ({"s": Field(_names("server host machine service name"), _word), "c": _PLACE, "v": Field(_names("version version release"), lambda r: f"{r.randint(0, 30)}.{r.randint(0, 30)}"), "p": Field(_names("port port number"), lambda r: r.randint(22, 9999)), "r": Field(_names("replicas replicas count instances"), lambda r: r.randint(1, 40))}, (
        "Server {s} [runs|stands|is] in {c}[| and listens on port {p}].", "{s} runs version {v}[| on port {p}].", "The service {s} has {r} replicas[| in {c}].", "Run {r} replicas of {s}[| on port {p}].", "{s} [listens on|uses] port {p}.", "Upgrade {s} to version {v}.",
    )),
    ({"o": _CODE, "t": Field(_names("title subject problem summary"), lambda r: words.sentence(r, 2, 4)[:-1]), "p": Field(_names("priority priority level"), lambda r: r.choice(_names("low high urgent normal medium"))), "n": Field(_names("assignee name owner person"), words.name)}, (
        "Ticket {o} has {p} priority[| and belongs to {n}].", "{n} works on ticket {o}.", "Ticket {o}: \"{t}\"[|, priority {p}|, {n}].", "\"{t}\" is assigned to {n}[| with {p} priority].", "{n} opened a {p} ticket.",
    )),
)  # fmt: skip


def sample(rng: random.Random) -> tuple[str, dict[str, Any], list[str], set[str]]:
    """A sentence, the fields it states under one of their names, in the order of the sentence, names of fields of the
    same record that it does not state, and all names under which one might ask for what it states.
    """
    fields, patterns = rng.choice(RECORDS)
    text = pick(rng, patterns)
    stated: dict[str, Any] = {}
    shown: dict[str, Any] = {}
    for slot in _FIELD.findall(text):
        if slot in shown:
            continue
        name = rng.choice(fields[slot].names)
        if name in stated:
            name = f"{name}_{slot}"
        shown[slot] = stated[name] = fields[slot].value(rng)
    askable = {name for slot in shown for name in fields[slot].names}
    absent = [
        field.names[0]
        for slot, field in fields.items()
        if slot not in shown and field.names[0] not in askable
    ]
    # A value at the beginning keeps its case: it is copied as it stands.
    written = text.format(**shown) if text[0] == "{" else capital(text.format(**shown))
    return written, stated, absent, askable
