"""Tokens that a step sampled: one per request while it is copied to the host, or several after draft verification.

Drafts are verified by sampling. Noise is a function of seed and position, so the token sampled after known tokens is
the one that a step without drafts would sample; a draft is accepted if it equals that token. Drafts therefore change
only the number of steps, whatever the sampling parameters.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from argosy_engine.sample.logprobs import LogprobsTensors
from argosy_engine.sample.sampler import GrammarMask, Sampler, SamplerOutput
from argosy_engine.sample.token_logprobs import TokenLogprobs


class HostTokens(NamedTuple):
    token_ids: list[list[int]]
    """New tokens of each row."""
    logprobs: dict[int, list[TokenLogprobs]]
    """Row -> one entry per new token, for requests that asked for them."""


class DrawnTokens(Protocol):
    first: torch.Tensor
    """int64 [R], on the device: the first new token of each row."""
    failed: dict[int, str]
    """Row -> reason why its request cannot continue."""

    def wait(self) -> HostTokens: ...


class OnTheWay:
    """One token per row, copied to the host asynchronously. `wait` does not wait for work that was launched later."""

    def __init__(self, sampled: SamplerOutput) -> None:
        self.first = sampled.token_ids
        self.failed = sampled.failed
        self._logprobs = sampled.logprobs
        tensors = (sampled.token_ids, *(sampled.logprobs.tensors if sampled.logprobs else ()))
        self._event: torch.cuda.Event | None = None
        self._tensors: tuple[torch.Tensor, ...] = tensors
        if self.first.device.type == "cuda":
            self._tensors = tuple(
                torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
                for tensor in tensors
            )
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> HostTokens:
        if self._event is not None:
            self._event.synchronize()
        token_ids, *tensors = self._tensors
        logprobs = {}
        if self._logprobs is not None:
            by_row = self._logprobs._replace(tensors=LogprobsTensors(*tensors)).by_row()
            logprobs = {row: [entry] for row, entry in by_row.items()}
        return HostTokens([[token] for token in token_ids.tolist()], logprobs)


class Verified:
    """Tokens after draft verification: at most one more per row than it has drafts.

    Sampling proceeds by depth, with the rows whose drafts have all been accepted so far, because logits processors look
    at the previous tokens. Each depth waits for the device.

    Args:
        logits: [R + number of drafts, vocab_size]; for each row, one after its known tokens and one after each draft.
        slots: int64 [R].
        positions: int64 [R], position in its sequence of the first token that each row samples.
        drafts: draft tokens of each row; may be empty.
        grammar: bitmask by rows of the logits.
    """

    def __init__(
        self,
        sampler: Sampler,
        logits: torch.Tensor,
        slots: NDArray[np.int64],
        positions: NDArray[np.int64],
        drafts: list[list[int]],
        grammar: GrammarMask | None,
    ) -> None:
        counts = np.array([1 + len(each) for each in drafts])
        starts = np.cumsum(counts) - counts
        self.failed: dict[int, str] = {}
        self._host = HostTokens([[] for _ in drafts], {})
        rows = np.arange(len(drafts))
        depth = 0
        while len(rows):
            index = starts[rows] + depth
            sampled = sampler.sample(
                logits[torch.from_numpy(index).to(logits.device)],
                slots[rows],
                positions[rows] + depth,
                _mask_of(grammar, index),
            )
            if not depth:
                self.first = sampled.token_ids
            self.failed |= {int(rows[row]): why for row, why in sampled.failed.items()}
            for row, token in zip(rows.tolist(), sampled.token_ids.tolist(), strict=True):
                self._host.token_ids[row].append(token)
            if sampled.logprobs is not None:
                for row, entry in sampled.logprobs.by_row().items():
                    self._host.logprobs.setdefault(int(rows[row]), []).append(entry)
            rows = np.array(
                [row for row in rows.tolist() if self._is_right(row, drafts[row], depth)], np.int64
            )
            depth += 1

    def wait(self) -> HostTokens:
        return self._host

    def _is_right(self, row: int, drafts: list[int], depth: int) -> bool:
        return (
            depth < len(drafts) and drafts[depth] == self._host.token_ids[row][-1] and row not in self.failed
        )


def _mask_of(grammar: GrammarMask | None, index: NDArray[np.int64]) -> GrammarMask | None:
    """Return the part of the mask for the logits that `index` selects, with rows renumbered accordingly."""
    if grammar is None:
        return None
    _, places, chosen = np.intersect1d(index, grammar.rows, assume_unique=True, return_indices=True)
    return GrammarMask(places, grammar.bitmask[chosen]) if len(places) else None
