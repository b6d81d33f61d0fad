from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy_engine.triton_kernels.launch import KNOWN_DEVICES, assume_device
from argosy_engine.triton_kernels.rope_and_cache import rope_and_cache
from option_pairs import covering

EPS = 1e-6
MAX_POSITIONS = 50


@dataclass
class Step:
    """Inputs of one step, with padding rows. The cache is filled with NaN: what is not written stays NaN."""

    qkv: torch.Tensor
    positions: torch.Tensor
    cosines: torch.Tensor
    sines: torch.Tensor
    slots: torch.Tensor
    kv_cache: torch.Tensor
    num_heads: int
    options: dict[str, Any]

    def run(self):
        before = self.qkv.clone()
        rope_and_cache(
            self.qkv,
            self.positions,
            self.cosines,
            self.sines,
            self.slots,
            self.kv_cache,
            num_heads=self.num_heads,
            **self.options,
        )
        return before


def make_step(
    *,
    heads=(4, 2),
    head_dim=64,
    rotary_dim=None,
    dtype=torch.float32,
    cache_dtype=None,
    block_size=16,
    slots=(3, -1, 17, 40, -1),
    has_norm=False,
    **options,
):
    generator = torch.Generator().manual_seed(0)
    num_heads, num_kv_heads = heads
    if has_norm:
        options["q_norm"], options["k_norm"] = torch.randn(2, head_dim, generator=generator).to(dtype)
        options["eps"] = EPS
    tokens = len(slots)
    angles = torch.randn(MAX_POSITIONS, (rotary_dim or head_dim) // 2, generator=generator)
    cache = torch.full((2, 4, block_size, num_kv_heads, head_dim), torch.nan)
    return Step(
        qkv=torch.randn(tokens, (num_heads + 2 * num_kv_heads) * head_dim, generator=generator).to(dtype),
        positions=torch.randint(MAX_POSITIONS, (tokens,), generator=generator),
        cosines=angles.cos(),
        sines=angles.sin(),
        slots=torch.tensor(slots, dtype=torch.int64),
        kv_cache=cache.to(cache_dtype or dtype),
        num_heads=num_heads,
        options=options,
    )


def split(step, qkv):
    num_kv_heads, head_dim = step.kv_cache.shape[3:]
    parts = qkv.view(len(qkv), -1, head_dim).split([step.num_heads, num_kv_heads, num_kv_heads], dim=1)
    return tuple(part.float() for part in parts)


def expected(step, qkv):
    """Return q and k after norm and rotation, and v, in float32: each [T, heads, head_dim]."""

    def norm(x, weight):
        if weight is None:
            return x
        weight = weight.float() + step.options.get("adds_one", False)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight

    def rotate(x):
        half = step.cosines.shape[1]
        cos, sin = step.cosines[step.positions].unsqueeze(1), step.sines[step.positions].unsqueeze(1)
        first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)

    q, k, v = split(step, qkv)
    return rotate(norm(q, step.options.get("q_norm"))), rotate(norm(k, step.options.get("k_norm"))), v


def check(step, *, scales=(1.0, 1.0), **tolerance):
    before = step.run()
    q, k, v = expected(step, before)
    q_out, k_out, v_out = split(step, step.qkv)
    dtype, used = step.qkv.dtype, step.slots >= 0
    torch.testing.assert_close(q_out[used].to(dtype), q[used].to(dtype))
    q_before, k_before, v_before = split(step, before)
    assert torch.equal(q_out[~used], q_before[~used])
    assert torch.equal(k_out, k_before)
    assert torch.equal(v_out, v_before)
    for cache, wanted, scale in zip(step.kv_cache.float(), (k, v), scales, strict=True):
        rows = cache.flatten(0, 1)
        found = rows[step.slots[used]] * scale
        if not tolerance:
            found, wanted = found.to(dtype), wanted.to(dtype)
        torch.testing.assert_close(found, wanted[used], **tolerance)
        unused = torch.ones(len(rows), dtype=torch.bool)
        unused[step.slots[used]] = False
        assert rows[unused].isnan().all()


OPTIONS = {
    "heads": [(1, 1), (4, 2), (7, 1), (6, 6), (16, 2)],
    "head_dim": [16, 64, 80, 96, 112, 128, 256, 512],
    "dtype": [torch.float32, torch.bfloat16, torch.float16],
    "block_size": [16, 32],
    "has_norm": [False, True],
    "adds_one": [False, True],
    "share": [1, 2, 4],
}
"""Of `make_step`; one of `share` parts of a head is rotated."""


def check_options(head_dim, share, **options):
    check(make_step(head_dim=head_dim, rotary_dim=head_dim // share, **options))


@pytest.mark.parametrize("options", covering(OPTIONS), ids=str)
def test_norm_rotation_and_write_match_the_reference(options):
    check_options(**options)


@pytest.mark.full
@settings(max_examples=60, deadline=None)
@given(st.fixed_dictionaries({name: st.sampled_from(values) for name, values in OPTIONS.items()}))
def test_any_options_match_the_reference(options):
    check_options(**options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fp8_cache_holds_scaled_values(dtype):
    scales = torch.tensor([0.25]), torch.tensor([0.5])
    step = make_step(dtype=dtype, cache_dtype=torch.float8_e4m3fn, k_scale=scales[0], v_scale=scales[1])
    check(step, scales=(0.25, 0.5), rtol=2**-4, atol=2**-10)


def test_fp8_cache_saturates():
    scale = torch.tensor([1.0])
    step = make_step(cache_dtype=torch.float8_e4m3fn, k_scale=scale, v_scale=scale)
    step.qkv.fill_(1e6)
    step.run()
    assert (step.kv_cache[1].flatten(0, 1)[step.slots[[0, 2, 3]]].float() == 448.0).all()


def test_large_batch_takes_more_heads_per_program():
    check(make_step(heads=(34, 2), head_dim=32, slots=range(60)))


def test_positions_of_another_integer_dtype():
    step = make_step()
    step.positions = step.positions.int()
    check(step)


def test_strided_cache_and_projection():
    step = make_step()
    step.kv_cache = torch.full((4, 2, 16, 2, 64), torch.nan).transpose(0, 1)
    step.qkv = torch.cat((step.qkv, step.qkv), dim=1)[:, : step.qkv.shape[1]]
    check(step)


def test_nothing_runs_for_an_empty_batch():
    step = make_step(slots=())
    step.run()
    assert step.kv_cache.isnan().all()


def test_scales_without_an_fp8_cache_are_refused():
    with pytest.raises(ValueError, match="k_scale"):
        make_step(k_scale=torch.ones(1), v_scale=torch.ones(1)).run()


def test_fp8_cache_without_scales_is_refused():
    with pytest.raises(ValueError, match="k_scale"):
        make_step(cache_dtype=torch.float8_e4m3fn).run()


def test_fp8_cache_is_refused_where_the_device_has_none():
    scale = torch.ones(1)
    step = make_step(cache_dtype=torch.float8_e4m3fn, k_scale=scale, v_scale=scale)
    with assume_device(KNOWN_DEVICES["A100"]), pytest.raises(ValueError, match="FP8"):
        step.run()
