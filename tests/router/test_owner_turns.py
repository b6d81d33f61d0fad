"""Places that owners take in turn."""

from __future__ import annotations

import asyncio

from argosy_protocol.program.process import OwnerTurns


async def test_owners_take_turns_and_have_one_place_each() -> None:
    turns = OwnerTurns(2)
    begun: list[str] = []
    may_end: dict[str, asyncio.Event] = {}

    async def work(name: str) -> None:
        async with turns.turn(name[0]):
            begun.append(name)
            await may_end[name].wait()

    names = ["a1", "a2", "a3", "b1", "c1", "d1"]
    may_end.update({name: asyncio.Event() for name in names})
    tasks = {name: asyncio.create_task(work(name)) for name in names}

    async def settled() -> list[str]:
        for _ in range(20):
            await asyncio.sleep(0)
        return begun

    assert await settled() == ["a1", "b1"]
    may_end["a1"].set()
    assert await settled() == ["a1", "b1", "c1"], "`a` comes again behind those that wait"
    tasks["d1"].cancel()
    may_end["b1"].set()
    assert await settled() == ["a1", "b1", "c1", "a2"]
    for event in may_end.values():
        event.set()
    await asyncio.gather(*tasks.values(), return_exceptions=True)
    assert begun == ["a1", "b1", "c1", "a2", "a3"]
    assert turns.num_owners == 0
