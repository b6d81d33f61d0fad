"""Experts divided over data-parallel cores: the cores compute in step, and each gives what one process gives."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
from collections.abc import Iterator, Sequence
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from argosy_engine import LLM, EngineArgs, SamplingParams, StructuredOutputsParams
from argosy_engine.api.doctor import diagnose
from argosy_engine.core.proc.data_parallel_client import DPLBSyncMPClient
from argosy_engine.errors import ConfigError, EngineDead, UtilityFailed
from argosy_engine.frontend.async_llm import AsyncLLM
from argosy_engine.frontend.input_processor import InputProcessor
from argosy_engine.frontend.observer import Observer
from argosy_engine.frontend.output_processor import CompletionOutput, GenerationOutput, RequestOutput
from argosy_engine.frontend.renderer import TokenizedPrompt
from argosy_engine.messages import EngineCoreOutputs, EngineCoreRequest
from argosy_engine.sizing.kv_cache_sizing import check_model
from fake_worker import continuation
from processes import children, cpu_share, has_grammar_server, is_alive, wait_until, workers
from random_checkpoints import KINDS, make_checkpoint

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parents[2]
FLAGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "threads": 1,
    "max_model_len": 160,
    "num_gpu_blocks_override": 13,
}
WIDE: dict[str, Any] = {"data_parallel_size": 2, "enable_expert_parallel": True}
RANKS = (0, 1, None)


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 20, "ignore_eos": True, **fields})


class Wanted(NamedTuple):
    prompt: list[int]
    params: SamplingParams


STORY = [20 + place * 7 % 400 for place in range(50)]
REQUESTS = [
    Wanted(STORY, params(max_tokens=40)),
    Wanted([*STORY, 9, 8], params(max_tokens=40, logprobs=3)),
    Wanted([*STORY, 7], params(temperature=0.9, seed=5, top_p=0.9)),
    Wanted([300] * 5, params(temperature=1.0, seed=3, n=2)),
    Wanted([7, 8, 9], params(frequency_penalty=0.5, max_tokens=9)),
    Wanted([5], params(max_tokens=1)),
    Wanted(
        [40, 41],
        params(
            ignore_eos=False, structured_outputs=StructuredOutputsParams(choice=["lighthouse", "windmill"])
        ),
    ),
    Wanted([11] * 20, params(prompt_logprobs=1, max_tokens=2)),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sparse layers between dense ones."""
    path = tmp_path_factory.mktemp("experts")
    make_checkpoint(KINDS["qwen3-moe-mixed"], path)
    shutil.copy(ROOT / "models" / "argosy-tiny" / "tokenizer.json", path)
    return path


def generate(llm: LLM) -> list[RequestOutput]:
    prompts, wanted = [each.prompt for each in REQUESTS], [each.params for each in REQUESTS]
    return llm.generate(prompts, wanted, use_tqdm=False)


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[RequestOutput]:
    with LLM(str(checkpoint), **FLAGS) as one:
        return generate(one)


class Counters(Observer):
    """Adds up what the cores report."""

    def __init__(self) -> None:
        self.num_preemptions = 0
        self.num_tokens = [0, 0]
        """Tokens that each core has computed for requests."""

    def on_core_outputs(self, outputs: EngineCoreOutputs) -> None:
        if outputs.stats is not None:
            self.num_preemptions += outputs.stats.num_preemptions
            self.num_tokens[outputs.engine_index] += outputs.stats.iteration_tokens


class Engine:
    """An engine of two cores, whose clients choose the core. Its methods run in its own event loop."""

    def __init__(self, checkpoint: Path) -> None:
        self._runner = asyncio.Runner()
        self.run = self._runner.run
        args = EngineArgs.of(model=str(checkpoint), **FLAGS, **WIDE)
        self.llm = self.run(AsyncLLM.start(args))
        self._inputs = InputProcessor(self.llm.config)
        self.counters = Counters()
        self.llm.observers.append(self.counters)

    def requests(self, index: int, rank: int | None) -> list[EngineCoreRequest]:
        return self.requests_for(REQUESTS[index], rank)

    def requests_for(self, wanted: Wanted, rank: int | None) -> list[EngineCoreRequest]:
        prompt = TokenizedPrompt(wanted.prompt, [])
        return self._inputs.process_inputs(prompt, wanted.params, data_parallel_rank=rank)

    async def answer(self, index: int, rank: int | None) -> list[GenerationOutput]:
        """Run one of `REQUESTS` and return the outputs of its choices."""
        return await self.llm.collect(self.requests(index, rank), REQUESTS[index].params.n)

    async def leave(self, index: int, rank: int | None, num_messages: int) -> None:
        """Run one of `REQUESTS` for a client that goes away after some messages."""
        stream = self.llm.generate(self.requests(index, rank), REQUESTS[index].params.n)
        async with aclosing(stream):
            async for _ in stream:
                num_messages -= 1
                if num_messages <= 0:
                    return

    def count_tokens(self) -> list[int]:
        """Return how many tokens each core has computed, once the cores have told of all."""
        before: list[int] | None = None
        counted = list(self.counters.num_tokens)
        while counted != before:
            self.run(self.llm.client.call_utility("check"))  # is answered after what was told before
            before, counted = counted, list(self.counters.num_tokens)
        return counted

    def close(self) -> None:
        self.run(self.llm.close())
        self._runner.close()


@pytest.fixture(scope="module")
def two(checkpoint: Path) -> Iterator[Engine]:
    engine = Engine(checkpoint)
    yield engine
    engine.close()


def check(found: Sequence[GenerationOutput] | Sequence[CompletionOutput], wanted: RequestOutput) -> None:
    for mine, other in zip(found, wanted.outputs, strict=True):
        assert (mine.token_ids, mine.finish_reason) == (other.token_ids, other.finish_reason)
        for entry, theirs in zip(mine.logprobs, other.logprobs, strict=True):
            assert entry.token_ids == theirs.token_ids
            assert entry.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)


def test_requests_of_both_cores_get_the_tokens_of_one_process(
    two: Engine, expected: list[RequestOutput]
) -> None:
    async def all_at_once() -> list[list[GenerationOutput]]:
        return await asyncio.gather(*(two.answer(index, None) for index in range(len(REQUESTS))))

    for _ in range(2):  # the second time from the prefix cache
        for found, wanted in zip(two.run(all_at_once()), expected, strict=True):
            check(found, wanted)
    assert all(two.counters.num_tokens)


def test_doctor_tells_what_each_worker_takes(two: Engine, checkpoint: Path) -> None:
    told = diagnose(EngineArgs.of(model=str(checkpoint), **FLAGS, **WIDE)).budget
    assert told is not None
    for found in two.llm.config.memory_of_ranks:
        assert found.weights_bytes == told.weights_bytes
        assert found.activation_bytes == told.activation_bytes


@pytest.mark.parametrize("rank", [0, 1])
def test_one_core_may_do_all_the_work(two: Engine, expected: list[RequestOutput], rank: int) -> None:
    """The other one only lends its experts. All requests together do not fit into the KV cache of one."""
    before, preempted = two.count_tokens(), two.counters.num_preemptions

    async def all_at_once() -> list[list[GenerationOutput]]:
        return await asyncio.gather(*(two.answer(index, rank) for index in range(len(REQUESTS))))

    for found, wanted in zip(two.run(all_at_once()), expected, strict=True):
        check(found, wanted)
    done = [after - count for after, count in zip(two.count_tokens(), before, strict=True)]
    assert done[rank] > 0
    assert done[1 - rank] == 0
    assert two.counters.num_preemptions > preempted


@pytest.mark.parametrize(
    "seed", [2, pytest.param(0, marks=pytest.mark.full), pytest.param(1, marks=pytest.mark.full)]
)
def test_requests_may_come_and_go_at_any_time(two: Engine, expected: list[RequestOutput], seed: int) -> None:
    """Clients that send one request after another: a core gets the next just as the last has ended, and while the other
    core falls idle, is busy, or computes the only request there is."""

    async def client(number: int) -> None:
        draw = random.Random(f"{seed} {number}")
        for _ in range(14):
            index, rank = draw.randrange(len(REQUESTS)), draw.choice(RANKS)
            if draw.random() < 0.3:
                await two.leave(index, rank, draw.randrange(4))
            else:
                check(await two.answer(index, rank), expected[index])
            for _ in range(draw.randrange(3)):
                await asyncio.sleep(0)

    async def clients() -> None:
        await asyncio.gather(*(client(number) for number in range(1 + seed)))

    two.run(clients())
    assert two.llm.num_live == 0


def test_cores_at_rest_do_not_spin(two: Engine) -> None:
    pids = two.llm.client.pids
    wait_until(lambda: all(map(has_grammar_server, pids)), "the grammar processes, started while idle")
    two.run(two.answer(0, 0))
    # Whoever spins takes a whole core, or what he gets of it, for ever.
    wait_until(lambda: cpu_share(pids, 0.5) < 0.2, "idle cores")


def test_all_cores_sleep_or_none(two: Engine, expected: list[RequestOutput]) -> None:
    async def sleep_while_one_is_busy() -> None:
        requests = two.requests_for(Wanted(STORY, params(max_tokens=109)), 1)  # longer than any other
        async with aclosing(two.llm.generate(requests)) as stream:
            await anext(stream)
            with pytest.raises(UtilityFailed, match="requests are running"):
                await two.llm.client.call_utility("sleep", 1)
            with pytest.raises(UtilityFailed, match="no sleep level 3"):
                await two.llm.sleep(3)
            assert await anext(stream), "it was not aborted"
        await two.llm.sleep()
        await two.llm.wake_up()
        check(await two.answer(0, 0), expected[0])

    two.run(sleep_while_one_is_busy())
    assert two.run(two.llm.client.call_utility("check")) is True


def step_until_done(llm: LLM) -> None:
    while llm.engine.has_unfinished_requests():
        llm.engine.step()


@pytest.mark.parametrize(
    "dimension",
    [
        "tensor_parallel_size",
        pytest.param("pipeline_parallel_size", marks=pytest.mark.full),  # below, without a model
    ],
)
def test_cores_of_several_workers(checkpoint: Path, expected: list[RequestOutput], dimension: str) -> None:
    with several_workers(checkpoint, dimension) as llm:
        for found, wanted in zip(generate(llm), expected, strict=True):
            check(found.outputs, wanted)
        llm.sleep()
        llm.wake_up()
        (again,) = llm.generate([REQUESTS[0].prompt], REQUESTS[0].params, use_tqdm=False)
        check(again.outputs, expected[0])


def test_cores_of_several_stages_take_every_step_together(bare_workers: None, checkpoint: Path) -> None:
    with several_workers(checkpoint, "pipeline_parallel_size") as llm:
        prompts = [each.prompt for each in REQUESTS]
        for _ in range(2):
            for found in llm.generate(prompts, params(), use_tqdm=False):
                assert found.token_ids == continuation(found.prompt_token_ids, 20)
            llm.sleep()
            llm.wake_up()


@contextmanager
def several_workers(checkpoint: Path, dimension: str) -> Iterator[LLM]:
    """An engine of two cores with two workers each, of which one is killed at the end of the block."""
    llm = LLM(str(checkpoint), **FLAGS, **WIDE, **{dimension: 2})
    try:
        assert isinstance(llm.client, DPLBSyncMPClient)
        yield llm
        cores = llm.client.pids
        others = [pid for core in cores for pid in workers(core)]
        assert len(others) == 4
        llm.engine.add_request("a", {"prompt_token_ids": STORY}, params(max_tokens=109))
        llm.engine.step()
        os.kill(others[3], signal.SIGKILL)
        killed = rf"data-parallel rank 1: Worker_DP1_[TP]P1 \(process {others[3]}\) ended: killed by SIGKILL"
        with pytest.raises(EngineDead, match=killed):
            step_until_done(llm)
        llm.close()
        wait_until(lambda: not any(map(is_alive, [*cores, *others])), "all processes to end")
    finally:
        llm.close()


def test_a_killed_core_ends_the_engine_with_its_reason(bare_workers: None, checkpoint: Path) -> None:
    async def kill() -> None:
        llm = await AsyncLLM.start(EngineArgs.of(model=str(checkpoint), **FLAGS, **WIDE))
        try:
            pids = llm.client.pids
            os.kill(pids[0], signal.SIGKILL)
            inputs = InputProcessor(llm.config)
            made = inputs.process_inputs(
                TokenizedPrompt(STORY, []), params(max_tokens=100), data_parallel_rank=1
            )
            with pytest.raises(EngineDead):
                await llm.collect(made)
            with pytest.raises(EngineDead, match=r"data-parallel rank 0: .*killed by SIGKILL"):
                await llm.collect(made)
        finally:
            await llm.close()
        wait_until(lambda: not any(map(is_alive, pids)), "the cores to end")

    asyncio.run(kill())


def test_a_core_that_cannot_start_ends_those_that_wait_for_it(bare_workers: None, checkpoint: Path) -> None:
    before = set(children(os.getpid()))
    with pytest.raises(ConfigError, match="not on this core"):
        LLM(str(checkpoint), **FLAGS, **WIDE, worker_cls="probe_worker.FailsOnOneCoreWorker")
    assert set(children(os.getpid())) <= before


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"data_parallel_size": 9}, "divides the experts among 9 workers, and .* has only 8; use a smaller"),
        ({"model": "builtin://tiny"}, "has no experts; leave it out"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(checkpoint: Path, flags: dict[str, Any], message: str) -> None:
    args = EngineArgs.of(**{"model": str(checkpoint), **FLAGS, **WIDE, **flags})
    with pytest.raises(ConfigError, match=message):
        check_model(args)
