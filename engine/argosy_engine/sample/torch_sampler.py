"""TorchSampler: samples with torch operations, and with our CPU kernels where the logits are on a CPU.

Draws are temperature, min_p, top-k, top-p, then an inverse CDF with one stateless uniform number per row. A row's token
depends only on its own logits, parameters, seed and position, never on other rows. Without top-k and top-p the CDF runs
over the token ids; with either, over the tokens in descending order of their logits, ties by id. On a CPU one kernel
does all of this (native/src/sampling.h). The torch code here is its reference and runs on other devices, where it never
waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from argosy_engine.native.library import DTYPES, Kernels, kernels
from argosy_engine.params import SamplingParams
from argosy_engine.sample.builtin_processors import (
    AllowedTokenIds,
    BadWords,
    LogitBias,
    MinTokens,
    Penalties,
    ThinkingBudget,
)
from argosy_engine.sample.logits_processor import Ints, Rows
from argosy_engine.sample.sampler import (
    GrammarMask,
    SampledLogprobs,
    Sampler,
    SamplerOptions,
    SamplerOutput,
    gather_logprobs,
    score,
)

_DEFAULTS = SamplerOptions()


class TorchSampler(Sampler):
    """The sampler of CPUs, and the reference of the kernels."""

    def __init__(
        self,
        token_ids: NDArray[np.int32],
        eos_token_ids: tuple[int, ...],
        device: torch.device,
        options: SamplerOptions = _DEFAULTS,
    ) -> None:
        super().__init__(token_ids, eos_token_ids, device, options)
        num_slots = self._num_slots
        self._temperature = np.zeros(num_slots, np.float32)
        self._top_p = np.ones(num_slots, np.float32)
        self._top_k = np.zeros(num_slots, np.int64)
        self._min_p = np.zeros(num_slots, np.float32)
        self._seeds = np.zeros(num_slots, np.int64)
        self._penalties = Penalties(num_slots, device)
        self._processors = (
            AllowedTokenIds(),
            BadWords(token_ids),
            MinTokens(eos_token_ids),
            LogitBias(),
            self._penalties,
            *self._isolated,
            ThinkingBudget(token_ids),
        )

    def add(self, slot: int, params: SamplingParams, token_ids: list[int], num_prompt_tokens: int) -> None:
        self._temperature[slot] = 0.0 if params.is_greedy else params.temperature
        self._top_p[slot] = params.top_p
        self._top_k[slot] = max(params.top_k, 0)
        self._min_p[slot] = params.min_p
        self._seeds[slot] = params.seed or 0
        super().add(slot, params, token_ids, num_prompt_tokens)

    def stage(self, slots: Ints, positions: Ints) -> NDArray[np.int32]:
        return np.empty(0, np.int32)

    def sample(
        self,
        logits: torch.Tensor,
        slots: Ints,
        positions: Ints,
        grammar: GrammarMask | None = None,
        staged: torch.Tensor | None = None,
    ) -> SamplerOutput:
        self._flush()
        rows = Rows(slots, positions, self._num_slots)
        counts = self._num_logprobs[slots]
        with_logprobs = np.flatnonzero(counts >= 0)
        index = scores = None
        if len(with_logprobs):
            index = torch.from_numpy(with_logprobs).to(logits.device)
            if self._logprobs_mode.startswith("raw"):
                scores = score(logits[index], self._logprobs_mode)
        active = [processor for processor in self._processors if processor]
        if active or grammar is not None:
            logits = logits.float()
            if grammar is not None:
                apply_grammar(logits, grammar)
            for processor in active:
                processor.apply(logits, rows)
        batch = SamplingBatch(
            self._temperature[slots],
            self._top_p[slots],
            self._top_k[slots],
            self._min_p[slots],
            self._seeds[slots],
            positions,
        )
        tokens = sample(logits, batch)
        if self._penalties:
            self._penalties.observe(rows, tokens)
        failed = self._failed(slots)
        if index is None:
            return SamplerOutput(tokens, None, failed)
        if scores is None:
            scores = score(processed_logits(logits, batch)[index], self._logprobs_mode)
        wanted = counts[with_logprobs]
        gathered = gather_logprobs(scores, tokens[index], int(wanted.max()))
        gathered = self._with_chosen_tokens(gathered, slots[with_logprobs], scores.__getitem__)
        logprobs = SampledLogprobs(with_logprobs.tolist(), wanted.tolist(), gathered)
        return SamplerOutput(tokens, logprobs, failed)


def apply_grammar(logits: torch.Tensor, grammar: GrammarMask) -> None:
    """Mask out all tokens that the grammars do not allow, in place."""
    device, vocab_size = logits.device, logits.shape[1]
    rows = torch.from_numpy(grammar.rows).to(device)
    words = torch.from_numpy(grammar.bitmask).to(device)
    bits = (words.unsqueeze(2) >> torch.arange(32, dtype=torch.int32, device=device)) & 1
    logits[rows] = logits[rows].masked_fill_(bits.flatten(1)[:, :vocab_size] == 0, float("-inf"))


_CANDIDATES = 1024
"""On a CPU, top-k and top-p first consider only this many best tokens, which replaces a full sort by a partial one.
Rows whose nucleus is larger fall back to the full vocabulary. On other devices, finding such rows would wait for the
device, so all tokens are sorted there."""

_ENOUGH = 1 - 1e-6
"""Factor on top-p's threshold: tolerates a sum that falls short by rounding, which would otherwise decide how many of
several equally probable tokens are kept."""


@dataclass(slots=True)
class SamplingBatch:
    """Parallel arrays, one entry per sampled row."""

    temperature: NDArray[np.float32]
    """0: greedy."""
    top_p: NDArray[np.float32]
    top_k: Ints
    """0: off."""
    min_p: NDArray[np.float32]
    """0: off."""
    seeds: Ints
    positions: Ints
    """Index, in its sequence, of the token to sample."""


def sample(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Draw token ids, int64 [R], from logits [R, vocab_size] of any float dtype."""
    is_random = batch.temperature > 0
    if not is_random.any():
        return _greedy(logits, batch)
    if (loaded := _kernels(logits)) is not None:
        return loaded.sample(
            logits.contiguous(),
            batch.temperature,
            batch.top_p,
            batch.top_k,
            batch.min_p,
            uniform(batch.seeds, batch.positions),
        )
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
    loaded = _kernels(logits)
    return logits.argmax(dim=-1) if loaded is None else loaded.argmax(logits.contiguous())


def _kernels(logits: torch.Tensor) -> Kernels | None:
    """Return our kernels if they support these logits' device and dtype."""
    return kernels() if logits.device.type == "cpu" and logits.dtype in DTYPES else None


def _plain(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    return _draw(_probs(logits, batch), _noise(batch, logits.device))


def _cut(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Draw after top-k, then top-p over the remaining tokens. Ties at the boundary are broken by token id."""
    logits = logits.float()
    probs = _probs(logits, batch)
    vocab_size = probs.shape[-1]
    cuts = _cuts(probs, batch)
    u = _noise(batch, probs.device)
    count = min(_CANDIDATES, vocab_size) if logits.device.type == "cpu" else vocab_size
    best, ids = _best(logits, count)
    kept = _nucleus(probs.gather(1, ids), cuts)
    tokens = _draw_kept(kept, ids, u)
    if count < vocab_size:
        # If the last candidate or one of its ties is kept, tokens beyond the candidates may belong to the nucleus too.
        is_open = ((kept > 0) & (best == best[:, -1:])).any(-1) | ((cuts.top_k > count) & (cuts.mass < 0))
        if bool(is_open.any()):
            rest = is_open.nonzero().squeeze(1)
            _, ids = _best(logits[rest], vocab_size)
            kept = _nucleus(probs[rest].gather(1, ids), _Cuts(*(each[rest] for each in cuts)))
            tokens[rest] = _draw_kept(kept, ids, u[rest])
    return tokens


class _Cuts(NamedTuple):
    """Top-k and top-p limits as parallel tensors [R]."""

    top_k: torch.Tensor
    """vocab_size where top-k is off."""
    top_p: torch.Tensor
    mass: torch.Tensor
    """Total probability that top-p refers to; negative: the sum over the k best tokens."""


def _cuts(probs: torch.Tensor, batch: SamplingBatch) -> _Cuts:
    device, vocab_size = probs.device, probs.shape[-1]
    mass = torch.ones(len(probs), dtype=torch.float64, device=device)
    if (batch.min_p > 0.0).any():
        has_floor = torch.from_numpy(batch.min_p > 0.0).to(device)
        mass = torch.where(has_floor, probs.double().sum(-1), mass)  # rows without min_p keep exactly 1
    top_k = torch.from_numpy(np.where(batch.top_k > 0, batch.top_k, vocab_size)).to(device)
    # Top-p is a share of what top-k keeps, which `_nucleus` sums up.
    mass = torch.where(top_k < vocab_size, -1.0, mass)
    return _Cuts(top_k, torch.from_numpy(batch.top_p).to(device), mass)


def _nucleus(values: torch.Tensor, cuts: _Cuts) -> torch.Tensor:
    """Zero the probabilities that top-k and top-p drop, in candidates [R, N] sorted in descending order."""
    is_beyond = torch.arange(values.shape[-1], device=values.device) >= cuts.top_k.unsqueeze(1)
    values = values.masked_fill(is_beyond, 0.0)
    cumulative = values.double().cumsum(-1)
    limit = cuts.top_p * torch.where(cuts.mass < 0, cumulative[:, -1], cuts.mass) * _ENOUGH
    return torch.where(cumulative - values < limit.unsqueeze(1), values, 0.0)


def _draw_kept(kept: torch.Tensor, ids: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    return ids.gather(1, _draw(kept, u).unsqueeze(1)).squeeze(1)


def processed_logits(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Return the float32 logits [R, vocab_size] that `sample` draws from.

    They are divided by the temperature, and minus infinity where min_p, top-k or top-p drop a token. Greedy rows are
    unchanged.
    """
    is_random = batch.temperature > 0
    temperature = torch.from_numpy(np.where(is_random, batch.temperature, np.float32(1))).to(logits.device)
    processed = logits.float() / temperature.unsqueeze(1)
    is_cut = is_random & ((batch.top_p < 1.0) | (batch.top_k > 0) | (batch.min_p > 0.0))
    if is_cut.any():
        rows, cut = torch.from_numpy(np.flatnonzero(is_cut)).to(logits.device), _take(batch, is_cut)
        probs = _probs(logits[rows], cut)
        _, ids = _best(logits[rows].float(), probs.shape[-1])
        kept = torch.zeros_like(probs).scatter_(1, ids, _nucleus(probs.gather(1, ids), _cuts(probs, cut)))
        processed[rows] = processed[rows].masked_fill_(kept == 0.0, float("-inf"))
    return processed


def _best(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `count` best logits and their tokens in descending order, ties by id.

    If further tokens tie with the last one, which of them are included is unspecified.
    """
    if count == logits.shape[-1]:
        values, tokens = torch.sort(logits, dim=-1, descending=True, stable=True)
        return values, tokens
    tokens = torch.topk(logits, count, dim=-1, sorted=False).indices.sort(dim=-1).values
    values, order = torch.sort(logits.gather(1, tokens), dim=-1, descending=True, stable=True)
    return values, tokens.gather(1, order)


def _probs(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Return probabilities at the rows' temperatures, 0 where min_p drops a token."""
    temperature = torch.from_numpy(batch.temperature).to(logits.device)
    probs = torch.softmax(logits.float() / temperature.unsqueeze(1), dim=-1)
    if (batch.min_p > 0.0).any():
        share = torch.from_numpy(batch.min_p).to(logits.device)
        probs = torch.where(probs < share.unsqueeze(1) * probs.amax(-1, keepdim=True), 0.0, probs)
    return probs


def _noise(batch: SamplingBatch, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(uniform(batch.seeds, batch.positions)).to(device)


def _draw(probs: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Apply the inverse CDF of unnormalised probabilities [R, N]: the first index whose cumulative sum exceeds
    u * total."""
    cumulative = probs.double().cumsum(-1)
    target = (u * cumulative[:, -1]).unsqueeze(1)
    index = torch.searchsorted(cumulative, target, right=True).squeeze(1)
    # u < 1, but rounding may make the target equal to the last sum; then take the last token with any probability.
    last = cumulative.shape[-1] - 1 - (probs.flip(-1) > 0).int().argmax(-1)
    return torch.minimum(index, last)


_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def uniform(seeds: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return uniform numbers in [0, 1) for parallel arrays of seeds and token positions (prompt included).

    There is no generator state, so a seeded request draws the same noise in any batch, after a preemption, and on
    another replica that resumes it. The mixing function is SplitMix64 (Steele, Lea, Flood 2014).
    """
    with np.errstate(over="ignore"):
        state = _mix(seeds.astype(np.uint64) + _GAMMA) ^ (positions.astype(np.uint64) * _GAMMA)
        bits = _mix(state + _GAMMA)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))
