"""Lockstep: ranks agree on every round, whoever begins it, and sleep when there is none."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import pytest

from argosy_engine.distributed.lockstep import Lockstep, LockstepFiles, Round

T = TypeVar("T")
TIMEOUT_S = 60.0


@contextmanager
def ranks(size: int) -> Iterator[list[Lockstep]]:
    files = LockstepFiles(size)
    yield [Lockstep(files.ends(rank)) for rank in range(size)]
    files.close()
    files.close()


def at_once(*calls: Callable[[], T]) -> list[T]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [each.result(TIMEOUT_S) for each in [pool.submit(call) for call in calls]]


def test_all_ranks_get_what_each_has_posted() -> None:
    with ranks(3) as (a, b, c):
        for counts in ([5, 0, 1], [0, 7, 7], [1 << 20, 0, 0]):
            joined = zip((a, b, c), counts, strict=True)
            found = at_once(*(lambda rank=rank, count=count: rank.join(count) for rank, count in joined))
            assert found == [Round(counts, is_decode=True)] * 3
            assert [each.num_rows for each in found if each] == [max(counts)] * 3


def test_one_prompt_keeps_all_ranks_from_a_graph() -> None:
    with ranks(2) as (a, b):
        found = at_once(lambda: a.join(4, is_decode=False), lambda: b.join(1))
        assert found == [Round([4, 1], is_decode=False)] * 2


def test_a_round_with_a_rank_that_sleeps_is_void() -> None:
    with ranks(2) as (a, b):
        assert at_once(lambda: a.join(4), lambda: b.join(0, is_awake=False)) == [None, None]
        assert at_once(lambda: a.join(4), lambda: b.join(0)) == [Round([4, 0], is_decode=True)] * 2


def test_a_rank_is_called_once_for_each_round() -> None:
    with ranks(2) as (a, b):
        assert not b.is_called
        assert not b.wait(0)
        with ThreadPoolExecutor(1) as pool:
            began = pool.submit(a.join, 3)
            while not b.is_called:
                assert b.wait(TIMEOUT_S)
            assert not began.done()
            assert b.join(0) == began.result(TIMEOUT_S) == Round([3, 0], is_decode=True)
        assert not a.is_called
        assert not b.is_called


def test_a_wake_is_not_lost() -> None:
    with ranks(2) as (a, _):
        a.wake()
        a.wake()
        assert a.wait(0)
        assert not a.wait(0), "nothing has happened since"
        waker = threading.Thread(target=a.wake)
        waker.start()
        assert a.wait(TIMEOUT_S)
        waker.join()


def test_a_rank_that_waits_for_long_may_give_up() -> None:
    files = LockstepFiles(2)
    rank = Lockstep(files.ends(0), interval_s=0.001)
    calls = []

    def check() -> None:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("a worker died")

    rank.on_wait = check
    with pytest.raises(RuntimeError, match="a worker died"):
        rank.join(1)
    files.close()


@pytest.mark.parametrize("seed", range(4))
def test_ranks_with_work_at_any_time_run_the_same_rounds(seed: int) -> None:
    """Requests arrive in bursts, so that rounds begin just as all others have gone to sleep."""
    size, bursts = 4, 60
    stopped = threading.Event()

    def run(lockstep: Lockstep) -> list[Round | None]:
        draw = random.Random(f"{seed} {lockstep.rank}")
        rounds: list[Round | None] = []
        for _ in range(bursts):
            for _ in range(draw.randrange(4)):
                rounds.append(lockstep.join(draw.randrange(1, 9), is_decode=draw.random() < 0.5))
            for _ in range(draw.randrange(3)):
                if lockstep.is_called:
                    rounds.append(lockstep.join(0))
        finished.append(lockstep.rank)
        if len(finished) == size:
            stopped.set()
            for other in all_ranks:
                other.wake()
        while not (stopped.is_set() and not lockstep.is_called):
            if lockstep.is_called:
                rounds.append(lockstep.join(0))
            else:
                assert lockstep.wait(TIMEOUT_S)
        return rounds

    finished: list[int] = []
    with ranks(size) as all_ranks:
        found = at_once(*(lambda rank=rank: run(rank) for rank in all_ranks))
    assert len(found[0]) > bursts
    assert found == [found[0]] * size
    assert all(each is not None and any(each.num_tokens) for each in found[0]), "no round without tokens"
