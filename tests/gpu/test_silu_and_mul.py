import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy_engine.triton_kernels import activations as silu_and_mul_module
from argosy_engine.triton_kernels.activations import (
    gelu_tanh_and_mul,
    gelu_tanh_and_mul_fp8,
    relu2,
    relu2_fp8,
    silu_and_mul,
    silu_and_mul_fp8,
)
from fp8_reference import assert_fp8_rows


def silu_reference(gate, up):
    return F.silu(gate) * up


def gelu_reference(gate, up):
    return F.gelu(gate, approximate="tanh") * up


pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # numpy's, where a GPU has none

ACTIVATIONS = [(silu_and_mul, silu_reference), (gelu_tanh_and_mul, gelu_reference)]


@settings(max_examples=15, deadline=None)
@given(
    activation=st.sampled_from(ACTIVATIONS),
    rows=st.integers(1, 4),
    inner=st.one_of(st.integers(1, 200), st.sampled_from([1024, 1500, 3072])),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_activation_matches_the_reference(activation, rows, inner, dtype):
    activate, reference = activation
    gate_up = (4 * torch.randn(rows, 2 * inner, generator=torch.Generator().manual_seed(0))).to(dtype)
    out = activate(gate_up)
    assert out.shape == (rows, inner)
    torch.testing.assert_close(out, reference(*gate_up.float().chunk(2, dim=-1)).to(dtype))


@pytest.mark.parametrize(("activate", "reference"), ACTIVATIONS)
def test_extreme_gates(activate, reference):
    gate = torch.tensor([[-1e4, -90.0, -10.0, -5.5, 0.0, 5.5, 90.0, 1e4]])
    up = torch.full_like(gate, 0.5)
    torch.testing.assert_close(
        activate(torch.cat((gate, up), dim=-1)), reference(gate, up), atol=1e-6, rtol=1e-5
    )


def test_strided_rows_and_given_output():
    wide = torch.randn(3, 100)
    out = torch.full((3, 48), 7.0)
    silu_and_mul(wide[:, 16:80], out=out[:, :32])
    torch.testing.assert_close(out[:, :32], silu_reference(wide[:, 16:48], wide[:, 48:80]))
    assert torch.equal(out[:, 32:], torch.full((3, 16), 7.0))


def test_nothing_runs_for_an_empty_batch():
    assert silu_and_mul(torch.empty(0, 64)).shape == (0, 32)


FP8_ACTIVATIONS = [(silu_and_mul_fp8, silu_reference), (gelu_tanh_and_mul_fp8, gelu_reference)]


@settings(max_examples=15, deadline=None)
@given(
    activation=st.sampled_from(FP8_ACTIVATIONS),
    rows=st.integers(0, 3),
    inner=st.one_of(st.integers(1, 200), st.sampled_from([1024, 1500])),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    scale=st.sampled_from([None, 0.01, 0.5]),
)
def test_activations_in_fp8(activation, rows, inner, dtype, scale):
    activate, reference = activation
    gate_up = (4 * torch.randn(rows, 2 * inner + 3, generator=torch.Generator().manual_seed(0))).to(dtype)
    gate_up = gate_up[:, : 2 * inner]
    out, scales = activate(gate_up, None if scale is None else torch.tensor([scale]))
    # In float64, because torch's gelu loses its digits at gates far below 0.
    assert_fp8_rows(out, scales, reference(*gate_up.double().chunk(2, dim=-1)), scale)


def test_in_fp8_a_row_may_be_wider_than_registers_hold(monkeypatch):
    monkeypatch.setattr(silu_and_mul_module, "ROW_BLOCK", 64)
    monkeypatch.setattr(silu_and_mul_module, "PART_BLOCK", 32)
    gate_up = torch.randn(3, 2 * 150)
    gate_up[0, 149] = 40.0  # the largest is in the last block
    out, scales = silu_and_mul_fp8(gate_up, None)
    assert_fp8_rows(out, scales, silu_reference(*gate_up.chunk(2, dim=-1)), None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "inner"), [(1, 1), (3, 200), (2, 1500)])
def test_squared_relus(rows, inner, dtype):
    up = (4 * torch.randn(rows, inner + 3, generator=torch.Generator().manual_seed(0))).to(dtype)[:, :inner]
    wanted = F.relu(up.float()).square()
    torch.testing.assert_close(relu2(up), wanted.to(dtype))
    for scale in (None, 0.5):
        out, scales = relu2_fp8(up, None if scale is None else torch.tensor([scale]))
        assert_fp8_rows(out, scales, wanted.double(), scale)


def test_squared_relus_keep_nan():
    up = torch.tensor([[torch.nan, -1.0, 2.0]])
    torch.testing.assert_close(relu2(up), torch.tensor([[torch.nan, 0.0, 4.0]]), equal_nan=True)


def test_in_fp8_nan_stays_in_its_row():
    gate_up = torch.ones(2, 64)
    gate_up[0, 40] = torch.nan
    out, scales = silu_and_mul_fp8(gate_up, None)
    wanted = (out.float() * scales)[0]
    assert wanted[8].isnan()
    assert_fp8_rows(out[1:], scales[1:], silu_reference(*gate_up[1:].chunk(2, dim=-1)), None)
