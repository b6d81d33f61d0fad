"""A checkpoint's safetensors files: which there are, the names, shapes and offsets of their tensors, and where a
tensor, or a rank's part of it, lies in a file. Reads the index and headers only, and does not import torch.

A safetensors file begins with the length of its header (8 bytes, little-endian), followed by the header, a JSON object
that maps tensor names to {dtype, shape, data_offsets} (https://huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from argosy_engine.errors import ConfigError
from argosy_engine.model_configs.model_config import may_not_read, read_json
from argosy_engine.model_configs.sharding import Shard

MAX_HEADER_BYTES = 100 << 20
"""The limit that the format defines."""

MAX_DIMENSIONS = 16
"""Of a tensor. The product of tens of thousands takes Python seconds, and nothing ends it."""
_MAX_NAME_BYTES = 255
"""What a file system takes as a file's name."""
_MAX_SHOWN = 128
"""Characters of a malformed name that an error message shows."""


def checkpoint_shards(path: Path) -> dict[Path, set[str] | None]:
    """Return the checkpoint's safetensors files, each with the tensors that the index lists for it.

    Without an index there is one file, and None in place of the names: all its tensors count.

    Raises:
        ConfigError: there is no checkpoint in directory `path`, or its index is malformed.
    """
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if not index.is_file():
        if single.is_file():
            return {single: None}
        raise ConfigError(
            f"{path} has no model.safetensors; other weight formats are not loaded, because they can carry code"
        )
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{index} has no weight_map")
    shards: dict[Path, set[str]] = {}
    for tensor, name in weight_map.items():
        # A shard is a file next to its index; anything else could read outside the checkpoint.
        if not isinstance(name, str) or not _is_shard_name(name):
            shown = (
                repr(name[:_MAX_SHOWN]) if isinstance(name, str) else "a file by something else than a text"
            )
            raise ConfigError(
                f"{index} names {shown}; shards are .safetensors files in its own folder, with printable names of at "
                f"most {_MAX_NAME_BYTES} bytes"
            )
        shards.setdefault(path / name, set()).add(tensor)
    return dict(shards)


def _is_shard_name(name: str) -> bool:
    return (
        name.isprintable()
        and len(name.encode()) <= _MAX_NAME_BYTES
        and Path(name).name == name
        and name.endswith(".safetensors")
    )


class StoredTensor(msgspec.Struct):
    """Header entry of one tensor."""

    dtype: str
    shape: Annotated[list[Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]], Meta(max_length=MAX_DIMENSIONS)]
    data_offsets: tuple[int, int]
    """Begin and end (exclusive), relative to the start of the data."""


class StoredShard(NamedTuple):
    """One file of a checkpoint."""

    file: Path
    data_start: int
    """Offset of the data in the file; the offsets of its tensors are relative to it."""
    tensors: dict[str, StoredTensor]
    """Those that the checkpoint takes from this file."""


def read_shards(path: Path) -> list[StoredShard]:
    """Read the headers of all shards of the checkpoint in directory `path`.

    Raises:
        ConfigError: there is no safetensors file, or one is missing or malformed.
    """
    shards = []
    for file, wanted in checkpoint_shards(path).items():
        data_start, stored = read_header(file)
        tensors = {name: tensor for name, tensor in stored.items() if wanted is None or name in wanted}
        shards.append(StoredShard(file, data_start, tensors))
    return shards


def checkpoint_elements(path: Path) -> dict[str, int]:
    """Return the number of elements of each tensor, over all shards of the checkpoint in directory `path`.

    Raises:
        ConfigError: there is no safetensors file, or one is missing or malformed.
    """
    shards = read_shards(path)
    return {name: math.prod(tensor.shape) for shard in shards for name, tensor in shard.tensors.items()}


def read_header(file: Path) -> tuple[int, dict[str, StoredTensor]]:
    """Return the offset at which the data of a safetensors file starts, and its tensors by name.

    Raises:
        ConfigError: the file is missing or malformed.
    """
    try:
        with file.open("rb") as handle:
            (length,) = struct.unpack("<Q", handle.read(8))
            if length > MAX_HEADER_BYTES:
                raise ConfigError(f"{file}: the header is larger than {MAX_HEADER_BYTES} bytes")
            header = msgspec.json.decode(handle.read(length), type=dict[str, Any])
    except FileNotFoundError:
        raise ConfigError(f"{file} is missing") from None
    except PermissionError:
        raise may_not_read(file.parent, file) from None
    except (OSError, struct.error, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from None
    header.pop("__metadata__", None)
    try:
        return 8 + length, msgspec.convert(header, dict[str, StoredTensor])
    except msgspec.ValidationError as error:
        raise ConfigError(f"{file}: {error}") from None


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
