"""Lists of digests as sha256sum prints them."""

from __future__ import annotations

import pytest

from argosy_fetcher.errors import UnsupportedModel
from argosy_fetcher.source import MAX_FILES, Digest
from argosy_fetcher.sources.http import MAX_SUMS_BYTES, parse_sha256sums

A, B = "a" * 64, "b" * 64


def test_text_and_binary_lines_are_read() -> None:
    content = f"# model\n\n{A}  config.json\n{B.upper()} *./onnx/a b.json\n{A}  SHA256SUMS\n".encode()
    assert parse_sha256sums(content, "https://h/SHA256SUMS") == {
        "config.json": Digest("sha256", A),
        "onnx/a b.json": Digest("sha256", B),
    }


def test_a_repeated_line_is_one_file() -> None:
    assert len(parse_sha256sums(f"{A}  x\n{A}  x\n".encode(), "m")) == 1


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (f"{A}  x\n{B}  x\n".encode(), "two digests for 'x'"),
        (f"{A[1:]}  x\n".encode(), "line 1 of SHA256SUMS"),
        (f"{A}  x\nSHA256 (x) = {A}\n".encode(), "line 2 of SHA256SUMS"),
        (f"\\{A}  a\\nb\n".encode(), "line 1 of SHA256SUMS"),
        (f"{A} x\n".encode(), "line 1 of SHA256SUMS"),
        (f"{A}  ../x\n".encode(), "unsafe name: '../x'"),
        (f"{A}  /etc/passwd\n".encode(), "unsafe name"),
        (f"{A}  ././x\n".encode(), "unsafe name"),
        (b"\xff\xfe", "not UTF-8"),
        (b"\n" * (MAX_SUMS_BYTES + 1), "more than"),
        ("".join(f"{A}  {number}\n" for number in range(MAX_FILES + 1)).encode(), "more than 10000 files"),
    ],
    ids=[
        "two digests", "short digest", "BSD's form", "escaped name", "one blank", "parent", "absolute", "dot",
        "encoding", "size", "count",
    ],
)  # fmt: skip
def test_other_content_is_refused(content: bytes, reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        parse_sha256sums(content, "https://h/SHA256SUMS")
