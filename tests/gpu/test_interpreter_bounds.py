"""The tests' interpreter refuses what a kernel reads or writes outside its tensors."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from argosy_engine.triton_kernels.launch import launch


@triton.jit
def _copy(source_ptr, target_ptr, size: int, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    tl.store(target_ptr + index, tl.load(source_ptr + index, mask=index < size), mask=index < size)


@pytest.mark.parametrize(("given", "room", "action"), [(3, 4, "load"), (4, 3, "store")])
def test_an_element_beyond_a_view_is_refused(given: int, room: int, action: str) -> None:
    source, target = torch.arange(8.0), torch.zeros(8)
    with pytest.raises(Exception, match=f"a {action} of 1 elements outside"):
        launch(_copy, (1,), source_ptr=source[:given], target_ptr=target[:room], size=4, BLOCK=8)


def test_what_is_masked_may_point_anywhere() -> None:
    target = torch.zeros(4)
    launch(_copy, (1,), source_ptr=torch.arange(4.0), target_ptr=target, size=4, BLOCK=8)
    assert target.tolist() == [0.0, 1.0, 2.0, 3.0]
