"""Products by weights in FP8, of few tokens and with scales of blocks, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy_engine.layers.products import BlockFp8Linear, Fp8Linear
from argosy_engine.quantized_rows import QuantizedRows
from argosy_engine.triton_kernels.activations import quantize_fp8
from argosy_engine.triton_kernels.fp8_linear import FEW, block_fp8_linear, fp8_linear_few, quantize_fp8_blocks
from argosy_engine.triton_kernels.launch import (
    KNOWN_DEVICES,
    assume_device,
    launched_variants,
    recorded_launches,
)
from option_pairs import covering

FP8 = torch.float8_e4m3fn
SMALL_DEVICE = replace(KNOWN_DEVICES["H100"], num_sms=1)
"""Has a program for every multiprocessor whatever its size, so that tiles are the largest."""


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def channels(outputs, inputs):
    weight = random(outputs, inputs, seed=1) / inputs**0.5
    scales = weight.abs().amax(dim=1) / 448
    return (weight / scales[:, None]).to(FP8), scales


def blocks(outputs, inputs):
    """Return a weight in FP8, its scales [blocks, out], and what it stands for, float64."""
    weight = random(outputs, inputs, seed=2).to(FP8)
    count = -(-inputs // 128)
    scales = (random(count, outputs, seed=3).abs() + 0.1) / inputs**0.5
    return weight, scales, weight.double() * scales.double().repeat_interleave(128, dim=0)[:inputs].t()


FEW_OPTIONS = {
    "tokens": [1, 2, 8, 9, FEW],
    "outputs": [16, 40, 130],
    "inputs": [16, 128, 176, 512, 656],
    "has_bias": [False, True],
    "dtype": [torch.bfloat16, torch.float16],
    "device": [KNOWN_DEVICES["H100"], SMALL_DEVICE],
}


@pytest.mark.parametrize("options", covering(FEW_OPTIONS), ids=lambda each: str(list(each.values())[:-1]))
def test_few_tokens(options):
    tokens, outputs, inputs, has_bias, dtype, device = options.values()
    weight, scales = channels(outputs, inputs)
    x, x_scales = quantize_fp8(random(tokens, inputs), None)
    bias = random(outputs, seed=4).to(dtype) if has_bias else None
    exact = (x.double() * x_scales) @ (weight.double() * scales[:, None]).t()
    with assume_device(device):
        found = fp8_linear_few(x, x_scales, weight, scales, bias, dtype)
    wanted = exact if bias is None else exact + bias.double()
    torch.testing.assert_close(found.double(), wanted, rtol=2.0**-8, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_number_of_fp8_counts_exactly(dtype):
    numbers = torch.arange(256, dtype=torch.uint8).view(FP8)
    numbers = numbers[numbers.float().isfinite()]
    weight = torch.zeros(len(numbers), 128, dtype=torch.uint8)
    weight[:, 3] = numbers.view(torch.uint8)
    x = torch.zeros(1, 128)
    x[0, 3] = 1
    ones = torch.ones(len(numbers))
    found = fp8_linear_few(x.to(FP8), torch.ones(1, 1), weight.view(FP8), ones, None, dtype)
    assert torch.equal(found[0].float(), numbers.float())
    found = block_fp8_linear(x.to(dtype), weight.view(FP8), ones[None])
    assert torch.equal(found[0].float(), numbers.float())


BLOCK_OPTIONS = {
    "tokens": [1, 8, 9, FEW, FEW + 1, 70, 150],
    "outputs": [16, 40, 200],
    "inputs": [16, 128, 176, 512, 656],
    "has_bias": [False, True],
    "dtype": [torch.bfloat16, torch.float16],
    "device": [KNOWN_DEVICES["H100"], SMALL_DEVICE],
}


@pytest.mark.parametrize("options", covering(BLOCK_OPTIONS), ids=lambda each: str(list(each.values())[:-1]))
def test_scales_of_blocks(options):
    """Many tokens are quantised, and the sums are of what that leaves."""
    tokens, outputs, inputs, has_bias, dtype, device = options.values()
    weight, scales, widened = blocks(outputs, inputs)
    x = random(tokens, inputs).to(dtype)
    bias = random(outputs, seed=4).to(dtype) if has_bias else None
    given_x = x.double()
    if tokens > FEW:
        values, x_scales = quantize_fp8_blocks(x)
        given_x = values.double() * x_scales.double().repeat_interleave(128, dim=1)[:, :inputs]
        assert (given_x - x.double()).abs().max() <= x.double().abs().max() / 16
    wanted = given_x @ widened.t() + (0 if bias is None else bias.double())
    with assume_device(device):
        found = block_fp8_linear(x, weight, scales, bias)
    torch.testing.assert_close(found.double(), wanted, rtol=2.0**-8, atol=1e-4)


@settings(max_examples=10, deadline=None)
@given(
    rows=st.integers(1, 3),
    width=st.one_of(st.integers(1, 300), st.sampled_from([1024, 4104])),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_blocks_are_divided_by_their_scale_and_rounded(rows, width, dtype):
    x = (3 * random(rows, width)).to(dtype)
    out, scales = quantize_fp8_blocks(x)
    padded = torch.nn.functional.pad(x.float(), (0, -width % 128)).unflatten(1, (-1, 128))
    torch.testing.assert_close(scales, (padded.abs().amax(dim=2) / 448).clamp(min=1e-12))
    exact = (padded / scales[:, :, None]).flatten(1)[:, :width]
    rounded = exact.clamp(-448, 448).to(FP8).float()
    torch.testing.assert_close(out.float(), rounded, rtol=0.07, atol=0)  # a tie may go either way


@pytest.mark.parametrize("tokens", [2, 40])
def test_strided_rows(tokens):
    weight, scales, _ = blocks(20, 64)
    wide = random(tokens, 192).to(torch.bfloat16)
    found = block_fp8_linear(wide[:, 64:128], weight, scales)
    assert torch.equal(found, block_fp8_linear(wide[:, 64:128].contiguous(), weight, scales))


def test_nothing_runs_for_an_empty_batch():
    weight, scales = channels(32, 64)
    with recorded_launches() as launches:
        layer = Fp8Linear(weight, scales, None, None, torch.bfloat16, quantize_fp8)
        assert layer(torch.empty(0, 64, dtype=torch.bfloat16)).shape == (0, 32)
        blocked = BlockFp8Linear(weight, scales[None], None)
        assert blocked(torch.empty(0, 64, dtype=torch.bfloat16)).shape == (0, 32)
    assert not launches


def test_nan_stays_in_its_row():
    weight, scales, _ = blocks(20, 256)
    for tokens in (3, 20):
        x = random(tokens, 256).to(torch.bfloat16)
        clean = block_fp8_linear(x, weight, scales)
        x[1, 5] = torch.nan
        found = block_fp8_linear(x, weight, scales)
        assert found[1].isnan().all()
        assert torch.equal(found[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize("tokens", [1, FEW, FEW + 1])
def test_one_kernel_for_few_tokens_and_torch_for_more(tokens):
    weight, scales = channels(32, 64)
    layer = Fp8Linear(weight, scales, None, None, torch.bfloat16, quantize_fp8)
    rows = QuantizedRows(*quantize_fp8(random(tokens, 64).to(torch.bfloat16), None))
    exact = (rows.values.double() * rows.scales) @ (weight.double() * scales[:, None]).t()
    with launched_variants() as variants:
        found = layer(rows)
    assert {each[0] for each in variants} == ({"fp8_linear_few"} if tokens <= FEW else set())
    torch.testing.assert_close(found.double(), exact, rtol=2.0**-7, atol=1e-3)


@pytest.mark.parametrize("tokens", [1, FEW])
@pytest.mark.parametrize("is_blocked", [False, True])
def test_a_launch_moves_little_more_than_the_weights(tokens, is_blocked):
    outputs, inputs = 1024, 4096
    weight = torch.zeros(outputs, inputs, dtype=FP8)
    with recorded_launches() as launches:
        if is_blocked:
            block_fp8_linear(
                torch.zeros(tokens, inputs).bfloat16(), weight, torch.ones(inputs // 128, outputs)
            )
        else:
            x = torch.zeros(tokens, inputs, dtype=FP8)
            fp8_linear_few(x, torch.ones(tokens, 1), weight, torch.ones(outputs), None, torch.bfloat16)
    (launch,) = launches
    moved = sum(each.nbytes for each in launch.arguments.values() if isinstance(each, torch.Tensor))
    activations = tokens * (inputs * (2 if is_blocked else 1) + outputs * 2)
    assert moved - activations <= 1.05 * outputs * inputs
