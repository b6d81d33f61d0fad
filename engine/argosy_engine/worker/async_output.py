"""Async output: tokens that a step has sampled, while they are copied to the host.

The next step may be launched before the copy has arrived. Steps that verify drafts: `rejection_sampler`.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from argosy_engine.sample.logprobs import LogprobsTensors
from argosy_engine.sample.sampler import SamplerOutput
from argosy_engine.sample.token_logprobs import TokenLogprobs
from argosy_engine.worker.host_copies import HostCopies, HostCopy


class SampledTokens(NamedTuple):
    """Tokens of a step, on the host."""

    token_ids: list[list[int]]
    """New tokens of each row."""
    logprobs: dict[int, list[TokenLogprobs]]
    """Row -> one entry per new token, for requests that asked for them."""


class PendingTokens(Protocol):
    """Tokens that a step has sampled: one per row, or several after rejection sampling."""

    first: torch.Tensor
    """int64 [R], on the device: the first new token of each row."""
    failed: dict[int, str]
    """Row -> reason why its request cannot continue."""

    def wait(self) -> SampledTokens: ...


class AsyncTokens:
    """One token per row, copied to the host asynchronously.

    Args:
        copies: starts the copy; None: the tensors are on the host, because a CPU has computed them.
    """

    def __init__(self, sampled: SamplerOutput, copies: HostCopies | None) -> None:
        self.first = sampled.token_ids
        self.failed = sampled.failed
        self._logprobs = sampled.logprobs
        tensors = (sampled.token_ids, *(sampled.logprobs.tensors if sampled.logprobs else ()))
        self._copy = HostCopy(tensors) if copies is None else copies.start(tensors)

    def wait(self) -> SampledTokens:
        token_ids, *tensors = self._copy.wait()
        logprobs = {}
        if self._logprobs is not None:
            by_row = self._logprobs._replace(tensors=LogprobsTensors(*tensors)).by_row()
            logprobs = {row: [entry] for row, entry in by_row.items()}
        tokens = SampledTokens([[token] for token in token_ids.tolist()], logprobs)
        self._copy.release()
        return tokens
