"""An engine sleeps only without unfinished requests, and aborted ones leave nothing behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from argosy_engine.config import EngineArgs
from argosy_engine.core.engine_core import EngineCore
from argosy_engine.messages import EngineCoreRequest, UtilityCall
from argosy_engine.params import SamplingParams
from argosy_engine.structured.manager import GrammarRequest
from argosy_engine.structured.structured_outputs_params import GrammarSpec
from fake_executor import BLOCK, FakeExecutor
from fake_worker import next_token


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def core(request: pytest.FixtureRequest) -> Iterator[EngineCore]:
    args = EngineArgs.of(model="builtin://tiny", block_size=BLOCK, async_scheduling=request.param)
    made = EngineCore(args, FakeExecutor())
    yield made
    made.shutdown()


def add(core: EngineCore, name: str, grammar: GrammarRequest | None = None) -> None:
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    core.add_request(EngineCoreRequest(name, [1, 2, 3], params, 0.0, grammar=grammar))


def call(core: EngineCore, method: str, *args: object) -> str | None:
    """Calls a utility; why it failed."""
    return core.call_utility(UtilityCall(0, method, list(args))).failure


def drain(core: EngineCore) -> dict[str, list[int]]:
    received: dict[str, list[int]] = {}
    for _ in range(20):
        if not core.has_work:
            return received
        for output in core.step().outputs:
            received.setdefault(output.request_id, []).extend(output.new_token_ids)
    pytest.fail("the core does not come to an end")


def check_works(core: EngineCore) -> None:
    add(core, "later")
    tokens = [1, 2, 3]
    for _ in range(4):
        tokens.append(next_token(tuple(tokens)))
    assert drain(core) == {"later": tokens[3:]}


@pytest.mark.parametrize("num_steps", range(4))
def test_steps_of_aborted_requests_end_before_it_sleeps(core: EngineCore, num_steps: int) -> None:
    add(core, "leaves")
    for _ in range(num_steps):
        core.step()
    assert call(core, "sleep", 1) is not None
    core.abort_requests(["leaves"])
    assert call(core, "sleep", 1) is None
    assert drain(core) == {}
    assert call(core, "wake_up") is None
    check_works(core)
    core.scheduler.check()


def test_a_grammar_that_still_compiles(core: EngineCore) -> None:
    add(core, "waits", GrammarRequest(GrammarSpec("regex", "[a-z]+")))
    assert call(core, "sleep", 1) == "requests are running"
    core.abort_requests(["waits"])
    assert not core.structured.is_waiting_for("waits")
    assert call(core, "sleep", 1) is None
    assert drain(core) == {}
    assert call(core, "wake_up") is None
    check_works(core)
