"""decode_batches: how torch's attention cuts a step's decodes into padded batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from argosy_engine.attention import WORKSPACE_BYTES
from argosy_engine.attention.metadata import AttentionMetadata

_BUCKET_TOKENS = 256
"""Decodes whose lengths round up to the same multiple share a padded batch."""


class DecodeBatch(NamedTuple):
    """Decodes that are computed together."""

    rows: torch.Tensor | slice
    """Their rows in the step, int64 on their device, or all of them."""
    shortest: int
    """Tokens of the shortest sequence."""
    longest: int


def decode_batches(
    meta: AttentionMetadata, token_bytes: int, workspace_bytes: int = WORKSPACE_BYTES
) -> Iterator[DecodeBatch]:
    """Cut a step's decodes into batches.

    Sequences of a batch have similar lengths, so that one long request does not slow down the others, and what is
    gathered stays within `workspace_bytes`, but for a single sequence.

    Args:
        token_bytes: gathered per token of a sequence.
    """
    seq_lens = meta.seq_lens_cpu[: meta.num_decodes].tolist()
    buckets: dict[int, list[int]] = {}
    for row, seq_len in enumerate(seq_lens):
        buckets.setdefault(-(-seq_len // _BUCKET_TOKENS), []).append(row)
    for bucket, rows in buckets.items():
        size = max(workspace_bytes // (bucket * _BUCKET_TOKENS * token_bytes), 1)
        if meta.num_decodes <= size and len(buckets) == 1:
            yield DecodeBatch(slice(0, meta.num_decodes), min(seq_lens), max(seq_lens))
            return
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            lengths = [seq_lens[row] for row in part]
            yield DecodeBatch(torch.tensor(part, device=meta.seq_lens.device), min(lengths), max(lengths))
