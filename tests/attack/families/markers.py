"""Texts full of control markers, which are slow for a parser that scans a character more than once."""

from __future__ import annotations

import json
from functools import cache

from ..fleet import ATTACKER_KEY, MODEL
from ..target import CHAT, COMPLETIONS, Attack, Target
from ..wire import leave

MARKERS = ("<|", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "<|endoftext|>", "<" * 7)


@cache
def _message(marker: str, size: int) -> bytes:
    content = marker * (size // len(marker))
    return json.dumps(
        {"model": MODEL, "max_tokens": 2, "messages": [{"role": "user", "content": content}]}
    ).encode()


async def long_markers(target: Target) -> None:
    """Send six million bytes each. Every other client disconnects at once, and the work on its request should stop."""
    bodies = [_message(marker, 6_000_000) for marker in MARKERS[:4]]

    async def once(number: int) -> None:
        body = bodies[number % len(bodies)]
        if number % 2:
            await leave(target.fleet.port, CHAT, body, key=ATTACKER_KEY, after_events=0, wait_s=0.3)
            target.outcomes["left"] += 1
        else:
            await target.ask(CHAT, body)

    await target.volley(once, in_flight=6, most=24)


async def short_markers(target: Target) -> None:
    """Send markers within the model's context length, in every place of a request."""

    async def once(number: int) -> None:
        marker = MARKERS[number % len(MARKERS)] * 150
        bodies = [
            (COMPLETIONS, {"prompt": marker}),
            (CHAT, {"messages": [{"role": "system", "content": marker}, {"role": "user", "content": "a"}]}),
            (CHAT, {"messages": [{"role": "tool", "tool_call_id": marker[:200], "content": marker}]}),
            (CHAT, {"messages": [{"role": marker[:60], "content": marker}]}),
            (CHAT, {"messages": [{"role": "user", "content": "a"}], "stop": [marker[:1000]] * 16}),
            (
                CHAT,
                {"messages": [{"role": "assistant", "content": marker}], "continue_final_message": True,
                 "add_generation_prompt": False},
            ),
        ]  # fmt: skip
        path, fields = bodies[number % len(bodies)]
        await target.ask(path, {"model": MODEL, "max_tokens": 8, **fields})

    await target.volley(once)


ATTACKS = (Attack("long markers", long_markers), Attack("short markers", short_markers))
