"""Sampler: the interface of what turns logits into token ids for a whole batch, and the state that its kinds share.

There are two. `torch_sampler` runs torch operations, and our CPU kernels where the logits are on a CPU.
`kernel_sampler` runs our Triton kernels. Both work in the order of vLLM V1 (v1/sample/sampler.py): snapshot of the raw
log probabilities, grammar mask, allowed_token_ids, bad_words, min_tokens, logit_bias, penalties, custom processors
(`--logits-processors`), thinking_token_budget, then the draw (temperature, min_p, top-k, top-p) and the log
probabilities of the drawn tokens.
Their greedy tokens are the same. The same seed draws other tokens, because the inverse CDF of the one needs tokens in
an order, which takes a sort (`triton_kernels/sampling.py`).

A sampler keeps each request's sampling state by slot. A step does only the work that its live requests need: an
all-greedy batch is one argmax.

Before the kernels are trusted, `self_test` compares them with torch's sampler on the device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib import import_module
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from argosy_engine.errors import ConfigError
from argosy_engine.params import SamplingParams
from argosy_engine.sample.builtin_processors import IsolatedProcessor
from argosy_engine.sample.logits_processor import Added, BatchUpdate, Ints, LogitsProcessor, ProcessorConfig
from argosy_engine.sample.token_logprobs import LogprobsMode, TokenLogprobs

SamplerKind = Literal["torch", "kernels"]


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
    kind: SamplerKind = "torch"


def make_sampler(
    token_ids: NDArray[np.int32],
    eos_token_ids: tuple[int, ...],
    device: torch.device,
    options: SamplerOptions,
) -> Sampler:
    """Make a sampler of the kind that the options name; see `Sampler` for the arguments.

    Raises:
        ConfigError: a logits processor of the options cannot be constructed.
    """
    module, _, name = _KINDS[options.kind].partition(":")
    kind: type[Sampler] = getattr(import_module(f"argosy_engine.sample.{module}"), name)
    return kind(token_ids, eos_token_ids, device, options)


_KINDS = {"torch": "torch_sampler:TorchSampler", "kernels": "kernel_sampler:KernelSampler"}
"""module:class; only those who use the kernels need triton."""


class Sampler(ABC):
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
        options: SamplerOptions,
    ) -> None:
        self._num_slots = len(token_ids)
        self._num_logprobs = np.full(self._num_slots, -1, np.int64)
        self._chosen_ids: dict[int, tuple[int, ...]] = {}
        """By slot, the tokens that are scored instead of the best ones."""
        self._logprobs_mode = options.logprobs_mode
        config = ProcessorConfig(options.model_path, options.vocab_size, eos_token_ids, token_ids, device)
        self._isolated = tuple(IsolatedProcessor(kind, config) for kind in options.logits_processors)
        self._processors: tuple[LogitsProcessor | IsolatedProcessor, ...] = self._isolated
        """All that want to hear of requests, in the order in which they change logits."""
        self._update = BatchUpdate()

    def add(self, slot: int, params: SamplingParams, token_ids: list[int], num_prompt_tokens: int) -> None:
        """Add a request in a slot, with its tokens so far."""
        self._num_logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        self._chosen_ids.pop(slot, None)
        if params.logprob_token_ids:
            self._chosen_ids[slot] = params.logprob_token_ids
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

    @abstractmethod
    def stage(self, slots: Ints, positions: Ints) -> NDArray[np.int32]:
        """Return what `sample` needs on the device for these rows, for the caller to copy with the rest of a step.

        The length, 0 for a sampler that needs nothing, depends on the number of rows only.

        Args:
            slots: [R]; a slot may have several rows.
            positions: [R]; see `sample`.
        """

    @abstractmethod
    def sample(
        self,
        logits: torch.Tensor,
        slots: Ints,
        positions: Ints,
        grammar: GrammarMask | None = None,
        staged: torch.Tensor | None = None,
    ) -> SamplerOutput:
        """Sample one token per row.

        Args:
            logits: [R, vocab_size] of any float dtype; may be changed in place.
            slots: [R], distinct slots.
            positions: [R], the index of the sampled token in its sequence; -1: padding.
            staged: what `stage` returned for these rows, int32 on the device, 16-byte aligned. None: copy it now.
        """

    def _with_chosen_tokens(
        self, best: LogprobsTensors, slots: Ints, scores: Callable[[torch.Tensor], torch.Tensor]
    ) -> LogprobsTensors:
        """Return log probabilities in which `logprob_token_ids` have replaced the best tokens.

        Args:
            best: of N tokens, each with as many alternatives as any of them asks for.
            slots: [N], whose tokens these are.
            scores: returns the scores [n, vocab_size] of some of the N tokens, given by index.
        """
        entries = {
            row: self._chosen_ids[slot] for row, slot in enumerate(slots.tolist()) if slot in self._chosen_ids
        }
        if not entries:
            return best
        width = best.token_ids.shape[1] - 1
        ids = torch.tensor(
            [[*chosen, *[0] * (width - len(chosen))] for chosen in entries.values()],
            device=best.token_ids.device,
        )
        rows = torch.tensor(list(entries), device=ids.device)
        best.token_ids[rows, 1:] = ids.to(best.token_ids.dtype)
        best.logprobs[rows, 1:] = scores(rows).gather(1, ids)
        return best

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


_MAX_LOGITS_BYTES = 64 << 20
"""Bytes of logits computed at a time for prompt positions: a long prompt's logits can take gigabytes."""


def score(logits: torch.Tensor, mode: LogprobsMode) -> torch.Tensor:
    """Return the scores to report for logits [N, vocab_size], in float32: the logits or their log probabilities."""
    return logits.float() if mode.endswith("logits") else logits.float().log_softmax(-1)


class LogprobsTensors(NamedTuple):
    """Scores of N tokens with k alternatives each."""

    token_ids: torch.Tensor
    """int64 [N, 1 + k]"""
    logprobs: torch.Tensor
    """float32 [N, 1 + k]"""
    ranks: torch.Tensor
    """int64 [N]"""

    def tolists(self, counts: list[int]) -> list[TokenLogprobs]:
        """Return one entry per token, with `counts` alternatives each. Waits for the device."""
        ids, values, ranks = self.token_ids.tolist(), self.logprobs.tolist(), self.ranks.tolist()
        return [
            TokenLogprobs(ids[row][: count + 1], values[row][: count + 1], ranks[row])
            for row, count in enumerate(counts)
        ]


def gather_logprobs(logprobs: torch.Tensor, token_ids: torch.Tensor, count: int) -> LogprobsTensors:
    """Gather the scores of the tokens [N] and of the `count` best tokens from float32 scores [N, vocab_size]."""
    chosen = logprobs.gather(1, token_ids.unsqueeze(1))
    ranks = (logprobs > chosen).sum(1) + 1
    best = torch.topk(logprobs, min(count, logprobs.shape[1]), dim=1)
    return LogprobsTensors(
        torch.cat([token_ids.unsqueeze(1), best.indices], 1), torch.cat([chosen, best.values], 1), ranks
    )


def score_prompt(
    compute_logits: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    token_ids: torch.Tensor,
    count: int,
    vocab_size: int,
    mode: LogprobsMode,
) -> list[TokenLogprobs]:
    """Compute the log probabilities of prompt tokens.

    Args:
        hidden: [N, hidden_size], the hidden states at the positions before the tokens.
        token_ids: int64 [N].
        count: alternatives per token.
        mode: `processed` is the same as `raw` here, because a prompt's logits are not processed.
    """
    size = max(_MAX_LOGITS_BYTES // (4 * vocab_size), 1)
    scored: list[TokenLogprobs] = []
    for part, tokens in zip(hidden.split(size), token_ids.split(size), strict=True):
        scores = score(compute_logits(part), mode)
        scored += gather_logprobs(scores, tokens, count).tolists([count] * len(tokens))
    return scored


_PROMPT, _OUTPUT = [0, 1, 1], [1, 2]
_BIAS = {0: -2.0, 1: 1.5}
_ALLOWED = tuple(range(1, 256, 3))
_REQUESTS = (
    SamplingParams(temperature=0.0, logprobs=5),
    SamplingParams(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2),
    SamplingParams(temperature=0.0, logit_bias=_BIAS, min_tokens=8, logprobs=0),
    SamplingParams(temperature=0.0, allowed_token_ids=_ALLOWED, logprobs=2),
    SamplingParams(temperature=0.7, top_k=1, seed=1),
    SamplingParams(temperature=0.7, top_p=1e-6, min_p=0.5, seed=2, logprobs=1),
)
_BEST = 40.0
"""How far the best logit of a row is above the second, so that limits keep it alone in any dtype."""
_NUM_BEST = 42
_LEAST_VOCABULARY = 6 * _NUM_BEST + 4
_TOLERANCE = 1e-3


@torch.inference_mode()
def self_test(options: SamplerOptions, dtype: torch.dtype, device: torch.device) -> str | None:
    """Sample a small step with both samplers and return why the kernels must not be used, or None.

    A driver, a compiler or a device may do what no test on another machine has seen. Greedy tokens and log
    probabilities must be torch's; a row with limits must draw what torch keeps. Vocabularies of fewer than 256 tokens
    are not tested.

    Raises:
        ConfigError: the kernels have left the device unusable for this process.
    """
    if options.vocab_size < _LEAST_VOCABULARY:
        return None
    try:
        ours = _outputs(options._replace(kind="kernels"), dtype, device)
    except Exception as error:  # whatever a compiler or a driver raise
        reason = f"it failed with {type(error).__name__}: {str(error)[:300]}"
        _check_usable(device, reason)
        return reason
    for mine, torchs in zip(ours, _outputs(options._replace(kind="torch"), dtype, device), strict=True):
        if mine.token_ids.tolist() != torchs.token_ids.tolist():
            return f"it draws {mine.token_ids.tolist()} where torch draws {torchs.token_ids.tolist()}"
        assert mine.logprobs is not None
        assert torchs.logprobs is not None
        for row, entry in torchs.logprobs.by_row().items():
            error = np.abs(np.subtract(mine.logprobs.by_row()[row].logprobs, entry.logprobs)).max()
            if not error <= _TOLERANCE:  # NaN is an error, too
                return f"its log probabilities are wrong by {error:.2g}"
    return None


def _outputs(options: SamplerOptions, dtype: torch.dtype, device: torch.device) -> list[SamplerOutput]:
    """Sample twice, with and without a grammar; drawn tokens are counted for the penalties in between."""
    count, vocab_size = len(_REQUESTS), options.vocab_size
    tokens = np.zeros((count, len(_PROMPT) + len(_OUTPUT) + 2), np.int32)
    sampler = make_sampler(tokens, (0,), device, options._replace(logits_processors=()))
    generator = torch.Generator().manual_seed(0)
    outputs = []
    for slot, params in enumerate(_REQUESTS):
        sampler.add(slot, params, _PROMPT + _OUTPUT, len(_PROMPT))
    words = np.full((1, -(-vocab_size // 32)), 0x55555555, np.int32)
    for step, grammar in enumerate((None, GrammarMask(np.array([1]), words))):
        logits = torch.randn(count, vocab_size, generator=generator)
        best = 6 * torch.randint(_NUM_BEST, (count, 1), generator=generator) + 4  # allowed by every mask
        logits.scatter_add_(1, best, torch.full((count, 1), _BEST))
        positions = np.full(count, len(_PROMPT) + len(_OUTPUT) + step)
        outputs.append(sampler.sample(logits.to(device, dtype), np.arange(count), positions, grammar))
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # a kernel's fault shows here
    return outputs


def _check_usable(device: torch.device, reason: str) -> None:
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except Exception as error:
        raise ConfigError(
            f"the sampling kernels have left {device} unusable: {reason}; start again with --attention-backend torch"
        ) from error
