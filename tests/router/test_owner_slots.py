"""Slots that owners share."""

from __future__ import annotations

from argosy_protocol.program.process import OwnerSlots


def taken(slots: OwnerSlots, owner: str, asked: int) -> int:
    return sum(slots.take(owner) for _ in range(asked))


def test_one_owner_alone_has_half_of_the_slots() -> None:
    slots = OwnerSlots(8)
    assert taken(slots, "a", 20) == 4
    assert (slots.num_of("a"), slots.num_taken) == (4, 4)


def test_others_find_a_slot_and_a_released_one_is_free_again() -> None:
    slots = OwnerSlots(8)
    assert taken(slots, "a", 20) == 4
    assert [taken(slots, each, 20) for each in "bcd"] == [2, 1, 1]
    assert not slots.take("e")
    for _ in range(4):
        slots.release("a")
    assert slots.take("e")
    assert (slots.num_of("a"), slots.num_taken) == (0, 5)
