"""Why an engine's workers have ended: what is the reason, and what the log says of the others."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch.distributed

from argosy_engine.distributed.parallel_state import GroupCommunicator, ParallelState
from argosy_engine.errors import ConfigError, EngineDead
from argosy_engine.executor.worker_protocol import WorkerEnd, WorkerFailure, death_of, failure_of

KILLED = WorkerEnd("Worker_TP1 (process 2)", "killed by SIGKILL", None)
LOST = WorkerEnd(
    "Worker_TP0 (process 1)", "", WorkerFailure("closed by peer", False, True, "trace of the peer")
)
FAULT = WorkerEnd(
    "Worker_TP2 (process 3)", "", WorkerFailure("KeyError: 1", False, False, "trace of the fault")
)
OTHER = FAULT._replace(who="Worker_TP3 (process 4)")
REFUSED = WorkerEnd("Worker_TP4 (process 5)", "", WorkerFailure("no such file", is_config_error=True))


@pytest.mark.parametrize(
    ("ends", "log"),
    [
        ([LOST, KILLED, FAULT], ["Worker_TP1 (process 2) ended: killed by SIGKILL"]),
        (
            [LOST, FAULT],
            [
                "Worker_TP2 (process 3) failed: KeyError: 1",
                "Worker_TP2 (process 3) failed\ntrace of the fault",
            ],
        ),
        (
            [FAULT, OTHER],
            [
                "Worker_TP2 (process 3) failed: KeyError: 1; Worker_TP3 (process 4) failed: KeyError: 1",
                "Worker_TP2 (process 3) failed\ntrace of the fault",
            ],
        ),
        (
            [LOST],
            [
                "Worker_TP0 (process 1) failed: closed by peer",
                "Worker_TP0 (process 1) failed\ntrace of the peer",
            ],
        ),
    ],
)
def test_the_reason_is_the_first_line_of_the_log(
    ends: list[WorkerEnd], log: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    death = death_of(ends)
    assert isinstance(death, EngineDead)
    assert str(death) == log[0]
    assert caplog.messages == log


def test_a_configuration_error_is_the_reason_whatever_else_ended(caplog: pytest.LogCaptureFixture) -> None:
    death = death_of([KILLED, LOST, REFUSED])
    assert isinstance(death, ConfigError)
    assert str(death) == "no such file"
    assert not caplog.messages


def test_a_failure_says_whether_another_worker_may_be_its_reason() -> None:
    def failure(call: object) -> WorkerFailure:
        try:
            call()  # type: ignore[operator]
        except Exception as error:
            return failure_of(error)
        raise AssertionError("it has not failed")

    in_collective = failure(lambda: GroupCommunicator(None).barrier())  # type: ignore[arg-type]
    assert in_collective.is_in_collective
    assert failure(torch.distributed.barrier).is_in_collective
    of_several = SimpleNamespace(world=SimpleNamespace(size=2), device="no device")
    assert not failure(lambda: ParallelState.least(of_several, 1)).is_in_collective  # type: ignore[arg-type]
    own = failure(lambda: {}["x"])
    assert not own.is_in_collective
    assert own.message == "KeyError: 'x'"
    assert own.traceback.startswith("Traceback (most recent call last)")
    assert own.traceback.endswith("KeyError: 'x'")
    refused = failure_of(ConfigError("use another"))
    assert refused == WorkerFailure("use another", is_config_error=True)
