"""The test that a backend has to pass on the device before it is used."""

import pytest
import torch
from msgspec.structs import replace

from argosy_engine.attention import triton_attn
from argosy_engine.attention.params import AttentionParams
from argosy_engine.attention.selector import AttentionNeeds
from argosy_engine.errors import ConfigError
from argosy_engine.layers import self_test as self_test_module
from argosy_engine.layers.self_test import attention_self_test, working_backend
from argosy_engine.triton_kernels import paged_attention, rope_and_cache, split_kv
from argosy_engine.triton_kernels.launch import KNOWN_DEVICES, assume_device, launch

CPU = torch.device("cpu")
FULL = AttentionParams(num_heads=2, num_kv_heads=1, head_dim=16, scale=0.2)
LOCAL = AttentionParams(
    num_heads=2, num_kv_heads=1, head_dim=16, scale=0.2, sliding_window=4096, logit_softcap=50.0
)


def no_fault():
    return None


def needs(dtype, layer=FULL):
    return AttentionNeeds("cuda", dtype, 16, [layer])


def test_our_kernels_pass():
    assert attention_self_test("triton", needs("bfloat16", LOCAL), torch.bfloat16, CPU) is None


@pytest.mark.parametrize(("field", "option"), [("has_sinks", "sinks"), ("has_alibi", "alibi_slopes")])
def test_a_backend_that_forgets_sinks_or_position_biases_is_found(field, option, monkeypatch):
    layer = replace(FULL, **{field: True})
    assert attention_self_test("triton", needs("float32", layer), torch.float32, CPU) is None
    original = triton_attn.paged_attention

    def without(*args, **options):
        return original(*args, **{**options, option: None})

    monkeypatch.setattr(triton_attn, "paged_attention", without)
    assert "is wrong by" in attention_self_test("triton", needs("float32", layer), torch.float32, CPU)


def test_a_backend_that_forgets_where_keys_end_is_found(monkeypatch):
    of_images = needs("float32", LOCAL)._replace(has_key_ends=True)
    assert attention_self_test("triton", of_images, torch.float32, CPU) is None
    original = triton_attn.paged_attention

    def without(*args, **options):
        return original(*args, **{**options, "key_ends": None})

    monkeypatch.setattr(triton_attn, "paged_attention", without)
    assert "is wrong by" in attention_self_test("triton", of_images, torch.float32, CPU)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.full)])
def test_our_kernels_pass_with_an_fp8_kv_cache(dtype):
    fp8 = needs(dtype)._replace(has_fp8_kv_cache=True)
    assert attention_self_test("triton", fp8, getattr(torch, dtype), CPU) is None


def test_a_gpu_without_fp8_leaves_an_fp8_kv_cache_to_torch():
    fp8 = needs("bfloat16")._replace(has_fp8_kv_cache=True)
    with assume_device(KNOWN_DEVICES["A100"]):
        choice = working_backend(fp8, "auto", {}, torch.bfloat16, CPU, no_fault)
    assert choice.name == "torch"
    assert "FP8 KV cache on a device without FP8" in choice.refused["triton"]


def test_every_kind_of_step_is_launched(monkeypatch):
    launches = []

    def spy(kernel, grid, **arguments):
        launches.append((kernel.__name__.lstrip("_"), arguments))
        launch(kernel, grid, **arguments)

    for module in (paged_attention, rope_and_cache, split_kv):
        monkeypatch.setattr(module, "launch", spy)
    assert working_backend(needs("float32"), "auto", {}, torch.float32, CPU, no_fault).name == "triton"
    assert {name for name, _ in launches} == {
        "paged_attention_kernel",
        "merge_segments_kernel",
        "rope_and_cache",
    }
    packed = {each["IS_PACKED"] for name, each in launches if name == "paged_attention_kernel"}
    assert packed == {True, False}
    rotated = [each for name, each in launches if name == "rope_and_cache"]
    kinds = {(each["q_norm_ptr"] is not None, each["ROTARY_DIM"] > 0) for each in rotated}
    assert kinds == {(True, True), (False, True), (False, False)}


class FirstBlockOnly(triton_attn.TritonAttention):
    """Computes as if every request had one block."""

    def __call__(self, qkv, kv_cache, meta):
        meta.block_table = meta.block_table[:, :1].expand_as(meta.block_table).contiguous()
        return super().__call__(qkv, kv_cache, meta)


class Failing(triton_attn.TritonAttention):
    def __call__(self, qkv, kv_cache, meta):
        raise RuntimeError("CUDA error: an illegal instruction was encountered")


class NotANumber(triton_attn.TritonAttention):
    def __call__(self, qkv, kv_cache, meta):
        return qkv.new_full((len(qkv), FULL.num_heads * FULL.head_dim), torch.nan)


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (FirstBlockOnly, "it is wrong by"),
        (NotANumber, "it is wrong by nan"),
        (Failing, "it failed with RuntimeError: CUDA error: an illegal instruction was encountered"),
    ],
)
def test_a_broken_backend_gives_way_to_torch(broken, reason, monkeypatch):
    monkeypatch.setattr(triton_attn, "TritonAttention", broken)
    choice = working_backend(needs("float32"), "auto", {}, torch.float32, CPU, no_fault)
    assert choice.name == "torch"
    assert reason in choice.refused["triton"]


def test_a_forced_backend_that_is_broken_is_refused(monkeypatch):
    monkeypatch.setattr(triton_attn, "TritonAttention", Failing)
    with pytest.raises(ConfigError, match="--attention-backend triton fails its test on this device"):
        working_backend(needs("float32"), "triton", {}, torch.float32, CPU, no_fault)


def test_faulty_kernels_of_other_layers_are_a_reason_against_the_backend(monkeypatch):
    monkeypatch.setattr(self_test_module, "attention_self_test", lambda *_: None)  # attention itself is right
    choice = working_backend(needs("float32"), "auto", {}, torch.float32, CPU, lambda: "silu is wrong by 1")
    assert (choice.name, choice.refused["triton"]) == ("torch", "silu is wrong by 1")
    with pytest.raises(ConfigError, match="fails its test on this device: silu is wrong by 1"):
        working_backend(needs("float32"), "triton", {}, torch.float32, CPU, lambda: "silu is wrong by 1")
