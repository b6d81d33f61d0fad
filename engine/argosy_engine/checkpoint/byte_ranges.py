"""Where a tensor, or a rank's part of it, lies in a safetensors file. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from argosy_engine.checkpoint.safetensors_header import StoredTensor
from argosy_engine.model_configs.sharding import Shard


class ByteRanges(NamedTuple):
    """What to read of a file for one tensor, and what that is."""

    ranges: tuple[range, ...]
    """Byte offsets in the file, in order; none is empty, and no two of them touch."""
    shape: tuple[int, ...]
    """Of what is read."""
    rest: Shard | None
    """The part that is still to be taken of what is read; None: all."""

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.ranges))


def byte_ranges(stored: StoredTensor, data_start: int, shard: Shard | None) -> ByteRanges:
    """Return what to read for a part of a tensor.

    Rows lie side by side in the file. Of a part along another dimension than the first, whole rows are read: its pieces
    are small and many.

    Args:
        data_start: offset of the file's data.
        shard: the part; None: the whole.
    """
    begin, end = (data_start + offset for offset in stored.data_offsets)
    shape = tuple(stored.shape)
    if shard is None or shard.dim > 0:
        return ByteRanges(_joined([range(begin, end)]), shape, shard)
    row = (end - begin) // shape[0] if shape[0] else 0
    parts = [range(begin + each.start * row, begin + each.stop * row) for each in shard.ranges]
    return ByteRanges(_joined(parts), shard.shape(shape), None)


def _joined(parts: Sequence[range]) -> tuple[range, ...]:
    joined: list[range] = []
    for part in parts:
        if not part:
            continue
        if joined and joined[-1].stop == part.start:
            joined[-1] = range(joined[-1].start, part.stop)
        else:
            joined.append(part)
    return tuple(joined)


def chunks(ranges: Sequence[range], max_bytes: int) -> Iterator[range]:
    """Yield the ranges in order, cut into pieces of at most `max_bytes`."""
    for each in ranges:
        for start in range(each.start, each.stop, max_bytes):
            yield range(start, min(start + max_bytes, each.stop))


def has_valid_size(stored: StoredTensor, itemsize: int) -> bool:
    """Whether a tensor's bytes are as many as its shape and dtype say."""
    begin, end = stored.data_offsets
    return 0 <= begin <= end and end - begin == math.prod(stored.shape) * itemsize
