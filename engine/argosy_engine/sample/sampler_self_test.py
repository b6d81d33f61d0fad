"""Self-test of the sampler of kernels: a small step on the device, compared with torch's sampler, before it is trusted.

A driver, a compiler or a device may do what no test on another machine has seen. Greedy tokens and log probabilities
must be torch's; a row with limits must draw what torch keeps.
"""

from __future__ import annotations

import numpy as np
import torch

from argosy_engine.errors import ConfigError
from argosy_engine.params.sampling_params import SamplingParams
from argosy_engine.sample.sampler import GrammarMask, SamplerOptions, SamplerOutput, make_sampler

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
    """Sample with both samplers and return why the kernels must not be used, or None.

    Vocabularies of fewer than 256 tokens are not tested.

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
