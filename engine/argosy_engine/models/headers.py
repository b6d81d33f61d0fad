"""Sizes of a checkpoint's tensors from the safetensors headers alone: no torch, no weights read.

A safetensors file begins with the length of its header (8 bytes, little-endian) and the header, a JSON object
tensor name -> {dtype, shape, data_offsets} (https://huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import msgspec

from argosy_engine.errors import ConfigError
from argosy_engine.models.checkpoint import checkpoint_shards

MAX_HEADER_BYTES = 100 << 20
"""The format's own limit."""


class _Tensor(msgspec.Struct):
    shape: list[int]


def checkpoint_elements(path: Path) -> dict[str, int]:
    """Tensor name -> number of elements, over all shards of the checkpoint in directory `path`.

    Raises:
        ConfigError: there is no safetensors file, or one is missing or malformed.
    """
    elements: dict[str, int] = {}
    for file, wanted in checkpoint_shards(path).items():
        found = _file_elements(file)
        elements |= {name: count for name, count in found.items() if wanted is None or name in wanted}
    return elements


def _file_elements(file: Path) -> dict[str, int]:
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
        return {name: _product(msgspec.convert(value, _Tensor).shape) for name, value in header.items()}
    except msgspec.ValidationError as error:
        raise ConfigError(f"{file}: {error}") from None


def _product(shape: list[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
