"""Sampler: turns logits into token ids for a whole batch.

The order is vLLM V1's (v1/sample/sampler.py): snapshot of the raw log probabilities, grammar mask, allowed_token_ids,
bad_words, min_tokens, logit_bias, penalties, custom processors (`--logits-processors`), then the draw
(`topk_topp_sampler`: temperature, min_p, top-k, top-p) and the log probabilities of the drawn tokens.

`Sampler` keeps each request's sampling state by slot. A step does only the work that its live requests need: an
all-greedy batch is one argmax.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from argosy_engine.params.sampling_params import SamplingParams
from argosy_engine.sample.logits_processor.builtin import AllowedTokenIds, BadWords, LogitBias, MinTokens
from argosy_engine.sample.logits_processor.interface import (
    Added,
    BatchUpdate,
    Ints,
    LogitsProcessor,
    ProcessorConfig,
    Rows,
)
from argosy_engine.sample.logits_processor.isolation import IsolatedProcessor
from argosy_engine.sample.logits_processor.penalties import Penalties
from argosy_engine.sample.logprobs import LogprobsTensors, gather_logprobs, score
from argosy_engine.sample.token_logprobs import LogprobsMode, TokenLogprobs
from argosy_engine.sample.topk_topp_sampler import SamplingBatch, processed_logits, sample


class GrammarMask(NamedTuple):
    """Tokens that grammars allow next, for the rows that have a grammar."""

    rows: Ints
    """[G], indices of rows of the logits."""
    bitmask: NDArray[np.int32]
    """[G, ceil(vocab_size / 32)]; token t is allowed if bit t % 32 of word t // 32 is set (xgrammar's layout)."""


class SampledLogprobs(NamedTuple):
    """Log probabilities of the N rows whose requests asked for them: parallel lists, tensors still on the device."""

    rows: list[int]
    counts: list[int]
    """Number of alternatives to report."""
    tensors: LogprobsTensors

    def by_row(self) -> dict[int, TokenLogprobs]:
        """Return the log probabilities by row. Waits for the device."""
        return dict(zip(self.rows, self.tensors.tolists(self.counts), strict=True))


class SamplerOutput(NamedTuple):
    token_ids: torch.Tensor
    """int64 [R], on the device."""
    logprobs: SampledLogprobs | None
    failed: dict[int, str]
    """Maps rows whose requests failed to the reason. Their tokens are meaningless."""


class SamplerOptions(NamedTuple):
    """Engine options that concern sampling."""

    model_path: str = ""
    vocab_size: int = 0
    logprobs_mode: LogprobsMode = "raw_logprobs"
    logits_processors: tuple[type[LogitsProcessor], ...] = ()


_DEFAULTS = SamplerOptions()


class Sampler:
    """Batched sampler; a request has a slot for as long as it runs.

    Args:
        token_ids: int32 [num_slots, max_len], every request's tokens so far. The owner keeps it up to date whenever
            `reads_tokens` is true.
        eos_token_ids: tokens that end a sequence, for min_tokens.

    Raises (from the constructor):
        ConfigError: a logits processor of the options cannot be constructed.
    """

    def __init__(
        self,
        token_ids: NDArray[np.int32],
        eos_token_ids: tuple[int, ...],
        device: torch.device,
        options: SamplerOptions = _DEFAULTS,
    ) -> None:
        num_slots = len(token_ids)
        self._num_slots = num_slots
        self._temperature = np.zeros(num_slots, np.float32)
        self._top_p = np.ones(num_slots, np.float32)
        self._top_k = np.zeros(num_slots, np.int64)
        self._min_p = np.zeros(num_slots, np.float32)
        self._seeds = np.zeros(num_slots, np.int64)
        self._num_logprobs = np.full(num_slots, -1, np.int64)
        self._logprobs_mode = options.logprobs_mode
        self._penalties = Penalties(num_slots, device)
        config = ProcessorConfig(options.model_path, options.vocab_size, eos_token_ids, token_ids, device)
        self._isolated = tuple(IsolatedProcessor(kind, config) for kind in options.logits_processors)
        self._processors: tuple[LogitsProcessor | IsolatedProcessor, ...] = (
            AllowedTokenIds(),
            BadWords(token_ids),
            MinTokens(eos_token_ids),
            LogitBias(),
            self._penalties,
            *self._isolated,
        )
        self._update = BatchUpdate()

    def add(self, slot: int, params: SamplingParams, token_ids: list[int], num_prompt_tokens: int) -> None:
        """Add a request in a slot, with its tokens so far."""
        self._temperature[slot] = 0.0 if params.is_greedy else params.temperature
        self._top_p[slot] = params.top_p
        self._top_k[slot] = max(params.top_k, 0)
        self._min_p[slot] = params.min_p
        self._seeds[slot] = params.seed or 0
        self._num_logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        self._update.added.append(Added(slot, params, token_ids, num_prompt_tokens))

    def remove(self, slot: int) -> None:
        """Remove the request in a slot."""
        self._flush_if_taken(slot)
        self._update.removed.append(slot)

    @property
    def reads_tokens(self) -> bool:
        """Whether the next call of `sample` reads the requests' latest tokens."""
        self._flush()
        return any(processor.reads_tokens for processor in self._processors if processor)

    def sample(
        self, logits: torch.Tensor, slots: Ints, positions: Ints, grammar: GrammarMask | None = None
    ) -> SamplerOutput:
        """Sample one token per row.

        Args:
            logits: [R, vocab_size] of any float dtype; may be changed in place.
            slots: [R], distinct slots.
            positions: [R], the index of the sampled token in its sequence.
        """
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
        logprobs = SampledLogprobs(with_logprobs.tolist(), wanted.tolist(), gathered)
        return SamplerOutput(tokens, logprobs, failed)

    def _failed(self, slots: Ints) -> dict[int, str]:
        """Return the rows for which a custom processor failed, with the reasons."""
        failures = {slot: why for processor in self._isolated for slot, why in processor.failures.items()}
        if not failures:
            return {}
        return {row: failures[slot] for row, slot in enumerate(slots.tolist()) if slot in failures}

    def _flush(self) -> None:
        if self._update:
            for processor in self._processors:
                processor.update_state(self._update)
            self._update = BatchUpdate()

    def _flush_if_taken(self, slot: int) -> None:
        """Flush if the slot's request was added since the last flush.

        An update applies removals before additions, so a request that came and left between two steps needs two.
        """
        if any(added.slot == slot for added in self._update.added):
            self._flush()


def apply_grammar(logits: torch.Tensor, grammar: GrammarMask) -> None:
    """Mask out all tokens that the grammars do not allow, in place."""
    device, vocab_size = logits.device, logits.shape[1]
    rows = torch.from_numpy(grammar.rows).to(device)
    words = torch.from_numpy(grammar.bitmask).to(device)
    bits = (words.unsqueeze(2) >> torch.arange(32, dtype=torch.int32, device=device)) & 1
    logits[rows] = logits[rows].masked_fill_(bits.flatten(1)[:, :vocab_size] == 0, float("-inf"))
