"""Flags: sizes, `--config FILE`, precedence, and the suggestions for what is misspelt."""

from __future__ import annotations

from pathlib import Path

import pytest

from argosy_engine.api.serve import parse_args
from argosy_engine.config import EngineArgs
from argosy_engine.errors import ConfigError


def config_file(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "engine.yaml"
    path.write_text(text)
    return ["--config", str(path)]


def test_a_file_gives_flags_and_the_command_line_wins(tmp_path: Path) -> None:
    given = config_file(
        tmp_path,
        "model: builtin://tiny\nport: 1234\nmax-model-len: 2k\nmax_num_seqs: 8\nserved-model-name: [a, b]\n"
        "enable-prefix-caching: false\nguard-metrics: true\napi-key: [k1, k2]\ngpu-memory-utilization: 0.5\n",
    )
    options, args = parse_args([*given, "--max-num-seqs", "9"])
    assert (args.model, args.max_model_len, args.max_num_seqs) == ("builtin://tiny", 2000, 9)
    assert (args.served_model_name, args.enable_prefix_caching) == (("a", "b"), False)
    assert (options.port, options.guard_metrics, options.api_key) == (1234, True, ("k1", "k2"))
    assert args.gpu_memory_utilization == 0.5
    options, args = parse_args(["other", *given, "--served-model-name", "c", "--enable-prefix-caching"])
    assert (args.model, args.served_model_name, args.enable_prefix_caching) == ("other", ("c",), True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_model_lenn: 3", "unknown key 'max_model_lenn'; did you mean max_model_len?"),
        ("- a\n- b", "is not a mapping"),
        ("a: [", "cannot read"),
        ("enable-chunked-prefill: 3", "must be true or false"),
        ("max-num-seqs: [1, 2]", "takes one value"),
        ("max-num-seqs: none", "--max-num-seqs"),
        ("config: x", "unknown key 'config'"),
        ("port: 70000", "--port"),
        ("!!python/object/apply:os.system [id]: 1", "cannot read"),
    ],
)
def test_a_bad_file_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    with pytest.raises(SystemExit) as left:
        parse_args(["builtin://tiny", *config_file(tmp_path, text)])
    assert left.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("512", 512), ("1k", 1000), ("1K", 1024), ("2.5k", 2500), ("auto", "auto"), ("-1", "auto")],
)
def test_sizes(text: str, tokens: object) -> None:
    assert parse_args(["m", f"--max-model-len={text}"])[1].max_model_len == tokens


@pytest.mark.parametrize("text", ["abc", "4_096"])
def test_a_length_that_is_no_number_is_told_what_it_may_be(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_args(["m", f"--max-model-len={text}"])
    told = f"--max-model-len: must be a whole number, auto, or like 4k, not '{text}'"
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "value", "told"),
    [
        ("--attention-backend", "FLASHINFER", "leave it out, or give flash_attn or triton"),
        ("--attention-backend", "TORCH_SDPA", "leave it out, or give cpu, whose kernels are for CPUs"),
        ("--kv-cache-dtype", "bfloat16", "without the flag keys and values have the model's dtype"),
    ],
)
def test_a_choice_of_vllm_s_is_refused_with_what_to_give_instead(
    flag: str, value: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_args(["m", flag, value])
    assert f"argument {flag}: {value} is not supported: {told}" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=f"{flag}: {value} is not supported: {told}"):
        EngineArgs.of(model="m", **{flag.removeprefix("--").replace("-", "_"): value})


def test_numbers_may_begin_with_a_point() -> None:
    flags = "--gpu-memory-utilization .9 --watermark .1 --shutdown-timeout .5"
    server, args = parse_args(["m", *flags.split()])
    assert (args.gpu_memory_utilization, args.watermark, server.shutdown_timeout) == (0.9, 0.1, 0.5)


@pytest.mark.parametrize("text", ["1.0001k", "k", "-2", "1T", "8", "", "1e9", "9" * 30])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(SystemExit) as left:
        parse_args(["m", f"--max-model-len={text}"])
    assert left.value.code == 2


def test_no_model_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_args(["--port", "1"])
    assert "give a model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "field"),
    [
        ("--tensor-parallel-size", "tensor_parallel_size"),
        ("-tp", "tensor_parallel_size"),
        ("--pipeline-parallel-size", "pipeline_parallel_size"),
        ("-pp", "pipeline_parallel_size"),
        ("--data-parallel-size", "data_parallel_size"),
        ("-dp", "data_parallel_size"),
    ],
)
def test_parallelism_has_vllm_s_flags(flag: str, field: str) -> None:
    assert getattr(parse_args(["builtin://tiny", flag, "3"])[1], field) == 3
    with pytest.raises(SystemExit):
        parse_args(["builtin://tiny", flag, "0"])


def test_experts_are_divided_among_the_workers_of_all_cores() -> None:
    command = ["builtin://tiny", "-tp", "2", "--enable-expert-parallel"]
    alone, shared = (parse_args([*command, "-dp", size])[1].parallel_config for size in ("1", "4"))
    assert (alone.shares_experts, alone.expert_size) == (False, 2)
    assert (shared.shares_experts, shared.expert_size) == (True, 8)


def test_dual_batch_overlap_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_args(["builtin://tiny", "-dp", "2", "--enable-expert-parallel", "--enable-dbo"])
    assert "--enable-dbo is not supported: it hides the transfers" in capsys.readouterr().err


def test_overrides_of_the_model_s_config_are_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, args = parse_args(["m", "--hf-overrides", '{"matryoshka_dimensions": [64, 128]}'])
    assert args.model_use.hf_overrides.matryoshka_dimensions == (64, 128)
    _, args = parse_args(config_file(tmp_path, "model: m\nhf-overrides: {is_matryoshka: true}\n"))
    assert args.model_use.hf_overrides.is_matryoshka
    with pytest.raises(SystemExit):
        parse_args(["m", "--hf-overrides", "{is_matryoshka"])
    assert "--hf-overrides is not JSON" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse_args(["m", "--hf-overrides", '{"architectures": "LlamaForCausalLM"}'])
    assert "--hf-overrides: Expected `array | null`, got `str`" in capsys.readouterr().err
    _, args = parse_args(
        ["m", "--hf-overrides.rope_scaling.rope_type=yarn", "--hf-overrides.rope_scaling.factor=4"]
    )
    assert args.hf_overrides == {"rope_scaling": {"rope_type": "yarn", "factor": 4}}


def test_the_compilation_config_is_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, args = parse_args(["m", "--compilation-config", '{"cudagraph_mode":"NONE"}'])
    assert args.compilation_config.cudagraph_mode == "NONE"
    given = config_file(tmp_path, "model: m\ncompilation-config: {cudagraph_capture_sizes: [1, 8]}\n")
    assert parse_args(given)[1].compilation_config.cudagraph_capture_sizes == (1, 8)
    with pytest.raises(SystemExit):
        parse_args(["m", "--compilation-config", '{"level":2}'])
    assert "--compilation-config: level 2 is not supported, because" in capsys.readouterr().err
