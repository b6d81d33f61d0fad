"""Models of packed integers, computed by the Triton kernels as they are packed: every format that has them, fused and
divided among ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from argosy_engine.attention.triton_attn import TritonBackend
from argosy_engine.checkpoint.weights import SafetensorsWeights
from argosy_engine.layers.experts import ExpertsSpec
from argosy_engine.layers.layer_factory import LayerFactory
from argosy_engine.layers.linear_method import OnlineIntLinearMethod, SchemeLinearMethod
from argosy_engine.layers.products import IntegerProduct, TritonIntegers
from argosy_engine.model_configs.sharding import WHOLE, Sharding
from argosy_engine.models import registry
from argosy_engine.models.config_file import load_model_config
from argosy_engine.triton_kernels.launch import launched_variants
from attention_cases import model_inputs
from fp8_checkpoints import write_packed_experts
from packed_checkpoints import (
    Format,
    compressed,
    gptq,
    gptq_config,
    pack_checkpoint,
    packed_ints,
)
from thread_ranks import run_threads
from transformers_checkpoints import write_checkpoint

CPU = torch.device("cpu")
BLOCK_SIZE = 16
TOKEN_IDS = list(range(2, 24))
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # numpy's, where a GPU has none

OWN = {
    "gptq-4-order": Format(
        gptq_config(4, 32, desc_act=True, sym=False), gptq(4, 32, is_ordered=True, is_symmetric=False)
    ),
    "gptq-8-groups": Format(gptq_config(8, 32), gptq(8, 32)),
    "pack-4-asym": Format(
        compressed("pack-quantized", {"strategy": "group", "group_size": 32, "symmetric": False}),
        packed_ints(4, 32, is_symmetric=False),
    ),
}
"""With groups that the kernels take."""


def pack_unlike(name, weight):
    return gptq(8 if name.endswith("k_proj") else 4, 32)(name, weight)


UNLIKE = Format(gptq_config(4, 32, dynamic={"+:.*k_proj": {"bits": 8, "group_size": 32}}), pack_unlike)
FORMS = [
    "gptq-4", "gptq-4-v2", "gptq-8", "awq", "awq-channel", "pack-4", "pack-8", "int-8", "bnb-int8", "auto-round-gptq",
]  # fmt: skip


@torch.inference_mode()
def logits(path, dtype, *, method=None, sharding=WHOLE, communicator=None):
    """Logits of a prompt and of a decode after it, by one rank."""
    config = load_model_config(path)
    model_class = registry.model_class(config.architecture)
    weights = SafetensorsWeights(path, dtype, CPU, prefix=model_class.checkpoint_prefix)
    if method is None and config.quantization is not None:
        quantization = config.quantization.with_stored_layers(weights.names)
        method = SchemeLinearMethod(quantization, IntegerProduct(TritonIntegers()))
    factory = LayerFactory(weights, TritonBackend(dtype), 64, method, sharding, communicator)
    model = model_class(config, factory)
    for layer in model.attention_layers:
        layer.bind(torch.zeros(layer.kv_cache_shape(4, BLOCK_SIZE), dtype=dtype))
    steps = []
    for start, end in [(0, len(TOKEN_IDS) - 1), (len(TOKEN_IDS) - 1, len(TOKEN_IDS))]:
        inputs = model_inputs(TOKEN_IDS[start:end], start, torch.tensor([[2, 0]]), BLOCK_SIZE)
        steps.append(model.logits(model.forward(inputs)))
    return torch.cat(steps).float()


def write(path: Path, form: str, model_type: str = "llama", **fields) -> None:
    write_checkpoint(model_type, path, num_hidden_layers=2, **fields)
    pack_checkpoint(path, OWN.get(form, form))


@pytest.mark.parametrize("form", [*FORMS, *OWN])
def test_models_compute_what_their_numbers_stand_for(form, tmp_path):
    """In bfloat16 they are off by no more than widened weights are, which are rounded."""
    write(tmp_path, form)
    dtype = torch.float16 if form in ("awq", "gptq-8") else torch.bfloat16
    exact, widened = (logits(tmp_path / "widened", each) for each in (torch.float32, dtype))
    with launched_variants() as variants:
        found = logits(tmp_path, dtype)
    assert {each[0] for each in variants} >= {"packed_linear_few", "packed_linear_many"}
    assert (found - exact).norm() < 1.2 * (widened - exact).norm()
    assert not torch.equal(found, widened)


@pytest.mark.parametrize("form", ["gptq-4", "awq", "pack-4-asym", "int-8"])
def test_ranks_compute_their_part(form, tmp_path):
    write(tmp_path, form)
    exact, whole = logits(tmp_path / "widened", torch.float32), logits(tmp_path, torch.bfloat16)
    ranks = run_threads(
        2,
        lambda group: logits(tmp_path, torch.bfloat16, sharding=Sharding(group.rank, 2), communicator=group),
    )
    assert torch.equal(*ranks)
    assert (ranks[0] - exact).norm() < 1.5 * (whole - exact).norm()


def test_weights_that_are_quantised_online(tmp_path):
    write_checkpoint("llama", tmp_path, num_hidden_layers=2)
    exact = logits(tmp_path, torch.float32)
    errors = []
    for bits in (8, 4):
        with launched_variants() as variants:
            method = OnlineIntLinearMethod(bits, TritonIntegers(narrows=False))
            found = logits(tmp_path, torch.bfloat16, method=method)
        assert "packed_linear_few" in {each[0] for each in variants}
        errors.append((found - exact).norm() / exact.norm())
    plain = (logits(tmp_path, torch.bfloat16) - exact).norm() / exact.norm()
    assert plain < errors[1]
    assert errors[0] < errors[1] < 0.5


def packed_experts(path, *, packs):
    return SchemeLinearMethod(load_model_config(path).quantization, packs_mxfp4=packs)


def test_experts_in_mxfp4(tmp_path):
    """Those of gpt-oss stay packed; a rank whose part begins within a block widens it."""
    write_packed_experts(tmp_path, num_hidden_layers=2)
    exact = logits(tmp_path, torch.float32, method=packed_experts(tmp_path, packs=False))
    widened, found = (
        logits(tmp_path, torch.bfloat16, method=packed_experts(tmp_path, packs=packs))
        for packs in (False, True)
    )
    assert (found - exact).norm() < 1.2 * (widened - exact).norm()
    for size in (2, 4):
        ranks = run_threads(
            size,
            lambda group, size=size: logits(
                tmp_path,
                torch.bfloat16,
                method=packed_experts(tmp_path, packs=True),
                sharding=Sharding(group.rank, size),
                communicator=group,
            ),
        )
        assert all(torch.equal(ranks[0], each) for each in ranks)
        assert (ranks[0] - exact).norm() < 1.5 * (widened - exact).norm()


def test_experts_in_mxfp4_are_a_quarter_of_widened_ones(tmp_path):
    write_packed_experts(tmp_path)
    config = load_model_config(tmp_path)
    sizes = {}
    for packs in (False, True):
        weights = SafetensorsWeights(tmp_path, torch.bfloat16, CPU, prefix="model.")
        spec = ExpertsSpec(
            "model.layers.0.mlp.",
            config.experts.routing,
            config.hidden_size,
            config.experts.inner,
            config.experts.activation,
            config.experts.names,
        )
        stacked = packed_experts(tmp_path, packs=packs).load_experts(weights, spec)
        tensors = [stacked.gate_up, stacked.down, stacked.gate_up_scale, stacked.down_scale]
        sizes[packs] = sum(each.nbytes for each in tensors if each is not None)
    assert sizes[True] == sizes[False] * (1 / 4 + 1 / 64)


def test_what_the_kernels_do_not_take_is_widened_and_a_line_of_the_log_says_so(tmp_path, caplog):
    """Groups of 16, parts of a product that differ, and experts, which are stacked."""
    for form, model_type, reason in (
        ("pack-4-asym", "llama", "groups of a multiple of 32 inputs, not of 16"),
        (UNLIKE, "llama", "its parts differ"),
        ("gptq-4", "qwen3_moe", "no kernel multiplies by stacked experts that are packed"),
    ):
        path = tmp_path / str(len(list(tmp_path.iterdir())))
        path.mkdir()
        fields = {"moe_intermediate_size": 64} if model_type == "qwen3_moe" else {}
        write_checkpoint(model_type, path, num_hidden_layers=2, **fields)
        pack_checkpoint(path, form)
        caplog.clear()
        with caplog.at_level("INFO", logger="argosy.models"):
            found = logits(path, torch.bfloat16)
        assert "is widened, and others may be: " in caplog.text
        assert reason in caplog.text
        exact, widened = (logits(path / "widened", each) for each in (torch.float32, torch.bfloat16))
        assert (found - exact).norm() < 1.2 * (widened - exact).norm()
