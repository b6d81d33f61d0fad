"""Data parallelism offline: `LLM(..., data_parallel_size=2)` spreads prompts over two cores, with the same results."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from argosy_engine import LLM, EngineArgs, SamplingParams, StructuredOutputsParams
from argosy_engine.core.proc.async_core_client import AsyncMPClient
from argosy_engine.core.proc.core_handle import CoreHandle
from argosy_engine.core.proc.data_parallel_client import (
    DPLBAsyncMPClient,
    DPLBSyncMPClient,
    combined_config,
    combined_result,
)
from argosy_engine.errors import ConfigError, EngineClosed, EngineDead, InvalidRequest, UtilityFailed
from argosy_engine.resolved_config import ResolvedConfig
from engine_processes import worker_path
from fake_worker import continuation
from processes import children, is_alive, wait_until, workers

ARGS: dict[str, Any] = {
    "model": "builtin://tiny",
    "device": "cpu",
    "dtype": "float32",
    "threads": 1,
    "num_gpu_blocks_override": 512,
    "worker_cls": "probe_worker.ProbeWorker",
}
PROMPTS = [
    f"Tell me of {what}." for what in ("the sea", "a lantern", "two cats", "the harbor", "an old clock")
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, seed=5, n=2, max_tokens=12, ignore_eos=True)
LOGPROBS = SamplingParams(temperature=0.0, max_tokens=4, logprobs=2, prompt_logprobs=1)
CHOICE = SamplingParams(
    max_tokens=12, seed=1, structured_outputs=StructuredOutputsParams(choice=["lighthouse", "windmill"])
)
FOREVER = SamplingParams(max_tokens=3000, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with worker_path(), LLM(**ARGS, data_parallel_size=2) as made:
        yield made


@pytest.fixture(scope="module")
def single() -> Iterator[LLM]:
    with LLM(**ARGS) as made:
        yield made


def step_until_done(llm: LLM) -> None:
    while llm.engine.has_unfinished_requests():
        llm.engine.step()


def cores(llm: LLM) -> list[int]:
    assert isinstance(llm.client, DPLBSyncMPClient)
    return llm.client.pids


@pytest.mark.parametrize(
    "params", [GREEDY, SEEDED, LOGPROBS, CHOICE], ids=["greedy", "seeded", "logprobs", "choice"]
)
def test_results_are_those_of_one_core(llm: LLM, single: LLM, params: SamplingParams) -> None:
    found, expected = (each.generate(PROMPTS, params, use_tqdm=False) for each in (llm, single))
    for one, other in zip(found, expected, strict=True):
        assert one.prompt_token_ids == other.prompt_token_ids
        for mine, others in zip(one.outputs, other.outputs, strict=True):
            assert (mine.token_ids, mine.text, mine.finish_reason) == (
                others.token_ids,
                others.text,
                others.finish_reason,
            )
            assert [entry.token_ids for entry in mine.logprobs] == [
                entry.token_ids for entry in others.logprobs
            ]
        assert (one.prompt_logprobs is None) == (other.prompt_logprobs is None)


def test_vectors_are_those_of_one_core(llm: LLM, single: LLM) -> None:
    found, expected = (each.embed(PROMPTS, use_tqdm=False) for each in (llm, single))
    for one, other in zip(found, expected, strict=True):
        assert one.outputs.embedding == pytest.approx(other.outputs.embedding, abs=1e-6)


def test_repeats_go_to_the_core_that_holds_their_prefix(llm: LLM) -> None:
    assert llm.engine.reset_prefix_cache()
    prompts = [f"{number}: " + "the harbor is far away, " * 20 for number in range(4)]
    first = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [result.num_cached_tokens for result in first] == [0] * 4
    again = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert all(result.num_cached_tokens > 0.8 * len(result.prompt_token_ids) for result in again)
    assert llm.engine.reset_prefix_cache()
    assert llm.generate(prompts, GREEDY, use_tqdm=False)[0].num_cached_tokens == 0


def test_calls_reach_the_workers_of_all_cores(llm: LLM) -> None:
    answers = llm.collective_rpc("echo", args=["x"])
    assert [answer[1:] for answer in answers] == [["x"], ["x"]]
    assert [pid for pid, _ in answers] == cores(llm)
    with pytest.raises(UtilityFailed, match=r"data-parallel rank 0: .*as asked"):
        llm.collective_rpc("fail")
    assert llm.client.call_utility("check") is True


def test_all_cores_sleep_or_none(llm: LLM) -> None:
    llm.engine.add_request("busy", "Once", FOREVER)
    llm.engine.step()
    with pytest.raises(UtilityFailed, match="requests are running"):
        llm.sleep()
    assert llm.collective_rpc("holds_memory") == [True, True]
    llm.engine.abort_request("busy")
    llm.sleep(2)
    assert llm.collective_rpc("holds_memory") == [False, False]
    with pytest.raises(UtilityFailed, match="no sleep level 5"):
        llm.sleep(5)
    assert llm.collective_rpc("holds_memory") == [False, False]
    llm.wake_up()
    assert llm.collective_rpc("holds_memory") == [True, True]
    assert len(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == len(PROMPTS)


def test_requests_may_be_aborted_on_every_core(llm: LLM) -> None:
    for number in range(4):
        llm.engine.add_request(str(number), f"{number} ships", FOREVER)
    llm.engine.step()
    llm.engine.abort_request(["0", "1", "2", "3"])
    assert not llm.client.has_work
    assert llm.client.call_utility("unknown_requests", ["a"]) == ["a"]
    assert llm.engine.reset_prefix_cache(), "no core holds blocks"


def test_a_core_that_is_killed_ends_the_engine(bare_workers: None) -> None:
    llm = LLM(**{**ARGS, "worker_cls": "auto"}, data_parallel_size=2, distributed_executor_backend="mp")
    try:
        pids = cores(llm)
        others = [worker for pid in pids for worker in workers(pid)]
        assert len(others) == 2
        llm.engine.add_request("a", "Once upon a time", FOREVER)
        llm.engine.add_request("b", "The sea", FOREVER)
        llm.engine.step()
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(EngineDead, match=r"data-parallel rank 1: .*killed by SIGKILL"):
            step_until_done(llm)
        with pytest.raises(EngineDead, match="data-parallel rank 1"):
            llm.engine.reset_prefix_cache()
    finally:
        llm.close()
    wait_until(lambda: not any(map(is_alive, [*pids, *others])), "all processes to end")
    with pytest.raises(EngineClosed):
        llm.generate("x")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The processes of the cores that a test starts, as it starts them."""
    pids: list[int] = []
    start = CoreHandle.start

    def start_and_record(handle: CoreHandle) -> None:
        start(handle)
        pids.append(handle.pid)

    monkeypatch.setattr(CoreHandle, "start", start_and_record)
    return pids


def test_a_start_that_fails_says_why_and_leaves_nothing(tmp_path: Path, started: list[int]) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["NoSuchModel"]}')  # the cores find out
    with pytest.raises(ConfigError, match="NoSuchModel"):
        LLM(str(tmp_path), data_parallel_size=2)
    assert len(started) == 2
    assert not set(started) & set(children(os.getpid()))


def test_each_core_may_have_several_workers(bare_workers: None) -> None:
    with LLM(**ARGS, data_parallel_size=2, tensor_parallel_size=2) as llm:
        answers = llm.collective_rpc("place", kwargs={"base": 0})
        assert answers == [[0, 2], [1, 2]] * 2, "(rank, world size) of the workers of each core"
        for result in llm.generate(PROMPTS, GREEDY, use_tqdm=False):
            assert result.token_ids == continuation(result.prompt_token_ids, 12)


async def test_an_asynchronous_start_that_fails_says_why_and_leaves_nothing(
    tmp_path: Path, started: list[int]
) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["NoSuchModel"]}')
    with pytest.raises(ConfigError, match="NoSuchModel"):
        await DPLBAsyncMPClient.start(EngineArgs.of(model=str(tmp_path), data_parallel_size=2))
    assert len(started) == 2
    assert not set(started) & set(children(os.getpid()))
    gc.collect()  # a socket that was left open warns


async def test_a_start_that_is_cancelled_while_it_fails_leaves_nothing(
    tmp_path: Path, started: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when two ranks fail at once: the error of one cancels the start of the other."""
    loop, end = asyncio.get_running_loop(), CoreHandle.end
    is_ending, may_end = asyncio.Event(), threading.Event()

    def end_when_told(handle: CoreHandle) -> None:
        loop.call_soon_threadsafe(is_ending.set)
        assert may_end.wait(60)
        end(handle)

    monkeypatch.setattr(CoreHandle, "end", end_when_told)
    start = asyncio.create_task(AsyncMPClient.start(EngineArgs.of(model=str(tmp_path))))
    await is_ending.wait()
    start.cancel()
    await asyncio.wait({start}, timeout=0.05)
    is_early = start.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert not is_early, "the core has not ended"
    assert not set(started) & set(children(os.getpid()))
    gc.collect()  # a socket that was left open warns


def test_a_rank_that_does_not_exist_is_refused(single: LLM) -> None:
    prompt = single.renderer.render_prompt("Once")
    (request,) = single.input_processor.process_inputs(prompt, GREEDY, data_parallel_rank=0)
    assert request.data_parallel_rank == 0
    for rank in (1, -1):
        with pytest.raises(InvalidRequest, match="this engine has 1 "):
            single.input_processor.process_inputs(prompt, GREEDY, data_parallel_rank=rank)


def test_an_engine_serves_what_all_of_its_ranks_can(single: LLM) -> None:
    def config(**changes: Any) -> ResolvedConfig:
        return structs.replace(single.config, **changes)

    combined = combined_config([config(), config(max_model_len=100)])
    assert (combined.max_model_len, combined.data_parallel_size) == (100, 2)
    with pytest.raises(ConfigError, match="different weights"):
        combined_config([config(), config(model_fingerprint="another")])


def test_results_of_all_cores_count_as_one() -> None:
    assert combined_result("collective_rpc", [["a", "b"], ["c"]]) == ["a", "b", "c"]
    assert combined_result("unknown_requests", [["x", "y"], ["y", "z"]]) == ["y"], "a core knows its own"
    assert combined_result("reset_prefix_cache", [True, False]) is False
    assert combined_result("wake_up", [None, None]) is None
    with pytest.raises(EngineDead, match="data-parallel rank 1: gone"):
        combined_result("check", [True, EngineDead("gone")])
