"""Tensor parallelism: two worker processes give what one gives, through every part of the engine."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from msgspec import structs
from openai import OpenAI

from argosy_engine import LLM, EngineArgs, SamplingParams, StructuredOutputsParams
from argosy_engine.api.doctor import diagnose
from argosy_engine.attention.selector import BackendChoice
from argosy_engine.core.proc.core_client import SyncMPClient
from argosy_engine.distributed.parallel_config import ParallelConfig
from argosy_engine.distributed.parallel_state import Communicator, LocalCommunicator, ParallelState
from argosy_engine.errors import ConfigError, EngineDead, UtilityFailed
from argosy_engine.frontend.output_processor import RequestOutput
from argosy_engine.params import PoolingParams
from argosy_engine.resolved_config import MemoryBudget
from argosy_engine.sample.token_logprobs import TokenLogprobs
from argosy_engine.worker.worker import agreed_backend
from engine_processes import worker_path
from listening import listening_addresses
from preemptions import PreemptionCounter
from processes import free_port, is_alive, running, wait_until, workers
from random_checkpoints import KINDS, make_checkpoint
from served_engine import SERVE_TINY
from thread_ranks import run_threads
from thread_workers import thread_workers
from transformers_checkpoints import write_checkpoint
from transformers_sweep import served

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parents[2]
FLAGS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "threads": 1}
TINY: dict[str, Any] = {"model": "builtin://tiny", **FLAGS, "max_model_len": 128}
FEW_BLOCKS = {"num_gpu_blocks_override": 18}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
LOOPBACK = "0100007F"
"""127.0.0.1, as the kernel writes it."""
STORY = "Once upon a time there was a small ship, and it sailed far out to the north where the ice is."


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 24, **fields})


REQUESTS = [
    (STORY, params(ignore_eos=True, max_tokens=24)),
    (STORY + " Then", params(ignore_eos=True, max_tokens=24, logprobs=3)),
    ("Tell me about the sea", params(temperature=1.0, seed=3, top_p=0.9, logprobs=2)),
    ("Tell me about the sea", params(temperature=0.8, seed=4, n=3, ignore_eos=True, max_tokens=24)),
    ("Give me words", params(temperature=1.2, seed=1, top_k=20, min_p=0.05, logit_bias={5: 3.0, 9: -100.0})),
    ("What is 2 plus 3?", params(repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.1)),
    ("A person, as JSON:", params(structured_outputs=StructuredOutputsParams(json=SCHEMA), max_tokens=40)),
    ("Yes or no?", params(structured_outputs=StructuredOutputsParams(choice=["yes", "no"]))),
    ("One, two, three,", params(min_tokens=12, stop=["e"], bad_words=["four"])),
    ("Grass is green", params(prompt_logprobs=2, max_tokens=2)),
]
VECTORS = [PoolingParams(), PoolingParams(pooling_type="mean", normalize=False)]


class Outcome(NamedTuple):
    """What an engine gave for `REQUESTS` and `VECTORS`."""

    generated: list[RequestOutput]
    repeated: list[RequestOutput]
    """The same requests again, from the prefix cache where it is of use."""
    slept: list[RequestOutput]
    """The same after the weights were freed and loaded again."""
    vectors: list[list[float]]
    num_preemptions: int
    survivor: RequestOutput
    """A request beside which others were aborted at every stage."""
    memory: MemoryBudget
    listening: set[str]
    """Addresses on which the workers' processes listen."""


def outcome_of(**flags: Any) -> Outcome:
    with LLM(**{**TINY, **flags, **FEW_BLOCKS}) as llm:
        prompts, wanted = [prompt for prompt, _ in REQUESTS], [each for _, each in REQUESTS]
        counter = PreemptionCounter(llm.client)
        generated = llm.generate(prompts, wanted, use_tqdm=False)
        repeated = llm.generate(prompts, wanted, use_tqdm=False)
        vectors = [llm.encode(STORY, each, use_tqdm=False)[0].outputs.embedding for each in VECTORS]
        llm.sleep()
        llm.wake_up()
        slept = llm.generate(prompts, wanted, use_tqdm=False)
        return Outcome(
            generated,
            repeated,
            slept,
            vectors,
            counter.total,
            survivor_of(llm),
            llm.config.memory,
            listening_addresses(workers(os.getpid())),
        )


def survivor_of(llm: LLM) -> RequestOutput:
    engine = llm.engine
    engine.add_request("stays", STORY, params(ignore_eos=True, max_tokens=12))
    for turn in range(4):
        engine.add_request("leaves", "Tell me about the sea", params(ignore_eos=True))
        for _ in range(turn):
            engine.step()
        engine.abort_request("leaves")
    finished = {}
    while engine.has_unfinished_requests():
        finished |= {output.request_id: output for output in engine.step() if output.finished}
    return finished["stays"]


@pytest.fixture(scope="module")
def one() -> Outcome:
    return outcome_of()


@pytest.fixture(scope="module")
def two() -> Outcome:
    return outcome_of(tensor_parallel_size=2)


def check_logprobs(found: Sequence[TokenLogprobs | None], expected: Sequence[TokenLogprobs | None]) -> None:
    for entry, wanted in zip(found, expected, strict=True):
        if wanted is None:
            assert entry is None
            continue
        assert entry is not None
        assert (entry.token_ids, entry.rank) == (wanted.token_ids, wanted.rank)
        assert entry.logprobs == pytest.approx(wanted.logprobs, abs=1e-4)


def check_same(found: list[RequestOutput], expected: list[RequestOutput]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.error is None
        assert [each.token_ids for each in ours.outputs] == [each.token_ids for each in theirs.outputs]
        assert [each.finish_reason for each in ours.outputs] == [
            each.finish_reason for each in theirs.outputs
        ]
        for mine, other in zip(ours.outputs, theirs.outputs, strict=True):
            check_logprobs(mine.logprobs, other.logprobs)
        check_logprobs(ours.prompt_logprobs or [], theirs.prompt_logprobs or [])


def test_tokens_and_log_probabilities_are_the_same(one: Outcome, two: Outcome) -> None:
    check_same(two.generated, one.generated)
    assert two.num_preemptions > 0
    assert one.num_preemptions > 0


def test_the_prefix_cache_changes_nothing(one: Outcome, two: Outcome) -> None:
    check_same(two.repeated, one.generated)
    assert two.repeated[0].num_cached_tokens == one.repeated[0].num_cached_tokens > 0


def test_engines_that_wake_up_have_the_same_weights(one: Outcome, two: Outcome) -> None:
    check_same(two.slept, one.generated)


def test_vectors_are_the_same(one: Outcome, two: Outcome) -> None:
    for found, expected in zip(two.vectors, one.vectors, strict=True):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), atol=1e-4, rtol=1e-4)


def test_aborted_requests_affect_no_other(one: Outcome, two: Outcome) -> None:
    check_same([two.survivor], [one.survivor])


def test_workers_of_one_machine_listen_for_no_other(two: Outcome) -> None:
    assert two.listening == {LOOPBACK}


def test_doctor_tells_what_each_worker_takes(two: Outcome) -> None:
    told = diagnose(EngineArgs.of(**TINY, **FEW_BLOCKS, tensor_parallel_size=2)).budget
    assert told is not None
    unstable = {"total_bytes": 0, "available_bytes": 0}
    assert structs.replace(told, **unstable) == structs.replace(two.memory, **unstable)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3-moe")
    make_checkpoint(KINDS["qwen3-moe"], path)
    shutil.copy(ROOT / "models" / "argosy-tiny" / "tokenizer.json", path)
    return path


def test_experts_are_divided(experts: Path) -> None:
    prompts = [[7, 8, 9], list(range(20, 60)), [300] * 5]
    wanted = [params(), params(temperature=0.9, seed=5), params(ignore_eos=True, logprobs=2)]
    found = []
    for flags in ({}, {"tensor_parallel_size": 2, "enable_expert_parallel": True}):
        with thread_workers(), LLM(str(experts), **FLAGS, num_gpu_blocks_override=64, **flags) as llm:
            found.append(llm.generate(prompts, wanted, use_tqdm=False))
    check_same(found[1], found[0])


def test_the_server_answers(bare_workers: None, tmp_path: Path) -> None:
    port = free_port()
    arguments = [*SERVE_TINY, "--dtype", "float32", "--tensor-parallel-size", "2", "--port", str(port)]
    with running(arguments, tmp_path / "log", port=port) as server:
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        answer = client.completions.create(model="tiny", prompt="The sea", max_tokens=5, temperature=0)
        assert answer.usage is not None
        assert answer.usage.completion_tokens > 0
        assert "on each of 2 workers" in server.log.read_text()


def test_workers_agree_on_the_size_of_the_cache() -> None:
    flags = {**TINY, "tensor_parallel_size": 2, "worker_cls": "probe_worker.UnequalWorker"}
    with thread_workers(), LLM(**flags) as llm:
        assert llm.config.num_gpu_blocks == 412
        assert llm.collective_rpc("num_blocks") == [412, 412]


def test_workers_agree_on_an_attention_backend() -> None:
    def agreed(group: Communicator) -> BackendChoice:
        state = ParallelState(
            ParallelConfig(tensor=2), group.rank, group, LocalCommunicator(), group, torch.device("cpu")
        )
        name = ("triton", "torch")[group.rank]
        return agreed_backend(BackendChoice(name, {"cpu": "a GPU"}), state)

    first, second = run_threads(2, agreed)
    assert first == ("torch", {"cpu": "a GPU", "triton": "another worker cannot use it"})
    assert second == ("torch", {"cpu": "a GPU"})


def test_a_killed_worker_ends_the_engine_with_its_reason(capfd: pytest.CaptureFixture[str]) -> None:
    long = {**TINY, "max_model_len": 800}
    with worker_path(is_bare=True):
        llm = LLM(**long, tensor_parallel_size=2, num_gpu_blocks_override=64, multiprocess=True)
    try:
        assert isinstance(llm.client, SyncMPClient)
        core = llm.client.pid
        pids = workers(core)
        assert len(pids) == 2
        llm.engine.add_request("a", STORY, params(ignore_eos=True, max_tokens=240))
        llm.engine.step()
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(EngineDead, match=r"^Worker_TP1 \(process \d+\) ended: killed by SIGKILL"):
            step_for_ever(llm)
        wait_until(lambda: not any(map(is_alive, (core, *pids))), "core and workers to end")
        log = capfd.readouterr().err
        assert (
            log.count("attention backend") == log.count("INFO [Worker_TP0] argosy_engine.worker.worker ") == 1
        )
        errors = [line.split(" ERROR ")[1] for line in log.splitlines() if " ERROR " in line]
        reason, *others = errors
        assert reason.startswith(
            f"[EngineCore] argosy.executor Worker_TP1 (process {pids[1]}) ended: killed by"
        )
        assert all("state of the engine core" in line for line in others)
        assert "Traceback" not in log
    finally:
        llm.close()


def step_for_ever(llm: LLM) -> None:
    while True:
        llm.engine.step()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"tensor_parallel_size": 3}, "num_attention_heads 4 is not a multiple of it; use 1, 2 or 4$"),
        ({"tensor_parallel_size": 2, "enable_expert_parallel": True}, "has no experts; leave it out"),
        ({"tensor_parallel_size": 2, "distributed_executor_backend": "uni"}, "runs one worker.*use mp"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(**{**TINY, **flags}, multiprocess=True)


def test_workers_wake_up_together_or_stay_asleep() -> None:
    flags = {**TINY, **FEW_BLOCKS, "tensor_parallel_size": 2, "worker_cls": "probe_worker.MeetingWorker"}
    prompt, greedy = REQUESTS[0]
    with thread_workers(), LLM(**flags) as llm:
        (before,) = llm.generate([prompt], greedy, use_tqdm=False)
        llm.sleep()
        for rank in (1, 0):
            path = llm.collective_rpc("move_model", args=[rank, "/nowhere"])[rank]
            with pytest.raises(UtilityFailed, match="/nowhere"):
                llm.wake_up()
            assert llm.collective_rpc("holds_memory") == [False, False]
            llm.collective_rpc("move_model", args=[rank, path])
        llm.wake_up()
        llm.wake_up()
        llm.collective_rpc("sleep_alone", args=[0])  # as if sleeping had failed in the other
        llm.wake_up()
        (after,) = llm.generate([prompt], greedy, use_tqdm=False)
    assert after.outputs[0].token_ids == before.outputs[0].token_ids


def test_two_workers_share_layers_with_states(tmp_path: Path) -> None:
    """Batched, in chunks over the prefix cache, and preempted."""
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
    reference = write_checkpoint("qwen3_5_moe_text", tmp_path, **sizes, linear_value_head_dim=32)
    found = served(reference, tmp_path, model_impl="argosy", tensor_parallel_size=2)
    assert found[:2] == ("served", "")
    assert found.preemptions
    assert found.cached_tokens
