import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy_engine.triton_kernels.activations import quantize_fp8

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def random(*shape, dtype=torch.float32):
    return (3 * torch.randn(*shape, generator=torch.Generator().manual_seed(0))).to(dtype)


@settings(max_examples=15, deadline=None)
@given(
    rows=st.integers(1, 4),
    width=st.one_of(st.integers(1, 200), st.sampled_from([4096, 9000])),
    dtype=st.sampled_from(DTYPES),
    scale=st.sampled_from([None, 0.01, 0.5]),
)
def test_rows_are_divided_by_their_scale_and_rounded(rows, width, dtype, scale):
    x = random(rows, width, dtype=dtype)
    out, scales = quantize_fp8(x, None if scale is None else torch.tensor([scale]))
    largest = x.float().abs().amax(dim=1, keepdim=True) / 448
    expected = largest if scale is None else torch.full((rows, 1), scale)
    torch.testing.assert_close(scales, expected)
    rounded = (x.float() / scales).clamp(-448, 448).to(torch.float8_e4m3fn)
    torch.testing.assert_close(out.float(), rounded.float(), rtol=0.07, atol=0)  # a tie may go either way


def test_a_row_of_zeros_stays_zero():
    out, scales = quantize_fp8(torch.zeros(2, 32), None)
    assert (out.float() == 0).all()
    assert (scales > 0).all()


def test_strided_rows():
    wide = random(3, 64)
    out, scales = quantize_fp8(wide[:, 16:48], None)
    torch.testing.assert_close(out.float() * scales, wide[:, 16:48], rtol=0.07, atol=0.01)


@pytest.mark.parametrize("scale", [None, torch.ones(1)])
def test_nothing_runs_for_an_empty_batch(scale):
    out, scales = quantize_fp8(torch.empty(0, 32), scale)
    assert (out.shape, scales.shape) == ((0, 32), (0, 1))
