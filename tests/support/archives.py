"""Builds tar archives in memory, honest and hostile ones."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Mapping

from argosy_fetcher.source import Packing


def tar_of(files: Mapping[str, bytes]) -> bytes:
    return tar_of_members([(tarfile.TarInfo(path), content) for path, content in files.items()])


def tar_of_members(members: list[tuple[tarfile.TarInfo, bytes]]) -> bytes:
    """Write members as they are, with the sizes of their contents."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for member, content in members:
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def member_of_type(path: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    member = tarfile.TarInfo(path)
    member.type = kind
    member.linkname = target
    return member


def packed(files: Mapping[str, bytes], packing: Packing) -> bytes:
    """Pack files in any of the packings."""
    if packing == "tar+gzip":
        return gzip.compress(tar_of(files))
    if packing == "tar+zstd":
        import zstandard

        return zstandard.compress(tar_of(files))
    return tar_of(files)
