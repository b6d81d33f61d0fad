"""The local rollout: single steps as a table, whole rollouts by simulation."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy.local.supervisor import Goal, Member, goal, next_step, revision_of, threads_per_replica
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


def roll_out(
    wanted: InferenceService, fleet: dict[str, Member], *, works: bool, steps: int = 50
) -> tuple[Goal, int]:
    """Take steps until nothing is left to do; every new replica becomes available, or fails.

    Returns the last goal and the smallest number of available replicas on the way.
    """
    lowest, serial = len(fleet), len(fleet)
    for _ in range(steps):
        aim = goal(wanted, list(fleet.values()))
        step = next_step(aim, list(fleet.values()))
        for name in step.retire:
            del fleet[name]
        lowest = min(lowest, sum(member.is_available for member in fleet.values()))
        for _ in range(step.start):
            fleet[f"new-{serial}"] = Member(
                f"new-{serial}", aim.revision, works, is_leaving=False, has_failed=not works
            )
            serial += 1
        if step == (0, ()):
            break
    return aim, lowest


@pytest.mark.parametrize("surge", [0, 1, 4])
@pytest.mark.parametrize("unavailable", [1, 2, 4])
def test_a_broken_edit_replaces_one_replica_and_halts(surge: int, unavailable: int) -> None:
    edited = service(replicas=4, rollout={"maxSurge": surge, "maxUnavailable": unavailable})
    fleet = {str(number): Member(str(number), OLD, True, False) for number in range(4)}
    aim, lowest = roll_out(edited, fleet, works=False)
    new = [member.name for member in fleet.values() if member.revision == aim.revision]
    assert len(new) == 1
    assert aim.halted_by == new[0]
    assert lowest == (4 if surge else 3)
    assert sum(member.is_available for member in fleet.values()) == lowest

    mended = service(
        replicas=4,
        engine={"maxNumSeqs": 8},
        rollout={"maxSurge": surge, "maxUnavailable": unavailable},
    )
    aim, _ = roll_out(mended, fleet, works=True)
    assert [member.revision for member in fleet.values()] == [aim.revision] * 4


def test_a_later_failure_halts_as_well() -> None:
    edited = service(replicas=3, rollout={"maxSurge": 2})
    new = revision_of(edited)
    fleet = [Member(name, OLD, True, False) for name in ("a", "b")]
    fleet += [Member("c", new, True, False), Member("d", new, False, False, has_failed=True)]
    aim = goal(edited, fleet)
    assert aim.halted_by == "d"
    assert next_step(aim, fleet) == (0, ())
    fleet[-1] = Member("d", new, True, False)  # it serves after all
    aim = goal(edited, fleet)
    assert aim.halted_by == ""
    assert next_step(aim, fleet).retire == ("a",)


def test_an_old_replica_that_fails_for_a_moment_is_kept_while_no_new_one_works() -> None:
    """It may be the last one that works: a surge replica can take the memory of the old one, say."""
    edited = service(replicas=1)
    new = revision_of(edited)
    old = Member("a", OLD, False, False, has_failed=True, has_served=True)
    broken = Member("n", new, False, False, has_failed=True)
    assert next_step(goal(edited, [old, broken]), [old, broken]) == (0, ())
    grown = service(replicas=3)
    assert goal(grown, [old, broken]).halted_by == "n"
    assert next_step(goal(grown, [old, broken]), [old, broken]).start == 0
    works = broken._replace(is_available=True, has_failed=False)
    assert next_step(goal(edited, [old, works]), [old, works]) == (0, ("a",))
    assert next_step(goal(edited, [old]), [old]).retire == ("a",), "it must not block the edit that mends it"


RECOVERING = Member("a", OLD, False, False, has_failed=True, has_served=True, is_recovering=True)


@pytest.mark.parametrize("replicas", [1, 3])
def test_an_old_replica_that_restarts_at_the_moment_of_an_edit_is_kept_until_a_new_one_works(
    replicas: int,
) -> None:
    edited = service(replicas=replicas)
    fleet = [RECOVERING, *(Member(f"b{number}", OLD, True, False) for number in range(1, replicas))]
    assert next_step(goal(edited, fleet), fleet) == (1, ()), "nor is it missing from the old ones"
    broken = Member("n", revision_of(edited), False, False, has_failed=True)
    assert goal(edited, [*fleet, broken]).halted_by == "n"
    assert next_step(goal(edited, [*fleet, broken]), [*fleet, broken]) == (0, ())
    works = broken._replace(is_available=True, has_failed=False)
    assert "a" in next_step(goal(edited, [*fleet, works]), [*fleet, works]).retire


@pytest.mark.parametrize(("num_down", "retired"), [(1, "a"), (2, "a"), (3, "a")])
def test_without_a_surge_one_of_the_old_replicas_that_restart_is_replaced_first(
    num_down: int, retired: str
) -> None:
    edited = service(replicas=3, rollout={"maxSurge": 0})
    down = [RECOVERING._replace(name=name) for name in "abc"[:num_down]]
    fleet = [*down, *(Member(name, OLD, True, False) for name in "abc"[num_down:])]
    assert next_step(goal(edited, fleet), fleet) == (0, (retired,))
    left = fleet[1:]
    assert next_step(goal(edited, left), left) == (1, ()), "and the new one has to work before the others go"
    left.append(Member("n", revision_of(edited), False, False, has_failed=True))
    assert next_step(goal(edited, left), left) == (0, ())


@pytest.mark.parametrize(
    ("replicas", "rollout"), [(1, {"maxSurge": 0}), (3, {"maxSurge": 0, "maxUnavailable": 2})]
)
def test_without_a_surge_old_replicas_stop_before_new_ones_start(
    replicas: int, rollout: dict[str, int]
) -> None:
    edited = service(replicas=replicas, rollout=rollout)
    fleet = {str(number): Member(str(number), OLD, True, False) for number in range(replicas)}
    for serial in range(100):
        aim = goal(edited, list(fleet.values()))
        step = next_step(aim, list(fleet.values()))
        for name in step.retire:
            fleet[name] = fleet[name]._replace(is_leaving=True, is_available=False)
        for number in range(step.start):
            fleet[f"new-{serial}-{number}"] = Member(f"new-{serial}-{number}", aim.revision, False, False)
        assert len(fleet) <= replicas
        assert sum(member.is_available for member in fleet.values()) >= replicas - rollout.get(
            "maxUnavailable", 1
        )
        waiting = [member for member in fleet.values() if member.is_leaving or not member.is_available]
        if not waiting:
            break
        if waiting[0].is_leaving:
            del fleet[waiting[0].name]
        else:
            fleet[waiting[0].name] = waiting[0]._replace(is_available=True)
    assert [member.revision for member in fleet.values()] == [aim.revision] * replicas


@pytest.mark.parametrize(("replicas", "retired"), [(3, ""), (2, ""), (1, "b"), (0, "nba")])
def test_a_halted_rollout_still_scales_down(replicas: int, retired: str) -> None:
    edited = service(replicas=replicas)
    fleet = [Member(name, OLD, True, False) for name in "ab"]
    fleet.append(Member("n", revision_of(edited), False, False, has_failed=True))
    assert next_step(goal(edited, fleet), fleet) == (0, tuple(retired))


def test_a_router_that_restarts_costs_no_old_replica() -> None:
    edited = service(replicas=2)
    new = revision_of(edited)
    fleet = [Member(name, OLD, False, False, is_unreported=True) for name in "ab"]
    assert next_step(goal(edited, fleet), fleet) == (1, ())
    fleet.append(Member("n", new, False, False, has_failed=True))
    assert goal(edited, fleet).halted_by == "n"
    fleet[-1:] = [Member(name, new, True, False) for name in "no"]
    assert next_step(goal(edited, fleet), fleet) == (0, ("a", "b"))


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
    assert (revision_of(service(**spec)) == revision_of(service())) == is_same


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
