"""CUDA graphs of decodes and mixed steps, with an API that calls the captured function again instead of replaying
kernels."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from argosy_engine import EngineArgs, LLMEngine, SamplingParams
from argosy_engine.config import capture_sizes
from argosy_engine.distributed.lockstep import Round
from argosy_engine.errors import ConfigError
from argosy_engine.messages import NewRequest, SchedulerOutput
from argosy_engine.sample.sampler import SamplerOptions
from argosy_engine.triton_kernels.launch import KNOWN_DEVICES
from argosy_engine.triton_kernels.paged_attention import _layout_of
from argosy_engine.worker import cuda_graphs
from argosy_engine.worker import worker as worker_module
from argosy_engine.worker.cuda_graphs import MIN_QUERIES, StepGraphs, graph_sizes, mixed_graph_sizes
from argosy_engine.worker.device_inputs import DeviceInputs
from argosy_engine.worker.input_batch import InputBatch, StepArrays, StepTensors, empty_step, flatten_step
from argosy_engine.worker.model_runner import ModelRunner
from argosy_engine.worker.warm_up import estimate_graphs
from checked_copies import CheckedRuntime
from rerun_graphs import RerunGraphs
from shallow_model import write_shallow_model

CPU = torch.device("cpu")
PROMPTS = ["Hello", "The sky is", "Tell me about the sea"]


def generate(
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    graphs: RerunGraphs | None,
    *,
    mixed: tuple[int, ...] = (),
    **flags: Any,
) -> dict[str, list[int]]:
    """Generate with our Triton kernels; interpreted ones behave as on a device where rows are padding."""

    def make(*args: Any, **kwargs: Any) -> ModelRunner:
        runner = ModelRunner(*args, **kwargs, runtime=CheckedRuntime())
        if graphs is not None:
            captured: list[int] = []
            assert runner.capture_graphs([1, 2, 4], graphs, lambda: captured.append(1), mixed=mixed)
            assert len(captured) == 3 + len(mixed)
        return runner

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(worker_module, "ModelRunner", make)
    args = EngineArgs.of(
        model=str(model), load_format="dummy", device="cpu", dtype="float32", threads=1,
        num_gpu_blocks_override=64, attention_backend="triton", max_num_seqs=4, max_model_len=128, **flags,
    )  # fmt: skip
    engine = LLMEngine.from_engine_args(args)
    try:
        for index, prompt in enumerate(PROMPTS):
            params = SamplingParams(temperature=0.0, max_tokens=2 + index, ignore_eos=True)
            engine.add_request(str(index), prompt, params)
        finished = {}
        while engine.has_unfinished_requests():
            finished |= {
                each.request_id: each.outputs[0].token_ids for each in engine.step() if each.finished
            }
        return finished
    finally:
        engine.close()


@pytest.mark.filterwarnings(
    "ignore:(overflow|invalid value):RuntimeWarning"
)  # attention leaves padding undefined
def test_an_engine_generates_the_same_with_graphs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = write_shallow_model(tmp_path / "shallow")
    expected = generate(model, monkeypatch, None)
    graphs = RerunGraphs()
    assert generate(model, monkeypatch, graphs, async_scheduling=True) == expected
    assert graphs.captured == [4, 2, 1]
    assert {*graphs.replays} == {4, 2, 1}  # 3 requests are padded to 4; then 2, then 1 are left


@pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")
def test_queries_grow_with_their_positions_in_graphs_as_well(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = write_shallow_model(tmp_path / "shallow")
    config = json.loads((model / "config.json").read_text())
    rope = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 2,
        "llama_4_scaling_beta": 8.0,
    }
    for name in ("layer_types", "sliding_window", "rope_scaling"):
        config.pop(name, None)
    config |= {
        "architectures": ["Ministral3ForCausalLM"],
        "model_type": "ministral3",
        "rope_parameters": rope,
        "max_position_embeddings": 128,
    }
    (model / "config.json").write_text(json.dumps(config))
    expected = generate(model, monkeypatch, None)
    assert generate(model, monkeypatch, RerunGraphs()) == expected


class Steps:
    """Steps of up to 6 requests over a toy model that reads every tensor of a step."""

    def __init__(self, api: RerunGraphs, *, is_required: bool = False) -> None:
        self.batch = InputBatch(6, 64, 4, 1, (1,), CPU, SamplerOptions(), tracks_blocks=True)
        self.inputs = DeviceInputs(self.batch, 16, max_num_tokens=64, device=CPU, runtime=CheckedRuntime())
        self.num_eager = 0
        self.graphs = StepGraphs(self.inputs, self.forward, api, is_required=is_required)

    def forward(self, tensors: StepTensors) -> torch.Tensor:
        self.num_eager += 1
        inputs, meta = tensors.inputs, tensors.inputs.meta
        parts = (
            inputs.token_ids,
            inputs.positions,
            meta.slot_mapping,
            meta.seq_lens,
            meta.block_table[:, 0],
        )
        return torch.stack([part.float() for part in parts], dim=1)

    def step(self, lengths: dict[str, int], queries: int = 1) -> StepArrays:
        for name, length in lengths.items():
            self.batch.add(
                NewRequest(name, [length] * length, [[length]], length - queries, SamplingParams())
            )
        scheduled = dict.fromkeys(lengths, queries)
        return flatten_step(self.batch, SchedulerOutput([], {}, scheduled, len(scheduled), [], {}), None)


def test_a_replay_reads_the_step_it_is_called_for() -> None:
    api = RerunGraphs()
    steps = Steps(api)
    assert steps.graphs.capture([2, 4])
    assert api.captured == [4, 2]
    for lengths in ({"a": 3, "b": 5, "c": 9}, {"d": 7}):
        ran = steps.graphs.run(steps.step(lengths))
        assert ran is not None
        expected = [[n, n - 1, 16 * n + n - 1, n, n] for n in lengths.values()]
        assert ran[0].tolist() == expected
    assert api.replays == [4, 2]


def test_what_layers_share_is_derived_from_the_step_of_each_replay() -> None:
    steps = Steps(RerunGraphs())

    def forward(tensors: StepTensors) -> torch.Tensor:
        meta = tensors.inputs.meta
        return meta.shared.setdefault("doubled", meta.positions.float().unsqueeze(1) * 2)

    steps.graphs = StepGraphs(steps.inputs, forward, RerunGraphs())
    assert steps.graphs.capture([2])
    for length in (3, 9):
        ran = steps.graphs.run(steps.step({f"of {length}": length}))
        assert ran is not None
        assert ran[0][-1].tolist() == [2 * (length - 1)]


def test_steps_of_other_shapes_run_eagerly() -> None:
    steps = Steps(RerunGraphs())
    assert steps.graphs.run(steps.step({"before": 3})) is None
    assert steps.graphs.capture([2])
    assert steps.graphs.run(steps.step({"a": 3, "b": 5, "c": 9})) is None
    assert steps.graphs.run(steps.step({"prompt": 4}, queries=4)) is None


def test_cores_that_share_experts_replay_graphs_of_one_size() -> None:
    api = RerunGraphs()
    steps = Steps(api)
    assert steps.graphs.capture([2, 4])
    decode = steps.step({"a": 3})
    ran = steps.graphs.run(decode, Round([1, 3], is_decode=True))
    assert ran is not None
    assert ran[0].tolist() == [[3, 2, 50, 3, 3]]
    assert ran[1].inputs.meta.slot_mapping.tolist() == [50, -1, -1, -1]
    lent = steps.graphs.run(empty_step(), Round([0, 2], is_decode=True))
    assert lent is not None
    assert len(lent[0]) == 0
    assert api.replays == [4, 2]
    assert steps.graphs.run(decode, Round([1, 9], is_decode=False)) is None, "the other core has a prompt"
    assert steps.graphs.run(empty_step(), Round([0, 5], is_decode=True)) is None, "none is as large"


def test_a_failed_capture_names_size_and_operation_and_leaves_eager_steps(
    caplog: pytest.LogCaptureFixture,
) -> None:
    steps = Steps(RerunGraphs(fails_at=2))
    assert not steps.graphs.capture([4, 2, 1])
    assert steps.graphs.run(steps.step({"a": 3})) is None
    (record,) = caplog.records
    assert "a step of 2 requests failed after aten.stack" in record.getMessage()
    assert "not permitted when stream is capturing" in record.getMessage()


def test_a_failed_capture_is_an_error_where_other_workers_would_replay() -> None:
    with pytest.raises(
        ConfigError, match=r"a step of 2 requests failed after aten\.stack.*use --enforce-eager"
    ):
        Steps(RerunGraphs(fails_at=2), is_required=True).graphs.capture([4, 2, 1])


def test_more_sizes_may_be_captured_later() -> None:
    api = RerunGraphs()
    steps = Steps(api)
    assert steps.graphs.capture([4])
    assert steps.graphs.capture([1, 2, 4])
    assert api.captured == [4, 2, 1]


@pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")
def test_an_engine_generates_the_same_with_graphs_of_mixed_steps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = write_shallow_model(tmp_path / "shallow")
    flags = {"max_num_batched_tokens": 16, "async_scheduling": True}  # the prompts take several steps
    expected = generate(model, monkeypatch, None, **flags)
    monkeypatch.setattr(cuda_graphs, "MIN_QUERIES", 2)
    graphs = RerunGraphs()
    assert generate(model, monkeypatch, graphs, mixed=(8, 16), **flags) == expected
    assert graphs.captured == [16, 8, 4, 2, 1]
    assert {*graphs.replays} == {
        16,
        2,
        1,
    }  # prompts, the last of them beside decodes; then 2 requests, then 1


class MixedSteps(Steps):
    """The same over a toy model that reads what a mixed step has per token; what it has per request is noted."""

    def __init__(self, api: RerunGraphs, *, is_required: bool = False) -> None:
        super().__init__(api, is_required=is_required)
        self.requests: list[list[list[int]]] = []
        self.bounds: list[int] = []

    def forward(self, tensors: StepTensors) -> torch.Tensor:
        self.num_eager += 1
        inputs, meta = tensors.inputs, tensors.inputs.meta
        self.requests.append(
            [each.tolist() for each in (meta.query_start_loc, meta.seq_lens, meta.block_table[:, 0])]
        )
        self.bounds.append(meta.max_query_len)
        return torch.stack(
            [part.float() for part in (inputs.token_ids, inputs.positions, meta.slot_mapping)], dim=1
        )

    def mixed(self, **requests: tuple[int, int]) -> StepArrays:
        """Return a step of new requests, each of a length of which so many tokens are computed; decodes first."""
        for name, (length, queries) in requests.items():
            self.batch.add(
                NewRequest(
                    name,
                    [length] * length,
                    [[*range(length, length + 4)]],
                    length - queries,
                    SamplingParams(),
                )
            )
        scheduled = {name: queries for name, (_, queries) in requests.items()}
        return flatten_step(
            self.batch, SchedulerOutput([], {}, scheduled, sum(scheduled.values()), [], {}), None
        )


@pytest.fixture
def mixed_steps(monkeypatch: pytest.MonkeyPatch) -> MixedSteps:
    monkeypatch.setattr(cuda_graphs, "MIN_QUERIES", 3)
    steps = MixedSteps(RerunGraphs())
    assert steps.graphs.capture([8, 16], is_mixed=True)
    assert steps.graphs.capture([2, 4])
    return steps


def test_a_mixed_step_is_padded_by_tokens_and_requests_that_read_and_write_nothing(
    mixed_steps: MixedSteps,
) -> None:
    for step, tokens in (
        (mixed_steps.mixed(a=(9, 1), b=(7, 5)), [(9, 8, 152), *((7, at, 16 * 7 + at) for at in range(2, 7))]),
        (mixed_steps.mixed(c=(4, 4)), [(4, at, 16 * 4 + at) for at in range(4)]),
    ):
        ran = mixed_steps.graphs.run(step)
        assert ran is not None
        hidden, tensors = ran
        assert hidden.tolist() == [[*map(float, each)] for each in tokens], "and nothing of the padding"
        meta = tensors.inputs.meta
        padding = 8 - len(tokens)
        assert meta.slot_mapping[len(tokens) :].tolist() == [-1] * padding
        assert tensors.inputs.token_ids[len(tokens) :].tolist() == [0] * padding
        starts, lens, blocks = mixed_steps.requests[-1]
        count = len(step.slots)
        assert starts == [0, *step.ends.tolist(), *[len(tokens)] * (6 - count)]
        assert lens == [*step.seq_lens.tolist(), *[0] * (6 - count)]
        assert blocks[count:] == [0] * (6 - count)
        assert set(mixed_steps.bounds[-1:]) == {8}
    assert mixed_steps.bounds[:2] == [16, 16], "captured for prompts that fill the step"


def test_a_mixed_step_uses_the_next_captured_number_of_tokens(mixed_steps: MixedSteps) -> None:
    for queries in (4, 8, 9, 16):
        ran = mixed_steps.graphs.run(mixed_steps.mixed(**{f"of {queries}": (queries, queries)}))
        assert ran is not None
        assert len(ran[0]) == queries
    assert isinstance(mixed_steps.graphs._api, RerunGraphs)
    assert mixed_steps.graphs._api.replays == [8, 8, 16, 16]


def test_other_mixed_steps_run_eagerly(mixed_steps: MixedSteps) -> None:
    run = mixed_steps.graphs.run
    assert run(mixed_steps.mixed(few=(9, 3))) is None, "its keys may be split"
    assert run(mixed_steps.mixed(many=(17, 17))) is None, "none is as large"
    step = mixed_steps.mixed(shared=(4, 4))
    assert run(step, Round([4, 1], is_decode=False)) is None, "the other core would have to know"
    assert run(step) is not None


def test_mixed_steps_that_cannot_be_captured_leave_the_decodes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cuda_graphs, "MIN_QUERIES", 3)
    steps = MixedSteps(RerunGraphs(fails_at=8))
    assert not steps.graphs.capture([8, 16], is_mixed=True)
    assert steps.graphs.capture([2])
    assert "a step of 8 tokens failed after aten.stack" in caplog.records[0].getMessage()
    assert "mixed steps run eagerly" in caplog.records[0].getMessage()
    assert steps.graphs.run(steps.mixed(prompt=(6, 6))) is None
    assert steps.graphs.run(steps.mixed(decode=(6, 1))) is not None
    with pytest.raises(ConfigError, match="a step of 8 tokens failed"):
        MixedSteps(RerunGraphs(fails_at=8), is_required=True).graphs.capture([8], is_mixed=True)


@pytest.mark.parametrize("device", KNOWN_DEVICES)
def test_attention_of_a_graph_has_the_configuration_of_the_steps_that_it_replays(device: str) -> None:
    """Of every step with more than MIN_QUERIES tokens of a request, whatever the shape of the model's attention."""
    traits = KNOWN_DEVICES[device]
    bf16, fp32, fp8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
    for dtype, kv_dtype in ((bf16, bf16), (bf16, fp8), (fp32, fp32)):
        for head_dim in (64, 80, 128, 256, 512):
            for group in (1, 2, 3, 5, 8, 16, 64) if head_dim <= 256 else (1, 4, 16):
                shape = traits, dtype, kv_dtype
                wanted = _layout_of(*shape, 2048, group * 2, 2, head_dim, 256, 1 << 17, 2048, None)
                for tokens, requests in ((MIN_QUERIES + 1, 1), (200, 8), (2048, 256)):
                    eager = _layout_of(
                        *shape, tokens, group * 2, 2, head_dim, requests, 1 << 17, MIN_QUERIES + 1, None
                    )
                    found = eager.tiles, eager.block_q, eager.is_packed, eager.num_segments
                    assert found == (wanted.tiles, wanted.block_q, True, 1)
                    assert eager.num_programs <= wanted.num_programs


@pytest.mark.parametrize(
    ("max_num_seqs", "wanted", "sizes"),
    [
        (1, (), [1]),
        (7, (), [1, 2, 4, 7]),
        (20, (), [1, 2, 4, 8, 16, 20]),
        (16, (32, 3, 16, 3), [3, 16]),
    ],
)
def test_sizes_are_bounded_by_the_requests_that_may_run(
    max_num_seqs: int, wanted: tuple[int, ...], sizes: list[int]
) -> None:
    assert capture_sizes(max_num_seqs, wanted) == sizes


def test_the_largest_sizes_are_further_apart() -> None:
    sizes = capture_sizes(1024)
    assert sizes[:5] == [1, 2, 4, 8, 16]
    assert sizes[-3:] == [480, 496, 512]
    assert len(sizes) == 3 + 32 + 16


@pytest.mark.parametrize(
    ("flags", "device", "backend", "sizes"),
    [
        ({}, "cuda", "triton", [1, 2, 4]),
        ({"compilation_config": {"cudagraph_capture_sizes": [3, 1, 64]}}, "cuda", "triton", [1, 3]),
        ({"compilation_config": {"cudagraph_mode": "NONE"}}, "cuda", "triton", []),
        ({"compilation_config": {"cudagraph_mode": "FULL_AND_PIECEWISE"}}, "cuda", "triton", [1, 2, 4]),
        ({"compilation_config": {"cudagraph_mode": "FULL"}}, "cuda", "triton", [1, 2, 4]),
        ({"compilation_config": {"cudagraph_mode": "PIECEWISE"}}, "cuda", "triton", [1, 2, 4]),
        ({"enforce_eager": True}, "cuda", "triton", []),
        ({}, "cuda", "flash_attn", [1, 2, 4]),
        ({}, "cuda", "torch", []),
        ({}, "cpu", "triton", []),
    ],
)
def test_flags_and_device_decide_what_is_captured(
    flags: dict[str, Any], device: str, backend: str, sizes: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    args = EngineArgs.of(model="builtin://tiny", max_num_seqs=4, **flags)
    assert graph_sizes(args, device, backend) == sizes


DEFAULT_MIXED = [160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1000]


@pytest.mark.parametrize(
    ("mode", "wanted", "device", "backend", "reason", "sizes", "said"),
    [
        ("FULL_DECODE_ONLY", [], "cuda", "triton", None, [], ""),
        ("NONE", [], "cuda", "triton", None, [], ""),
        ("FULL", [], "cuda", "triton", None, DEFAULT_MIXED, ""),
        (
            "FULL_AND_PIECEWISE",
            [],
            "cuda",
            "triton",
            None,
            DEFAULT_MIXED,
            "is taken as FULL: attention is part of",
        ),
        ("PIECEWISE", [], "cuda", "triton", None, DEFAULT_MIXED, "is taken as FULL: attention is part of"),
        ("FULL", [4, 128, 129, 1000, 1001], "cuda", "triton", None, [129, 1000], ""),
        ("FULL", [1, 2], "cuda", "triton", None, [], ""),
        (
            "FULL",
            [],
            "cuda",
            "flash_attn",
            None,
            [],
            "FULL_DECODE_ONLY: the attention backend flash_attn depends",
        ),
        ("FULL", [], "cuda", "triton", "it has states", [], "is taken as FULL_DECODE_ONLY: it has states"),
        ("FULL", [], "cpu", "triton", None, [], ""),
    ],
)
def test_mixed_steps_are_captured_where_they_are_wanted_and_certain(
    mode: str, wanted: list[int], device: str, backend: str, reason: str | None, sizes: list[int], said: str,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    config = {"cudagraph_mode": mode, "cudagraph_capture_sizes": wanted}
    args = EngineArgs.of(model="builtin://tiny", max_num_batched_tokens=1000, compilation_config=config)
    with caplog.at_level("INFO"):
        assert mixed_graph_sizes(args, device, backend, reason) == sizes
    assert said in caplog.text
    assert bool(said) == bool(caplog.records)


def test_an_engine_without_graphs_has_none_of_mixed_steps() -> None:
    args = EngineArgs.of(
        model="builtin://tiny", enforce_eager=True, compilation_config={"cudagraph_mode": "FULL"}
    )
    assert mixed_graph_sizes(args, "cuda", "triton", None) == []


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            {"cudagraph_mode": "ALL"},
            "--compilation-config: cudagraph_mode: must be one of NONE, FULL, FULL_D",
        ),
        ({"cudagraph_capture_sizes": [0]}, "--compilation-config: cudagraph_capture_sizes"),
        ({"backend": "x"}, "--compilation-config: Object contains unknown field `backend`"),
    ],
)
def test_a_compilation_config_that_is_not_supported_is_refused(config: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        EngineArgs.of(model="builtin://tiny", compilation_config=config)


def test_memory_of_graphs_is_that_of_the_largest_and_of_the_others() -> None:
    assert estimate_graphs([], 0) == 0
    assert estimate_graphs([100], 1) == 100
    assert estimate_graphs([100, 3], 51) == 250
