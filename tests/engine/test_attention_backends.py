"""The choice of an attention backend: order, reasons, and a forced one that cannot serve."""

from __future__ import annotations

import json
import logging

import pytest
from msgspec.structs import replace

from argosy_engine import LLM, SamplingParams
from argosy_engine.api.doctor import main as doctor
from argosy_engine.attention.params import AttentionParams
from argosy_engine.attention.selector import AttentionNeeds, select_backend
from argosy_engine.checkpoint.model_folder import resolve_model
from argosy_engine.errors import ConfigError
from argosy_engine.models.config_file import load_model_config
from argosy_engine.native import build
from argosy_engine.native.build import NativeUnavailable
from argosy_engine.native.library import Kernels

LAYER = AttentionParams(num_heads=4, num_kv_heads=2, head_dim=64, scale=0.125)
NEEDS = AttentionNeeds("cpu", "float32", 16, [LAYER])


def _has_kernels() -> bool:
    try:
        build.usable_variant()
    except NativeUnavailable:
        return False
    return True


needs_kernels = pytest.mark.skipif(not _has_kernels(), reason="no kernels for this CPU")


@needs_kernels
def test_a_cpu_uses_the_kernels() -> None:
    choice = select_backend(NEEDS)
    assert (choice.name, dict(choice.refused)) == ("cpu", {})
    assert str(choice) == "cpu"


@needs_kernels
@pytest.mark.parametrize(
    ("needs", "reason"),
    [
        (NEEDS._replace(dtype="float16"), "not float16"),
        (NEEDS._replace(has_fp8_kv_cache=True), "in the model's dtype only"),
        (NEEDS._replace(block_size=20), "--block-size 20 is not a multiple of"),
        (NEEDS._replace(layers=[LAYER, replace(LAYER, head_dim=20)]), "head size of 20"),
        (NEEDS._replace(layers=[replace(LAYER, head_dim=512)]), "head size of 512"),
        (NEEDS._replace(layers=[replace(LAYER, num_heads=98)]), "more than 48 query heads"),
    ],
)
def test_what_the_kernels_cannot_serve_is_left_to_torch_with_the_reason(
    needs: AttentionNeeds, reason: str
) -> None:
    choice = select_backend(needs)
    assert choice.name == "torch"
    assert list(choice.refused) == ["cpu", "triton"]
    assert reason in choice.refused["cpu"]
    assert "computes on GPUs" in choice.refused["triton"]
    reasons = [f"not {name}: {choice.refused[name]}" for name in ("cpu", "triton")]
    assert f"torch ({'; '.join(reasons)})" == str(choice)
    with pytest.raises(ConfigError, match=f"--attention-backend cpu cannot serve .*{reason}"):
        select_backend(needs, "cpu")
    assert select_backend(needs, "torch").refused == {}


def test_kernels_that_are_off_or_broken_are_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = select_backend(NEEDS, unavailable={"cpu": "it gave wrong results"})
    assert (broken.name, broken.refused["cpu"]) == ("torch", "it gave wrong results")
    monkeypatch.setenv("ARGOSY_NATIVE", "0")
    off = select_backend(NEEDS)
    assert (off.name, off.refused["cpu"]) == ("torch", "the kernels are off (ARGOSY_NATIVE=0)")
    monkeypatch.delenv("ARGOSY_NATIVE")
    monkeypatch.setattr(build, "cpu_flags", lambda: frozenset({"fpu"}))
    assert "has none of" in select_backend(NEEDS).refused["cpu"]


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match="there is: auto, cpu, triton, torch"):
        select_backend(NEEDS, "flash")


@pytest.mark.parametrize(
    "variant", [each for each in build.VARIANTS if each.cpu_flags <= build.cpu_flags()], ids=lambda v: v.name
)
def test_a_variant_has_the_lanes_that_the_choice_assumes(variant: build.Variant) -> None:
    assert Kernels(build.library_path(variant)).lanes == variant.lanes


@pytest.mark.parametrize("forced", ["torch", "auto"])
def test_doctor_and_engine_name_the_same_backend(
    forced: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    flags = ["builtin://tiny", "--device", "cpu", "--block-size", "8", "--attention-backend", forced]
    assert doctor([*flags, "-o", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert doctor(flags) == 0
    assert f"attention backend {told['attention_backend']}" in capsys.readouterr().out
    with caplog.at_level(logging.INFO, logger="argosy_engine.worker"):
        llm = LLM("builtin://tiny", device="cpu", block_size=8, attention_backend=forced, threads=1,
                  kv_cache_memory_bytes=64 << 20, max_model_len=128)  # fmt: skip
        (output,) = llm.generate(
            ["Once upon a time"], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        )
        llm.close()
    assert len(output.outputs[0].token_ids) == 4
    (line,) = [record.message for record in caplog.records if "attention backend" in record.message]
    assert line.startswith(f"attention backend: {told['attention_backend']}")
    for name, reason in told["refused_backends"].items():
        assert f"not {name}: {reason}" in line


@needs_kernels
def test_doctor_refuses_a_forced_backend_that_cannot_serve(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["builtin://tiny", "--device", "cpu", "--block-size", "20", "--attention-backend", "cpu"]
    assert doctor(flags) == 2
    assert "--block-size 20 is not a multiple of" in capsys.readouterr().err


def test_a_window_of_the_whole_context_is_full_attention() -> None:
    config = load_model_config(resolve_model("builtin://tiny"))
    longest = config.max_position_embeddings
    windows = (longest, longest - 1, *config.sliding_windows[2:])
    first, second, *_ = replace(config, sliding_windows=windows).attention_layers
    assert (first.sliding_window, second.sliding_window) == (None, longest - 1)
