"""Products by integers that stay packed, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from argosy_engine.layers.products import TritonIntegers
from argosy_engine.native.library import QuantizedWeight
from argosy_engine.triton_kernels.launch import KNOWN_DEVICES, assume_device, recorded_launches
from argosy_engine.triton_kernels.packed_linear import PackedIntegers, block_inputs, pack, packed_linear
from option_pairs import covering

TOLERANCE = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Of the result's rounding; sums in float32 add little."""
SMALL_DEVICE = replace(KNOWN_DEVICES["H100"], num_sms=1)
"""Has a program for every multiprocessor whatever its size, so that tiles are the largest."""


def random_weight(
    bits: int, outputs: int, inputs: int, group: int | None, *, has_zeros: bool, has_order: bool = False
) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(bits + outputs + inputs)
    half = 1 << bits - 1
    integers = torch.randint(-half, half, (outputs, inputs), dtype=torch.int8, generator=generator)
    scales = (
        (torch.rand(outputs, inputs // (group or inputs), generator=generator) / half + 0.01).half().float()
    )
    zeros = torch.randint(-half, half, scales.shape, generator=generator)
    order = torch.randperm(inputs, generator=generator).int() if has_order else None
    return QuantizedWeight(bits, integers, scales, -scales * zeros if has_zeros else None, order)


OPTIONS = {
    "bits": [4, 8],
    "dtype": list(TOLERANCE),
    "tokens": [1, 2, 5, 8, 9, 16, 17, 33, 70],
    "outputs": [16, 40, 130],
    "shape": [
        (32, None),
        (64, 32),
        (128, 128),
        (160, 32),
        (192, 64),
        (192, 96),
        (250, None),
        (256, 256),
        (384, 128),
    ],
    "has_zeros": [False, True],
    "has_bias": [False, True],
    "has_order": [False, True],
    "device": [KNOWN_DEVICES["H100"], SMALL_DEVICE],
}


@pytest.mark.parametrize("options", covering(OPTIONS), ids=lambda each: str(list(each.values())[:-1]))
def test_products_are_those_of_float64(options):
    bits, dtype, tokens, outputs, shape, has_zeros, has_bias, has_order, device = options.values()
    inputs, group = shape
    weight = random_weight(bits, outputs, inputs, group, has_zeros=has_zeros, has_order=has_order)
    generator = torch.Generator().manual_seed(tokens)
    x = (torch.randn(tokens, inputs, generator=generator) / inputs**0.5).to(dtype)
    bias = torch.randn(outputs, generator=generator).to(dtype) if has_bias else None
    exact = x.double() @ weight.widened(torch.float64).t() + (0 if bias is None else bias.double())
    with assume_device(device):
        found = TritonIntegers().linear(weight, bias, dtype)(x)
    assert found.dtype is dtype
    torch.testing.assert_close(found.double(), exact, rtol=TOLERANCE[dtype], atol=1e-5)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zero", [None, -1, 0, 1])
def test_every_integer_counts_exactly(bits, dtype, zero):
    """With the lowest and the highest zero point as well; of the last block, most is filled up."""
    half = 1 << bits - 1
    numbers = torch.arange(-half, half)
    inputs = max(len(numbers), 32)
    integers = torch.zeros(len(numbers), inputs, dtype=torch.int8)
    integers[:, 0] = numbers
    point = 0 if zero is None else {-1: -half, 0: 3, 1: half - 1}[zero]
    zeros = None if zero is None else torch.full((1, len(numbers)), point, dtype=torch.int8)
    weight = PackedIntegers(pack(integers, bits), torch.ones(1, len(numbers)), zeros, bits, inputs)
    for tokens in (1, 33):
        x = torch.zeros(tokens, inputs, dtype=dtype)
        x[:, 0] = 1
        assert torch.equal(packed_linear(x, weight).float(), (numbers - point).float().expand(tokens, -1))


@pytest.mark.parametrize("bits", [4, 8])
def test_a_number_is_where_the_kernels_take_it(bits):
    """Input part * 32 + word * 2 + half of a block is at bit part * bits + half * 16."""
    size = block_inputs(bits)
    for place in (0, 1, 2, 31, 32, 33, size - 1, size, size + 45):
        integers = torch.full((1, 2 * size), -(1 << bits - 1), dtype=torch.int8)  # whose bits are all 0
        integers[0, place] += 1
        block, within = divmod(place, size)
        part, word, half = within // 32, within % 32 // 2, within % 2
        expected = torch.zeros(32, dtype=torch.int32)
        expected[block * 16 + word] = 1 << (part * bits + half * 16)
        assert torch.equal(pack(integers, bits)[0], expected)


@pytest.mark.parametrize("tokens", [2, 40])
def test_strided_rows(tokens):
    weight = random_weight(4, 20, 64, 32, has_zeros=True)
    wide = torch.randn(tokens, 192).to(torch.bfloat16)
    product = TritonIntegers().linear(weight, None, torch.bfloat16)
    assert torch.equal(product(wide[:, 64:128]), product(wide[:, 64:128].contiguous()))


def test_nothing_runs_for_an_empty_batch():
    weight = random_weight(8, 20, 64, 32, has_zeros=False)
    with recorded_launches() as launches:
        found = TritonIntegers().linear(weight, None, torch.float16)(torch.empty(0, 64, dtype=torch.float16))
    assert found.shape == (0, 20)
    assert not launches


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_scales_are_kept_in_16_bits_where_these_are_exact(dtype):
    scales = (torch.rand(24, 2) / 100 + 0.001).to(dtype).float()
    if dtype is torch.bfloat16:
        scales[0, 0] = 2.0**100  # out of float16's range
    weight = QuantizedWeight(4, torch.zeros(24, 64, dtype=torch.int8), scales)
    for narrows in (True, False):
        with recorded_launches() as launches:
            TritonIntegers(narrows=narrows).linear(weight, None, torch.bfloat16)(
                torch.zeros(1, 64).bfloat16()
            )
        assert launches[0].arguments["scales_ptr"].dtype is (dtype if narrows else torch.float32)


@pytest.mark.parametrize("tokens", [1, 16])
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("group", [32, 64, 128, None])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_launch_moves_little_more_than_the_packed_weights(bits, group, has_zeros, tokens):
    """These are the checkpoint's: numbers, scales in 16 bits, zero points of as many bits as numbers."""
    outputs, inputs = 1024, 4096
    weight = random_weight(bits, outputs, inputs, group, has_zeros=has_zeros)
    with recorded_launches() as launches:
        TritonIntegers().linear(weight, None, torch.bfloat16)(torch.zeros(tokens, inputs).bfloat16())
    (launch,) = launches
    moved = sum(each.nbytes for each in launch.arguments.values() if isinstance(each, torch.Tensor))
    activations = tokens * (inputs + outputs) * 2
    groups = inputs // (group or inputs)
    packed = outputs * (inputs * bits // 8 + groups * 2 + (groups * bits // 8 if has_zeros else 0))
    assert moved - activations <= 1.1 * packed
    assert weight.scales.shape[1] == groups
