"""What every executor and every client of a core does for an `LLMEngine`: requests, calls of the workers, sleep.

The workers are of `probe_worker.ProbeWorker`.
"""

from __future__ import annotations

import os
import re

import pytest

from argosy_engine import LLMEngine, SamplingParams
from argosy_engine.core.proc.core_client import InprocClient
from argosy_engine.errors import EngineAsleep, InvalidRequest, UtilityFailed
from argosy_engine.frontend.output_processor import RequestOutput
from fake_worker import continuation

PROMPTS = [[49, 80, 366, 223, 507, 264, 67, 466], [312, 223, 85, 349], [7] * 20]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
FOREVER = GREEDY.replace(max_tokens=4000)
"""Does not end before it is aborted or its process is killed, however late the test gets to it."""
FAKE_TOKENS = {str(index): continuation(prompt, 12) for index, prompt in enumerate(PROMPTS)}
"""What `generate` returns for bare workers."""


def generate(engine: LLMEngine) -> dict[str, list[int]]:
    for index, prompt in enumerate(PROMPTS):
        engine.add_request(str(index), prompt, GREEDY)
    return finish(engine)


def finish(engine: LLMEngine) -> dict[str, list[int]]:
    """Step until all requests have ended, and return their tokens."""
    finished = {}
    while engine.has_unfinished_requests():
        finished |= {output.request_id: output.token_ids for output in engine.step() if output.finished}
    return finished


def check_engine(engine: LLMEngine, expected: dict[str, list[int]], num_workers: int = 1) -> None:
    """Check all of the contract.

    Args:
        expected: what `generate` returns.
    """
    assert generate(engine) == expected
    check_requests(engine)
    check_calls(engine, num_workers)
    check_sleep(engine, expected, num_workers)


def check_requests(engine: LLMEngine) -> None:
    engine.add_request("a", "Once", GREEDY)
    with pytest.raises(InvalidRequest, match="'a' is running"):
        engine.add_request("a", "Twice", GREEDY)
    with pytest.raises(InvalidRequest, match="empty"):
        engine.add_request("b", [], GREEDY)
    engine.add_request("b", [5, 6], GREEDY.replace(n=2))
    engine.step()
    engine.abort_request(["a", "unknown"])
    seen: list[int] = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert output.request_id == "b"
            assert len(output.token_ids) >= len(seen)
            seen = list(output.token_ids)
    assert len(seen) == GREEDY.max_tokens
    assert output.finished
    assert output.outputs[1].token_ids == seen
    engine.add_request("a", "Once", GREEDY)  # the id is free again
    engine.abort_request("a")
    assert engine.step() == []


def check_calls(engine: LLMEngine, num_workers: int) -> None:
    answers = engine.collective_rpc("echo", args=["x", 1, {"y": [2.5, None]}])
    assert [values for _, *values in answers] == [["x", 1, {"y": [2.5, None]}]] * num_workers
    assert len({pid for pid, *_ in answers}) == num_workers
    placed = [[7 + rank, num_workers] for rank in range(num_workers)]
    assert engine.collective_rpc("place", timeout=60, kwargs={"base": 7}) == placed
    with pytest.raises(UtilityFailed, match="unexpected keyword argument 'floor'"):
        engine.collective_rpc("place", kwargs={"floor": 7})
    for timeout in (0, -1.0, float("nan"), ["x"]):
        with pytest.raises(UtilityFailed, match="timeout is a number of seconds"):
            engine.collective_rpc("echo", timeout)  # type: ignore[arg-type]
    for method, message in (
        ("fail", "as asked"),
        ("_load", "no method"),
        ("nothing", "no method"),
        ("args", "no method"),
    ):
        with pytest.raises(UtilityFailed, match=message):
            engine.collective_rpc(method)
    with pytest.raises(UtilityFailed, match="unknown utility"):
        engine.client.call_utility("__class__")


def check_sleep(engine: LLMEngine, expected: dict[str, list[int]], num_workers: int) -> None:
    engine.add_request("busy", "Once", FOREVER)
    engine.step()
    with pytest.raises(UtilityFailed, match="requests are running"):
        engine.sleep()
    engine.abort_request("busy")
    with pytest.raises(UtilityFailed, match="no sleep level 3"):
        engine.sleep(3)
    for level in (1, 2):
        engine.sleep(level)
        assert engine.collective_rpc("holds_memory") == [False] * num_workers
        assert re.search(r"wake_up\(\) of an LLM or POST /wake_up", refusal(engine))
        engine.wake_up()
        assert engine.collective_rpc("holds_memory") == [True] * num_workers
        assert generate(engine) == expected


def refusal(engine: LLMEngine) -> str:
    """Return why the engine does not take a request: at once, or once a core process has answered."""
    if isinstance(engine.client, InprocClient):
        with pytest.raises(EngineAsleep) as caught:
            engine.add_request("refused", "Once", GREEDY)
        return str(caught.value)
    engine.add_request("refused", "Once", GREEDY)
    outputs: list[RequestOutput] = []
    while not outputs:
        outputs = engine.step()
    (output,) = outputs
    assert output.finished
    return output.error or ""


def worker_pids(engine: LLMEngine) -> list[int]:
    return [pid for pid, *_ in engine.collective_rpc("echo")]


def is_in_this_process(engine: LLMEngine) -> bool:
    """Whether the engine's only worker is."""
    return worker_pids(engine) == [os.getpid()]
