"""The kernels of Mamba-2 layers against float64, step by step over blocks with stale states."""

import math

import pytest
import torch
from msgspec.structs import replace

from argosy_engine.attention.backend import StateLayer
from argosy_engine.layers.mamba import TritonMamba
from argosy_engine.models.config_file import load_model_config
from argosy_engine.models.loader import load_model
from argosy_engine.triton_kernels.launch import recorded_launches
from attention_cases import attention_metadata, bind_sequence, sequence_inputs
from delta_net_cases import BLOCK_SIZE
from mamba_cases import SIZES, check_ranks, check_steps, inputs_of, weights_of
from transformers_checkpoints import write_checkpoint

STEPS = {
    "several chunks": [[(0, 70)], [(70, 103)], [(103, 104)]],
    "one token, a chunk, a decode": [[(0, 1)], [(1, 2)], [(2, 36)], [(36, 37)]],
    "several requests": [[(0, 1), (0, 2), (0, 34)], [(1, 2), (2, 3), (34, 35)], [(2, 3), (3, 12)]],
}


def as_it_is(squares):
    return squares


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        ("aligned", torch.float32),
        ("one head", torch.float32),
        ("many", torch.float32),
        ("odd", torch.float32),
        ("odd", torch.bfloat16),
    ],
)
def test_steps_equal_the_whole_in_float64(sizes, dtype, steps):
    params = SIZES[sizes]
    check_steps(TritonMamba(params, weights_of(params)), params, dtype, STEPS[steps])


def test_heads_of_published_size():
    params = SIZES["published"]
    check_steps(TritonMamba(params, weights_of(params)), params, torch.float32, [[(0, 3)], [(3, 4)]])


@pytest.mark.parametrize(
    ("groups", "num_ranks", "norm"), [(1, 2, "after_gate"), (1, 4, "before_gate"), (2, 4, "after_gate")]
)
def test_ranks_that_share_groups(groups, num_ranks, norm):
    params = replace(SIZES["aligned"], num_groups=groups, norm=norm)
    check_ranks(TritonMamba, params, torch.float32, STEPS["several requests"], num_ranks)


@pytest.mark.parametrize("shares", [False, True])
def test_padding_changes_nothing(shares):
    """As CUDA graphs have it: requests without tokens, and tokens that belong to none."""
    params = replace(SIZES["odd"], num_groups=1) if shares else SIZES["odd"]
    run = TritonMamba(params, weights_of(params), as_it_is if shares else None)
    outputs, states = [], []
    for num_rows in (2, 4):
        state = StateLayer(params.state, torch.float32)
        shapes = [((4, *shape), dtype) for shape, dtype in state.tensors]
        state.bind([torch.full(shape, math.nan, dtype=dtype) for shape, dtype in shapes], 16)
        meta = attention_metadata([(0, 1), (0, 1)], torch.tensor([[1], [2]]), 16)
        padding = num_rows - 2
        meta.query_start_loc = torch.tensor([0, 1, 2] + [2] * padding, dtype=torch.int32)
        meta.seq_lens = torch.tensor([1, 1] + [0] * padding, dtype=torch.int32)
        meta.block_table = torch.tensor([[1], [2]] + [[0]] * padding, dtype=torch.int32)
        out = run(inputs_of(params, 4, 5)[:num_rows], state, meta)
        assert not out[2:].any()
        outputs.append(out[:2])
        states.append(state.states)
    assert torch.equal(*outputs)
    for few, many in zip(*states, strict=True):
        torch.testing.assert_close(few, many, equal_nan=True, rtol=0, atol=0)
        assert few[3].isnan().all(), "no other block is written"


@pytest.mark.parametrize("shares", [False, True])
def test_decodes_take_three_launches_and_one_more_where_ranks_share_a_group(shares):
    params = replace(SIZES["aligned"], num_groups=1) if shares else SIZES["aligned"]
    run = TritonMamba(params, weights_of(params), as_it_is if shares else None)
    more = ["norm_squares"] if shares else []
    state = StateLayer(params.state, torch.float32)
    state.bind([torch.zeros(4, *shape, dtype=dtype) for shape, dtype in state.tensors], BLOCK_SIZE)
    names = []
    for spans in ([(3, 4), (7, 8)], [(3, 4), (0, 5)]):
        with recorded_launches() as launches:
            meta = attention_metadata(spans, torch.tensor([[1], [2]]), BLOCK_SIZE)
            run(inputs_of(params, sum(end - start for start, end in spans), 1), state, meta)
        names.append([each.name for each in launches])
    assert names[0] == ["mamba_inputs", "state_update", *more, "gated_norm"]
    assert names[1] == [
        "mamba_inputs",
        "keep_inputs",
        "state_update",
        "chunk_scores",
        "scan_chunks",
        *more,
        "gated_norm",
    ]


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        (
            "granitemoehybrid",
            {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
        ),
        ("nemotron_h", {"moe_latent_size": 40}),
    ],
)
@torch.inference_mode()
def test_models_have_the_logits_of_transformers(model_type, fields, tmp_path):
    reference = write_checkpoint(model_type, tmp_path, mamba_n_groups=2, **fields)
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
    torch.testing.assert_close(torch.cat(ours), expected, atol=1e-3, rtol=1e-4)
