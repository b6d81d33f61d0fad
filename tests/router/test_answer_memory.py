"""The bound on the memory of answers to requests of batches."""

from __future__ import annotations

import pytest

from argosy_batch import answer_memory
from argosy_batch.answer_memory import AnswerMemory, HeldAnswer


@pytest.fixture(autouse=True)
def limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_memory, "MAX_HELD_BYTES", 100)


class Reading:
    """One answer, and whether it is read."""

    def __init__(self, memory: AnswerMemory) -> None:
        self.is_read = True
        self.held = HeldAnswer(memory)
        self.held.reads(self._pause, self._resume)

    def _pause(self) -> None:
        assert self.is_read
        self.is_read = False

    def _resume(self) -> None:
        assert not self.is_read
        self.is_read = True


def test_beyond_the_limit_only_the_first_answer_is_read_on() -> None:
    memory = AnswerMemory()
    first, second, third = (Reading(memory) for _ in range(3))
    second.held.add(60)
    first.held.add(50)
    third.held.add(1)
    assert [each.is_read for each in (first, second, third)] == [False, True, False]
    second.held.add(200)
    assert second.is_read, "one is always completed"
    second.held.stops_reading()
    assert (memory.held, first.is_read) == (311, False), "it is held until it is written"
    second.held.clear()
    assert (memory.held, first.is_read, third.is_read) == (51, True, True)
    first.held.clear()
    third.held.clear()
    assert memory.held == 0


def test_the_next_one_is_read_while_the_limit_is_exceeded() -> None:
    memory = AnswerMemory()
    first, second, third = (Reading(memory) for _ in range(3))
    for each in (first, second, third):
        each.held.add(90)
    assert [each.is_read for each in (first, second, third)] == [True, False, False]
    first.held.clear()
    assert [second.is_read, third.is_read] == [True, False]


def test_an_answer_leaves_nothing_behind() -> None:
    memory = AnswerMemory()
    with memory.answer() as held:
        held.add(200)
        held.clear()
        held.add(300)
        assert memory.held == 300
    assert memory.held == 0
