"""GGUF files of a repository: which one a quantisation means, and how many of a file's bytes are its header.

Must not know sources or what reads the files. Invariant: a quantisation means exactly one file, which may be in parts,
or is refused with those that there are. Names of files are llama.cpp's convention, MODEL-QUANT[-00001-of-0000N].gguf,
in any case and with `.` or `_` for `-` (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final

from argosy_fetcher.errors import UnsupportedModel

SUFFIX: Final = ".gguf"
_MAX_LISTED: Final = 40
"""Quantisations that a message lists; the largest repositories have about thirty."""
_MAX_PARTS: Final = 1000
"""Several times those of the largest models."""
_NOT_THE_MODEL: Final = re.compile(r"mmproj|imatrix", re.IGNORECASE)
"""In the names of projectors of images, and of statistics of which quantisations are made."""
_PART: Final = re.compile(r"-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})$")
_LABEL: Final = re.compile(
    r"(?:^|[-._])(?P<label>(?:(?:UD|I1)-)?(?:I?Q[1-8](?:_[0-9A-Z]+)*|TQ[12]_0|MXFP4(?:_[A-Z]+)*|NVFP4|BF16|F(?:P)?(?:16|32)))"
    r"(?=$|[-.])",
    re.IGNORECASE,
)


def choose_gguf(source: str, quantization: str, paths: Iterable[str]) -> tuple[str, ...]:
    """Return the path of the one file that a quantisation means, or of all its parts in their order.

    Args:
        source: its name, for messages.
        quantization: such as Q4_K_M; any end of a file's name does, to the name's beginning or a `-`, `.` or `_`. With
            `.gguf` at its end it is the name of a file, or of one of its parts.
        paths: of all files.

    Raises:
        UnsupportedModel: no file has it, several have it, or parts of it are missing.
    """
    if quantization.endswith(SUFFIX):
        return _complete(source, part_paths(quantization), set(paths), "")
    wanted, files = quantization.upper(), _models(paths)
    stems = {path: _stem(path).upper() for path in files}
    found = [path for path in files if _label(path) == wanted] or [
        path
        for path, stem in stems.items()
        if stem.endswith(wanted) and stem[: -len(wanted)][-1:] in ("", "-", ".", "_")
    ]
    repository = source.partition("?")[0].removesuffix(f":{quantization}")
    if not found:
        raise UnsupportedModel(f"{source} has no GGUF file of this quantisation{_there(repository, files)}")
    whole: list[tuple[str, ...]] = [(path,) for path in found if not _is_part(path)]
    whole = whole or list(dict.fromkeys(map(part_paths, found)))
    if len(whole) > 1:
        names = ", ".join(ascii(each[0][:200]) for each in whole[:4])
        raise UnsupportedModel(
            f"{source} means {len(whole)} files: {names}; give more of the end of a name, such as "
            f"{repository}:{_stem(whole[0][0])}{_there(repository, files)}"
        )
    return _complete(source, whole[0], set(files), f"; use another revision{_there(repository, files)}")


def _complete(source: str, parts: tuple[str, ...], paths: Container[str], remedy: str) -> tuple[str, ...]:
    missing = [path for path in parts if path not in paths]
    if missing:
        raise UnsupportedModel(
            f"{source} is in {len(parts)} parts, of which {missing[0][:200]!a} and {len(missing) - 1} more are not "
            f"there{remedy}"
        )
    return parts


def part_paths(path: str) -> tuple[str, ...]:
    """Return the paths of all parts of the file that one belongs to, in their order; of a whole file its own.

    Raises:
        UnsupportedModel: its name says that there are more than any model has.
    """
    stem = path.removesuffix(SUFFIX)
    part = _PART.search(stem)
    if part is None:
        return (path,)
    count = int(part["count"])
    if not 1 <= int(part["number"]) <= count <= _MAX_PARTS:
        raise UnsupportedModel(
            f"{path[:200]!a} is no part of at most {_MAX_PARTS}, which its name says; rename it"
        )
    return tuple(
        f"{stem[: part.start()]}-{number:05}-of-{count:05}{SUFFIX}" for number in range(1, count + 1)
    )


def quantizations(paths: Iterable[str]) -> tuple[str, ...]:
    """Return the quantisations that there are, or the name of a file that has none."""
    return tuple(sorted({_label(path) or _stem(path) for path in _models(paths)}))


def _there(repository: str, files: Iterable[str]) -> str:
    names = quantizations(files)
    if not names:
        return "; it has no GGUF files of a model"
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return f"; there are {', '.join(names[:_MAX_LISTED])}{more}: {repository}:QUANT"


def gguf_remedy(repository: str, paths: Iterable[str]) -> str:
    """Say how a repository that has GGUF files only is served; empty if it has none of a model.

    Args:
        repository: hf://ORG/NAME.
    """
    files = _models(paths)
    return f"; it has GGUF files, of which one is served{_there(repository, files)}" if files else ""


def _models(paths: Iterable[str]) -> list[str]:
    return [
        path
        for path in sorted(paths)
        if path.endswith(SUFFIX) and not _NOT_THE_MODEL.search(PurePosixPath(path).name)
    ]


def _stem(path: str) -> str:
    return _PART.sub("", PurePosixPath(path).name[: -len(SUFFIX)])


def _is_part(path: str) -> bool:
    part = _PART.search(PurePosixPath(path).name[: -len(SUFFIX)])
    return part is not None and int(part["count"]) != 1


def _label(path: str) -> str:
    """Return the quantisation in a file's name, in capitals; empty if there is none."""
    found = [each["label"] for each in _LABEL.finditer(_stem(path))]
    return found[-1].upper() if found else ""


@dataclass(frozen=True)
class GgufHeader:
    """What comes before a file's tensors."""

    num_bytes: int
    tensors: Mapping[str, tuple[int, int]]
    """Name of a tensor of one dimension of F32 -> first byte and the one behind its last, in the file."""


class CutOff(Exception):
    """The header goes on behind these bytes."""


class NotGguf(Exception):
    """These are not the first bytes of a GGUF file of version 2 or 3."""


_MAX_FIELDS: Final = 1 << 17
_MAX_ELEMENTS: Final = 1 << 24
_MAX_NAME_BYTES: Final = 1 << 16
_SIZES: Final = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_UINT32, _STRING, _ARRAY = 4, 8, 9
"""Types of values."""
_F32: Final = 0
"""A tensor's type."""
_MAX_DIMENSIONS: Final = 4


def read_header(data: bytes) -> GgufHeader:
    """Find the end of a header.

    Args:
        data: a file's first bytes.

    Raises:
        CutOff: the header is longer.
        NotGguf: this is none, or it exceeds a bound.
    """
    if not b"GGUF".startswith(data[:4]):
        raise NotGguf
    reader = _Reader(data)
    reader.skip(4)
    version, num_tensors, num_fields = reader.unpack("<IQQ")
    if version not in (2, 3) or num_tensors > _MAX_FIELDS or num_fields > _MAX_FIELDS:
        raise NotGguf
    alignment = 32
    for _ in range(num_fields):
        name = reader.string(_MAX_NAME_BYTES)
        (kind,) = reader.unpack("<I")
        if name == b"general.alignment" and kind == _UINT32:
            (alignment,) = reader.unpack("<I")
        else:
            reader.skip_value(kind)
    found: dict[str, tuple[int, int]] = {}
    for _ in range(num_tensors):
        name = reader.string(_MAX_NAME_BYTES)
        (num_dimensions,) = reader.unpack("<I")
        if num_dimensions > _MAX_DIMENSIONS:
            raise NotGguf
        shape = reader.unpack(f"<{num_dimensions}Q")
        kind, offset = reader.unpack("<IQ")
        if kind == _F32 and num_dimensions == 1:
            found[name.decode("utf-8", "replace")] = (offset, offset + 4 * math.prod(shape))
    if not 0 < alignment <= 1 << 20:
        raise NotGguf
    start = reader.at + -reader.at % alignment
    return GgufHeader(reader.at, {name: (start + a, start + b) for name, (a, b) in found.items()})


class _Reader:
    def __init__(self, data: bytes) -> None:
        self.at = 0
        self._data = data

    def skip(self, num_bytes: int) -> None:
        self.at += num_bytes
        if self.at > len(self._data):
            raise CutOff

    def unpack(self, form: str) -> tuple[int, ...]:
        start = self.at
        self.skip(struct.calcsize(form))
        return struct.unpack_from(form, self._data, start)

    def string(self, most: int) -> bytes:
        (length,) = self.unpack("<Q")
        if length > most:
            raise NotGguf
        start = self.at
        self.skip(length)
        return self._data[start : self.at]

    def skip_value(self, kind: int) -> None:
        if kind == _STRING:
            self.string(_MAX_ELEMENTS)
        elif kind == _ARRAY:
            kind, length = self.unpack("<IQ")
            if length > _MAX_ELEMENTS:
                raise NotGguf
            if kind == _STRING:
                for _ in range(length):
                    self.string(_MAX_ELEMENTS)
            elif kind in _SIZES:
                self.skip(length * _SIZES[kind])
            else:  # no key of a model has arrays of arrays
                raise NotGguf
        elif kind in _SIZES:
            self.skip(_SIZES[kind])
        else:
            raise NotGguf
