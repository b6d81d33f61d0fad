"""Numbers in memory that several processes share."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from argosy_engine.core.proc.rank_balancer import RankBalancer
from argosy_engine.errors import EngineBusy, InvalidRequest
from argosy_engine.frontend.admission import QueueLimits
from argosy_engine.messages import EngineCoreRequest
from argosy_engine.osproc import SharedCounters, make_shared_memory
from argosy_engine.params import SamplingParams


def rows(num_processes: int, num_columns: int) -> list[SharedCounters]:
    memory = make_shared_memory(num_processes, num_columns)
    made = [SharedCounters(memory, num_processes, index, num_columns) for index in range(num_processes)]
    os.close(memory)
    return made


def test_a_process_reads_the_sum_of_the_others() -> None:
    first, second, third = rows(3, 2)
    first.set(0, 1)
    second.set(0, 20)
    third.set(0, 300)
    third.set(1, -4)
    assert [row.others(0) for row in (first, second, third)] == [320, 301, 21]
    assert [row.others(1) for row in (first, second, third)] == [-4, -4, 0]
    assert second.after(1).others(0) == -4


def test_a_child_process_writes_into_the_same_memory() -> None:
    memory = make_shared_memory(2, 1)
    program = (
        "import sys; from argosy_engine.osproc import SharedCounters\n"
        "SharedCounters(int(sys.argv[1]), 2, 1, 1).set(0, 1 << 40)"
    )
    counters = SharedCounters(memory, 2, 0, 1)
    subprocess.run([sys.executable, "-c", program, str(memory)], pass_fds=[memory], check=True, timeout=60)
    os.close(memory)
    assert counters.others(0) == 1 << 40


def test_the_limits_on_queues_are_those_of_all_processes() -> None:
    first, second = (QueueLimits(3, 100, counters=row) for row in rows(2, 4))
    first.enter("a", 60)
    second.enter("b", 30)
    assert (first.num_reqs, first.num_queued_tokens) == (second.num_reqs, second.num_queued_tokens) == (2, 90)
    with pytest.raises(EngineBusy, match="90 prompt tokens are waiting"):
        second.check(1, 20)
    first.start("a")
    second.check(1, 20)
    with pytest.raises(EngineBusy, match="2 requests are waiting or running"):
        second.check(2)
    first.leave("a")
    second.check(2)
    with pytest.raises(InvalidRequest, match="this engine takes 3"):
        second.check(4)


def test_the_limits_of_a_rank_are_those_of_all_processes() -> None:
    first, second = (QueueLimits(4, None, num_ranks=2, counters=row) for row in rows(2, 6))
    first.enter("a", 0, rank=1)
    second.enter("b", 0)
    second.place("b", 1)
    for limits in (first, second):
        limits.check(1, rank=0)
        with pytest.raises(EngineBusy, match="in data-parallel rank 1"):
            limits.check(1, rank=1)


def test_requests_of_other_processes_weigh_in_the_choice_of_a_rank() -> None:
    first, second = (RankBalancer([8, 8], row) for row in rows(2, 4))
    made = [EngineCoreRequest(str(number), [1] * 10, SamplingParams(), 0.0) for number in range(4)]
    assert first.add(made[0]) == 0
    assert [second.add(made[1]), second.add(made[2])] == [1, 0]
    assert first.num_requests == second.num_requests == (2, 1)
    assert first.add(made[3]) == 1
    second.remove(["1", "2"])
    assert first.num_requests == (1, 1)
