import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy_engine.triton_kernels.rms_norm import (
    MAX_WIDTH,
    add_rms_norm,
    add_rms_norm_fp8,
    rms_norm,
    rms_norm_fp8,
)
from fp8_reference import assert_fp8_rows

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = 1e-6


def expected(x, weight):
    wide = x.double()
    return wide / (wide.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@settings(max_examples=15, deadline=None)
@given(
    rows=st.integers(1, 4),
    width=st.one_of(st.integers(1, 300), st.sampled_from([1024, 5120])),
    dtype=st.sampled_from(DTYPES),
    weight_dtype=st.sampled_from(DTYPES),
    adds_one=st.booleans(),
)
def test_norm_matches_the_reference(rows, width, dtype, weight_dtype, adds_one):
    x, weight = random(rows, width, dtype=dtype), random(width, dtype=weight_dtype, seed=1)
    out = rms_norm(x, weight, EPS, adds_one=adds_one)
    assert out.dtype is dtype
    torch.testing.assert_close(out, expected(x, weight.float() + adds_one).to(dtype))


@settings(max_examples=15, deadline=None)
@given(
    rows=st.integers(1, 4),
    width=st.integers(1, 300),
    dtype=st.sampled_from(DTYPES),
    adds_one=st.booleans(),
)
def test_sum_is_rounded_and_kept_as_the_residual(rows, width, dtype, adds_one):
    x, residual, weight = (random(rows, width, dtype=dtype, seed=seed) for seed in range(3))
    weight = weight[0]
    total = x + residual
    before = x.clone()
    out = add_rms_norm(x, residual, weight, EPS, adds_one=adds_one)
    assert torch.equal(residual, total)
    assert torch.equal(x, before)
    torch.testing.assert_close(out, expected(total, weight.float() + adds_one).to(dtype))


@settings(max_examples=10, deadline=None)
@given(
    rows=st.integers(1, 4),
    width=st.integers(1, 300),
    dtype=st.sampled_from(DTYPES),
    adds_one=st.booleans(),
)
def test_what_is_added_may_have_a_norm_of_its_own(rows, width, dtype, adds_one):
    x, residual = (random(rows, width, dtype=dtype, seed=seed) for seed in range(2))
    weight, x_weight = random(width, seed=2), random(width, seed=3)
    total = (residual.double() + expected(x, x_weight + adds_one)).to(dtype)
    out = add_rms_norm(x, residual, weight, EPS, x_weight=x_weight, adds_one=adds_one)
    torch.testing.assert_close(residual, total)
    torch.testing.assert_close(out, expected(residual, weight + adds_one).to(dtype))


def test_widest_row():
    x, weight = random(2, MAX_WIDTH, dtype=torch.bfloat16), random(MAX_WIDTH, seed=1)
    torch.testing.assert_close(rms_norm(x, weight, EPS), expected(x, weight).to(torch.bfloat16))


def test_wider_row_is_refused():
    with pytest.raises(ValueError, match=str(MAX_WIDTH)):
        rms_norm(torch.empty(1, MAX_WIDTH + 1), torch.empty(MAX_WIDTH + 1), EPS)


def test_strided_rows_and_given_output():
    wide = random(3, 64)
    x, weight = wide[:, 16:48], random(32, seed=1)
    out = torch.full((3, 40), 7.0)
    assert rms_norm(x, weight, EPS, out=out[:, :32]).data_ptr() == out.data_ptr()
    torch.testing.assert_close(out[:, :32], expected(x, weight).float())
    assert torch.equal(out[:, 32:], torch.full((3, 8), 7.0))


def test_output_may_be_the_input():
    x, weight = random(3, 32), random(32, seed=1)
    wanted = expected(x, weight).float()
    torch.testing.assert_close(rms_norm(x, weight, EPS, out=x), wanted)


def test_nothing_runs_for_an_empty_batch():
    assert rms_norm(torch.empty(0, 32), torch.ones(32), EPS).shape == (0, 32)


def test_nan_stays_in_its_row():
    x, weight = random(2, 48), random(48, seed=1)
    x[0, 3] = torch.nan
    out = rms_norm(x, weight, EPS)
    assert out[0].isnan().all()
    torch.testing.assert_close(out[1:], expected(x[1:], weight).float())


@settings(max_examples=15, deadline=None)
@given(
    rows=st.integers(0, 3),
    width=st.integers(1, 300),
    dtype=st.sampled_from(DTYPES),
    scale=st.sampled_from([None, 0.01, 0.5]),
    x_has_norm=st.none() | st.booleans(),
)
def test_norms_in_fp8(rows, width, dtype, scale, x_has_norm):
    """`x_has_norm`: nothing is added; or x, or its norm."""
    x, residual = (random(rows, width, dtype=dtype, seed=seed) for seed in range(2))
    weight, x_weight = random(width, seed=2), random(width, seed=3)
    given_scale = None if scale is None else torch.tensor([scale])
    if x_has_norm is None:
        out, scales = rms_norm_fp8(x, weight, EPS, given_scale)
        total = x
    else:
        x_weight = x_weight if x_has_norm else None
        total = residual.clone()
        add_rms_norm(x, total, weight, EPS, x_weight=x_weight)
        out, scales = add_rms_norm_fp8(x, residual, weight, EPS, given_scale, x_weight=x_weight)
        assert torch.equal(residual, total)
    assert_fp8_rows(out, scales, expected(total, weight), scale)


@pytest.mark.filterwarnings("ignore:All-NaN")  # numpy's, where a GPU has none
def test_in_fp8_a_row_of_zeros_stays_zero_and_nan_stays_in_its_row():
    x = torch.zeros(2, 48)
    x[1, 3] = torch.nan
    out, scales = rms_norm_fp8(x, torch.ones(48), EPS, None)
    assert (out[0].float() == 0).all()
    assert scales[0] > 0
    assert (out[1].float() * scales[1]).isnan().all()
