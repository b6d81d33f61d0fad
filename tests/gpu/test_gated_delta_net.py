"""The kernels of Gated DeltaNets against float64, step by step over blocks with stale states."""

import math
from dataclasses import replace

import pytest
import torch

from argosy_engine.attention.layer import StateLayer
from argosy_engine.layers.delta_net import TritonDeltaNet
from argosy_engine.models.config_file import load_model_config
from argosy_engine.models.loader import load_model
from argosy_engine.triton_kernels.gated_delta_net import requests_of_tokens
from attention_cases import attention_metadata, bind_sequence, sequence_inputs
from delta_net_cases import BLOCK_SIZE, SIZES, check_steps, inputs_of, weights_of
from random_checkpoints import KINDS, make_checkpoint

STEPS = {
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
