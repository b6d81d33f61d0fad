"""The kernels of Gated DeltaNets against float64, step by step over blocks with stale states."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from msgspec import structs

from argosy_engine.attention.backend import StateLayer
from argosy_engine.layers.delta_net import TorchDeltaNet, TritonDeltaNet
from argosy_engine.models.config_file import load_model_config
from argosy_engine.models.loader import load_model
from argosy_engine.triton_kernels.short_conv import chunks_of_prompts, requests_of_tokens
from attention_cases import attention_metadata, bind_sequence, sequence_inputs
from delta_net_cases import BLOCK_SIZE, SIZES, check_steps, inputs_of, reference, weights_of
from random_checkpoints import KINDS, make_checkpoint

STEPS = {
    "several chunks": [[(0, 70)], [(70, 103)], [(103, 104)]],
    "one token, a chunk, a decode": [[(0, 1)], [(1, 2)], [(2, 20)], [(20, 21)]],
    "several requests": [[(0, 1), (0, 2), (0, 17)], [(1, 2), (2, 3), (17, 18)], [(2, 3), (3, 12)]],
}


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        ("aligned", torch.float32),
        ("one head", torch.float32),
        ("odd", torch.float32),
        ("odd", torch.bfloat16),
    ],
)
def test_steps_equal_the_whole_in_float64(sizes, dtype, steps):
    params = SIZES[sizes]
    check_steps(TritonDeltaNet(params, weights_of(params)), params, dtype, STEPS[steps])


def test_heads_of_published_size():
    params = SIZES["published"]
    check_steps(TritonDeltaNet(params, weights_of(params)), params, torch.float32, [[(0, 3)], [(3, 4)]])


def test_padding_changes_nothing():
    """As CUDA graphs have it: requests without tokens, and tokens that belong to none."""
    params = SIZES["odd"]
    run = TritonDeltaNet(params, weights_of(params))
    outputs, states = [], []
    for num_rows in (2, 4):
        state = StateLayer(params.state, torch.float32)
        shapes = [((4, *shape), dtype) for shape, dtype in state.tensors]
        state.bind([torch.full(shape, math.nan, dtype=dtype) for shape, dtype in shapes], 16)
        qkvz, ba = inputs_of(params, 4, 5)
        meta = attention_metadata([(0, 1), (0, 1)], torch.tensor([[1], [2]]), 16)
        padding = num_rows - 2
        meta.query_start_loc = torch.tensor([0, 1, 2] + [2] * padding, dtype=torch.int32)
        meta.seq_lens = torch.tensor([1, 1] + [0] * padding, dtype=torch.int32)
        meta.block_table = torch.tensor([[1], [2]] + [[0]] * padding, dtype=torch.int32)
        outputs.append(run(qkvz[:num_rows], ba[:num_rows], state, meta)[:2])
        states.append(state.states)
    assert torch.equal(*outputs)
    for few, many in zip(*states, strict=True):
        torch.testing.assert_close(few, many, equal_nan=True, rtol=0, atol=0)
        assert few[3].isnan().all(), "no other block is written"


def test_keys_too_large_for_chunks():
    params = structs.replace(SIZES["one head"], key_dim=300)
    check_steps(TritonDeltaNet(params, weights_of(params)), params, torch.float32, [[(0, 3)], [(3, 5)]])


def test_keys_that_are_all_alike():
    """Of which each changes what all before it have changed: the worst case of a chunk's triangular system."""
    params, steps = SIZES["one head"], [[(0, 64)]]
    weights = weights_of(params)._replace(rates=torch.zeros(1), conv=torch.zeros(2, params.num_channels))
    weights.conv[-1] = 1.0
    qkvz, ba = torch.ones(64, params.num_channels + params.num_values), torch.full((64, 2), 9.0)
    qkvz[:, 64:80] = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
    outputs = []
    for kernel in (TritonDeltaNet, TorchDeltaNet):
        state = StateLayer(params.state, torch.float32)
        shapes = [((6, *shape), dtype) for shape, dtype in state.tensors]
        state.bind([torch.zeros(shape, dtype=dtype) for shape, dtype in shapes], 64)
        meta = attention_metadata(steps[0], torch.tensor([[1]]), 64)
        outputs.append(kernel(params, weights)(qkvz, ba, state, meta))
    expected = reference(params, weights, qkvz, ba)
    for out in outputs:
        torch.testing.assert_close(out.double(), expected, atol=1e-4, rtol=1e-4)


def test_a_token_that_forgets_all_costs_those_after_it_no_precision():
    params = SIZES["one head"]
    weights = weights_of(params)._replace(rates=torch.full((1,), 16.0), dt_bias=torch.zeros(1))
    qkvz, ba = inputs_of(params, 40, seed=1)
    ba[:, 1:] = -6.0  # softplus of which is 0.0025
    ba[::3, 1:] = 80.0
    state = StateLayer(params.state, torch.float32)
    state.bind([torch.zeros(2, *shape, dtype=dtype) for shape, dtype in state.tensors], 64)
    meta = attention_metadata([(0, 40)], torch.tensor([[1]]), 64)
    found = TritonDeltaNet(params, weights)(qkvz, ba, state, meta)
    torch.testing.assert_close(found.double(), reference(params, weights, qkvz, ba), atol=2e-5, rtol=2e-5)


def test_chunks_of_prompts():
    starts = np.array([0, 1, 2, 42, 47, 63], np.int32)
    chunks = chunks_of_prompts(starts, 2, 16)
    assert chunks.tolist() == [[2, 18], [18, 34], [34, 42], [42, 47], [47, 63]]
    assert chunks_of_prompts(starts[:3], 2, 16).shape == (0, 2)


def test_requests_of_tokens():
    starts = torch.tensor([0, 1, 4, 4, 6, 6], dtype=torch.int32)
    assert requests_of_tokens(starts, 8).tolist() == [0, 1, 1, 1, 3, 3, 5, 5]


@pytest.mark.parametrize("name", ["qwen3-next", "qwen3.5"])
@torch.inference_mode()
def test_models_have_the_logits_of_transformers(name, tmp_path):
    fields = {
        **KINDS[name].fields,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
    }
    reference = make_checkpoint(replace(KINDS[name], fields=fields), tmp_path)
    token_ids = list(range(2, 21))
    expected = reference(torch.tensor([token_ids])).logits[0]
    model = load_model(
        tmp_path,
        load_model_config(tmp_path),
        dtype=torch.float32,
        device=torch.device("cpu"),
        attention_backend="triton",
        max_positions=64,
        load_format="auto",
        seed=0,
    ).model
    bind_sequence(model, len(token_ids), BLOCK_SIZE)
    ours = []
    for start, end in ((0, 17), (17, 18), (18, 19)):
        inputs = sequence_inputs(model, token_ids[start:end], start, len(token_ids), BLOCK_SIZE)
        ours.append(model.logits(model.forward(inputs)))
    torch.testing.assert_close(torch.cat(ours), expected, atol=KINDS[name].tolerance, rtol=1e-4)
