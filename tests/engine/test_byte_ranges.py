"""Byte ranges of tensors and of ranks' parts of them."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy_engine.checkpoint.shards import StoredTensor, byte_ranges, chunks, has_valid_size
from argosy_engine.model_configs.sharding import Shard

DATA_START = 40


@st.composite
def parts(draw: Any) -> tuple[torch.Tensor, Shard | None, int]:
    shape = draw(st.lists(st.integers(0, 5), min_size=0, max_size=3))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn]))
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    shard = None
    if shape and draw(st.booleans()):
        dim = draw(st.integers(0, len(shape) - 1))
        bounds = sorted(draw(st.lists(st.integers(0, shape[dim]), min_size=2, max_size=4).filter(_is_even)))
        pairs = zip(bounds[::2], bounds[1::2], strict=True)
        shard = Shard(dim, tuple(range(start, stop) for start, stop in pairs))
    return tensor, shard, draw(st.integers(0, 50))


def _is_even(bounds: list[int]) -> bool:
    return len(bounds) % 2 == 0


@settings(max_examples=300, deadline=None)
@given(parts(), st.integers(1, 30))
def test_what_the_ranges_hold_is_the_part(
    part: tuple[torch.Tensor, Shard | None, int], max_bytes: int
) -> None:
    tensor, shard, begin = part
    stored = StoredTensor("", list(tensor.shape), (begin, begin + tensor.nbytes))
    assert has_valid_size(stored, tensor.itemsize)
    file = bytes(DATA_START + begin) + tensor.flatten().view(torch.uint8).numpy().tobytes() + bytes(9)
    found = byte_ranges(stored, DATA_START, shard)
    pieces = list(chunks(found.ranges, max_bytes))
    assert all(0 < len(piece) <= max_bytes for piece in pieces)
    held = bytearray(b"".join(file[piece.start : piece.stop] for piece in pieces))
    assert len(held) == found.num_bytes
    read = torch.frombuffer(held, dtype=torch.uint8) if held else torch.empty(0, dtype=torch.uint8)
    ours, wanted = read.view(tensor.dtype).view(found.shape), tensor
    if found.rest is not None:
        ours = _taken(ours, found.rest)
    if shard is not None:
        wanted = _taken(wanted, shard)
        assert shard.dim > 0 or found.num_bytes == wanted.nbytes, "a part of the rows is read alone"
    assert torch.equal(ours.float(), wanted.float())


def _taken(tensor: torch.Tensor, shard: Shard) -> torch.Tensor:
    return torch.cat([tensor.narrow(shard.dim, each.start, len(each)) for each in shard.ranges], shard.dim)


def test_ranges_that_touch_are_one_read() -> None:
    stored = StoredTensor("F32", [10, 2], (0, 80))
    shard = Shard(0, (range(2), range(2, 4), range(6, 7)))
    assert byte_ranges(stored, 100, shard).ranges == (range(100, 132), range(148, 156))


def test_offsets_that_do_not_fit_the_shape_are_noticed() -> None:
    for offsets in ((0, 79), (8, 80), (80, 0)):
        assert not has_valid_size(StoredTensor("F32", [10, 2], offsets), 4)
