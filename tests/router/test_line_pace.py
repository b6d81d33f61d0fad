"""How many requests of batches are in flight, and whose is the next."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from argosy_batch.line_requests import LinePace, PaceClosed

from .harness import until


class Line:
    """A request that is in flight until the test ends it."""

    def __init__(self, pace: LinePace, order: list[str], name: str, model: str, account: str) -> None:
        self._end = asyncio.Event()
        self.task = asyncio.create_task(self._run(pace, order, name, model, account))

    async def _run(self, pace: LinePace, order: list[str], name: str, model: str, account: str) -> None:
        async with pace.turn(model, account):
            order.append(name)
            await self._end.wait()

    async def end(self) -> None:
        self._end.set()
        await self.task


class Rooms:
    """What a router has room for."""

    def __init__(self, **rooms: int) -> None:
        self.rooms = rooms
        self.num_asked = 0

    async def __call__(self, model: str) -> int:
        self.num_asked += 1
        return self.rooms.get(model, 0)


def begin(
    pace: LinePace, order: list[str], account: str, names: Sequence[str], model: str = "m"
) -> list[Line]:
    return [Line(pace, order, name, model, account) for name in names]


async def test_accounts_take_turns_and_one_end_lets_one_go() -> None:
    pace, order = LinePace(Rooms(), max_inflight=8), list[str]()
    many = begin(pace, order, "many", ["a1", "a2", "a3"])
    await until(lambda: order == ["a1"])
    few = begin(pace, order, "few", ["b1"])
    await asyncio.sleep(0)
    for line, after in ((many[0], "a2"), (many[1], "b1"), (few[0], "a3")):
        await line.end()
        await until(lambda after=after: order[-1] == after)  # type: ignore[misc]
        assert pace.inflight == 1
    await many[2].end()
    assert order == ["a1", "a2", "b1", "a3"]
    assert pace.inflight == 0


async def test_as_many_go_as_the_router_has_room_for_and_all_models_together_may() -> None:
    rooms = Rooms(one=2, two=9)
    pace, order = LinePace(rooms, max_inflight=6, ask_s=0.0), list[str]()
    begun = begin(pace, order, "a", [f"one-{n}" for n in range(8)], "one")
    await until(lambda: len(order) > 2)
    rooms.rooms["one"] = 0
    in_one = len(order)
    begun += begin(pace, order, "a", [f"two-{n}" for n in range(8)], "two")
    await until(lambda: pace.inflight == 6)
    assert [name.partition("-")[0] for name in order] == ["one"] * in_one + ["two"] * (6 - in_one)
    rooms.rooms = {"one": 9, "two": 9}
    for line in begun:
        await line.end()
    assert sorted(order) == sorted(f"{model}-{n}" for model in ("one", "two") for n in range(8))
    asked = rooms.num_asked
    for _ in range(20):
        await asyncio.sleep(0)
    assert rooms.num_asked <= asked + 2, "nobody is asked while nothing waits"


async def test_a_model_that_does_not_answer_leaves_places_to_others() -> None:
    pace, order = LinePace(Rooms(hung=64, other=64, third=64), max_inflight=16, ask_s=0.0), list[str]()
    hung = begin(pace, order, "a", [f"hung-{n}" for n in range(40)], "hung")
    await until(lambda: pace.inflight == 12)
    others = begin(pace, order, "b", [f"other-{n}" for n in range(20)], "other")
    await until(lambda: pace.inflight == 15)
    third = begin(pace, order, "c", ["third-0", "third-1"], "third")
    fourth = begin(pace, order, "c", ["fourth-0"], "fourth")
    await until(lambda: "third-0" in order and "fourth-0" in order)
    for line in (*others, *third, *fourth):
        await line.end()
    assert [name for name in order if name.startswith("other")] == [f"other-{n}" for n in range(20)]
    assert {"third-1", "fourth-0"} <= set(order)
    assert pace.inflight == len([name for name in order if name.startswith("hung")]) == 12
    for line in hung:
        await line.end()
    assert (len(order), pace.inflight) == (63, 0)


async def test_a_router_without_room_has_one_request_less_in_flight() -> None:
    pace, order = LinePace(Rooms(m=3), max_inflight=8, ask_s=0.0), list[str]()
    lines = begin(pace, order, "a", list("abcdefgh"))
    await until(lambda: len(order) >= 4)
    before = len(order)
    pace.refused("m")
    assert pace.inflight == before
    for line in lines:
        await line.end()
    assert len(order) == 8


async def test_lines_that_are_given_up_take_nobodys_turn() -> None:
    pace, order = LinePace(Rooms(), max_inflight=8), list[str]()
    first, *others = begin(pace, order, "a", list("abcd"))
    await until(lambda: order == ["a"])
    for line in others[:2]:
        line.task.cancel()
    await first.end()  # in the same turn of the loop as the cancellations
    await until(lambda: order == ["a", "d"])
    await others[2].end()
    assert pace.inflight == 0
    last, waits = begin(pace, order, "a", ["e", "f"])
    await until(lambda: order[-1] == "e")
    last.task.cancel()
    await until(lambda: order[-1] == "f")
    await waits.end()
    assert pace.inflight == 0


async def test_lines_that_wait_learn_that_the_program_stops() -> None:
    pace, order = LinePace(Rooms(), max_inflight=8), list[str]()
    first, second = begin(pace, order, "a", ["a", "b"])
    await until(lambda: order == ["a"])
    pace.close()
    with pytest.raises(PaceClosed):
        await second.task
    await first.end()
    with pytest.raises(PaceClosed):
        async with pace.turn("m", "a"):
            raise AssertionError
