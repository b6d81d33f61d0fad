"""The rollout policy that operator and local fleet share: bounds, halts and replacement in place."""

from __future__ import annotations

import pytest

from argosy_resource.rollout import Rollout, RolloutReplica, halting_replica, rollout_bounds


def replicas(text: str) -> list[RolloutReplica]:
    """`o`/`n`: old or new revision; capital: serving; `!` after it: failed."""
    found: list[RolloutReplica] = []
    for letter in text:
        if letter == "!":
            found[-1] = found[-1]._replace(has_failed=True)
        else:
            found.append(
                RolloutReplica(
                    f"replica-{len(found)}",
                    is_new=letter in "nN",
                    is_serving=letter.isupper(),
                    has_failed=False,
                )
            )
    return found


@pytest.mark.parametrize(
    ("there", "surge", "unavailable", "expected"),
    [
        ("", 3, 2, (3, 2)),  # nothing is replaced
        ("NNN", 3, 2, (3, 2)),
        ("OOO", 3, 2, (1, 0)),  # the first new replica is created alone
        ("OOOn", 3, 2, (1, 0)),
        ("OOON", 3, 2, (1, 0)),  # the second one follows once the first is available
        ("OONn", 3, 2, (3, 2)),
        ("OOnn", 3, 2, (1, 0)),  # two at once, because replicas were added as well
        ("OOO", 0, 3, (0, 1)),
        ("OOn", 0, 3, (0, 1)),
        ("ONn", 0, 3, (0, 3)),
        ("ooo", 0, 3, (0, 1)),
    ],
)
def test_the_first_new_replica_is_created_alone(
    there: str, surge: int, unavailable: int, expected: tuple[int, int]
) -> None:
    rollout = Rollout(max_surge=surge, max_unavailable=unavailable)
    assert rollout_bounds(rollout, replicas(there), is_in_place=False) == expected


@pytest.mark.parametrize(
    ("surge", "unavailable", "is_in_place", "free", "expected"),
    [
        (2, 0, False, None, (2, 0)),
        (2, 0, False, 5, (2, 0)),
        (2, 0, False, 1, (1, 0)),
        (2, 0, False, 0, (0, 0)),
        (2, 0, True, 0, (0, 1)),
        (2, 3, True, None, (0, 3)),
    ],
)
def test_a_rollout_without_capacity_for_its_surge(
    surge: int, unavailable: int, is_in_place: bool, free: int | None, expected: tuple[int, int]
) -> None:
    rollout = Rollout(max_surge=surge, max_unavailable=unavailable)
    assert rollout_bounds(rollout, replicas("ONn"), is_in_place=is_in_place, free=free) == expected


@pytest.mark.parametrize(
    ("there", "halting"),
    [
        ("OOn!", "replica-2"),
        ("On!n!", "replica-1"),  # the first by name
        ("OOn", None),
        ("OON!", None),  # it serves again
        ("oo!n!", None),  # no old replica serves that could be lost
        ("n!n", None),
        ("O!ON", None),  # an old one failed: its successor is on its way
        ("", None),
    ],
)
def test_a_new_replica_that_fails_halts_the_rollout(there: str, halting: str | None) -> None:
    found = halting_replica(replicas(there))
    assert (found and found.name) == halting
