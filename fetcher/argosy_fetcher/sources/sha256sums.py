"""SHA256SUMS: what `sha256sum` prints, as a list of a folder's files with their digests.

Knows no protocol: web servers and buckets hold such files alike.
"""

from __future__ import annotations

import re

from argosy_fetcher.errors import UnsupportedModel
from argosy_fetcher.snapshot import MAX_FILES, Digest, check_path

FILE_NAME = "SHA256SUMS"
MAX_SUMS_BYTES = 4 << 20

_LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](.+)")


def parse_sha256sums(content: bytes, source: str) -> dict[str, Digest]:
    """Return path -> digest. Empty lines and lines that begin with `#` are skipped.

    Args:
        source: name of the model's source, for errors.

    Raises:
        UnsupportedModel: it is too long, has a line of another form, an unsafe path, or two digests for one path.
    """
    if len(content) > MAX_SUMS_BYTES:
        raise UnsupportedModel(f"{source}: {FILE_NAME} has more than {MAX_SUMS_BYTES} bytes")
    try:
        lines = content.decode().splitlines()
    except UnicodeDecodeError:
        raise UnsupportedModel(f"{source}: {FILE_NAME} is not UTF-8") from None
    digests: dict[str, Digest] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise UnsupportedModel(
                f"{source}: line {number} of {FILE_NAME} is not a digest and a path, as `sha256sum` prints them"
            )
        path = check_path(match[2].removeprefix("./"))
        digest = Digest("sha256", match[1].lower())
        if path == FILE_NAME:
            continue
        if digests.setdefault(path, digest) != digest:
            raise UnsupportedModel(f"{source}: {FILE_NAME} has two digests for {path!r}")
        if len(digests) > MAX_FILES:
            raise UnsupportedModel(f"{source}: {FILE_NAME} names more than {MAX_FILES} files")
    return digests
