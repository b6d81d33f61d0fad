import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from argosy_engine.sample.sampler import gather_logprobs, score
from argosy_engine.triton_kernels.launch import recorded_launches
from argosy_engine.triton_kernels.sampling import Cuts, sample_tokens
from argosy_engine.triton_kernels.top_logprobs import cut_logits, top_logprobs
from gpu_sampling_reference import device_batch
from option_pairs import covering

INF = float("inf")


OPTIONS = {
    "vocab_size": [1, 5, 4096, 4100, 9000],
    "dtype": [torch.bfloat16, torch.float16, torch.float32],
    "count": [0, 1, 5, 20],
    "is_normalized": [False, True],
}


def check(vocab_size, dtype, count, is_normalized, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(2, vocab_size, generator=generator) * 4).to(dtype)
    tokens = torch.randint(vocab_size, (2,), generator=generator)
    scored = top_logprobs(logits, tokens, count, is_normalized=is_normalized)
    reference = gather_logprobs(
        score(logits, "raw_logprobs" if is_normalized else "raw_logits"), tokens, count
    )
    torch.testing.assert_close(scored.logprobs, reference.logprobs)
    exact = logits.float()
    assert scored.ranks.tolist() == ((exact > exact.gather(1, tokens[:, None])).sum(1) + 1).tolist()
    order = torch.sort(exact, dim=1, descending=True, stable=True).indices[:, :count]
    assert scored.token_ids.equal(torch.cat([tokens[:, None], order], 1))


@pytest.mark.parametrize("options", covering(OPTIONS), ids=str)
def test_scores_ranks_and_alternatives_are_those_of_the_cpu(options):
    check(**options)


@pytest.mark.full
@settings(max_examples=40, deadline=None, phases=[Phase.explicit, Phase.generate])  # shrinking takes minutes
@given(
    st.fixed_dictionaries({name: st.sampled_from(values) for name, values in OPTIONS.items()}),
    st.integers(0, 2**20),
)
def test_random_logits_are_scored_as_by_the_cpu(options, seed):
    check(**options, seed=seed)


def test_only_the_given_rows_are_scored():
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(0))
    tokens = torch.tensor([1, 2, 3, 4])
    every = top_logprobs(logits, tokens, 3)
    out = top_logprobs(logits, tokens, 3)
    out.logprobs.fill_(7.0)
    rows = torch.tensor([2, -1, 0], dtype=torch.int32)
    some = top_logprobs(logits, tokens, 3, rows=rows, out=type(out)(*(each[:3] for each in out)))
    assert some.token_ids[[0, 2]].equal(every.token_ids[[2, 0]])
    assert some.logprobs[[0, 2]].equal(every.logprobs[[2, 0]])
    assert (some.logprobs[1] == 7.0).all()


def test_masked_tokens_come_last_and_by_id():
    logits = torch.full((1, 50), -INF)
    logits[0, 30], logits[0, 20] = 1.0, float("nan")
    scored = top_logprobs(logits, torch.tensor([20]), 3)
    assert scored.token_ids.tolist() == [[20, 30, 0, 1]]
    assert scored.logprobs.tolist() == [[-INF, 0.0, -INF, -INF]]
    assert scored.ranks.tolist() == [2]
    nothing = top_logprobs(torch.full((1, 50), -INF), torch.tensor([0]), 1)
    assert nothing.logprobs.tolist() == [[-INF, -INF]]


def test_processed_logits_are_scaled_and_cut():
    logits = torch.tensor([[4.0, 3.0, 3.0, 3.0, 1.0], [1.0, 2.0, 3.0, 4.0, 5.0], [0.0, 0.0, 0.0, 0.0, 9.0]])
    batch = device_batch(3, temperature=2.0, top_k=3)
    batch.temperature[1], batch.positions[2] = 0.0, -1
    cuts = Cuts(torch.empty(3), torch.empty(3, dtype=torch.int32))
    sample_tokens(logits, batch, cuts=cuts)
    out = cut_logits(logits, batch, cuts, out=torch.full((3, 5), 7.0))
    assert out.tolist() == [[2.0, 1.5, 1.5, -INF, -INF], logits[1].tolist(), [7.0] * 5]


def test_scoring_takes_two_launches():
    with recorded_launches() as launches:
        top_logprobs(torch.zeros(2, 9000), torch.zeros(2, dtype=torch.int64), 20)
    assert len(launches) == 2


def test_more_alternatives_than_the_kernels_find_are_refused():
    with pytest.raises(ValueError, match="use gather_logprobs"):
        top_logprobs(torch.zeros(1, 500), torch.zeros(1, dtype=torch.int64), 129)
