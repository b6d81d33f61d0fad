"""The sampling kernel against torch's path and against the definition in float64.

Both compute weights in float32 and sum them in float64, so a token may differ only where the uniform number, or a cut,
falls on a boundary between two tokens to within `CLOSE`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from argosy_engine.native import build
from argosy_engine.native.library import Kernels
from argosy_engine.sample import torch_sampler
from argosy_engine.sample.torch_sampler import SamplingBatch, uniform

HERE = [variant for variant in build.VARIANTS if variant.cpu_flags <= build.cpu_flags()]
pytestmark = pytest.mark.skipif(not HERE, reason="no variant of the kernels for this CPU")

CLOSE = 2e-6
"""Share of the probability by which a boundary may lie elsewhere: float32 weights, each within some 2e-7."""


@pytest.fixture(params=HERE, ids=lambda variant: variant.name)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernels]:
    loaded = Kernels(build.library_path(request.param))
    loaded.set_threads(3)
    yield loaded
    loaded.set_threads(1)


def by_torch(
    logits: torch.Tensor, batch: SamplingBatch, monkeypatch: pytest.MonkeyPatch
) -> NDArray[np.int64]:
    with monkeypatch.context() as patch:
        patch.setattr(torch_sampler, "kernels", lambda: None)
        return torch_sampler.sample(logits, batch).numpy()


def by_kernel(
    kernels: Kernels, logits: torch.Tensor, batch: SamplingBatch, monkeypatch: pytest.MonkeyPatch
) -> NDArray[np.int64]:
    with monkeypatch.context() as patch:
        patch.setattr(torch_sampler, "kernels", lambda: kernels)
        return torch_sampler.sample(logits, batch).numpy()


def make_batch(rng: np.random.Generator, count: int, vocab_size: int) -> SamplingBatch:
    """Every combination of cuts, and greedy rows among them."""

    def choose(*values: float) -> NDArray[np.float64]:
        return rng.choice(values, count)

    return SamplingBatch(
        temperature=choose(0.0, 0.3, 0.7, 1.0, 1.0, 2.0).astype(np.float32),
        top_p=choose(1.0, 1.0, 0.07, 0.53, 0.91, 0.9973).astype(np.float32),
        top_k=choose(0, 0, 1, 5, 40, 1023, 1500, vocab_size).astype(np.int64),
        min_p=choose(0.0, 0.0, 0.013, 0.37).astype(np.float32),
        seeds=rng.integers(0, 1 << 62, count),
        positions=rng.integers(0, 1 << 20, count),
    )


def make_logits(
    rng: np.random.Generator, kind: str, count: int, vocab_size: int, dtype: torch.dtype
) -> torch.Tensor:
    values = rng.standard_normal((count, vocab_size)) * rng.choice([0.1, 1.0, 3.0, 9.0], (count, 1))
    if kind == "ties":
        values = np.round(values * 2) / 2
    elif kind == "equal":
        values[:] = 1.5
    elif kind == "masked":
        values[rng.random((count, vocab_size)) < 0.9] = -np.inf
        values[:, -1] = 0.25
    elif kind == "one left":
        values[:, :-1] = -np.inf
    return torch.from_numpy(values).to(dtype)


def is_explained(token: int, logits: NDArray[np.float64], batch: SamplingBatch, row: int) -> bool:
    """Whether the definition gives this token for some uniform number, and some cuts, within CLOSE of the row's."""
    temperature = float(batch.temperature[row])
    if temperature == 0:
        return token == int(logits.argmax())
    probs = np.exp(logits / temperature - logits.max() / temperature)
    if not probs[token] > 0:
        return False
    top_k, top_p, min_p = int(batch.top_k[row]), float(batch.top_p[row]), float(batch.min_p[row])
    u = float(uniform(batch.seeds[row : row + 1], batch.positions[row : row + 1])[0])
    is_cut = top_p < 1 or top_k > 0
    order = np.argsort(-logits, kind="stable") if is_cut else np.arange(len(probs))
    for floor in {min_p * (1 - CLOSE), min_p * (1 + CLOSE)}:
        kept = np.where(probs < floor, 0.0, probs)[order]
        if top_k:
            kept[top_k:] = 0
        before = np.cumsum(kept) - kept
        for limit in {top_p - CLOSE, top_p + CLOSE} if top_p < 1 else {2.0}:
            nucleus = np.where((before < limit * kept.sum()) | (before == 0), kept, 0.0)
            ends = np.cumsum(nucleus) / nucleus.sum()
            place = int(np.flatnonzero(order == token)[0])
            start = ends[place - 1] if place else 0.0
            if nucleus[place] > 0 and start - CLOSE <= u <= ends[place] + CLOSE:
                return True
    return False


@pytest.mark.parametrize("kind", ["random", "ties", "equal", "masked", "one left"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_kernel_draws_what_torch_draws(
    kernels: Kernels, kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(11)
    num_rows = num_equal = 0
    for vocab_size, count in (
        (1, 8),
        (2, 20),
        (15, 60),
        (17, 60),
        (1000, 60),
        (1025, 60),
        (4096, 60),
        (151936, 6),
    ):
        logits = make_logits(rng, kind, count, vocab_size, dtype)
        batch = make_batch(rng, count, vocab_size)
        ours = by_kernel(kernels, logits, batch, monkeypatch)
        theirs = by_torch(logits, batch, monkeypatch)
        for row in np.flatnonzero(ours != theirs).tolist():
            values = logits[row].double().numpy()
            assert is_explained(int(ours[row]), values, batch, row), (vocab_size, row, ours[row], theirs[row])
            assert is_explained(int(theirs[row]), values, batch, row), (
                vocab_size,
                row,
                ours[row],
                theirs[row],
            )
        num_rows += count
        num_equal += int((ours == theirs).sum())
    assert num_equal >= num_rows - 1


def test_the_kernel_meets_the_definition(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(12)
    for kind in ("random", "ties", "masked"):
        logits = make_logits(rng, kind, 200, 700, torch.float32)
        batch = make_batch(rng, 200, 700)
        for row, token in enumerate(by_kernel(kernels, logits, batch, monkeypatch)):
            assert is_explained(int(token), logits[row].double().numpy(), batch, row)


def test_a_wrong_token_is_not_explained() -> None:
    rng = np.random.default_rng(13)
    batch = make_batch(rng, 100, 50)
    logits = rng.standard_normal((100, 50))
    explained = [
        sum(is_explained(token, logits[row], batch, row) for token in range(50)) for row in range(100)
    ]
    assert set(explained) == {1}


@pytest.mark.parametrize("value", [-np.inf, np.inf, np.nan])
def test_rows_without_a_distribution_still_give_a_token(
    kernels: Kernels, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(14)
    logits = torch.randn(64, 300)
    logits[::2] = value
    logits[1::4, 7] = value
    batch = make_batch(rng, 64, 300)
    tokens = by_kernel(kernels, logits, batch, monkeypatch)
    assert ((tokens >= 0) & (tokens < 300)).all()
    if value == -np.inf:
        assert (tokens[1::4] != 7).all()


def test_every_uniform_number_gives_a_possible_token(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = torch.full((3, 5000), float("-inf"))
    logits[:, 40] = logits[:, 60] = 0.0
    off = np.zeros(3, np.int64)
    batch = SamplingBatch(
        temperature=np.ones(3, np.float32),
        top_p=np.array([1, 0.99, 1], np.float32),
        top_k=np.array([0, 0, 9]),
        min_p=np.zeros(3, np.float32),
        seeds=off,
        positions=off,
    )
    for u, expected in ((0.0, 40), (0.5 - 2**-53, 40), (0.5, 60), (1 - 2**-53, 60)):
        monkeypatch.setattr(torch_sampler, "uniform", lambda seeds, _, u=u: np.full(len(seeds), u))
        assert by_kernel(kernels, logits, batch, monkeypatch).tolist() == [expected] * 3
        assert by_torch(logits, batch, monkeypatch).tolist() == [expected] * 3


@pytest.mark.parametrize("path", ["kernel", "torch"])
@pytest.mark.parametrize(
    "fault", ["all nan", "first block nan", "some nan", "inf", "all -inf", "nan and -inf"]
)
def test_a_row_that_is_not_finite_gets_some_token_and_its_neighbours_get_theirs(
    kernels: Kernels, path: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(4)
    count, vocab_size = 64, 3000
    batch, logits = (
        make_batch(rng, count, vocab_size),
        make_logits(rng, "random", count, vocab_size, torch.float32),
    )
    broken = logits.clone()
    odd = broken[1::2]
    if "-inf" in fault:
        odd[:] = -np.inf
    if fault == "all nan":
        odd[:] = np.nan
    elif fault == "first block nan":
        odd[:, :1024] = np.nan
    elif fault != "all -inf":
        odd[:, ::7] = np.inf if fault == "inf" else np.nan

    def draw_tokens(values: torch.Tensor) -> NDArray[np.int64]:
        if path == "torch":
            return by_torch(values, batch, monkeypatch)
        return by_kernel(kernels, values, batch, monkeypatch)

    sane, tokens = draw_tokens(logits.clone()), draw_tokens(broken)
    assert ((tokens >= 0) & (tokens < vocab_size)).all()
    assert (tokens[::2] == sane[::2]).all()
