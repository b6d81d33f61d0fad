"""Rejection sampling: verifies draft tokens by sampling, and keeps those that equal what is sampled.

Noise is a function of seed and position, so the token sampled after known tokens is the one that a step without drafts
would sample; a draft is accepted if it equals that token. Drafts therefore change only the number of steps, whatever
the sampling parameters.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from argosy_engine.sample.sampler import GrammarMask, Sampler
from argosy_engine.worker.async_output import SampledTokens


class RejectionSampled:
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
        self._host = SampledTokens([[] for _ in drafts], {})
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

    def wait(self) -> SampledTokens:
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
