"""/ready?wait=S: the answer of an engine that starts comes when the start is over, not a probe's period later."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from argosy_engine.api.app import build_app
from argosy_engine.api.served_engine import Engine


def client(engine: Engine) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=build_app(engine)), base_url="http://engine")


@pytest.mark.parametrize("end", ["ready", "draining"])
async def test_the_answer_is_held_back_until_the_start_is_over(end: str) -> None:
    engine = Engine(("m",))
    async with client(engine) as http:
        asked = asyncio.create_task(http.get("/ready", params={"wait": 30}))
        for _ in range(100):  # turns of the event loop
            await asyncio.sleep(0)
        assert not asked.done()
        if end == "ready":
            engine.warmed_up()
        else:
            await asyncio.wait_for(engine.drain(), 30)
        answer = await asyncio.wait_for(asked, 30)
        assert answer.json() == {"status": end}
        again = await asyncio.wait_for(http.get("/ready", params={"wait": 30}), 20)
        assert again.json() == {"status": end}


async def test_a_wait_ends_and_none_is_the_default() -> None:
    async with client(Engine(("m",))) as http:
        for params in ({"wait": 0.01}, {}):
            answer = await asyncio.wait_for(http.get("/ready", params=params), 30)
            assert (answer.status_code, answer.json()) == (503, {"status": "starting"})


@pytest.mark.parametrize("wait", ["31", "-1", "x", "nan", ""])
async def test_a_wait_is_bounded(wait: str) -> None:
    async with client(Engine(("m",))) as http:
        assert (await http.get("/ready", params={"wait": wait})).status_code == 422
