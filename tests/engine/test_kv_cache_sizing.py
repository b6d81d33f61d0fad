"""KV cache sizing: blocks that fit on a device, the maximum length, and what `argosy doctor` reports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from argosy_engine import LLM
from argosy_engine.api.doctor import diagnose
from argosy_engine.api.doctor import main as doctor
from argosy_engine.attention.backend import ModelInputs
from argosy_engine.attention.kv_cache_spec import (
    FullAttentionSpec,
    RecurrentStateSpec,
    block_bytes,
    group_layers,
    groups_of_layers,
)
from argosy_engine.attention.params import WORKSPACE_BYTES
from argosy_engine.checkpoint.model_folder import resolve_model
from argosy_engine.checkpoint.shards import checkpoint_elements
from argosy_engine.config import EngineArgs
from argosy_engine.errors import ConfigError, DoesNotFit
from argosy_engine.frontend.model_source import budget_table
from argosy_engine.model_configs.model_config import ModelConfig
from argosy_engine.model_configs.sharding import Sharding, all_stages
from argosy_engine.models.config_file import load_model_config, parse_config
from argosy_engine.models.loader import plan_weights
from argosy_engine.resolved_config import MemoryBudget
from argosy_engine.sizing.kv_cache_sizing import (
    estimate_activations,
    estimate_weights,
    plan_memory,
    planned_groups,
    rank_elements,
    scarcest,
    stage_elements,
)
from argosy_engine.sizing.resources import DeviceMemory, cpu_memory
from transformers_checkpoints import small_config, write_checkpoint

TINY = resolve_model("builtin://tiny")
GIB = 1 << 30


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return load_model_config(TINY)


def plan(config: ModelConfig, available: int, device: str = "cpu", used: int = 0, **flags: object):  # type: ignore[no-untyped-def]
    args = EngineArgs.of(model="builtin://tiny", **flags)
    memory = DeviceMemory(device, "test", available + used, available)
    groups = planned_groups(config, 2, args.block_size)
    return plan_memory(args, config, memory, groups=groups, weights_bytes=10 << 20, activation_bytes=6 << 20)


@given(
    available=st.integers(1 << 20, 1 << 36),
    used=st.integers(0, 1 << 34),
    utilization=st.floats(0.01, 1.0),
    block_size=st.sampled_from([1, 16, 32, 256]),
    device=st.sampled_from(["cpu", "cuda"]),
    max_model_len=st.sampled_from(["auto", 16, 500, 4096]),
)
def test_the_plan_never_exceeds_the_share(
    available: int, used: int, utilization: float, block_size: int, device: str, max_model_len: object
) -> None:
    config = load_model_config(TINY)
    flags = {
        "gpu_memory_utilization": utilization,
        "block_size": block_size,
        "max_model_len": max_model_len,
    }
    try:
        budget = plan(config, available, device, used, **flags)
    except DoesNotFit:
        return
    taken = budget.kv_cache_bytes + budget.weights_bytes + budget.activation_bytes
    if device == "cuda":
        assert taken + used <= (available + used) * utilization
    assert taken <= available
    assert budget.kv_cache_tokens >= budget.max_model_len
    assert budget.max_concurrency >= 1


@given(
    available=st.integers(1 << 24, 1 << 34),
    state=st.integers(1, 1 << 24),
    page=st.sampled_from([0, 1 << 10, 1 << 16]),
    interval=st.sampled_from([16, 1024, 1 << 20]),
    max_num_seqs=st.integers(1, 512),
    caching=st.booleans(),
)
def test_states_and_blocks_share_the_memory(
    available: int, state: int, page: int, interval: int, max_num_seqs: int, caching: bool
) -> None:
    attention = [FullAttentionSpec(page)] * 4 if page else []
    groups = group_layers([*attention, *[RecurrentStateSpec(state)] * 4])
    args = EngineArgs.of(
        model="builtin://tiny",
        max_model_len="auto",
        mamba_block_size=interval,
        max_num_seqs=max_num_seqs,
        enable_prefix_caching=caching,
    )
    memory = DeviceMemory("cpu", "test", available, available)
    try:
        budget = plan_memory(
            args, load_model_config(TINY), memory, groups=groups, weights_bytes=0, activation_bytes=0
        )
    except DoesNotFit:
        return
    assert budget.kv_cache_bytes <= available
    assert budget.num_states >= (3 if caching else 2)
    assert budget.max_concurrency >= 1
    per_request = 2 if caching else 1
    if (
        budget.num_states <= max_num_seqs * per_request
    ):  # not all can run, so nothing that serves fewer takes more
        assert budget.num_states * budget.state_bytes >= available * 0.4 * 0.49 - 2 * budget.state_bytes
    if not caching:
        assert budget.num_states <= max_num_seqs + 1
    assert budget.most_running == budget.num_states - 1
    if not page:
        assert budget.block_bytes == 0


@pytest.mark.parametrize("caching", [False, True])
def test_one_request_at_a_time_has_its_state(caching: bool) -> None:
    groups = group_layers([FullAttentionSpec(1 << 10), RecurrentStateSpec(1 << 10)])
    args = EngineArgs.of(model="builtin://tiny", max_num_seqs=1, enable_prefix_caching=caching)
    memory = DeviceMemory("cpu", "test", GIB, GIB)
    budget = plan_memory(
        args, load_model_config(TINY), memory, groups=groups, weights_bytes=0, activation_bytes=0
    )
    assert budget.num_states >= (3 if caching else 2)
    assert budget.most_running >= 1


@pytest.mark.parametrize("caching", [False, True])
def test_a_stage_limits_what_its_layers_keep(caching: bool) -> None:
    """Stages without attention, or without states, leave the number to the others."""
    groups = group_layers([*[FullAttentionSpec(1 << 12)] * 3, *[RecurrentStateSpec(1 << 16)] * 3])
    args = EngineArgs.of(
        model="builtin://tiny", max_num_seqs=64, max_model_len=1024, enable_prefix_caching=caching
    )
    memory = DeviceMemory("cpu", "test", 16 << 20, 16 << 20)

    def plan_of(*own: int) -> MemoryBudget:
        return plan_memory(
            args,
            load_model_config(TINY),
            memory,
            groups=groups_of_layers(groups, own),
            weights_bytes=0,
            activation_bytes=0,
        )

    both, attention, states = plan_of(0, 3), plan_of(1, 2), plan_of(4, 5)
    assert [each.block_bytes for each in (both, attention, states)] == [1 << 12, 2 << 12, 0]
    assert [each.state_bytes for each in (both, attention, states)] == [1 << 16, 0, 2 << 16]
    assert states.num_blocks == 64 * 64 + 1 > max(both.num_blocks, attention.num_blocks)
    assert attention.num_states >= 64 + 1 > states.num_states
    for each in (both, attention, states):
        assert each.kv_cache_bytes <= 16 << 20
    agreed = scarcest([both, attention, states])
    assert agreed.num_blocks == min(both.num_blocks, attention.num_blocks)
    assert agreed.num_states == min(both.num_states, states.num_states)


@pytest.mark.parametrize("groups", [1, 2])
def test_ranks_that_share_groups_hold_them_whole(groups: int, tmp_path: Path) -> None:
    write_checkpoint("bamba", tmp_path, mamba_n_groups=groups)
    config = load_model_config(tmp_path)
    planned, held = (
        plan_weights(config, torch.float32, Sharding(0, 4)).elements,
        rank_elements(config, checkpoint_elements(tmp_path), 4),
    )
    own = sum(count for name, count in planned.items() if name.endswith("mamba.in_proj.weight"))
    told = sum(count for name, count in held.items() if name.endswith("mamba.in_proj.weight"))
    replicated = held["replicated"] - len(config.attention_layers) * config.replicated_elements(4)
    assert own == told + replicated
    assert replicated > 0


@pytest.mark.parametrize(
    ("model_type", "is_tied"), [("lfm2_moe", True), ("nemotron_h", False), ("granitemoehybrid", False)]
)
def test_stages_hold_their_layers_and_what_is_at_either_end(
    model_type: str, is_tied: bool, tmp_path: Path
) -> None:
    write_checkpoint(model_type, tmp_path, tie_word_embeddings=is_tied)
    config, stored = load_model_config(tmp_path), checkpoint_elements(tmp_path)
    small = 10 * config.hidden_size  # norms, and rotations that a model has once
    for stage in all_stages(4):
        planned = plan_weights(config, torch.float32, stage=stage).elements
        told = stage_elements(config, stored, stage)
        assert abs(sum(told.values()) - sum(planned.values())) < small
        bytes_of = [estimate_weights(config, each, 4, "cpu", 1, stage) for each in (planned, told)]
        assert abs(bytes_of[0] - bytes_of[1]) < 4 * small


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_length_that_an_error_names_fits_and_one_more_does_not(config: ModelConfig, device: str) -> None:
    def attempt(length: object) -> int:
        # a share of the device that leaves a few MiB, on either kind
        share = 0.0001 if device == "cpu" else 17.5 / 1024
        budget = plan(config, GIB * (1 if device == "cuda" else 16), device, max_model_len=length,
                      gpu_memory_utilization=share)  # fmt: skip
        return int(budget.max_model_len)

    with pytest.raises(DoesNotFit) as refused:
        attempt(4096)
    words = str(refused.value).split("use --max-model-len ")[1]
    fits = int(words.split()[0])
    assert attempt(fits) == fits
    assert attempt("auto") == fits
    with pytest.raises(DoesNotFit):
        attempt(fits + 1)


def test_flags_override_memory(config: ModelConfig) -> None:
    block = block_bytes(planned_groups(config, 2, 16))
    by_bytes = plan(config, GIB, kv_cache_memory_bytes=300 * block + 1)
    assert (by_bytes.num_blocks, by_bytes.limited_by) == (300, "--kv-cache-memory-bytes")
    by_count = plan(config, GIB, num_gpu_blocks_override=7)
    assert (by_count.num_blocks, by_count.limited_by) == (7, "--num-gpu-blocks-override")
    few = plan(config, GIB, max_num_seqs=1, max_model_len=64)
    assert (few.num_blocks, few.limited_by) == (5, "--max-num-seqs")
    assert plan(config, GIB).limited_by == "memory"


def test_without_chunked_prefill_the_budget_must_hold_the_longest_prompt(config: ModelConfig) -> None:
    with pytest.raises(ConfigError, match="at least 4096"):
        plan(config, 16 * GIB, enable_chunked_prefill=False)
    assert plan(config, 16 * GIB, enable_chunked_prefill=False, max_num_batched_tokens=4096)


def test_workers_share_the_memory_of_a_cpu_and_have_a_gpu_each(config: ModelConfig) -> None:
    pair = plan(config, 2 * GIB, tensor_parallel_size=2)
    assert (pair.num_workers, pair.available_bytes) == (2, GIB)
    assert pair.kv_cache_bytes == plan(config, GIB).kv_cache_bytes
    assert "on each of 2 workers" in budget_table(pair)
    assert plan(config, 2 * GIB, "cuda", tensor_parallel_size=2).available_bytes == 2 * GIB


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("path", ["/", "/pods/engine"])
def test_the_tightest_cgroup_counts_and_its_page_cache_does_not(
    tmp_path: Path, version: int, path: str
) -> None:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 1000 kB\nMemAvailable: 900 kB\n")
    if version == 1:
        root, names = (
            cgroups / "memory",
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        )
    else:
        root, names = cgroups, ("memory.max", "memory.current", "inactive_file")
    (proc / "self" / "cgroup").write_text(f"4:memory:{path}\n" if version == 1 else f"0::{path}\n")
    leaf = root / path.lstrip("/")
    leaf.mkdir(parents=True)
    (root / names[0]).write_text("max\n")
    (leaf / names[0]).write_text(f"{500 * 1024}\n")
    (leaf / names[1]).write_text(f"{300 * 1024}\n")
    (leaf / "memory.stat").write_text(f"anon 5\n{names[2]} {100 * 1024}\n")
    memory = cpu_memory(proc, cgroups)
    assert (memory.total_bytes, memory.available_bytes) == (500 * 1024, 300 * 1024)


def test_headers_tell_the_size_of_the_loaded_weights() -> None:
    total = sum(checkpoint_elements(TINY).values())
    assert (TINY / "model.safetensors").stat().st_size == pytest.approx(2 * total, rel=0.02)


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 8, b"\x02" + b"\0" * 7 + b"[]", b"\x0e" + b"\0" * 7 + b'{"a":{"b": 1}}']
)
def test_a_broken_checkpoint_is_a_config_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError):
        checkpoint_elements(tmp_path)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_doctor_and_engine_agree_on_the_budget(dtype: str) -> None:
    """The tiny model's head is its embedding: on a CPU the head's product has a copy of its own, which counts."""
    flags: dict[str, Any] = {
        "model": "builtin://tiny",
        "device": "cpu",
        "dtype": dtype,
        "kv_cache_memory_bytes": 64 << 20,
    }
    size = 2 if dtype == "bfloat16" else 4
    told = diagnose(EngineArgs.of(**flags)).budget
    llm = LLM(**flags, threads=1)
    try:
        found = llm.config.memory
        copies = llm.config.vocab_size * llm.config.embedding_size * size
    finally:
        llm.close()
    assert told is not None
    stored = sum(checkpoint_elements(TINY).values()) * size
    assert told.weights_bytes == found.weights_bytes == stored + copies
    assert told.kv_cache_bytes == found.kv_cache_bytes
    assert budget_table(told) == budget_table(found)


def test_doctor_says_what_a_gpu_would_hold() -> None:
    gpu = DeviceMemory("cuda", "test GPU", 80 * GIB, 79 * GIB)
    diagnosis = diagnose(EngineArgs.of(model="builtin://tiny", max_num_seqs=4096, max_model_len=4096), gpu)
    assert diagnosis.fits
    assert diagnosis.budget is not None
    assert diagnosis.dtype == "bfloat16"
    dummy = diagnose(EngineArgs.of(model="builtin://tiny", load_format="dummy"), gpu)
    assert dummy.budget is not None
    assert dummy.budget.weights_bytes == pytest.approx(diagnosis.budget.weights_bytes, rel=0.05)


def test_doctor_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor(["builtin://tiny", "--device", "cpu", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"] is True
    assert doctor(["builtin://tiny", "--device", "cpu", "--kv-cache-memory-bytes", "1M"]) == 1
    assert "use --max-model-len " in capsys.readouterr().out
    assert doctor(["/nonexistent"]) == 2
    assert "is no directory" in capsys.readouterr().err


def test_doctor_imports_no_torch() -> None:
    code = "import sys, argosy_engine.api.doctor as d; d.main(['builtin://tiny']); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-P", "-c", code], check=True, capture_output=True)


def test_attention_by_torch_asks_for_room_to_gather(config: ModelConfig) -> None:
    def extra(max_model_len: int, max_num_seqs: int) -> int:
        args = EngineArgs.of(
            model="builtin://tiny",
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            max_num_batched_tokens=1024,
        )
        with_kernels, without = (
            estimate_activations(config, args, 4, backend) for backend in ("cpu", "torch")
        )
        return without - with_kernels

    token_bytes = 2 * config.num_key_value_heads * config.head_dim * 4
    assert extra(1024, 2) == 2 * 2 * 1024 * token_bytes
    assert extra(4096, 2) == 2 * 2 * 4096 * token_bytes
    assert extra(4096, 256) == 2 * WORKSPACE_BYTES


@pytest.mark.parametrize("logprobs_mode", ["raw_logprobs", "processed_logprobs"])
def test_the_largest_steps_run_and_sample_every_request(
    logprobs_mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory profile of a CUDA device, run on a CPU."""
    from argosy_engine.worker import worker as worker_module
    from argosy_engine.worker.warm_up import run_largest_steps

    runners: list[Any] = []

    class KeptRunner(worker_module.ModelRunner):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            runners.append(self)

    monkeypatch.setattr(worker_module, "ModelRunner", KeptRunner)
    args = EngineArgs.of(
        model="builtin://tiny", device="cpu", max_num_batched_tokens=64, max_num_seqs=5, num_gpu_blocks_override=4,
        threads=1, logprobs_mode=logprobs_mode,
    )  # fmt: skip
    worker_module.Worker(args).start()
    runner = runners[-1]
    seen: list[tuple[int, list[int], list[int]]] = []
    forward = runner.model.forward

    def spy(inputs: ModelInputs) -> torch.Tensor:
        meta = inputs.meta
        query_lens = np.diff(meta.query_start_loc_cpu).tolist()
        seen.append((meta.num_decodes, query_lens, meta.seq_lens.tolist()))
        return forward(inputs)

    monkeypatch.setattr(runner.model, "forward", spy)
    assert run_largest_steps(runner, args, 1024) == 10
    assert seen == [(0, [13, 13, 13, 13, 12], [13, 13, 13, 13, 12]), (4, [1, 1, 1, 1, 60], [1023] * 5)]
    assert run_largest_steps(runner, args, 1024) == 10  # nothing of the first run is left


def test_without_a_model_doctor_checks_this_machine_with_the_built_in_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert doctor(["--device", "cpu"]) == 0
    told = capsys.readouterr()
    assert told.out.startswith("tiny: Qwen3ForCausalLM")
    assert "no model is given" in told.err
    assert doctor(["--device", "cpu", "--model", "/nowhere"]) == 2
    assert "no model is given" not in capsys.readouterr().err


def test_experts_that_are_computed_at_once_have_activations_of_all_that_a_token_takes() -> None:
    raw = {**small_config("olmoe").to_dict(), "architectures": ["OlmoeForCausalLM"]}
    args = EngineArgs.of(model="builtin://tiny", max_num_batched_tokens=1024, max_num_seqs=1)
    few, many = (
        [
            estimate_activations(parse_config({**raw, "num_experts_per_tok": k}, {}, {}), args, 2, backend)
            for backend in ("cpu", "triton")
        ]
        for k in (1, 8)
    )
    assert few[0] == many[0]
    assert many[1] - few[1] >= 2 * 1024 * 5 * (raw["intermediate_size"] + raw["hidden_size"])
