"""Clients that disconnect, at every stage of a request."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random

from ..fleet import ATTACKER_KEY, MODEL
from ..target import COMPLETIONS, Attack, Target
from ..wire import HOST, leave, reset


def _body(stream: bool, **fields: object) -> dict[str, object]:
    return {
        "model": MODEL,
        "prompt": "Once",
        "max_tokens": 400,
        "ignore_eos": True,
        "stream": stream,
        **fields,
    }


async def during_answers(target: Target) -> None:
    """Disconnect after the request, after the first event, or later; with and without streaming, one choice or many."""
    rng = random.Random(0)

    async def once(number: int) -> None:
        body = _body(stream=number % 2 == 0, n=(1, 8)[number % 3 == 0])
        events = int(number % 4 == 0)
        with contextlib.suppress(OSError, TimeoutError):
            await leave(
                target.fleet.port, COMPLETIONS, body, key=ATTACKER_KEY, after_events=events,
                wait_s=rng.random() * 0.4,
            )  # fmt: skip
        target.outcomes["left"] += 1

    await target.volley(once, in_flight=16, most=1000)


async def during_requests(target: Target) -> None:
    """Disconnect within the head, between head and body, or within the body."""
    content = json.dumps(_body(stream=False)).encode()
    head = (
        f"POST {COMPLETIONS} HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {ATTACKER_KEY}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    ).encode()
    whole = head + content
    cuts = (1, 20, len(head) - 1, len(head), len(head) + 10, len(whole) - 1, len(whole))

    async def once(number: int) -> None:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection(HOST, target.fleet.port)
            writer.write(whole[: cuts[number % len(cuts)]])
            await asyncio.sleep(0.005 * (number % 5))
            reset(writer.transport)
        target.outcomes["left"] += 1

    await target.volley(once, in_flight=16, most=1500)


ATTACKS = (
    Attack("clients that leave during answers", during_answers),
    Attack("clients that leave during requests", during_requests),
)
