"""Engine cores that share experts: a core steps with the others, and lends its experts when it has nothing to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from argosy_engine.config import EngineArgs
from argosy_engine.core.engine_core import EngineCore
from argosy_engine.distributed.lockstep import Lockstep, LockstepFiles, Round
from argosy_engine.messages import EngineCoreOutput, EngineCoreRequest, UtilityCall
from argosy_engine.params import SamplingParams
from fake_executor import BLOCK, FakeExecutor

TIMEOUT_S = 60.0
ARGS = EngineArgs.of(model="builtin://tiny", block_size=BLOCK)


class Core:
    """A core with a fake executor, and its view of the rounds."""

    def __init__(self, lockstep: Lockstep) -> None:
        self.executor, self.lockstep = FakeExecutor(), lockstep
        self.core = EngineCore(ARGS, self.executor, lockstep)

    def add(self, name: str, max_tokens: int) -> None:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        self.core.add_request(EngineCoreRequest(name, [1, 2, 3], params, 0.0))

    def drain(self) -> list[EngineCoreOutput]:
        outputs = []
        while self.core.has_work:
            outputs += self.core.step().outputs
        return outputs

    def serve(self, until: Callable[[], bool]) -> None:
        """Lend experts, as the loop of a core's process does when it has no work."""
        while not until():
            if self.lockstep.is_called:
                self.core.lend_experts()
            else:
                self.lockstep.wait(TIMEOUT_S)

    def call(self, method: str, *args: object) -> str | None:
        return self.core.call_utility(UtilityCall(0, method, list(args))).failure


@pytest.fixture
def cores() -> Iterator[tuple[Core, Core]]:
    files = LockstepFiles(2)
    first, second = (Core(Lockstep(files.ends(rank))) for rank in range(2))
    yield first, second
    for each in (first, second):
        each.core.shutdown()
    files.close()


@contextmanager
def serving(core: Core) -> Iterator[None]:
    """Lend a core's experts meanwhile."""
    ended: Future[None] = Future()
    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(core.serve, ended.done)
        try:
            yield
        finally:
            ended.set_result(None)
            core.lockstep.wake()
            served.result(TIMEOUT_S)


def test_an_idle_core_lends_its_experts_to_every_step(cores: tuple[Core, Core]) -> None:
    busy, idle = cores
    with serving(idle):
        busy.add("a", 3)
        busy.add("b", 2)
        outputs = busy.drain()
    assert [len(each.new_token_ids) for each in outputs] == [1, 1, 1, 1, 1]
    decodes = [Round([2, 0], is_decode=True), Round([1, 0], is_decode=True)]
    assert idle.executor.lent == [Round([6, 0], is_decode=False), *decodes]
    assert busy.executor.lent == []
    with serving(busy):
        idle.add("c", 1)
        idle.drain()
    assert busy.executor.lent == [Round([0, 3], is_decode=False)]


def test_cores_with_work_step_together(cores: tuple[Core, Core]) -> None:
    for core, max_tokens in zip(cores, (4, 9), strict=True):
        core.add("a", max_tokens)

    def run(core: Core) -> None:
        core.drain()
        core.serve(lambda: all(not each.core.has_work for each in cores))
        for each in cores:
            each.lockstep.wake()

    with ThreadPoolExecutor(2) as pool:
        for each in [pool.submit(run, core) for core in cores]:
            each.result(TIMEOUT_S)
    lent = [len(core.executor.lent) for core in cores]
    assert lent == [5, 0], "the first core has computed in the other steps itself"


def test_requests_end_if_another_core_is_asleep(cores: tuple[Core, Core]) -> None:
    awake, asleep = cores
    assert asleep.call("sleep", 1) is None
    with serving(asleep):
        awake.add("a", 3)
        (output,) = awake.drain()
        assert output.error is not None
        assert "wake it up first" in output.error
    assert asleep.executor.lent == []
    assert asleep.call("wake_up") is None
    with serving(asleep):
        awake.add("b", 3)
        assert len(awake.drain()) == 3
    assert len(asleep.executor.lent) == 3
    assert awake.call("check") is None
