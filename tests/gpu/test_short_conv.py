"""The kernel of short convolutions against float64, step by step over blocks with stale states."""

import math

import pytest
import torch

from argosy_engine.attention.backend import StateLayer
from argosy_engine.attention.params import ShortConvParams
from argosy_engine.layers.short_conv import TritonShortConv
from argosy_engine.triton_kernels.launch import recorded_launches
from attention_cases import attention_metadata
from delta_net_cases import STEPS
from short_conv_cases import check_steps, weights_of


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize(
    ("num_channels", "kernel_size", "dtype"),
    [(48, 3, torch.float32), (600, 4, torch.float32), (10, 2, torch.bfloat16), (32, 3, torch.float16)],
)
def test_steps_equal_the_whole_in_float64(num_channels, kernel_size, dtype, steps):
    params = ShortConvParams(num_channels=num_channels, kernel_size=kernel_size)
    check_steps(TritonShortConv(weights_of(params)), params, dtype, STEPS[steps])


def test_padding_changes_nothing():
    """As CUDA graphs have it: requests without tokens, and tokens that belong to none."""
    params = ShortConvParams(num_channels=10, kernel_size=3)
    run = TritonShortConv(weights_of(params))
    bcx = torch.randn(4, 30, generator=torch.Generator().manual_seed(1))
    outputs, states = [], []
    for num_rows in (2, 4):
        state = StateLayer(params.state, torch.float32)
        state.bind([torch.full((4, 2, 10), math.nan)], 16)
        meta = attention_metadata([(0, 1), (0, 1)], torch.tensor([[1], [2]]), 16)
        padding = num_rows - 2
        meta.query_start_loc = torch.tensor([0, 1, 2] + [2] * padding, dtype=torch.int32)
        meta.seq_lens = torch.tensor([1, 1] + [0] * padding, dtype=torch.int32)
        meta.block_table = torch.tensor([[1], [2]] + [[0]] * padding, dtype=torch.int32)
        out = run(bcx[:num_rows], state, meta)
        assert not out[2:].any()
        outputs.append(out[:2])
        states.append(state.states[0])
    assert torch.equal(*outputs)
    torch.testing.assert_close(*states, equal_nan=True, rtol=0, atol=0)
    assert states[0][3].isnan().all(), "no other block is written"


def test_decodes_take_one_launch():
    params = ShortConvParams(num_channels=16, kernel_size=3)
    run, state = TritonShortConv(weights_of(params)), StateLayer(params.state, torch.float32)
    state.bind([torch.zeros(4, 2, 16)], 16)
    for spans, names in (
        ([(3, 4), (7, 8)], ["short_conv"]),
        ([(3, 4), (0, 5)], ["short_conv", "keep_inputs"]),
    ):
        with recorded_launches() as launches:
            meta = attention_metadata(spans, torch.tensor([[1], [2]]), 16)
            run(torch.zeros(sum(end - start for start, end in spans), 48), state, meta)
        assert [each.name for each in launches] == names
