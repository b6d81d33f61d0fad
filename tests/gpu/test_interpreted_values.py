"""Types that the tests' interpreter looks up are those that Triton builds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from argosy_engine.triton_kernels.launch import launch


@pytest.mark.parametrize("shape", [[8], [2, 4], [4, 2], [tl.constexpr(4), 2], (4, 2)], ids=str)
@pytest.mark.parametrize("element", [tl.int32, tl.float16, tl.pointer_type(tl.float16)], ids=str)
def test_a_block_has_its_element_type_and_shape(element: Any, shape: Any) -> None:
    sizes = tuple(getattr(size, "value", size) for size in shape)
    for _ in range(2):
        block = tl.block_type(element, shape)
        assert (block.scalar, tuple(block.shape), block.numel) == (element, sizes, 8)
        assert block == tl.block_type(element, list(sizes))
        assert block != tl.block_type(tl.int8, list(sizes))
        assert block != tl.block_type(element, [16])


@pytest.mark.parametrize(("shape", "error"), [([3], ValueError), ([4.0], TypeError), ([], TypeError)])
def test_a_shape_that_triton_refuses_is_refused_each_time(shape: Any, error: type[Exception]) -> None:
    tl.block_type(tl.int32, [4])
    for _ in range(2):
        with pytest.raises(error):
            tl.block_type(tl.int32, shape)


@triton.jit
def _outer_sum(out_ptr, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    rows, columns = index.to(tl.float32)[:, None], (index * 10)[None, :]
    tl.store(out_ptr + index[:, None] * SIZE + columns // 10, rows + columns)


def test_shapes_and_types_that_differ_are_broadcast_and_promoted() -> None:
    out = torch.zeros(4, 4)
    launch(_outer_sum, (1,), out_ptr=out, SIZE=4)
    index = torch.arange(4.0)
    assert out.equal(index[:, None] + 10 * index)


@triton.jit
def _with_constants(out_ptr, values_ptr):
    value = tl.load(values_ptr + tl.arange(0, 2))
    for _ in range(2):
        tl.store(out_ptr + tl.arange(0, 2), value * 0.0)
        tl.store(out_ptr + 2 + tl.arange(0, 2), value * -0.0)
        tl.store(out_ptr + 4 + tl.arange(0, 2), value * 2)
        tl.store(out_ptr + 6 + tl.arange(0, 2), 2.5 - value)
        tl.store(out_ptr + 8 + tl.arange(0, 2), 2 * tl.arange(0, 2) / 4)


def test_constants_have_their_sign_and_the_type_of_the_other_operand() -> None:
    out = torch.full((10,), torch.nan)
    for dtype in (torch.float32, torch.float16):
        launch(_with_constants, (1,), out_ptr=out, values_ptr=torch.tensor([1.0, 3.0], dtype=dtype))
        assert out.tolist() == [0.0, 0.0, 0.0, 0.0, 2.0, 6.0, 1.5, -0.5, 0.0, 0.5]
        assert out.signbit().tolist()[:4] == [False, False, True, True]
