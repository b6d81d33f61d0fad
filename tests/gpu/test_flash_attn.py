"""Backend `flash_attn`: what it passes to each version of the library, and when it is refused."""

import pytest
import torch

import fake_flash_attn
from argosy_engine.attention.params import AttentionParams
from argosy_engine.attention.selector import AttentionNeeds, installed_versions, select_backend, version_for
from argosy_engine.errors import ConfigError
from argosy_engine.layers.self_test import attention_self_test, working_backend

CPU = torch.device("cpu")
FULL = AttentionParams(num_heads=4, num_kv_heads=2, head_dim=16, scale=0.2)
LOCAL = AttentionParams(
    num_heads=2, num_kv_heads=1, head_dim=16, scale=0.2, sliding_window=4096, logit_softcap=50.0
)
AMPERE, HOPPER, BLACKWELL, CONSUMER = (8, 0), (9, 0), (10, 0), (12, 0)


def needs(block_size, *layers, dtype="bfloat16"):
    return AttentionNeeds("cuda", dtype, block_size, layers or (FULL,))


@pytest.mark.parametrize(
    ("version", "capability", "block_size"), [(2, AMPERE, 256), (3, HOPPER, 16), (4, BLACKWELL, 32)]
)
def test_prompts_decodes_and_chunks_are_right(version, capability, block_size, monkeypatch, tmp_path):
    fake_flash_attn.install(monkeypatch, tmp_path, version)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert installed_versions() == (version,)
    for layer in (FULL, LOCAL):
        assert select_backend(needs(block_size, layer), "flash_attn").name == "flash_attn"
        assert attention_self_test("flash_attn", needs(block_size, layer), torch.bfloat16, CPU) is None
    with pytest.raises(ConfigError, match="the same number and size of KV heads"):
        select_backend(needs(block_size, FULL, LOCAL), "flash_attn")


@pytest.mark.parametrize(
    ("capability", "installed", "version"),
    [
        (AMPERE, (2, 3, 4), 2),
        (HOPPER, (2, 3, 4), 3),
        (HOPPER, (2, 4), 4),
        (BLACKWELL, (2, 3, 4), 4),
        (BLACKWELL, (2, 3), 2),
        (CONSUMER, (2, 4), 2),
        (AMPERE, (3, 4), None),
    ],
)
def test_a_device_uses_the_version_that_is_made_for_it(capability, installed, version):
    assert version_for(capability, installed) == version


def test_a_device_that_no_installed_version_computes_on_is_refused(monkeypatch, tmp_path):
    fake_flash_attn.install(monkeypatch, tmp_path, 4)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: AMPERE)
    with pytest.raises(ConfigError, match=r"\(4\) computes on compute capability 8.0"):
        working_backend(needs(16), "flash_attn", {}, torch.bfloat16, CPU, lambda: None)


@pytest.mark.parametrize(
    ("versions", "needs", "reason"),
    [
        ((), needs(16), r"pip install flash-attn"),
        ((2,), needs(16), "flash-attn 2 needs --block-size 256, not 16"),
        ((3,), needs(16, dtype="float32"), "bfloat16 or float16, not float32"),
        ((3,), needs(16)._replace(device="cpu"), "GPUs only"),
        ((3,), needs(16)._replace(has_fp8_kv_cache=True), "not in FP8"),
        (
            (3,),
            needs(16, AttentionParams(num_heads=1, num_kv_heads=1, head_dim=20, scale=1.0)),
            "multiple of 8",
        ),
        (
            (3,),
            needs(16, AttentionParams(num_heads=1, num_kv_heads=1, head_dim=512, scale=1.0)),
            "up to 256",
        ),
        (
            (3,),
            needs(16, AttentionParams(num_heads=1, num_kv_heads=1, head_dim=64, scale=1.0, has_alibi=True)),
            "no position biases",
        ),
        (
            (3,),
            needs(16, AttentionParams(num_heads=1, num_kv_heads=1, head_dim=64, scale=1.0, has_sinks=True)),
            "no attention sinks",
        ),
    ],
)
def test_what_it_cannot_serve_is_refused(versions, needs, reason, monkeypatch, tmp_path):
    fake_flash_attn.install(monkeypatch, tmp_path, *versions)
    with pytest.raises(ConfigError, match=reason):
        select_backend(needs, "flash_attn")


def test_it_is_chosen_only_if_it_is_asked_for(monkeypatch, tmp_path):
    fake_flash_attn.install(monkeypatch, tmp_path, 3)
    assert select_backend(needs(16)).name == "triton"
    assert select_backend(needs(16), unavailable={"triton": "it is wrong"}).name == "torch"
