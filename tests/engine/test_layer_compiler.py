"""Compiled parts of layers: what is compiled, how often, and what happens if it fails or is wrong."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from argosy_engine.attention.torch_attn import TorchBackend
from argosy_engine.checkpoint.weights import DummyWeights
from argosy_engine.layers.layer_compiler import GraphCompiler, LayerCompiler
from argosy_engine.layers.layer_factory import LayerFactory
from argosy_engine.models import registry
from argosy_engine.models.config_file import load_model_config
from argosy_engine.models.registry import CausalLM
from random_checkpoints import KINDS

CPU = torch.device("cpu")
DTYPE = torch.bfloat16
TOKENS = (1, 2, 3, 8, 63, 64, 200)


def traced(graph: torch.fx.GraphModule, inputs: Any) -> Any:
    """A backend that runs what torch.compile has traced; it takes no seconds."""
    return graph.forward


def load(
    kind: str,
    path: Path,
    compiler: LayerCompiler | None,
    *,
    num_layers: int = 3,
    seed: int = 0,
    **fields: Any,
) -> CausalLM:
    published = KINDS[kind]
    published = replace(published, fields={**published.fields, **fields, "num_hidden_layers": num_layers})
    config = getattr(transformers, published.config)(**published.fields, architectures=[published.model])
    config.save_pretrained(path)
    read = load_model_config(path)
    with torch.inference_mode():
        factory = LayerFactory(DummyWeights(DTYPE, CPU, seed), TorchBackend(DTYPE), 512, compiler=compiler)
        return registry.model_class(read.architecture)(read, factory)


def outputs(model: CausalLM, num_tokens: int) -> list[torch.Tensor]:
    """Run every part of every layer, as the compiler has made it; return results and inputs after it."""
    generator = torch.Generator().manual_seed(num_tokens)
    found = []
    with torch.inference_mode():
        for layer in model.layers:
            for function, widths in layer.parts_to_compile():
                given = [torch.randn(num_tokens, width, generator=generator).to(DTYPE) for width in widths]
                found += [function(layer, *given), *given]
    return found


@pytest.mark.parametrize(
    ("kind", "functions"),
    [("llama", 2), ("gemma", 2), ("gemma3", 2), ("qwen3-moe", 1), ("gpt2", 2), ("opt", 2)],
)
def test_each_part_is_compiled_for_one_and_for_many_tokens(kind: str, functions: int, tmp_path: Path) -> None:
    compiler = LayerCompiler(traced)
    model = load(kind, tmp_path, compiler)
    assert compiler.prepare(model.layers, DTYPE, CPU) is None
    assert compiler.num_compilations == 2 * functions
    plain = load(kind, tmp_path, None)
    for num_tokens in TOKENS:
        for ours, theirs in zip(outputs(model, num_tokens), outputs(plain, num_tokens), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.05)
    assert compiler.num_compilations == 2 * functions
    assert compiler.num_plain_calls == 0


def test_layers_of_another_size_are_compiled_too(tmp_path: Path) -> None:
    compiler = LayerCompiler(traced)
    model = load("qwen3-moe-mixed", tmp_path, compiler)  # layers with experts, and with a gated MLP
    assert compiler.prepare(model.layers, DTYPE, CPU) is None
    assert compiler.num_compilations == 4
    wider = load("qwen3-moe-mixed", tmp_path, compiler, intermediate_size=256)
    assert compiler.prepare(wider.layers, DTYPE, CPU) is None
    assert compiler.num_compilations == 6
    outputs(model, 5)
    outputs(wider, 5)
    assert compiler.num_plain_calls == 0


def test_a_model_that_is_loaded_again_runs_the_same_code(tmp_path: Path) -> None:
    compiler = LayerCompiler(traced)
    assert compiler.prepare(load("llama", tmp_path, compiler).layers, DTYPE, CPU) is None
    compiled = compiler.num_compilations
    again = load("llama", tmp_path, compiler, seed=1)
    plain = load("llama", tmp_path, None, seed=1)
    for ours, theirs in zip(outputs(again, 3), outputs(plain, 3), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.05)
    assert (compiler.num_compilations, compiler.num_plain_calls) == (compiled, 0)


def test_what_no_compiled_code_fits_runs_uncompiled_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = LayerCompiler(traced)
    assert compiler.prepare(load("llama", tmp_path, compiler).layers, DTYPE, CPU) is None
    compiled = compiler.num_compilations
    other = load("llama", tmp_path, compiler, intermediate_size=256)
    outputs(other, 3)
    assert compiler.num_compilations == compiled
    assert compiler.num_plain_calls == len(other.layers)
    (message,) = (each.getMessage() for each in caplog.records if each.name.startswith("argosy"))
    assert "no compiled code of DecoderLayer.feed_forward fits [3, 64], [3, 64]" in message


def test_layers_with_norms_behind_are_not_compiled(tmp_path: Path) -> None:
    compiler = LayerCompiler(traced)
    assert compiler.prepare(load("opt-post-norm", tmp_path, compiler).layers, DTYPE, CPU) is None
    assert compiler.num_compilations == 0


def wrong(graph: torch.fx.GraphModule, inputs: Any) -> Any:
    def run(*arguments: Any) -> Any:
        return [each * 1.1 for each in graph.forward(*arguments)]

    return run


def without_the_sum(graph: torch.fx.GraphModule, inputs: Any) -> Any:
    """Leaves the residual as it was."""

    def run(*arguments: Any) -> Any:
        return graph.forward(
            *(each.clone() if isinstance(each, torch.Tensor) else each for each in arguments)
        )

    return run


def nan(graph: torch.fx.GraphModule, inputs: Any) -> Any:
    return lambda *arguments: [each * torch.nan for each in graph.forward(*arguments)]


def fail(graph: torch.fx.GraphModule, inputs: Any) -> Any:
    raise RuntimeError("no compiler was found")


@pytest.mark.parametrize(
    ("backend", "reason"),
    [
        (
            wrong,
            r"DecoderLayer.project of layer 0, for 64 tokens: it is wrong by [\d.]+ where [\d.]+ is allowed",
        ),
        (without_the_sum, "DecoderLayer.project of layer 0, for 64 tokens: it is wrong by"),
        (nan, "it is wrong by nan"),
        (
            fail,
            "DecoderLayer.project of layer 0, for 64 tokens: torch.compile failed with .*no compiler was found",
        ),
    ],
)
def test_a_fault_is_named_and_nothing_compiled_is_used(
    backend: GraphCompiler, reason: str, tmp_path: Path
) -> None:
    compiler = LayerCompiler(backend)
    model = load("llama", tmp_path, compiler)
    found = compiler.prepare(model.layers, DTYPE, CPU)
    assert found is not None
    assert re.search(reason, found)
    plain = load("llama", tmp_path, None)
    for ours, theirs in zip(outputs(model, 3), outputs(plain, 3), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.05)
