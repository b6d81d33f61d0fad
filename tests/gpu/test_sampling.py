import math

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from argosy_engine.triton_kernels import sampling
from argosy_engine.triton_kernels.launch import DeviceTraits, assume_device, launch, recorded_launches
from argosy_engine.triton_kernels.sampling import Cuts, exponential, sample_tokens
from gpu_sampling_reference import device_batch, kept_tokens, probabilities
from option_pairs import covering

NAN, INF = float("nan"), float("inf")


def no_cuts(rows):
    return Cuts(torch.full((rows,), NAN), torch.full((rows,), -1, dtype=torch.int32))


def kept_by(cuts, logits, row=0):
    x = torch.where(logits[row].isnan(), -INF, logits[row].float())
    ids = torch.arange(len(x))
    is_kept = (x > cuts.logits[row]) | ((x == cuts.logits[row]) & (ids <= cuts.token_ids[row]))
    return set(ids[is_kept & (x > -INF)].tolist())


def p_value(observed, expected):
    """Upper bound of the probability of a chi-square statistic as high as that of these counts (Laurent, Massart)."""
    statistic, freedom = float(((observed - expected) ** 2 / expected).sum()), len(observed) - 1
    excess = statistic - freedom
    if excess <= 0:
        return 1.0
    return math.exp(-(((math.sqrt(freedom + 2 * excess) - math.sqrt(freedom)) / 2) ** 2))


@pytest.mark.parametrize(
    ("row", "best"),
    [
        ([1.0, 3.0, 3.0, 2.0], 1),
        ([NAN, 1.0, NAN, 2.0], 3),
        ([-INF, -INF, -INF, -INF], 0),
        ([NAN, NAN, NAN, NAN], 0),
        ([1.0, INF, 2.0, INF], 1),
        ([-0.0, 0.0, -1.0, -2.0], 0),
    ],
)
def test_greedy_rows_take_the_best_token(row, best):
    for limits in ({}, {"top_k": 2, "top_p": 0.5}):
        batch = device_batch(1, temperature=0.0, **limits)
        assert sample_tokens(torch.tensor([row]), batch).tolist() == [best]


@pytest.mark.parametrize(
    ("row", "best"), [([-INF, -INF], 0), ([NAN, -INF], 0), ([1.0, INF, 2.0, INF], 1), ([3e38, 1.0], 0)]
)
@pytest.mark.filterwarnings("ignore:overflow")
def test_rows_whose_best_logit_is_infinite_are_greedy(row, best):
    for limits in ({}, {"top_k": 2, "top_p": 0.5}):
        batch = device_batch(1, temperature=0.5, **limits)
        assert sample_tokens(torch.tensor([row]), batch).tolist() == [best]


def test_the_best_token_is_found_in_any_part_of_the_vocabulary():
    logits = torch.randn(1, 2500, generator=torch.Generator().manual_seed(0)).repeat(6, 1).half()
    places = [0, 511, 512, 1024, 2047, 2499]
    for row, place in enumerate(places):
        logits[row, place:] = 20.0  # ties: the lowest id
    tokens = sample_tokens(logits, device_batch(6, temperature=0.0), has_limits=False)
    assert tokens.tolist() == places


OPTIONS = {
    "vocab_size": [1, 7, 300, 1023, 1300, 2500],
    "dtype": [torch.bfloat16, torch.float16, torch.float32],
    "temperature": [0.2, 1.0, 3.0],
    "top_k": [0, 1, 5, 400, 5000],
    "top_p": [1.0, 0.01, 0.4, 0.9, 0.9999],
    "min_p": [0.0, 0.03, 1.0],
    "is_coarse": [False, True],
}


def check_kept_tokens(vocab_size, dtype, temperature, top_k, top_p, min_p, is_coarse, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, vocab_size, generator=generator) * 4
    if is_coarse:
        logits = logits.round()  # many ties
    logits[torch.rand(1, vocab_size, generator=generator) < 0.1] = -INF
    logits[torch.rand(1, vocab_size, generator=generator) < 0.02] = NAN
    logits[0, seed % vocab_size] = 9.0
    logits = logits.to(dtype)
    limits = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    cuts = no_cuts(1)
    token = sample_tokens(logits, device_batch(1, seed=seed, **limits), cuts=cuts).item()
    kept = kept_by(cuts, logits)
    assert kept >= kept_tokens(logits[0], **limits, slack=-1e-5)
    assert kept <= kept_tokens(logits[0], **limits, slack=1e-5)
    assert token in kept


@pytest.mark.parametrize("options", covering(OPTIONS), ids=str)
def test_the_kept_tokens_are_those_of_a_sort(options):
    check_kept_tokens(**options)


@pytest.mark.full
@settings(max_examples=50, deadline=None, phases=[Phase.explicit, Phase.generate])  # shrinking takes minutes
@given(
    st.fixed_dictionaries({name: st.sampled_from(values) for name, values in OPTIONS.items()}),
    st.integers(0, 2**20),
)
def test_the_kept_tokens_of_random_logits_are_those_of_a_sort(options, seed):
    check_kept_tokens(**options, seed=seed)


def test_ties_at_the_cut_are_kept_by_id():
    logits = torch.zeros(2, 600)
    logits[:, 599] = 1.0
    batch = device_batch(2, top_k=4)
    batch.top_k[1], batch.top_p[1] = 0, (math.e + 9.5) / (math.e + 599)
    cuts = no_cuts(2)
    sample_tokens(logits, batch, cuts=cuts)
    assert kept_by(cuts, logits, 0) == {0, 1, 2, 599}
    assert kept_by(cuts, logits, 1) == {*range(10), 599}


def test_rows_with_more_candidates_than_the_buffer_holds_are_cut_and_drawn_alike(monkeypatch):
    logits = torch.randn(4, 1500, generator=torch.Generator().manual_seed(5)).bfloat16()
    batch = device_batch(4, top_p=0.9)
    batch.top_k[:] = torch.tensor([700, 0, 300, 0])
    batch.top_p[2], batch.min_p[3] = 1.0, 0.01
    results = []
    for capacity in (sampling.MAX_CANDIDATES, 16):
        monkeypatch.setattr(sampling, "MAX_CANDIDATES", capacity)
        cuts = no_cuts(4)
        tokens = sample_tokens(logits, batch, cuts=cuts)
        results.append((tokens.tolist(), cuts.logits.tolist(), cuts.token_ids.tolist()))
    assert results[0] == results[1]
    assert len(set(results[0][1])) > 1


def test_tokens_depend_on_neither_batch_nor_padding_nor_split():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(5, 3000, generator=generator) * 2
    batch = device_batch(5)
    batch.top_k[1], batch.top_p[2], batch.min_p[3], batch.temperature[4] = 20, 0.8, 0.02, 0.0
    batch.seeds[:] = torch.tensor([3, -4, 1 << 62, 0, 1])
    together = sample_tokens(logits, batch)
    names = list(type(batch).__slots__)
    order = [3, 0, 4, 2, 1]
    with assume_device(DeviceTraits(90, 1, 1 << 17)):  # one program per row instead of three
        padded = type(batch)(
            **{
                name: torch.cat([getattr(batch, name)[order], torch.ones(2)]).to(getattr(batch, name).dtype)
                for name in names
            }
        )
        padded.positions[5:] = -1
        wide = torch.full((7, 3100), NAN)
        wide[:5, :3000] = logits[order]
        tokens = sample_tokens(wide[:, :3000], padded)
    assert tokens.tolist() == [*together[order].tolist(), 0, 0]
    alone = type(batch)(**{name: getattr(batch, name)[:1] for name in names})
    assert sample_tokens(logits[:1], alone, has_limits=False).item() == together[0]


@triton.jit
def _write_noise(out_ptr, seed_ptr, num_positions, BLOCK: tl.constexpr):
    seed, ids = tl.load(seed_ptr), tl.arange(0, BLOCK)
    for position in range(num_positions):
        tl.store(out_ptr + position * BLOCK + ids, exponential(seed, 0 * seed + position, ids))


def noise(seed, positions=32, tokens=2048):
    out = torch.empty(positions, tokens)
    launch(
        _write_noise, (1,), out_ptr=out, seed_ptr=torch.tensor([seed]), num_positions=positions, BLOCK=tokens
    )
    return out.double()


def test_the_noise_is_exponential_and_independent():
    first, other = noise(7), noise(8)
    uniform = (-(-first).exp() + 1).flatten()
    counts = torch.histc(uniform, bins=64, min=0, max=1)
    assert p_value(counts, torch.full((64,), len(uniform) / 64)) > 1e-3
    lowest = torch.histc(uniform[uniform < 2**-6], bins=8, min=0, max=2**-6)
    assert p_value(lowest, lowest.mean().expand(8)) > 1e-3
    series = [first, other, first.roll(1, 0), first.roll(1, 1), first.roll(512, 1), first.roll(1024, 1)]
    correlation = torch.corrcoef(torch.stack([each.flatten() for each in series]))
    assert (correlation - torch.eye(len(series), dtype=torch.float64)).abs().max() < 5 / math.sqrt(
        len(uniform)
    )
    assert len(first.unique()) > 0.995 * first.numel()


def test_races_have_the_distribution_of_the_weights():
    weights = torch.tensor([0.5, 0.2, 0.1, 0.1, 0.05, 0.03, 0.015, 0.005], dtype=torch.float64)
    winners = (noise(1).reshape(-1, 8) / weights).argmin(1)
    assert p_value(winners.bincount(minlength=8), weights * len(winners)) > 1e-3


@pytest.mark.parametrize(
    ("limits", "rows"), [({}, 120), ({"top_k": 4, "top_p": 0.95, "temperature": 1.5}, 40)]
)
def test_tokens_have_the_distribution_of_the_kept_probabilities(limits, rows):
    logits = torch.tensor([1.0, 2.5, 2.0, -1.0, 0.5, 1.5, -INF, 1.0])
    limits = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **limits}
    kept = sorted(kept_tokens(logits, **limits, slack=0.0))
    expected = probabilities(logits, limits["temperature"])[kept]
    tokens = sample_tokens(logits.expand(rows, -1).contiguous(), device_batch(rows, seed=11, **limits))
    counts = tokens.bincount(minlength=8)
    assert counts[kept].sum() == rows
    assert p_value(counts[kept], expected / expected.sum() * rows) > 1e-3


def test_drawn_tokens_are_counted():
    logits = torch.randn(4, 40, generator=torch.Generator().manual_seed(2))
    counts = torch.zeros(3, 40, dtype=torch.int32)
    batch = device_batch(4)
    batch.positions[3] = -1
    entries = torch.tensor([2, -1, 0, 1], dtype=torch.int32)
    tokens = sample_tokens(logits, batch, has_limits=False, token_counts=counts, count_entries=entries)
    expected = torch.zeros_like(counts)
    expected[2, tokens[0]] = expected[0, tokens[2]] = 1
    assert counts.equal(expected)


def test_sampling_takes_at_most_four_launches():
    logits = torch.zeros(2, 3000)
    with recorded_launches() as launches:
        sample_tokens(logits, device_batch(2), has_limits=False)
    assert len(launches) == 2
    with recorded_launches() as launches:
        sample_tokens(logits, device_batch(2, top_k=3, top_p=0.5, min_p=0.1), cuts=no_cuts(2))
    assert len(launches) == 4


@pytest.mark.parametrize(("rows", "parts"), [(1, 149), (64, 15), (256, 9), (1024, 3), (4096, 1)])
def test_rows_are_split_among_fewer_programs_the_more_there_are(rows, parts):
    chunk = sampling.choose_chunk(rows, 151936, num_sms=132)
    assert chunk % 1024 == 0
    assert -(-151936 // chunk) == parts


def test_an_unusable_vocabulary_is_refused():
    with pytest.raises(ValueError, match="takes 1 to 4194304"):
        sample_tokens(torch.zeros(1, 0), device_batch(1))
