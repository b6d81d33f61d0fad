"""The sampler: distributions, top-k and top-p, and independence of rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from argosy_engine.sample.torch_sampler import SamplingBatch, sample, uniform


def batch(
    count: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    seed: int = 1,
) -> SamplingBatch:
    """`count` rows that differ only in their position."""
    return SamplingBatch(
        np.full(count, temperature, np.float32),
        np.full(count, top_p, np.float32),
        np.full(count, top_k, np.int64),
        np.full(count, min_p, np.float32),
        np.full(count, seed, np.int64),
        np.arange(count, dtype=np.int64),
    )


def frequencies(probs: list[float], count: int, **params: float) -> list[float]:
    logits = torch.tensor(probs).log().expand(count, -1)
    tokens = sample(logits, batch(count, **params))  # type: ignore[arg-type]
    return (torch.bincount(tokens, minlength=len(probs)) / count).tolist()


def test_noise_is_uniform_and_differs_by_seed_and_position() -> None:
    positions = np.arange(20000)
    draws = uniform(np.full(20000, 5), positions)
    assert draws.min() >= 0.0
    assert draws.max() < 1.0
    assert abs(draws.mean() - 0.5) < 0.01
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.03
    assert not (uniform(np.full(100, 5), positions[:100]) == uniform(np.full(100, 6), positions[:100])).any()
    assert len(set(uniform(np.arange(1000) - 500, np.zeros(1000, np.int64)).tolist())) == 1000


def test_greedy_takes_the_best() -> None:
    logits = torch.randn(5, 50)
    assert torch.equal(sample(logits, batch(5, temperature=0.0)), logits.argmax(-1))


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, [0.5, 0.3, 0.15, 0.05]),
        ({"temperature": 0.5}, [0.25 / 0.365, 0.09 / 0.365, 0.0225 / 0.365, 0.0025 / 0.365]),
        ({"top_k": 2}, [0.625, 0.375, 0.0, 0.0]),
        ({"top_p": 0.8}, [0.625, 0.375, 0.0, 0.0]),
        ({"top_p": 0.81}, [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0.0]),
        ({"top_k": 3, "top_p": 0.6}, [0.625, 0.375, 0.0, 0.0]),
        ({"top_k": 1}, [1.0, 0.0, 0.0, 0.0]),
        ({"min_p": 0.35}, [0.625, 0.375, 0.0, 0.0]),
        ({"min_p": 1.0}, [1.0, 0.0, 0.0, 0.0]),
        # min_p leaves 0.95, of which 0.85 are 0.8075: the first two have less.
        ({"min_p": 0.2, "top_p": 0.85}, [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0.0]),
        ({"min_p": 0.2, "top_p": 0.84}, [0.625, 0.375, 0.0, 0.0]),
        ({"min_p": 0.4, "top_k": 3}, [0.625, 0.375, 0.0, 0.0]),
    ],
)
def test_draws_follow_the_cut_distribution(params: dict[str, float], expected: list[float]) -> None:
    for got, want in zip(frequencies([0.5, 0.3, 0.15, 0.05], 20000, **params), expected, strict=True):
        assert abs(got - want) < 0.015
        assert (got == 0.0) == (want == 0.0)


def test_a_row_does_not_depend_on_its_batch() -> None:
    torch.manual_seed(0)
    logits = torch.randn(40, 3000)
    mixed = SamplingBatch(
        np.tile(np.array([0.0, 1.0, 0.7, 1.3], np.float32), 10),
        np.tile(np.array([1.0, 1.0, 0.9, 0.5], np.float32), 10),
        np.tile(np.array([0, 0, 0, 20], np.int64), 10),
        np.tile(np.array([0.0, 0.0, 0.0, 0.0, 0.1], np.float32), 8),
        np.arange(40, dtype=np.int64) * 977,
        np.arange(40, dtype=np.int64),
    )
    together = sample(logits, mixed).tolist()
    alone = [
        sample(
            logits[i : i + 1],
            SamplingBatch(
                *(
                    getattr(mixed, f)[i : i + 1]
                    for f in ("temperature", "top_p", "top_k", "min_p", "seeds", "positions")
                )
            ),
        ).item()
        for i in range(40)
    ]
    assert together == alone


def test_a_nucleus_beyond_the_candidates_falls_back_to_the_whole_vocabulary() -> None:
    tokens = sample(torch.zeros(1000, 1500), batch(1000, top_p=0.99))
    assert tokens.max() > 1400  # a nucleus of 1024 candidates could not reach past id 1023 among equals
    assert tokens.max() < 1488


@pytest.mark.parametrize("params", [{"top_k": 1200}, {"min_p": 0.5, "top_p": 0.99}])
def test_cuts_beyond_the_candidates_are_exact(params: dict[str, float]) -> None:
    logits = torch.zeros(1000, 1500)
    logits[:, 1200:] = -2.0
    tokens = sample(logits, batch(1000, **params))  # type: ignore[arg-type]
    assert 1150 < tokens.max() < 1200


def test_rounding_never_gives_an_impossible_token() -> None:
    logits = torch.full((2000, 8), float("-inf"))
    logits[:, 2:4] = 0.0
    assert set(sample(logits, batch(2000)).tolist()) == {2, 3}
