"""Sampler: logits to token ids for a whole batch.

Order as in vLLM V1 (v1/sample/sampler.py): snapshot of the raw log probabilities, grammar mask, allowed ids, bad
words, min_tokens, logit_bias, penalties, temperature, min_p, top-k, top-p, draw, then the log probabilities of what
was drawn. The draw is an inverse CDF with one stateless uniform per row (`noise`), so a row's token depends on its
own logits, parameters, seed and position only, never on its neighbours.

`Sampler` keeps what lives as long as a request, by slot; `sample` is the pure part behind it. A step pays only for
what its live requests use: an all-greedy batch is one argmax.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from argosy_engine.native.library import DTYPES, kernels
from argosy_engine.sample.logits_processors import (
    Added,
    AllowedTokenIds,
    BadWords,
    BatchUpdate,
    Ints,
    LogitBias,
    LogitsProcessor,
    MinTokens,
    Rows,
)
from argosy_engine.sample.logprobs import gather_logprobs
from argosy_engine.sample.noise import uniform
from argosy_engine.sample.params import SamplingParams
from argosy_engine.sample.penalties import Penalties
from argosy_engine.sample.token_logprobs import TokenLogprobs

_CANDIDATES = 1024
"""Top-k and top-p first look at this many best tokens: a partial sort instead of a full one. Rows whose nucleus is
larger fall back to the full vocabulary."""


class GrammarMask(NamedTuple):
    """What grammars allow next, for the rows that have one."""

    rows: Ints
    """[G] indices into the rows of the logits"""
    bitmask: NDArray[np.int32]
    """[G, ceil(vocab_size / 32)], token t allowed if bit t % 32 of word t // 32 is set (xgrammar's layout)"""


class SamplerOutput(NamedTuple):
    token_ids: torch.Tensor
    """int64 [R]"""
    logprobs: list[TokenLogprobs | None] | None
    """Per row, where its request asked for them; None if no row did."""


class Sampler:
    """
    Args:
        token_ids: int32 [num_slots, max_len], every request's tokens so far, kept current by the owner.
        eos_token_ids: what ends a sequence, for min_tokens.
    """

    def __init__(
        self, token_ids: NDArray[np.int32], eos_token_ids: tuple[int, ...], device: torch.device
    ) -> None:
        num_slots = len(token_ids)
        self._num_slots = num_slots
        self._temperature = np.zeros(num_slots, np.float32)
        self._top_p = np.ones(num_slots, np.float32)
        self._top_k = np.zeros(num_slots, np.int64)
        self._min_p = np.zeros(num_slots, np.float32)
        self._seeds = np.zeros(num_slots, np.int64)
        self._num_logprobs = np.full(num_slots, -1, np.int64)
        self._penalties = Penalties(num_slots, device)
        self._processors: tuple[LogitsProcessor, ...] = (
            AllowedTokenIds(),
            BadWords(token_ids),
            MinTokens(eos_token_ids),
            LogitBias(),
            self._penalties,
        )
        self._update = BatchUpdate()

    def add(self, slot: int, params: SamplingParams, token_ids: list[int], num_prompt_tokens: int) -> None:
        """A request takes a slot, with the tokens it has so far."""
        self._temperature[slot] = 0.0 if params.is_greedy else params.temperature
        self._top_p[slot] = params.top_p
        self._top_k[slot] = max(params.top_k, 0)
        self._min_p[slot] = params.min_p
        self._seeds[slot] = params.seed or 0
        self._num_logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        self._update.added.append(Added(slot, params, token_ids, num_prompt_tokens))

    def remove(self, slot: int) -> None:
        """A request gives its slot back."""
        self._flush_if_taken(slot)
        self._update.removed.append(slot)

    def sample(
        self, logits: torch.Tensor, slots: Ints, positions: Ints, grammar: GrammarMask | None = None
    ) -> SamplerOutput:
        """One token per row.

        Args:
            logits: [R, vocab_size] of any float dtype; may be changed.
            slots: [R] distinct slots.
            positions: [R] index in its sequence of the token that is sampled.
        """
        self._flush()
        rows = Rows(slots, positions, self._num_slots)
        counts = self._num_logprobs[slots]
        with_logprobs = np.flatnonzero(counts >= 0)
        raw = None
        if len(with_logprobs):
            index = torch.from_numpy(with_logprobs).to(logits.device)
            raw = logits[index].float().log_softmax(-1)
        active = [processor for processor in self._processors if processor]
        if active or grammar is not None:
            logits = logits.float()
            if grammar is not None:
                apply_grammar(logits, grammar)
            for processor in active:
                processor.apply(logits, rows)
        tokens = sample(
            logits,
            SamplingBatch(
                self._temperature[slots],
                self._top_p[slots],
                self._top_k[slots],
                self._min_p[slots],
                self._seeds[slots],
                positions,
            ),
        )
        if self._penalties:
            self._penalties.observe(rows, tokens)
        if raw is None:
            return SamplerOutput(tokens, None)
        wanted = counts[with_logprobs]
        gathered = gather_logprobs(raw, tokens[index], int(wanted.max())).tolists(wanted.tolist())
        logprobs: list[TokenLogprobs | None] = [None] * len(slots)
        for row, entry in zip(with_logprobs.tolist(), gathered, strict=True):
            logprobs[row] = entry
        return SamplerOutput(tokens, logprobs)

    def _flush(self) -> None:
        if self._update:
            for processor in self._processors:
                processor.update(self._update)
            self._update = BatchUpdate()

    def _flush_if_taken(self, slot: int) -> None:
        """An update holds removals before additions: a request that came and went between two steps needs two."""
        if any(added.slot == slot for added in self._update.added):
            self._flush()


def apply_grammar(logits: torch.Tensor, grammar: GrammarMask) -> None:
    """Makes everything impossible that the grammars do not allow; in place."""
    device, vocab_size = logits.device, logits.shape[1]
    rows = torch.from_numpy(grammar.rows).to(device)
    words = torch.from_numpy(grammar.bitmask).to(device)
    bits = (words.unsqueeze(2) >> torch.arange(32, dtype=torch.int32, device=device)) & 1
    logits[rows] = logits[rows].masked_fill_(bits.flatten(1)[:, :vocab_size] == 0, float("-inf"))


@dataclass(slots=True)
class SamplingBatch:
    """Parallel arrays, one entry per sampled row."""

    temperature: NDArray[np.float32]
    """0 means greedy"""
    top_p: NDArray[np.float32]
    top_k: Ints
    """0 means off"""
    min_p: NDArray[np.float32]
    """0 means off"""
    seeds: Ints
    positions: Ints
    """index in the sequence of the token being sampled"""


def sample(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Token ids int64 [R] for logits [R, vocab_size] of any float dtype: temperature, min_p, top-k, top-p, draw."""
    is_random = batch.temperature > 0
    if not is_random.any():
        return _greedy(logits, batch)
    is_cut = is_random & ((batch.top_p < 1.0) | (batch.top_k > 0))
    is_plain = is_random & ~is_cut
    if is_plain.all():
        return _plain(logits, batch)
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
        batch.min_p[rows],
        batch.seeds[rows],
        batch.positions[rows],
    )


def _greedy(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    if logits.device.type == "cpu" and logits.dtype in DTYPES and (loaded := kernels()) is not None:
        return loaded.argmax(logits.contiguous())
    return logits.argmax(dim=-1)


def _plain(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    return _draw(_probs(logits, batch), _noise(batch, logits.device))


def _cut(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Top-k, then top-p over what is left; ties at the edge are broken by token id."""
    device = logits.device
    probs = _probs(logits, batch)
    vocab_size = probs.shape[-1]
    mass = torch.ones(len(probs), dtype=torch.float64, device=device)
    if (batch.min_p > 0.0).any():
        has_floor = torch.from_numpy(batch.min_p > 0.0).to(device)
        mass = torch.where(has_floor, probs.double().sum(-1), mass)  # a row's mass is its own affair
    top_k = torch.from_numpy(np.where(batch.top_k > 0, batch.top_k, vocab_size)).to(device)
    top_p = torch.from_numpy(batch.top_p).to(device)
    u = _noise(batch, device)
    values, ids = _best(probs, min(_CANDIDATES, vocab_size))
    # Of what top-k keeps, top-p takes its share; unless top-k is off, that mass is that of the k best.
    mass = torch.where(top_k < vocab_size, -1.0, mass)
    tokens = _draw_nucleus(values, ids, top_k, top_p, mass, u)
    if vocab_size > _CANDIDATES:
        is_larger = (top_k > _CANDIDATES) & ((mass < 0) | (values.double().sum(-1) < top_p * mass))
        if bool(is_larger.any()):
            rest = is_larger.nonzero().squeeze(1)
            values, ids = _best(probs[rest], vocab_size)
            tokens[rest] = _draw_nucleus(values, ids, top_k[rest], top_p[rest], mass[rest], u[rest])
    return tokens


def _draw_nucleus(
    values: torch.Tensor,
    ids: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    mass: torch.Tensor,
    u: torch.Tensor,
) -> torch.Tensor:
    """Draws from sorted candidates [R, N]. `mass` is what top-p is a share of; below 0, the mass of the k best."""
    is_beyond = torch.arange(values.shape[-1], device=values.device) >= top_k.unsqueeze(1)
    values = values.masked_fill(is_beyond, 0.0)
    cumulative = values.double().cumsum(-1)
    limit = top_p * torch.where(mass < 0, cumulative[:, -1], mass)
    values = torch.where(cumulative - values < limit.unsqueeze(1), values, 0.0)
    return ids.gather(1, _draw(values, u).unsqueeze(1)).squeeze(1)


def _best(probs: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` most probable tokens, best first, equal ones by id."""
    if count == probs.shape[-1]:
        values, tokens = torch.sort(probs, dim=-1, descending=True, stable=True)
        return values, tokens
    tokens = torch.topk(probs, count, dim=-1, sorted=False).indices.sort(dim=-1).values
    values, order = torch.sort(probs.gather(1, tokens), dim=-1, descending=True, stable=True)
    return values, tokens.gather(1, order)


def _probs(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Probabilities at the rows' temperatures, 0 where min_p drops a token."""
    temperature = torch.from_numpy(batch.temperature).to(logits.device)
    probs = torch.softmax(logits.float() / temperature.unsqueeze(1), dim=-1)
    if (batch.min_p > 0.0).any():
        share = torch.from_numpy(batch.min_p).to(logits.device)
        probs = torch.where(probs < share.unsqueeze(1) * probs.amax(-1, keepdim=True), 0.0, probs)
    return probs


def _noise(batch: SamplingBatch, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(uniform(batch.seeds, batch.positions)).to(device)


def _draw(probs: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Inverse CDF over unnormalised probabilities [R, N]: the first index whose cumulative sum exceeds u * total."""
    cumulative = probs.double().cumsum(-1)
    target = (u * cumulative[:, -1]).unsqueeze(1)
    index = torch.searchsorted(cumulative, target, right=True).squeeze(1)
    # u < 1, but rounding may put the target on the last sum: then the last token with any probability.
    last = cumulative.shape[-1] - 1 - (probs.flip(-1) > 0).int().argmax(-1)
    return torch.minimum(index, last)
