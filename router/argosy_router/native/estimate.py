"""How many tokens a prompt's chunks are taken for, before an answer has told."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from argosy_protocol.chunks import chunk_offsets

_MOST = 2**32 - 1


def chunk_tokens(sizes: Iterable[int], bytes_per_token: float) -> array[int]:
    """For each chunk of `chunk_hashes`, the tokens of the prompt up to and including it, rounded down, as `array("I")`.

    Args:
        sizes: the segments', in bytes.
        bytes_per_token: above 0.
    """
    return array("I", [int(min(_MOST, offset / bytes_per_token)) for offset in chunk_offsets(sizes)])
