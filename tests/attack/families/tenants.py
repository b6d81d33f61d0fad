"""Many tenants at once, keys that come and go, and a namespace that vanishes with its requests."""

from __future__ import annotations

import asyncio
import contextlib
import random

from ..fleet import GUEST, MODEL, NUM_TENANTS, tenant_key
from ..target import COMPLETIONS, Attack, Target

_KNOWN_OR_NOT = frozenset({200, 401, 404, 429, 503})
CHANGE_S = 0.5


def _body(model: str, number: int) -> dict[str, object]:
    return {"model": model, "prompt": f"tenant {number}", "max_tokens": 8, "stream": number % 2 == 0}


async def ten_thousand_keys(target: Target) -> None:
    """Each request has another tenant's key, in no order."""
    numbers = list(range(NUM_TENANTS))
    random.Random(0).shuffle(numbers)

    async def once(number: int) -> None:
        tenant = numbers[number % NUM_TENANTS]
        await target.ask(COMPLETIONS, _body(MODEL, tenant), key=tenant_key(tenant))
        await target.ask("/v1/models", key=tenant_key(NUM_TENANTS + number), allowed=_KNOWN_OR_NOT)

    await target.volley(once, in_flight=24, most=NUM_TENANTS)


async def keys_rewritten(target: Target) -> None:
    """The file of keys loses a random half of its tenants, and gets others, twice a second."""
    rng, is_over = random.Random(1), asyncio.Event()

    async def rewrite() -> None:
        while not is_over.is_set():
            tenants = rng.sample(range(2 * NUM_TENANTS), NUM_TENANTS)
            await asyncio.to_thread(target.fleet.write_keys, tenants)
            target.outcomes["keys rewritten"] += 1
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(is_over.wait(), CHANGE_S)

    async def once(number: int) -> None:
        tenant = rng.randrange(2 * NUM_TENANTS)
        await target.ask(COMPLETIONS, _body(MODEL, number), key=tenant_key(tenant), allowed=_KNOWN_OR_NOT)

    writing = asyncio.create_task(rewrite())
    try:
        await target.volley(once, in_flight=8, most=2000)
    finally:
        is_over.set()
        await writing
        target.fleet.write_keys()


async def namespace_vanishes(target: Target) -> None:
    """The other namespace goes while its requests run and wait, and comes back."""

    async def change() -> None:
        has_guests = True
        while True:
            has_guests = not has_guests
            target.fleet.write_fleet(has_guests=has_guests)
            target.outcomes["namespace there" if has_guests else "namespace gone"] += 1
            await asyncio.sleep(CHANGE_S)

    async def once(number: int) -> None:
        await target.ask(COMPLETIONS, _body(GUEST, number) | {"max_tokens": 64}, allowed=_KNOWN_OR_NOT)

    changing = asyncio.create_task(change())
    try:
        await target.volley(once, in_flight=12, most=20_000)
    finally:
        changing.cancel()
        await asyncio.gather(changing, return_exceptions=True)
        target.fleet.write_fleet(has_guests=True)


ATTACKS = (
    Attack("ten thousand keys", ten_thousand_keys),
    Attack("keys rewritten", keys_rewritten),
    Attack("a namespace that vanishes", namespace_vanishes),
)
