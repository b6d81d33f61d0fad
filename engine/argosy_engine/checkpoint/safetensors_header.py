"""Tensor names, shapes and offsets of a checkpoint, read from the safetensors headers without torch or the weights.

A safetensors file begins with the length of its header (8 bytes, little-endian), followed by the header, a JSON object
that maps tensor names to {dtype, shape, data_offsets} (https://huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from argosy_engine.checkpoint.checkpoint_shards import checkpoint_shards
from argosy_engine.errors import ConfigError
from argosy_engine.model_configs.file_permission import may_not_read

MAX_HEADER_BYTES = 100 << 20
"""The limit that the format defines."""


class StoredTensor(msgspec.Struct):
    """Header entry of one tensor."""

    dtype: str
    shape: list[int]
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
