"""TorchSampler: samples with torch operations, and with our CPU kernels where the logits are on a CPU."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from argosy_engine.params.sampling_params import SamplingParams
from argosy_engine.sample.logits_processor.builtin import AllowedTokenIds, BadWords, LogitBias, MinTokens
from argosy_engine.sample.logits_processor.interface import Ints, Rows
from argosy_engine.sample.logits_processor.penalties import Penalties
from argosy_engine.sample.logits_processor.thinking_budget import ThinkingBudget
from argosy_engine.sample.logprobs import gather_logprobs, score
from argosy_engine.sample.sampler import GrammarMask, SampledLogprobs, Sampler, SamplerOptions, SamplerOutput
from argosy_engine.sample.topk_topp_sampler import SamplingBatch, processed_logits, sample

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
