"""Structured outputs that are expensive to compile or to apply, and clients that disconnect meanwhile."""

from __future__ import annotations

import random
from typing import Any

from ..fleet import ATTACKER_KEY, MODEL
from ..target import CHAT, COMPLETIONS, Attack, Target
from ..wire import leave

REGEXES = (
    '".*"' * 1000,
    '".*"' * 2000,
    "(a{1,1000}){1,1000}",
    "(" * 500 + "a" + ")*" * 500,
    "(a|aa)*" * 400,
    "[^x]{0,60000}",
    "(.*a.*b.*c){40}",
    "(?:x{0,100}y?){0,100}",
)
GRAMMARS = (
    "root ::= " + " | ".join(f'"{number:04}" a*' for number in range(1500)) + '\na ::= "x" | "y" a',
    "root ::= " + "(" * 600 + '"a"' + ")*" * 600,
    "\n".join(["root ::= r0", *(f"r{n} ::= r{n + 1} r{n + 1}" for n in range(30)), 'r30 ::= "a"']),
    'root ::= root root | "a" | ""',
    'root ::= "a"{1,100000}',
)


def _schema_bombs(number: int) -> list[dict[str, Any]]:
    text = {"type": "string", "pattern": "^" + "(a|b){0,200}" * 40 + "$"}
    wide = {f"field{n}_{number}": {"type": "integer"} for n in range(800)}
    deep: dict[str, Any] = {"type": "null"}
    for _ in range(200):
        deep = {"type": "object", "properties": {"a": deep}, "required": ["a"]}
    return [
        {"type": "object", "properties": {"a": text}},
        {"type": "object", "properties": wide, "required": list(wide)},
        {"type": "array", "items": {"type": "string"}, "minItems": 100_000},
        {"type": "string", "minLength": 1 << 20},
        {"anyOf": [{"const": f"{number} {n}"} for n in range(3000)]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}}},
        {"type": "integer", "minimum": -(10**18), "maximum": 10**18 + number},
        {"type": "number", "multipleOf": 0.0001, "minimum": 0, "maximum": number + 1},
        deep,
    ]


def _structured(number: int, kind: str, value: object) -> dict[str, Any]:
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"Go {number}"}],
        "max_tokens": 16,
        "structured_outputs": {kind: value},
    }


async def regexes(target: Target) -> None:
    async def once(number: int) -> None:
        # A different literal each time, so that the grammar cache does not help.
        regex = REGEXES[number % len(REGEXES)] + f"{number}"
        await target.ask(CHAT, _structured(number, "regex", regex))

    await target.volley(once)


async def grammars(target: Target) -> None:
    async def once(number: int) -> None:
        grammar = GRAMMARS[number % len(GRAMMARS)] + f'\nunused{number} ::= "{number}"'
        await target.ask(CHAT, _structured(number, "grammar", grammar))

    await target.volley(once)


async def schemas(target: Target) -> None:
    async def once(number: int) -> None:
        bombs = _schema_bombs(number)
        await target.ask(CHAT, _structured(number, "json", bombs[number % len(bombs)]))

    await target.volley(once)


async def cancelled(target: Target) -> None:
    """Ask for a grammar and disconnect while it compiles, or during the answer."""
    rng = random.Random(0)

    async def once(number: int) -> None:
        bombs = [
            _structured(number, "regex", REGEXES[number % len(REGEXES)] + f"c{number}"),
            _structured(number, "json", _schema_bombs(number)[number % 9]),
        ]
        body = {**bombs[number % 2], "stream": True, "max_tokens": 200}
        await leave(
            target.fleet.port, CHAT, body, key=ATTACKER_KEY, after_events=0, wait_s=rng.random() * 0.3
        )
        target.outcomes["left"] += 1

    await target.volley(once, in_flight=6)


async def structural_tags(target: Target) -> None:
    async def once(number: int) -> None:
        pattern = REGEXES[number % len(REGEXES)] + f"t{number}" if number % 2 else f"[a-z ]{{1,40}}{number}"
        tag = {
            "type": "structural_tag",
            "format": {
                "type": "triggered_tags",
                "triggers": ["<f="],
                "tags": [
                    {"begin": f"<f={n}>", "end": "</f>", "content": {"type": "regex", "pattern": pattern}}
                    for n in range(20)
                ],
            },
        }
        await target.ask(CHAT, _structured(number, "structural_tag", tag))

    await target.volley(once)


async def slow_steps(target: Target) -> None:
    """Use grammars within the limits whose masks are expensive to compute, on long generations."""

    async def once(number: int) -> None:
        text = {"type": "string", "minLength": 20, "maxLength": 200}
        fields = {f"f{n}_{number % 7}": text for n in range(40)}
        grammars: tuple[dict[str, Any], ...] = (
            {"regex": f"([a-z]{{1,8}}[ ,.]){{20,60}}{number}"},
            {"regex": f"(({number}|[a-y]{{1,3}}|[b-z]{{2,4}}) ?){{10,50}}"},
            {"grammar": f'root ::= e\ne ::= t ("+" t)*\nt ::= "(" e ")" | "{number}" | [a-z]+'},
            {"json": {"type": "object", "properties": fields, "required": list(fields)}},
            {"regex": "(" + "|".join(f"[a-z]{{0,{n}}}{number}x" for n in range(1, 60)) + ")*"},
        )
        body = {
            "model": MODEL,
            "prompt": f"{number}",
            "max_tokens": 128,
            "temperature": 2.0,
            "structured_outputs": grammars[number % len(grammars)],
        }
        await target.ask(COMPLETIONS, body)

    await target.volley(once)


ATTACKS = (
    Attack("regexes", regexes),
    Attack("grammars", grammars),
    Attack("JSON schemas", schemas),
    Attack("structural tags", structural_tags),
    Attack("expensive masks", slow_steps),
    Attack("cancelled grammars", cancelled),
)
