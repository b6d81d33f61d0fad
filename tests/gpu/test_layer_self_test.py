"""The test that the kernels of norms, gated activations and experts have to pass on the device."""

import re

import pytest
import torch
import transformers

from argosy_engine.layers.self_test import layer_self_test
from argosy_engine.models.config_file import load_model_config
from argosy_engine.triton_kernels import (
    activations,
    fp8_linear,
    fused_moe,
    gated_delta_net,
    mamba,
    packed_linear,
    rms_norm,
    short_conv,
)
from random_checkpoints import KINDS
from transformers_checkpoints import write_checkpoint

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")


def config_of(name, path):
    kind = KINDS[name]
    getattr(transformers, kind.config)(**kind.fields, architectures=[kind.model]).save_pretrained(path)
    return load_model_config(path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["gemma3", "qwen3-moe", "gpt2", "qwen3.5"])
def test_our_kernels_pass(name, dtype, tmp_path):
    assert layer_self_test(config_of(name, tmp_path), dtype, CPU) is None


@pytest.mark.parametrize(
    ("model_type", "fields"), [("glm4_moe", {}), ("gpt_oss", {}), ("nemotron_h", {"moe_latent_size": 40})]
)
def test_our_kernels_pass_for_other_experts(model_type, fields, tmp_path):
    write_checkpoint(model_type, tmp_path, **fields)
    assert layer_self_test(load_model_config(tmp_path), torch.bfloat16, CPU) is None


@pytest.mark.parametrize(
    ("model_type", "fields"), [("bamba", {"mamba_n_groups": 4}), ("lfm2", {}), ("falcon_h1", {})]
)
def test_our_kernels_pass_for_other_states(model_type, fields, tmp_path):
    write_checkpoint(model_type, tmp_path, **fields)
    assert layer_self_test(load_model_config(tmp_path), torch.bfloat16, CPU) is None


@pytest.mark.parametrize(("groups", "num_ranks"), [(1, 2), (2, 4)])
def test_our_kernels_pass_for_ranks_that_share_groups(groups, num_ranks, tmp_path):
    write_checkpoint("bamba", tmp_path, mamba_n_groups=groups)
    assert layer_self_test(load_model_config(tmp_path), torch.bfloat16, CPU, num_ranks) is None


@pytest.mark.parametrize("name", ["gemma3", "llama"])
def test_our_kernels_pass_in_fp8(name, tmp_path):
    config = config_of(name, tmp_path)
    assert layer_self_test(config, torch.bfloat16, CPU, has_fp8_products=True) is None


@pytest.mark.parametrize(
    ("kernel", "shown"),
    [
        ("rms_norm_fp8", "RMSNorm in FP8 is wrong by"),
        ("add_rms_norm_fp8", r"add \+ RMSNorm in FP8 is wrong by"),
    ],
)
def test_a_wrong_norm_in_fp8_is_found(kernel, shown, monkeypatch, tmp_path):
    original = getattr(rms_norm, kernel)

    def wrong(*args, **settings):
        out, scales = original(*args, **settings)
        return out, scales * 1.2

    monkeypatch.setattr(rms_norm, kernel, wrong)
    config = config_of("llama", tmp_path)
    assert layer_self_test(config, torch.bfloat16, CPU) is None
    assert re.match(shown, layer_self_test(config, torch.bfloat16, CPU, has_fp8_products=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_by_packed_integers_pass(dtype, tmp_path):
    forms = [(4, 128), (4, 32), (8, 64), (8, None)]
    assert layer_self_test(config_of("llama", tmp_path), dtype, CPU, packed=forms) is None


@pytest.mark.parametrize("form", [(4, 32), (8, None)])
def test_a_wrong_product_by_packed_integers_is_found(form, monkeypatch, tmp_path):
    monkeypatch.setattr(packed_linear, "packed_linear", scaled(packed_linear.packed_linear))
    reason = layer_self_test(config_of("llama", tmp_path), torch.bfloat16, CPU, packed=[form])
    assert f"a product by int{form[0]} in groups of {form[1] or 288} is wrong by" in reason


@pytest.mark.parametrize(
    ("kernel", "shown"),
    [
        ("fp8_linear_few", "a product in FP8 is wrong by"),
        ("block_fp8_linear", "a product by FP8 in blocks is wrong by"),
    ],
)
def test_a_wrong_product_in_fp8_is_found(kernel, shown, monkeypatch, tmp_path):
    monkeypatch.setattr(fp8_linear, kernel, scaled(getattr(fp8_linear, kernel)))
    config = config_of("llama", tmp_path)
    assert re.match(shown, layer_self_test(config, torch.bfloat16, CPU, has_fp8_products=True))


def scaled(kernel):
    return lambda *args, **settings: kernel(*args, **settings) * 1.1


@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm"])
def test_a_wrong_norm_is_found(name, monkeypatch, tmp_path):
    monkeypatch.setattr(rms_norm, name, scaled(getattr(rms_norm, name)))
    assert "RMSNorm is wrong by" in layer_self_test(config_of("llama", tmp_path), torch.bfloat16, CPU)


@pytest.mark.parametrize(
    ("name", "kernel"),
    [("silu", "silu_and_mul"), ("gelu_pytorch_tanh", "gelu_tanh_and_mul"), ("relu2", "relu2")],
)
def test_a_wrong_activation_is_found(name, kernel, monkeypatch, tmp_path):
    monkeypatch.setattr(activations, kernel, scaled(getattr(activations, kernel)))
    assert f"{name} is wrong by" in layer_self_test(config_of("llama", tmp_path), torch.bfloat16, CPU)


def test_experts_in_mxfp4_pass_and_wrong_ones_are_found(monkeypatch, tmp_path):
    write_checkpoint("gpt_oss", tmp_path, hidden_size=96, intermediate_size=64, head_dim=32)
    config = load_model_config(tmp_path)
    assert layer_self_test(config, torch.bfloat16, CPU, has_mxfp4=True) is None
    kernel = fused_moe.fused_moe

    def wrong(x, logits, w1, *args, **settings):
        out = kernel(x, logits, w1, *args, **settings)
        return out * 1.1 if w1.dtype is torch.uint8 else out

    monkeypatch.setattr(fused_moe, "fused_moe", wrong)
    reason = layer_self_test(config, torch.bfloat16, CPU, has_mxfp4=True)
    assert "experts in MXFP4 are wrong by" in reason


def test_wrong_experts_are_found(monkeypatch, tmp_path):
    monkeypatch.setattr(fused_moe, "fused_moe", scaled(fused_moe.fused_moe))
    assert "experts are wrong by" in layer_self_test(config_of("qwen3-moe", tmp_path), torch.bfloat16, CPU)


def test_a_wrong_gated_delta_net_is_found(monkeypatch, tmp_path):
    monkeypatch.setattr(gated_delta_net, "gated_delta_net", scaled(gated_delta_net.gated_delta_net))
    config = config_of("qwen3.5", tmp_path)
    assert "Gated DeltaNet is wrong by" in layer_self_test(config, torch.bfloat16, CPU)


def test_a_wrong_mamba_is_found(monkeypatch, tmp_path):
    monkeypatch.setattr(mamba, "mamba", scaled(mamba.mamba))
    write_checkpoint("bamba", tmp_path)
    assert "Mamba is wrong by" in layer_self_test(load_model_config(tmp_path), torch.bfloat16, CPU)


def test_a_wrong_short_convolution_is_found(monkeypatch, tmp_path):
    monkeypatch.setattr(short_conv, "short_conv", scaled(short_conv.short_conv))
    write_checkpoint("lfm2", tmp_path)
    reason = layer_self_test(load_model_config(tmp_path), torch.bfloat16, CPU)
    assert "short convolution is wrong by" in reason


def test_a_kernel_that_fails_is_a_reason(monkeypatch, tmp_path):
    def fail(*args):
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(rms_norm, "rms_norm", fail)
    reason = layer_self_test(config_of("llama", tmp_path), torch.bfloat16, CPU)
    assert reason == "a layer's kernels failed with RuntimeError: no kernel image is available"
