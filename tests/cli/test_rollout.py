"""The rollout's arithmetic: single steps by a table, whole rollouts by simulation."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.local.rollout import Goal, Member, goal, next_step, revision, threads_per_replica
from argosy_resource.types import InferenceService, parse

OLD, NEW = "old", "new"


def service(**spec: object) -> InferenceService:
    return parse({"metadata": {"name": "tiny"}, "spec": {"model": {"source": "builtin://tiny"}, **spec}})


def members(text: str) -> list[Member]:
    """`o`/`n`: old or new revision, capital: routable, `-` after it: leaving."""
    found: list[Member] = []
    for letter in text:
        if letter == "-":
            found[-1] = found[-1]._replace(is_leaving=True)
        else:
            found.append(Member(str(len(found)), OLD if letter in "oO" else NEW, letter.isupper(), False))
    return found


@pytest.mark.parametrize(
    ("there", "replicas", "surge", "unavailable", "start", "retire"),
    [
        ("", 2, 1, 0, 2, ""),
        ("NN", 2, 1, 0, 0, ""),
        ("Nn", 2, 1, 0, 0, ""),
        ("NN", 3, 1, 0, 1, ""),
        ("NNN", 1, 1, 0, 0, "21"),  # the youngest first: their caches are the smallest
        ("NnN", 2, 1, 0, 0, "1"),  # but before them whoever serves nobody
        ("OO", 2, 1, 0, 1, ""),
        ("OOn", 2, 1, 0, 0, ""),  # the new one is not routable yet
        ("OON", 2, 1, 0, 0, "0"),
        ("O-ON", 2, 1, 0, 0, ""),  # while one drains its memory is not free
        ("OO", 2, 0, 1, 0, "0"),
        ("OO", 2, 2, 0, 2, ""),
        ("OOO", 1, 1, 0, 0, "01"),
        ("oO", 2, 1, 0, 1, "0"),  # a broken old one is nobody's loss
        ("OO", 0, 1, 0, 0, "01"),
        ("N-", 1, 1, 0, 1, ""),
    ],
)
def test_next_step(there: str, replicas: int, surge: int, unavailable: int, start: int, retire: str) -> None:
    step = next_step(Goal(replicas, NEW, surge, unavailable), members(there))
    assert (step.start, "".join(step.retire)) == (start, retire)


@given(
    before=st.integers(0, 6),
    replicas=st.integers(0, 6),
    surge=st.integers(0, 3),
    unavailable=st.integers(0, 3),
    data=st.data(),
)
def test_a_rollout_keeps_its_bounds_and_ends(
    before: int, replicas: int, surge: int, unavailable: int, data: st.DataObject
) -> None:
    wanted = Goal(replicas, NEW, surge, max(unavailable, 0 if surge else 1))
    fleet = {str(number): Member(str(number), OLD, True, False) for number in range(before)}
    serial = before
    floor = min(before, max(0, replicas - wanted.unavailable))
    ceiling = max(before, replicas + surge)
    for _ in range(200):
        step = next_step(wanted, list(fleet.values()))
        for name in step.retire:
            assert not fleet[name].is_leaving
            fleet[name] = fleet[name]._replace(is_leaving=True, is_available=False)
        for _ in range(step.start):
            fleet[str(serial)] = Member(str(serial), NEW, False, False)
            serial += 1
        assert sum(member.is_available for member in fleet.values()) >= floor
        assert len(fleet) <= ceiling
        waiting = [member for member in fleet.values() if member.is_leaving or not member.is_available]
        if not waiting:
            break
        event = data.draw(st.sampled_from(waiting))  # something happens: one becomes routable, or is gone
        if event.is_leaving:
            del fleet[event.name]
        else:
            fleet[event.name] = event._replace(is_available=True)
    assert [member.revision for member in fleet.values()] == [NEW] * replicas


@pytest.mark.parametrize(
    ("spec", "is_same"),
    [
        ({"replicas": 5}, True),
        ({"router": {"policy": "least-load"}}, True),
        ({"resources": {"memory": "2Gi"}}, True),
        ({"rollout": {"maxSurge": 3}}, True),
        ({"engine": {"maxNumSeqs": 8}}, False),
        ({"engine": {"threads": 2}}, False),
        ({"engine": {"env": [{"name": "A", "value": "1"}]}}, False),
        ({"model": {"source": "builtin://tiny", "aliases": ["small"]}}, True),
        ({"model": {"source": "builtin://tiny", "servedName": "org/Tiny"}}, True),
        ({"resources": {"gpu": {"count": 2}}}, False),
    ],
)
def test_a_revision_changes_with_what_makes_the_process(spec: dict[str, object], is_same: bool) -> None:
    assert (revision(service(**spec)) == revision(service())) == is_same


@pytest.mark.parametrize(
    ("capacity", "surge", "unavailable"), [(None, 1, 0), (4, 1, 0), (3, 1, 0), (2, 0, 1), (1, 0, 1)]
)
def test_without_a_gpu_for_the_surge_a_change_replaces_in_place(
    capacity: int | None, surge: int, unavailable: int
) -> None:
    wanted = goal(service(replicas=2), capacity=capacity)
    assert (wanted.surge, wanted.unavailable) == (surge, unavailable)


@pytest.mark.parametrize(
    ("replicas", "rollout", "unavailable"),
    [
        (1, {}, 0),
        (1, {"maxUnavailable": 0}, 0),
        (2, {"maxUnavailable": 0}, 0),
        (1, {"maxUnavailable": 1}, 1),
        (1, {"maxSurge": 0}, 1),
    ],
)
def test_without_a_gpu_for_the_surge_the_last_replica_is_kept_unless_the_manifest_gives_it_up(
    replicas: int, rollout: dict[str, int], unavailable: int
) -> None:
    wanted = goal(service(replicas=replicas, rollout=rollout), capacity=replicas)
    assert (wanted.surge, wanted.unavailable) == (0, unavailable)
    assert wanted.waits_for_capacity == (unavailable == 0)
    step = next_step(wanted, [Member(str(number), OLD, True, False) for number in range(replicas)])
    assert len(step.retire) == unavailable


def test_no_more_replicas_start_than_there_are_gpus_for() -> None:
    wanted = msgspec.convert({"replicas": 3, "revision": NEW, "surge": 0, "unavailable": 1, "most": 2}, Goal)
    assert next_step(wanted, members("")).start == 2
    assert next_step(wanted, members("NN")).start == 0


@pytest.mark.parametrize(("replicas", "cores", "threads"), [(1, 8, 8), (3, 8, 2), (4, 2, 1), (0, 2, 2)])
def test_cores_are_divided_among_replicas(replicas: int, cores: int, threads: int) -> None:
    assert threads_per_replica([service(replicas=replicas)], cores) == threads
