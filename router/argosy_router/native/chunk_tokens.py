"""Estimate of the tokens in a prompt's chunks from their bytes."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from argosy_protocol.chunk_hash import chunk_offsets

_MOST = 2**32 - 1


def chunk_tokens(sizes: Iterable[int], bytes_per_token: float) -> array[int]:
    """For each chunk of `chunk_hashes`, estimate the prompt tokens up to and including it, rounded down (`array("I")`).

    Args:
        sizes: sizes of the segments in bytes.
        bytes_per_token: above 0.
    """
    return array("I", [int(min(_MOST, offset / bytes_per_token)) for offset in chunk_offsets(sizes)])
