"""Frequent requests for metrics and reports, also by clients that must not see them."""

from __future__ import annotations

from ..fleet import MODEL
from ..target import Attack, Target

QUESTION = {"model": MODEL, "messages": [{"role": "user", "content": "a" * 50_000}]}


async def metrics(target: Target) -> None:
    async def once(number: int) -> None:
        fleet = target.fleet
        engine = fleet.engines[number % len(fleet.engines)]
        if number % 3 == 0:
            await target.ask("/metrics", key="", port=engine.port)
        elif number % 3 == 1:
            await target.ask("/metrics")
        else:
            await target.ask("/metrics", key="", port=fleet.admin_port)

    await target.volley(once, in_flight=8, most=600)


async def administration(target: Target) -> None:
    """Request the admin port: explanations of large requests, routes, the overview, the page."""

    async def once(number: int) -> None:
        path, body = (
            ("/explain", QUESTION),
            ("/routes", None),
            ("/overview", None),
            ("/", None),
            ("/explain", b"[" * 5000),
        )[number % 5]
        await target.ask(path, body, key="", port=target.fleet.admin_port)

    await target.volley(once, in_flight=4)


ATTACKS = (Attack("metrics", metrics), Attack("admin port", administration))
