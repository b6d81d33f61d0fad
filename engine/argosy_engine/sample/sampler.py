"""Sampler: logits to token ids for a whole batch.

Order as in vLLM: temperature, top-k, top-p, draw. The draw is an inverse CDF with one stateless uniform per row
(`noise`), so a row's token depends on its own logits, seed and position only, never on its neighbours.
Rows are split by kind; each kind is a pure function of its rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from argosy_engine.sample.noise import uniform

_CANDIDATES = 1024
"""Top-k and top-p first look at this many best tokens: a partial sort instead of a full one. Rows whose nucleus is
larger fall back to the full vocabulary."""


@dataclass(slots=True)
class SamplingBatch:
    """Parallel arrays, one entry per sampled row."""

    temperature: NDArray[np.float32]
    """0 means greedy"""
    top_p: NDArray[np.float32]
    top_k: NDArray[np.int64]
    """0 means off"""
    seeds: NDArray[np.int64]
    positions: NDArray[np.int64]
    """index in the sequence of the token being sampled"""


def sample(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Token ids int64 [R] for logits [R, vocab_size] of any float dtype."""
    is_random = batch.temperature > 0
    if not is_random.any():
        return logits.argmax(dim=-1)
    is_cut = is_random & ((batch.top_p < 1.0) | (batch.top_k > 0))
    is_plain = is_random & ~is_cut
    if is_plain.all():
        return _draw(_scaled_probs(logits, batch.temperature), batch)
    tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    for rows, kind in ((~is_random, _greedy), (is_plain, _plain), (is_cut, _cut)):
        if rows.any():
            index = torch.from_numpy(np.flatnonzero(rows)).to(logits.device)
            tokens[index] = kind(logits[index], _take(batch, rows))
    return tokens


def _take(batch: SamplingBatch, rows: NDArray[np.bool_]) -> SamplingBatch:
    return SamplingBatch(
        batch.temperature[rows],
        batch.top_p[rows],
        batch.top_k[rows],
        batch.seeds[rows],
        batch.positions[rows],
    )


def _greedy(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    return logits.argmax(dim=-1)


def _plain(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    return _draw(_scaled_probs(logits, batch.temperature), batch)


def _cut(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Top-k, then top-p over what is left; ties at the edge are broken by token id."""
    probs = _scaled_probs(logits, batch.temperature)
    vocab_size = probs.shape[-1]
    top_k = (
        torch.from_numpy(np.where(batch.top_k > 0, batch.top_k, vocab_size))
        .to(probs.device)
        .clamp_(max=vocab_size)
    )
    top_p = torch.from_numpy(batch.top_p).to(probs.device)
    values, tokens = _best(probs, min(_CANDIDATES, vocab_size))
    mass = values.sum(-1)
    if vocab_size > _CANDIDATES and bool(((top_k > _CANDIDATES) & (mass < top_p)).any()):
        values, tokens = _best(probs, vocab_size)
    rank = torch.arange(values.shape[-1], device=probs.device)
    values = values.masked_fill(rank >= top_k.unsqueeze(1), 0.0)
    before = values.cumsum(-1) - values
    kept_mass = values.sum(-1, keepdim=True)
    nucleus = before < top_p.unsqueeze(1) * torch.where(top_k.unsqueeze(1) < vocab_size, kept_mass, 1.0)
    values = torch.where(nucleus, values, 0.0)
    return tokens.gather(1, _draw(values, batch).unsqueeze(1)).squeeze(1)


def _best(probs: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` most probable tokens, best first, equal ones by id."""
    if count == probs.shape[-1]:
        values, tokens = torch.sort(probs, dim=-1, descending=True, stable=True)
        return values, tokens
    tokens = torch.topk(probs, count, dim=-1, sorted=False).indices.sort(dim=-1).values
    values, order = torch.sort(probs.gather(1, tokens), dim=-1, descending=True, stable=True)
    return values, tokens.gather(1, order)


def _scaled_probs(logits: torch.Tensor, temperature: NDArray[np.float32]) -> torch.Tensor:
    scale = torch.from_numpy(temperature).to(logits.device)
    return torch.softmax(logits.float() / scale.unsqueeze(1), dim=-1)


def _draw(probs: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Inverse CDF over unnormalised probabilities [R, N]: the first index whose cumulative sum exceeds u * total."""
    cumulative = probs.double().cumsum(-1)
    u = torch.from_numpy(uniform(batch.seeds, batch.positions)).to(probs.device)
    target = (u * cumulative[:, -1]).unsqueeze(1)
    index = torch.searchsorted(cumulative, target, right=True).squeeze(1)
    # u < 1, but rounding may put the target on the last sum: then the last token with any probability.
    last = cumulative.shape[-1] - 1 - (probs.flip(-1) > 0).int().argmax(-1)
    return torch.minimum(index, last)
