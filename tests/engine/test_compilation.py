"""`--compilation-config '{"level": 3}'`: an engine whose layers are compiled, and what happens where they cannot be."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import generating_engine
from argosy_engine import EngineArgs
from argosy_engine.errors import ConfigError
from argosy_engine.layers.layer_compiler import LayerCompiler
from argosy_engine.models.config_file import parse_config
from argosy_engine.native.build import NativeUnavailable, cache_directory
from argosy_engine.worker import compilation


def generated_by_starts(cache: Path, model: str) -> list[dict[str, Any]]:
    compiler = cache / "g++"
    compiler.write_text('#!/bin/sh\nexec g++ "$@" -O0\n')  # to be quick
    compiler.chmod(0o755)
    environment = {
        "XDG_CACHE_HOME": str(cache),
        "CXX": str(compiler),
        "TORCHINDUCTOR_VEC_ISA_OK": "0",  # it tries no instructions, which takes longer than the rest
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    process = subprocess.run(
        [sys.executable, generating_engine.__file__, model],
        stdout=subprocess.PIPE,
        env={**os.environ, **environment},
        check=True,
    )
    return [json.loads(line) for line in process.stdout.splitlines() if line.startswith(b"{")]


@pytest.mark.timeout(600)
def test_a_second_start_generates_nothing(tmp_path: Path) -> None:
    model = tmp_path / "model"
    generating_engine.write_sparse_model(model)
    plain = generating_engine.make_engine(0, str(model))
    try:
        expected = generating_engine.generate(plain)
    finally:
        plain.close()
    (tmp_path / "argosy").mkdir(mode=0o700)
    # Kernels are not what is built here. Another test may be building some there.
    shutil.copytree(
        cache_directory(), tmp_path / "argosy" / "native", ignore=shutil.ignore_patterns(".build-*")
    )
    first, second = generated_by_starts(tmp_path, str(model))
    assert first == {"tokens": expected, "generated": 2, "read": 0, "later": 0}
    assert second == {"tokens": expected, "generated": 0, "read": 2, "later": 0}


def test_without_a_cpp_compiler_layers_run_at_level_0(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def find_none() -> str:
        raise NativeUnavailable("there is none")

    monkeypatch.setattr(compilation, "find_compiler", find_none)
    engine = generating_engine.make_engine(3, "builtin://tiny")
    engine.close()
    assert (
        "level 0): torch.compile needs a C++ compiler on a CPU; install g++, or name one in CXX"
        in caplog.text
    )


def fail(graph: torch.fx.GraphModule, inputs: Any) -> Any:
    raise RuntimeError("this instruction does not exist")


def test_a_failed_compilation_is_named_and_layers_run_at_level_0(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = generating_engine.make_engine(0, "builtin://tiny")
    expected = generating_engine.generate(plain)
    plain.close()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS"):
        monkeypatch.setenv(name, "")  # the engine sets it
    monkeypatch.setattr(compilation, "LayerCompiler", lambda: LayerCompiler(fail))
    engine = generating_engine.make_engine(3, "builtin://tiny")
    assert generating_engine.generate(engine) == expected
    engine.close()
    assert "level 0): DecoderLayer.project of layer 0, for 64 tokens: torch.compile failed" in caplog.text
    assert "this instruction does not exist" in caplog.text


def compile_with_cache(graph: torch.fx.GraphModule, inputs: Any) -> Any:
    code = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / "code"
    if code.exists() and code.read_text() != "whole":
        raise SyntaxError("the code is damaged")
    code.write_text("whole")
    return graph.forward


def test_a_damaged_cache_is_made_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS"):
        monkeypatch.setenv(name, "")  # the engine sets it
    monkeypatch.setattr(compilation, "LayerCompiler", lambda: LayerCompiler(compile_with_cache))
    generated = []
    for content in ("whole", "damaged"):
        caplog.clear()
        engine = generating_engine.make_engine(3, "builtin://tiny")
        generated.append(generating_engine.generate(engine))
        engine.close()
        assert "level 0)" not in caplog.text
        (code,) = (tmp_path / "argosy" / "torch_compile").glob("*/code")
        assert code.read_text() == "whole"
        code.write_text(content)
        caplog.clear()
    engine = generating_engine.make_engine(3, "builtin://tiny")
    generated.append(generating_engine.generate(engine))
    engine.close()
    assert "may be damaged and is made anew: DecoderLayer.project" in caplog.text
    assert "level 0)" not in caplog.text
    assert code.read_text() == "whole"
    assert generated[0] == generated[1] == generated[2]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("flags", "fields"),
    [({}, {"quantization_config": {"quant_method": "fp8"}}), ({"quantization": "fp8"}, {})],
)
def test_layers_with_quantised_weights_run_at_level_0(
    flags: dict[str, Any], fields: dict[str, Any], device: str, caplog: pytest.LogCaptureFixture
) -> None:
    raw = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64, "hidden_size": 64,
        "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2, **fields,
    }  # fmt: skip
    args = EngineArgs.of(model="x", compilation_config={"level": 3}, **flags)
    config = parse_config(raw, {}, {})
    backend = "triton" if device == "cuda" else "cpu"
    assert compilation.start_compilation(args, config, torch.bfloat16, torch.device(device), backend) is None
    assert "level 0): with quantised weights our own kernels quantise what the products read" in caplog.text


@pytest.mark.parametrize("fields", [{"level": 2}, {"level": 3}, {"mode": 3, "cudagraph_mode": "FULL"}])
def test_eager_execution_wins_over_a_compilation_and_says_so(
    fields: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    args = EngineArgs.of(model="x", compilation_config=fields, enforce_eager=True)
    config, device = cast(Any, None), torch.device("cpu")
    assert compilation.start_compilation(args, config, torch.bfloat16, device, "cpu") is None
    assert "layers are not compiled (--compilation-config level 0): --enforce-eager wins" in caplog.text


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"compilation_config": {"level": 1}}, "level 1 is not .*again while requests wait; use 0 or 3"),
        ({"compilation_config": {"level": 2}}, "level 2 is not supported, because a whole model cannot be"),
        ({"compilation_config": {"mode": 2}}, "level 2 is not supported, because a whole model cannot be"),
        ({"compilation_config": {"level": 3, "mode": 0}}, "two names of the same"),
        ({"compilation_config": {"level": 4}}, "--compilation-config: level"),
    ],
)  # fmt: skip
def test_levels_that_are_not_supported_are_refused(flags: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        EngineArgs.of(model="builtin://tiny", **flags)
