"""A checkpoint's tensors from the safetensors headers alone: no torch, no weights read.

A safetensors file begins with the length of its header (8 bytes, little-endian) and the header, a JSON object
tensor name -> {dtype, shape, data_offsets} (https://huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import msgspec

from argosy_engine.errors import ConfigError
from argosy_engine.models.checkpoint import checkpoint_shards

MAX_HEADER_BYTES = 100 << 20
"""The format's own limit."""


class StoredTensor(msgspec.Struct):
    """One tensor of a file."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]
    """Of its first byte and behind its last one, from the start of the data."""


def checkpoint_elements(path: Path) -> dict[str, int]:
    """Tensor name -> number of elements, over all shards of the checkpoint in directory `path`.

    Raises:
        ConfigError: there is no safetensors file, or one is missing or malformed.
    """
    elements: dict[str, int] = {}
    for file, wanted in checkpoint_shards(path).items():
        _, found = read_header(file)
        elements |= {
            name: math.prod(tensor.shape)
            for name, tensor in found.items()
            if wanted is None or name in wanted
        }
    return elements


def read_header(file: Path) -> tuple[int, dict[str, StoredTensor]]:
    """Where the data of a safetensors file starts, and its tensors by name.

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
    except (OSError, struct.error, msgspec.DecodeError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from None
    header.pop("__metadata__", None)
    try:
        return 8 + length, msgspec.convert(header, dict[str, StoredTensor])
    except msgspec.ValidationError as error:
        raise ConfigError(f"{file}: {error}") from None
