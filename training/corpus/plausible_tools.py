"""Tools as applications have them: a plain verb and noun, parameters with plain names, requests that state them in passing.

Drawn anew from lists, so that the model reads a schema of common words that it has not seen in this combination.
"""

# ruff: noqa: E501, SIM905  (tables of words and phrasings read best so)

import random

from . import words
from .tool_catalog import Parameter, Tool, Value, any_text

_VERBS = "create open close cancel update delete restart start stop scale book reserve order send check show list find rent lock move archive approve assign schedule print share rename pause resume deploy reset inspect export".split()
_NOUNS = "table room ticket invoice report document customer account service job deployment database container order booking parcel task project contract image playlist subscription ticket machine printer folder backup pipeline cluster camera garage appointment seat bike desk class pod node volume branch alarm".split()


def _whole(low: int, high: int) -> Value:
    return lambda rng: rng.randint(low, high)


def _of(choices: str) -> Value:
    return lambda rng: rng.choice(choices.split())


def _clock(rng: random.Random) -> str:
    return f"{rng.randint(0, 23)}:{rng.choice('012345')}{rng.choice('05')}"


def _label(rng: random.Random) -> str:
    return rng.choice(
        (
            words.english(rng),
            words.english(rng),
            words.any_word(rng).lower(),
            f"{words.english(rng)}-{words.english(rng)}",
        )
    )


def _called(rng: random.Random) -> str:
    return rng.choice(
        (
            words.name(rng),
            words.any_word(rng).capitalize(),
            f"{words.english(rng).capitalize()} {words.english(rng).capitalize()}",
        )
    )


def _string(name: str, value: Value, description: str, *clauses: str) -> tuple[Parameter, tuple[str, ...]]:
    return Parameter(name, "string", value, description), clauses


def _integer(
    name: str, low: int, high: int, description: str, *clauses: str
) -> tuple[Parameter, tuple[str, ...]]:
    return Parameter(name, "integer", _whole(low, high), description), clauses


_NAMED = (
    _string("name", _label, "Name", "{name}", "called {name}", "\"{name}\"", "named {name}"), _string("id", words.code, "Identifier", "{id}", "number {id}", "with the id {id}"), _string("title", any_text, "Title", "\"{title}\"", "titled \"{title}\"", "with the title \"{title}\"", "called \"{title}\""),
    _string("target", _label, "What it is about", "{target}", "for {target}"), _string("place", _called, "Where", "at {place}", "in {place}"), _string("restaurant", _called, "Name of the restaurant", "at {restaurant}"), _string("station", _called, "Name of the station", "at {station}", "from {station}"), _string("owner", words.name, "Who owns it", "of {owner}", "for {owner}", "that belongs to {owner}"),
    _string("customer", words.name, "Name of the customer", "for {customer}", "of customer {customer}"), _string("city", words.place, "The city", "in {city}"), _string("file", lambda r: f"{words.english(r)}.{r.choice(('txt', 'pdf', 'csv', 'png'))}", "File name", "{file}", "from {file}"), _string("folder", _label, "The folder", "in the folder {folder}", "from {folder}", "of the folder {folder}"),
)  # fmt: skip
_MORE = (
    _integer("count", 1, 50, "How many", "{count} times", "with {count} copies", "with a count of {count}"), _integer("people", 1, 20, "Number of people", "for {people} people", "for {people}", "for {people} persons"), _integer("replicas", 0, 40, "Number of replicas", "to {replicas} replicas", "with {replicas} replicas", "to {replicas}"), _integer("size", 1, 500, "Size in gigabytes", "with {size} GB", "of size {size}", "to {size} GB"),
    _integer("minutes", 1, 240, "Length in minutes", "for {minutes} minutes", "in {minutes} minutes"), _integer("days", 1, 30, "Number of days", "for {days} days"), _integer("amount", 1, 900, "Amount of money", "of {amount} euros", "for {amount} dollars", "over {amount} euros"), _integer("port", 22, 9999, "Port", "on port {port}"), _integer("seats", 1, 12, "Number of seats", "with {seats} seats", "for {seats} passengers"),
    _string("priority", _of("low normal high urgent critical"), "How urgent it is", "with {priority} priority", "as {priority}", "priority {priority}"), _string("date", lambda r: r.choice((r.choice(words.DAYS), f"{r.choice(words.MONTHS)} {r.randint(1, 28)}")), "The day", "on {date}", "for {date}"), _string("time", _clock, "The time", "at {time}"), _string("reason", any_text, "Why", "because of \"{reason}\"", "with the reason \"{reason}\""),
    _string("user", words.name, "Name of the user", "for {user}", "to {user}"), _string("color", _of("red blue green yellow black white"), "Colour", "in {color}"), _string("format", _of("pdf csv json html"), "Format", "as {format}", "in the format {format}"), _string("region", words.place, "Region", "in {region}", "in the region {region}"),
)  # fmt: skip
_FRAMES = (
    "[||||Please |Can you |Could you |I want you to |I'd like you to |Would you |Hey, ]{verb} [the|a|my|our||this] {noun}{c}[.|.||?| please| now| for me]", "[I need|I want|We need|I'd like] to {verb} [the|a|my|our] {noun}{c}[.||, please.]", "[I need|I want|We need|I'd like] [a|the|my] {noun}{c}[. {Verb} it.|, please {verb} it.|, can you {verb} it?]", "{Verb} {noun}{c}[.|]", "[The|My|Our] {noun}{c}: {verb} it[.|, please.]",
    "[It is time|I forgot|We have] to {verb} the {noun}{c}.",
)  # fmt: skip


def draw(rng: random.Random, taken: frozenset[str]) -> Tool:
    """A tool whose name is not among `taken`."""
    while True:
        verb, noun = rng.choice(_VERBS), rng.choice(_NOUNS)
        name = rng.choice((f"{verb}_{noun}", f"{verb}_{noun}", f"{verb}{noun.capitalize()}"))
        if f"{verb}_{noun}" not in taken:
            break
    chosen = [rng.choice(_NAMED), *rng.sample(_MORE, rng.choices((0, 1, 2), (4, 5, 2))[0])]
    if rng.random() < 0.12:
        chosen = chosen[1:] or chosen
    requests = []
    for _ in range(6):
        clauses = "".join(" " + rng.choice(clauses) for _, clauses in chosen)
        requests.append(rng.choice(_FRAMES).replace("{verb}", verb).replace("{Verb}", verb.capitalize()).replace("{noun}", noun).replace("{c}", clauses))  # fmt: skip
    described = {parameter.name for parameter, _ in chosen}
    about = rng.choice(sorted(described))
    description = rng.choice((
        f"{verb.capitalize()} a {noun}", f"{verb.capitalize()} a {noun}.", f"{verb.capitalize()} the {noun} of a user", f"{verb.capitalize()} a {noun} by {about}.", f"Use this to {verb} a {noun}.", f"{verb.capitalize()}s a {noun}", f"Change or {verb} a {noun}.", f"{noun.capitalize()}: {verb}",
    ))  # fmt: skip
    return Tool(name, description, tuple(parameter for parameter, _ in chosen), tuple(requests))
