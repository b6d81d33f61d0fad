"""The tokens that a step drew: one per request on its way to the host, or several where drafts were verified.

A draft is verified by drawing. Noise is a function of seed and position, so the token that is drawn behind known tokens
is the one that a step without drafts would draw; a draft that equals it is known from then on. Hence drafts change
the number of steps and nothing else, under every sampling parameter.
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
    """of each row"""
    logprobs: dict[int, list[TokenLogprobs]]
    """of each of its tokens, for rows whose requests asked"""


class DrawnTokens(Protocol):
    first: torch.Tensor
    """int64 [R], on the device: the first token of each row"""
    failed: dict[int, str]
    """Row -> why its request cannot go on"""

    def wait(self) -> HostTokens: ...


class OnTheWay:
    """One token per row. Waiting for them waits for nothing that was launched behind them."""

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
    """Up to one token more than a row has drafts.

    Draws depth by depth, because processors look at the tokens before: the rows whose drafts were right so far. Each
    depth waits for the device.

    Args:
        logits: [R + number of drafts, vocab_size]; of each row one behind its known tokens and one behind each draft.
        slots: int64 [R].
        positions: int64 [R], index in its sequence of the first token that each row gives.
        drafts: of each row; none is fine.
        grammar: by rows of the logits.
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
    """The mask of the logits that `index` takes, by its places."""
    if grammar is None:
        return None
    _, places, chosen = np.intersect1d(index, grammar.rows, assume_unique=True, return_indices=True)
    return GrammarMask(places, grammar.bitmask[chosen]) if len(places) else None
