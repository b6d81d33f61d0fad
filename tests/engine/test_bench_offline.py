"""`argosy bench throughput` and `latency` on a small engine in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from argosy_engine.benchmarks.bench_offline import bench_latency, bench_throughput
from argosy_engine.vllm_flags import OF_SERVERS, RARE_REFUSED, RARE_WITHOUT_EFFECT, REFUSED, WITHOUT_EFFECT
from argosy_protocol.program.flags import FlagParser

ENGINE = ["--model", "builtin://tiny", "--threads", "1", "--device", "cpu", "--kv-cache-memory-bytes", "32M"]


@pytest.mark.parametrize("backend", ["argosy", "vllm-chat"])
def test_throughput_counts_what_was_generated(
    backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "t.json"
    flags = ["--backend", backend, "--num-prompts", "4", "--input-len", "12", "--output-len", "3", "--n", "2"]
    assert bench_throughput([*ENGINE, *flags, "--num-warmups", "1", "--output-json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert set(result) == {
        "model_id", "elapsed_time", "num_requests", "total_num_tokens", "requests_per_second",
        "tokens_per_second",
    }  # fmt: skip
    assert result["num_requests"] == 4
    assert result["requests_per_second"] == pytest.approx(4 / result["elapsed_time"])
    printed = capsys.readouterr().out
    assert printed.startswith("Throughput: ")
    assert "Total num output tokens:  24\n" in printed
    prompt_tokens = result["total_num_tokens"] - 24
    assert f"Total num prompt tokens:  {prompt_tokens}\n" in printed
    assert prompt_tokens >= 4 * 12 - 4


def test_throughput_reads_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "p.jsonl").write_text(
        '{"prompt": "Hello!", "output_tokens": 2}\n{"prompt": "a", "output_tokens": 5}\n'
    )
    flags = ["--dataset-name", "custom", "--dataset-path", str(tmp_path / "p.jsonl"), "--num-prompts", "0"]
    assert bench_throughput([*ENGINE, *flags, "--custom-output-len", "-1"]) == 0
    assert "Total num output tokens:  7\n" in capsys.readouterr().out


@pytest.mark.parametrize("search", [[], ["--use-beam-search", "--n", "2"]], ids=["sampled", "beams"])
def test_latency_times_each_iteration(
    search: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "l.json"
    flags = ["--input-len", "6", "--output-len", "3", "--batch-size", "2", "--num-iters-warmup", "1"]
    assert bench_latency([*ENGINE, *flags, "--num-iters", "4", "--output-json", str(file), *search]) == 0
    result = json.loads(file.read_text())
    assert set(result) == {"model_id", "avg_latency", "latencies", "percentiles"}
    assert len(result["latencies"]) == 4
    assert result["avg_latency"] == pytest.approx(sum(result["latencies"]) / 4)
    assert list(result["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    printed = capsys.readouterr()
    assert printed.out.startswith("Avg latency: ")
    assert "99% percentile latency: " in printed.out
    assert "benchmark: 4/4 iterations" in printed.err


@pytest.mark.parametrize("command", [bench_latency, bench_throughput])
def test_flags_of_vllm_s_engine_are_those_of_the_server(
    command: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = "--disable-log-stats --swap-space 4 --no-enable-lora --cudagraph-capture-sizes 1 2 --device-ids 0"
    with pytest.raises(SystemExit) as ending:
        command(["/nowhere", *flags.split()])
    *notices, refusal = capsys.readouterr().err.splitlines()
    assert ending.value.code == 2
    assert notices == []
    assert "--device-ids is not supported: CUDA_VISIBLE_DEVICES says which devices there are" in refusal
    assert command(["/nowhere", *flags.split()[:-2]]) == 2
    *notices, refusal = capsys.readouterr().err.splitlines()
    assert [notice.split(": ", 1)[1] for notice in notices] == [
        "--swap-space has no effect: preempted requests are computed anew",
        "--disable-log-stats has no effect: lines of statistics are a server's",
    ]
    assert "/nowhere is no directory" in refusal


def test_offline_benchmarks_know_every_engine_flag_of_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known: list[frozenset[str]] = []

    def note(parser: FlagParser, *_: Any) -> None:
        known.append(parser.flag_names)
        raise SystemExit

    monkeypatch.setattr(FlagParser, "parse_args", note)
    for command in (bench_latency, bench_throughput):
        with pytest.raises(SystemExit):
            command([])
    server = {f"--{flag.name}" for flag in (*WITHOUT_EFFECT, *RARE_WITHOUT_EFFECT, *REFUSED, *RARE_REFUSED)}
    for names in known:
        assert not {name for name in server - names if name.removeprefix("--") not in OF_SERVERS}
        assert {"--disable-log-stats", "--stream-interval", "--otlp-traces-endpoint"} <= names


@pytest.mark.parametrize(
    ("command", "flags", "error"),
    [
        (bench_latency, ["--model", "/nowhere"], "/nowhere is no directory"),
        (bench_latency, [*ENGINE, "--disable-detokenize"], "is not supported: outputs always become text"),
        (bench_latency, [], "give a model: ORG/NAME, a directory or builtin://tiny"),
        (bench_latency, [*ENGINE, "--batch-size", "0"], "--batch-size: must be a whole number from 1"),
        (
            bench_latency,
            [*ENGINE, "--input-len", "1000000"],
            "exceed the context of",
        ),
        (bench_throughput, [*ENGINE, "--dataset-name", "custom"], "needs --dataset-path FILE"),
        (bench_throughput, [*ENGINE, "--random-batch-size", "2"], "is for embeddings"),
        (
            bench_throughput,
            [*ENGINE, "--num-prompts", "1", "--max-model-len", "64", "--input-len", "99"],
            "exceed the context of 64; shorten them",
        ),
        *(
            # No model is looked for before that.
            (
                command,
                ["/no/model", "--output-json", "/no/x"],
                "cannot write /no/x: No such file or directory; give another",
            )
            for command in (bench_latency, bench_throughput)
        ),
    ],
    ids=lambda value: " ".join(value[-2:]) if isinstance(value, list) else None,
)
def test_what_cannot_run_is_one_line_with_the_remedy(
    command: Any, flags: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = command(flags)
    except SystemExit as ending:
        code = int(ending.code or 0)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("argosy bench ")]
    assert code == 2
    assert error in line
