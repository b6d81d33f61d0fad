"""Pipeline parallelism: worker processes with a part of the layers each give the tokens of one process."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from argosy_engine import EngineArgs, LLMEngine, SamplingParams, StructuredOutputsParams
from argosy_engine.api.doctor import diagnose
from argosy_engine.api.doctor import main as doctor
from argosy_engine.core.proc.core_client import InprocClient, SyncMPClient
from argosy_engine.errors import ConfigError, EngineDead
from argosy_engine.frontend.output_processor import RequestOutput
from argosy_engine.messages import EngineCoreRequest
from argosy_engine.model_configs.sharding import Stage
from argosy_engine.sample.token_logprobs import TokenLogprobs
from engine_processes import worker_path
from gemma4_shapes import EXPERTS as GEMMA4_EXPERTS
from preemptions import PreemptionCounter
from processes import is_alive, wait_until, workers
from random_checkpoints import KINDS, make_checkpoint
from state_shapes import FALCON_FACTORS
from thread_workers import ThreadExecutor, thread_workers
from transformers_checkpoints import write_checkpoint
from transformers_sweep import served

ROOT = Path(__file__).parents[2]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
PIPELINE = {"pipeline_parallel_size": 2}
CROWDED = {"num_gpu_blocks_override": 14, "max_model_len": 128}

pytestmark = pytest.mark.timeout(300)


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, **fields})


REQUESTS = [
    ("Hello there, how are you today? " * 3, params(ignore_eos=True, max_tokens=40)),
    ("Tell me about the sea", params(temperature=1.0, seed=3, top_p=0.9, logprobs=2)),
    ("Tell me about the sea", params(temperature=0.8, seed=4, n=3)),
    ("What is 2 plus 3?", params(repetition_penalty=1.3, frequency_penalty=0.5)),
    ("A person, as JSON:", params(structured_outputs=StructuredOutputsParams(json=SCHEMA), max_tokens=60)),
    ("Yes or no?", params(structured_outputs=StructuredOutputsParams(choice=["yes", "no"]))),
    ("The sky is", params(max_tokens=1)),
    ("Grass is green", params(prompt_logprobs=1, max_tokens=2)),
]


@contextmanager
def engine(*, multiprocess: bool = False, **flags: Any) -> Iterator[LLMEngine]:
    fields = {"model": "builtin://tiny", "num_gpu_blocks_override": 256, **flags}
    made = LLMEngine.from_engine_args(
        EngineArgs.of(device="cpu", dtype="float32", threads=1, **fields), multiprocess=multiprocess
    )
    try:
        yield made
    finally:
        made.close()


def generate(engine: LLMEngine) -> dict[str, RequestOutput]:
    for index, (prompt, wanted) in enumerate(REQUESTS):
        engine.add_request(str(index), prompt, wanted)
    return finish(engine)


def finish(engine: LLMEngine) -> dict[str, RequestOutput]:
    finished = {}
    while engine.has_unfinished_requests():
        finished |= {output.request_id: output for output in engine.step() if output.finished}
    return finished


def assert_same(found: dict[str, RequestOutput], expected: dict[str, RequestOutput]) -> None:
    """Compare outputs; log probabilities but for rounding, which depends on how prompts are cut into steps."""
    assert found.keys() == expected.keys()
    for index, wanted in expected.items():
        output = found[index]
        assert output.error is None
        assert [(each.token_ids, each.text, each.finish_reason) for each in output.outputs] == [
            (each.token_ids, each.text, each.finish_reason) for each in wanted.outputs
        ]
        assert_close(output.prompt_logprobs, wanted.prompt_logprobs)
        for each, other in zip(output.outputs, wanted.outputs, strict=True):
            assert_close(each.logprobs, other.logprobs)


def assert_close(
    found: Sequence[TokenLogprobs | None] | None, expected: Sequence[TokenLogprobs | None] | None
) -> None:
    for entry, wanted in zip(found or [], expected or [], strict=True):
        if wanted is not None:
            assert entry is not None
            assert entry.token_ids == wanted.token_ids
            assert entry.logprobs == pytest.approx(wanted.logprobs, abs=1e-4)


@pytest.fixture(scope="module")
def expected() -> dict[str, RequestOutput]:
    with engine() as one:
        return generate(one)


@pytest.fixture(scope="module")
def pipeline() -> Iterator[LLMEngine]:
    with engine(**PIPELINE) as made:
        yield made


def test_tokens_are_those_of_one_process(pipeline: LLMEngine, expected: dict[str, RequestOutput]) -> None:
    assert_same(generate(pipeline), expected)
    again = generate(pipeline)
    assert_same(again, expected)
    assert sum(output.num_cached_tokens or 0 for output in again.values()) > 0
    pipeline.sleep()
    pipeline.wake_up()
    assert_same(generate(pipeline), expected)


def test_a_request_aborted_during_its_step_affects_no_other(pipeline: LLMEngine) -> None:
    greedy = params(ignore_eos=True)
    pipeline.add_request("reference", "The sea", greedy)
    reference = finish(pipeline)["reference"].token_ids
    for turn in range(5):
        pipeline.add_request("leaves", "Once upon a time there was", greedy)
        pipeline.add_request("stays", "The sea", greedy)
        for _ in range(turn):
            pipeline.step()
        pipeline.abort_request("leaves")
        pipeline.add_request("leaves", "The sea", greedy)  # the same id, perhaps the same slot
        finished = finish(pipeline)
        assert finished["stays"].token_ids == finished["leaves"].token_ids == reference


def test_every_stage_has_a_step_in_flight(pipeline: LLMEngine) -> None:
    client = pipeline.client
    assert isinstance(client, InprocClient)
    for name in ("a", "b"):
        pipeline.add_request(name, "The sea", params(ignore_eos=True, max_tokens=8))
    in_flight = []
    while pipeline.has_unfinished_requests():
        pipeline.step()
        in_flight.append(len(client.core.scheduler.in_flight))
    assert in_flight.count(1) > len(in_flight) // 2  # one is left while the other's output is processed


@pytest.mark.parametrize(
    "flags",
    [
        CROWDED,  # preemption
        {"max_num_batched_tokens": 16, "max_num_seqs": 5},  # prompts in chunks, slots taken again and again
        {"tensor_parallel_size": 2},
    ],
    ids=["crowded", "chunked", "tensor parallel"],
)
def test_tokens_are_the_same_with_other_flags(
    expected: dict[str, RequestOutput], flags: dict[str, Any]
) -> None:
    with thread_workers(), engine(**PIPELINE, **flags) as made:
        preemptions = PreemptionCounter(made.client)
        assert_same(generate(made), expected)
        assert (preemptions.total > 0) == (flags is CROWDED)


@pytest.mark.parametrize("kind", ["gemma3", "gpt2", "qwen3-moe", "deepseek-v3"])
def test_architectures(kind: str, tmp_path: Path) -> None:
    """Families differ in what is before and after the layers; Gemma's layers are of two kinds of KV cache."""
    make_checkpoint(KINDS[kind], tmp_path)
    found = []
    for stages in (1, 3):
        args = EngineArgs.of(
            model=str(tmp_path), dtype="float32", device="cpu", threads=1, max_model_len=128,
            num_gpu_blocks_override=64, pipeline_parallel_size=stages,
        )  # fmt: skip
        client = InprocClient(args, ThreadExecutor(args))
        for index, prompt in enumerate(([5, 6, 7, 8] * 10, [9, 10, 11])):
            sampling = params(ignore_eos=True, max_tokens=16)
            client.add_request(EngineCoreRequest(str(index), prompt, sampling, 0.0))
        outputs: dict[str, list[int]] = {}
        while client.has_work:
            for output in client.step().outputs:
                outputs.setdefault(output.request_id, []).extend(output.new_token_ids)
        client.close()
        found.append(outputs)
    assert found[0] == found[1]
    assert [len(tokens) for tokens in found[0].values()] == [16, 16]


@pytest.mark.parametrize(
    ("model_type", "stages", "fields"),
    [
        ("qwen3_next", 2, {}),
        ("qwen3_5_text", 3, {"layer_types": ["full_attention", *["linear_attention"] * 3]}),
        ("bamba", 3, {}),
        ("granitemoehybrid", 2, {"layer_types": ["full_attention"] * 2 + ["linear_attention"] * 2}),
        ("falcon_h1", 2, {"mamba_rms_norm": True, **FALCON_FACTORS}),
        ("lfm2", 3, {}),
        ("nemotron_h", 2, {}),
    ],
)
def test_each_stage_keeps_the_states_of_its_layers(
    model_type: str, stages: int, fields: dict[str, Any], tmp_path: Path
) -> None:
    """Prompts whole, in chunks, over a prefix cache, and preempted. Some stages have attention or states alone."""
    reference = write_checkpoint(model_type, tmp_path, **fields)
    with thread_workers():
        found = served(reference, tmp_path, model_impl="argosy", pipeline_parallel_size=stages)
    assert found[:2] == ("served", "")
    assert found.cached_tokens
    assert found.preemptions


def test_stages_of_ranks_that_share_a_group(tmp_path: Path) -> None:
    reference = write_checkpoint("bamba", tmp_path, mamba_n_groups=1)
    flags = {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}
    with thread_workers():
        found = served(reference, tmp_path, model_impl="argosy", **flags)
    assert found[:2] == ("served", "")


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("nemotron_h", {"moe_latent_size": 40, "n_groups": 1}),
        ("lfm2_moe", {"tie_word_embeddings": True}),
        ("gemma4_text", GEMMA4_EXPERTS),
    ],
)
def test_stages_of_ranks_that_divide_experts(model_type: str, fields: dict[str, Any], tmp_path: Path) -> None:
    """Whole experts, beside states, caches with pages of two sizes, or an embedding that is at both ends."""
    reference = write_checkpoint(model_type, tmp_path, **fields)
    flags = {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "enable_expert_parallel": True}
    with thread_workers():
        found = served(reference, tmp_path, model_impl="argosy", **flags)
    assert found[:2] == ("served", "")
    assert found.cached_tokens


@pytest.mark.parametrize("rank", [0, 1])
def test_the_end_of_any_stage_ends_the_engine(rank: int) -> None:
    with worker_path(is_bare=True), engine(multiprocess=True, **PIPELINE) as made:
        assert isinstance(made.client, SyncMPClient)
        core = made.client.pid
        pids = sorted(workers(core))
        made.add_request("x", "Once", params(max_tokens=500, ignore_eos=True))
        made.step()
        os.kill(pids[rank], signal.SIGKILL)
        with pytest.raises(EngineDead, match=rf"^Worker_PP{rank} \(process \d+\) ended: killed by SIGKILL"):
            finish(made)
        wait_until(lambda: not any(map(is_alive, [core, *pids])), "all processes to end")


def test_doctor_and_engine_agree_on_what_a_block_takes(
    pipeline: LLMEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    client = pipeline.client
    assert isinstance(client, InprocClient)
    flags = ["builtin://tiny", "--device", "cpu", "--dtype", "float32", "-o", "json"]
    budgets = []
    for stages in ("1", "2"):
        assert doctor([*flags, "--pipeline-parallel-size", stages]) == 0
        budgets.append(json.loads(capsys.readouterr().out)["budget"])
    assert budgets[1]["block_bytes"] == client.core.config.memory.block_bytes
    assert budgets[0]["block_bytes"] > budgets[1]["block_bytes"]
    assert budgets[0]["weights_bytes"] > budgets[1]["weights_bytes"]


@pytest.mark.parametrize(
    ("kinds", "flags"),
    [
        ("al" * 2, {"pipeline_parallel_size": 2}),
        ("llal", {"pipeline_parallel_size": 3}),
        ("llaa", {"pipeline_parallel_size": 2, "enable_prefix_caching": False}),
        ("lala", {"tensor_parallel_size": 2}),
    ],
)
def test_doctor_plans_states_as_workers_do(kinds: str, flags: dict[str, Any], tmp_path: Path) -> None:
    layer_types = [{"a": "full_attention", "l": "linear_attention"}[each] for each in kinds]
    write_checkpoint("granitemoehybrid", tmp_path, mamba_n_groups=1, layer_types=layer_types)
    shutil.copy(ROOT / "models" / "argosy-tiny" / "tokenizer.json", tmp_path)
    args = EngineArgs.of(
        model=str(tmp_path), device="cpu", dtype="float32", threads=1, max_model_len=128, max_num_seqs=4,
        kv_cache_memory_bytes=250_000, **flags,
    )  # fmt: skip
    told = diagnose(args)
    assert told.fits
    assert told.budget is not None
    executor = ThreadExecutor(args)
    try:
        memory = executor.start().memory
    finally:
        executor.shutdown()
    for name in ("num_blocks", "num_states", "max_model_len", "request_blocks"):
        assert getattr(told.budget, name) == getattr(memory, name)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"pipeline_parallel_size": 8}, "exceeds the model's .* layers; use at most"),
        ({"pipeline_parallel_size": 2, "async_scheduling": True}, "--async-scheduling needs"),
        ({"pipeline_parallel_size": 2, "distributed_executor_backend": "uni"}, "use mp"),
    ],
)
def test_what_cannot_work_is_refused(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message), engine(**flags, multiprocess=True):
        pass


@pytest.mark.parametrize(
    ("layers", "stages", "sizes"),
    [(4, 2, [2, 2]), (5, 2, [3, 2]), (10, 4, [2, 3, 3, 2]), (3, 3, [1, 1, 1]), (11, 4, [3, 3, 3, 2])],
)
def test_layers_are_divided_evenly_and_the_last_stage_has_the_fewest(
    layers: int, stages: int, sizes: list[int]
) -> None:
    parts = [Stage(index, stages).layers(layers) for index in range(stages)]
    assert [len(part) for part in parts] == sizes
    assert [layer for part in parts for layer in part] == list(range(layers))
