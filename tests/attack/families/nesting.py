"""Bodies that are nested deeply, or otherwise hard on decoders."""

from __future__ import annotations

import json
from functools import cache

from ..fleet import ATTACKER_KEY, MODEL
from ..target import CHAT, COMPLETIONS, Attack, Target
from ..wire import leave

LEVELS = (100, 250, 900, 2000)
REFUSED = frozenset({400, 413, 422})


def nested(levels: int, kind: str) -> str:
    """Return JSON nested `levels` deep. Built as text, because encoders do not nest that deeply."""
    if kind == "array":
        return "[" * levels + "]" * levels
    return '{"properties":{"a":' * levels + '{"type":"null"}' + "}}" * levels


def _chat(fields: str) -> bytes:
    messages = json.dumps([{"role": "user", "content": "hi"}])
    return f'{{"model":"{MODEL}","max_tokens":4,"messages":{messages},{fields}}}'.encode()


def _tool(parameters: str) -> str:
    return f'"tools":[{{"type":"function","function":{{"name":"f","parameters":{parameters}}}}}]'


def _bodies(levels: int) -> list[bytes]:
    arguments = json.dumps("[" * levels * 100)
    call = f'{{"id":"c","type":"function","function":{{"name":"f","arguments":{arguments}}}}}'
    history = f'[{{"role":"user","content":"hi"}},{{"role":"assistant","tool_calls":[{call}]}}]'
    return [
        _chat(_tool(nested(levels, "object"))),
        _chat(f'"documents":[{{"a":{nested(levels, "array")}}}]'),
        _chat(f'"chat_template_kwargs":{{"a":{nested(levels, "array")}}}'),
        _chat(f'"vllm_xargs":{{"a":{nested(levels, "array")}}}'),
        _chat(f'"unknown_field":{nested(levels, "array")}'),
        _chat(
            '"response_format":{"type":"json_schema","json_schema":{"name":"a","schema":'
            + nested(levels, "object")
            + "}}"
        ),
        _chat(f'"structured_outputs":{{"json":{nested(levels, "object")}}}'),
        f'{{"model":"{MODEL}","max_tokens":4,"messages":{history}}}'.encode(),
        f'{{"model":"{MODEL}","max_tokens":4,"prompt":{nested(levels, "array")}}}'.encode(),
    ]


async def deep_bodies(target: Target) -> None:
    bodies = [body for levels in LEVELS for body in _bodies(levels)]

    async def once(number: int) -> None:
        body = bodies[number % len(bodies)]
        await target.ask(COMPLETIONS if b'"prompt":' in body else CHAT, body)

    await target.volley(once, in_flight=12, most=240)


async def bottomless(target: Target) -> None:
    """Send up to 200,000 levels, which must be rejected."""
    bodies = [
        _chat(f'"a":{"[" * 100_000}'),
        b"[" * 200_000,
        _chat(f'"documents":{nested(50_000, "array")}'),
        b'\\"' * 100_000 + b"[" * 200,  # an unterminated string begins at every second byte
        b'\\"' * 100_000 + b"[" * 200 + b"\\",
    ]

    async def once(number: int) -> None:
        await target.ask(CHAT, bodies[number % len(bodies)], allowed=REFUSED)

    await target.volley(once)


@cache
def _large() -> tuple[bytes, ...]:
    """Return bodies at and beyond the limits of size and number, with invalid UTF-8 or absurd numbers."""
    return (
        b'{"model":"tiny","max_tokens":2,"prompt":"a","logit_bias":{'
        + b",".join(b'"%d":1' % number for number in range(50_000))
        + b"}}",
        b'{"model":"tiny","prompt":"' + b"\xff\xfe" * 1000 + b'"}',
        b'{"model":"tiny","prompt":"a","temperature":1e400}',
        b'{"model":"tiny","prompt":"a","seed":' + b"9" * 5000 + b"}",
        b'{"model":"tiny","prompt":"\\ud800","max_tokens":2}',
        b'{"model":"tiny","prompt":"\\u0000\\u0000","max_tokens":2}',
        b'{"model":"tiny","max_tokens":2,"prompt":"' + b"word " * 2_000_000 + b'"}',
        b'{"model":"tiny","max_tokens":2,"prompt":[' + b"7," * 1_200_000 + b"7]}",
        b'{"model":"tiny","max_tokens":2,"prompt":"' + b"x" * (33 << 20) + b'"}',
        b"", b"null", b"[]", b"{", b'"model"',
    )  # fmt: skip


async def large_bodies(target: Target) -> None:
    bodies = _large()

    async def once(number: int) -> None:
        await target.ask(COMPLETIONS, bodies[number % len(bodies)])
        if number % 5 == 0:
            await leave(
                target.fleet.port, COMPLETIONS, bodies[6], key=ATTACKER_KEY, after_events=0, wait_s=0.1
            )

    await target.volley(once, in_flight=4, most=60)


ATTACKS = (
    Attack("deep bodies", deep_bodies),
    Attack("bottomless bodies", bottomless),
    Attack("large bodies", large_bodies),
)
