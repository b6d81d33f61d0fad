import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy_engine.layers.experts import choose_experts
from argosy_engine.model_configs.experts_config import RoutingSpec
from argosy_engine.triton_kernels.fused_moe import route

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")


def random_logits(tokens, experts, dtype=torch.float32, seed=0):
    return torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check_sorted(routing):
    """Check that the tiles cover every pair that is not padding once, by expert, in order."""
    experts = routing.experts.flatten()
    seen = []
    order = []
    for tile in range(int(routing.num_tiles)):
        start, end = int(routing.tile_starts[tile]), int(routing.tile_ends[tile])
        pairs = routing.pairs[start : min(start + routing.tile_rows, end)].tolist()
        assert 0 < len(pairs) <= routing.tile_rows
        assert {int(experts[pair]) for pair in pairs} == {int(routing.tile_experts[tile])}
        order.append((int(routing.tile_experts[tile]), start))
        seen += pairs
    wanted = sorted((int(expert), pair) for pair, expert in enumerate(experts) if expert >= 0)
    assert seen == [pair for _, pair in wanted]
    assert order == sorted(order)


@settings(max_examples=8, deadline=None)
@given(
    tokens=st.one_of(st.integers(1, 12), st.just(40)),
    shape=st.sampled_from([(1, 1), (4, 2), (8, 8), (60, 4), (128, 8)]),
    normalises=st.booleans(),
    tile_rows=st.sampled_from([16, 32]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_routing_matches_softmax_and_top_k(tokens, shape, normalises, tile_rows, dtype):
    experts, k = shape
    logits = random_logits(tokens, experts, dtype)
    routing = route(logits, k, normalises=normalises, tile_rows=tile_rows)
    scores = torch.softmax(logits.float(), dim=-1)
    # Equal logits go to the lower expert first, as in a stable sort.
    wanted = scores.sort(dim=-1, descending=True, stable=True)
    weights = wanted.values[:, :k]
    if normalises:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    assert torch.equal(routing.experts.long(), wanted.indices[:, :k])
    torch.testing.assert_close(routing.weights, weights)
    check_sorted(routing)


@pytest.mark.parametrize("tokens", [1, 7, 70])
def test_all_tokens_at_one_expert(tokens):
    logits = torch.zeros(tokens, 16)
    logits[:, 5] = 9.0
    routing = route(logits, 1, normalises=True, tile_rows=16)
    assert (routing.experts == 5).all()
    assert int(routing.num_tiles) == -(-tokens // 16)
    check_sorted(routing)


def test_worst_case_of_tiles_fits():
    # 17 pairs of expert 0 take two tiles of 16, and each other expert takes a tile for one pair.
    choices = [0] * 17 + list(range(1, 8))
    logits = torch.nn.functional.one_hot(torch.tensor(choices), 8).float()
    routing = route(logits, 1, normalises=False, tile_rows=16)
    assert int(routing.num_tiles) == 9 <= len(routing.tile_experts)
    check_sorted(routing)


def test_padding_gets_no_expert():
    slots = torch.tensor([3, -1, 0, -1])
    logits = random_logits(4, 8)
    logits[1] = torch.nan
    routing = route(logits, 2, normalises=True, tile_rows=16, slot_mapping=slots)
    assert (routing.experts[[1, 3]] == -1).all()
    assert (routing.weights[[1, 3]] == 0).all()
    alone = route(logits[[0, 2]], 2, normalises=True, tile_rows=16)
    assert torch.equal(routing.experts[[0, 2]], alone.experts)
    assert torch.equal(routing.weights[[0, 2]], alone.weights)
    check_sorted(routing)


def test_padding_alone_makes_no_tiles():
    routing = route(random_logits(3, 8), 2, normalises=True, tile_rows=16, slot_mapping=torch.full((3,), -1))
    assert int(routing.num_tiles) == 0


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_experts_exist_and_differ_whatever_the_logits(value):
    logits = torch.full((2, 5), value)
    logits[1, 2] = 1.0
    routing = route(logits, 3, normalises=False, tile_rows=16)
    assert routing.experts.tolist() == [[0, 1, 2], [2, 0, 1]]
    torch.testing.assert_close(routing.weights[1], torch.tensor([1.0, 0.0, 0.0]))
    check_sorted(routing)


def test_pairs_with_experts_that_are_not_held_have_none():
    logits = random_logits(40, 12)
    whole = route(logits, 3, normalises=True, tile_rows=16)
    for held in (range(5), range(5, 6), range(6, 12)):
        routing = route(logits, 3, normalises=True, tile_rows=16, held=held)
        is_held = (whole.experts >= held.start) & (whole.experts < held.stop)
        assert torch.equal(routing.experts, torch.where(is_held, whole.experts - held.start, -1))
        assert torch.equal(routing.weights, whole.weights)
        check_sorted(routing)


def test_empty_batch():
    routing = route(torch.empty(0, 8), 2, normalises=True, tile_rows=16)
    assert routing.weights.shape == (0, 2)


ROUTINGS = [
    RoutingSpec(num_experts=12, experts_per_token=3, scores="sigmoid"),
    RoutingSpec(num_experts=12, experts_per_token=3, scores="sigmoid", normalises=True, has_correction=True),
    RoutingSpec(num_experts=16, experts_per_token=5, has_correction=True, normalises=True, scaling=2.5),
    RoutingSpec(
        num_experts=16,
        experts_per_token=4,
        scores="sigmoid",
        has_correction=True,
        num_groups=4,
        groups_per_token=2,
    ),
    RoutingSpec(num_experts=12, experts_per_token=3, scores="sigmoid", normalises=True, epsilon=0.1),
    RoutingSpec(num_experts=12, experts_per_token=3, normalises=True, has_expert_scales=True, scaling=2.0),
    RoutingSpec(num_experts=24, experts_per_token=6, num_groups=3, groups_per_token=2, group_score="best"),
    RoutingSpec(num_experts=20, experts_per_token=2, num_groups=10, groups_per_token=1, scaling=0.3),
]


@pytest.mark.parametrize("spec", ROUTINGS, ids=str)
@pytest.mark.parametrize("tokens", [1, 37])
def test_other_scores_choose_as_torch_does(spec, tokens):
    logits = random_logits(tokens, spec.num_experts)
    correction = random_logits(1, spec.num_experts, seed=1)[0] / 2 if spec.has_correction else None
    scales = random_logits(1, spec.num_experts, seed=2)[0] if spec.has_expert_scales else None
    routing = route(
        logits,
        spec.experts_per_token,
        normalises=spec.normalises,
        epsilon=spec.epsilon,
        expert_scales=scales,
        tile_rows=16,
        is_sigmoid=spec.scores == "sigmoid",
        correction=correction,
        num_groups=spec.num_groups,
        groups_per_token=spec.groups_per_token,
        adds_two=spec.group_score == "best_two",
        scaling=spec.scaling,
    )
    weights, experts = choose_experts(spec, logits, correction, scales)
    assert torch.equal(routing.experts.long(), experts)
    torch.testing.assert_close(routing.weights, weights)
    check_sorted(routing)


def test_what_is_not_a_number_still_chooses_experts_that_exist():
    logits = torch.full((3, 8), float("nan"))
    correction = torch.full((8,), float("nan"))
    routing = route(
        logits,
        2,
        normalises=True,
        tile_rows=16,
        is_sigmoid=True,
        correction=correction,
        num_groups=4,
        groups_per_token=2,
    )
    assert ((routing.experts >= 0) & (routing.experts < 8)).all()
    assert (routing.experts[:, 0] != routing.experts[:, 1]).all()
