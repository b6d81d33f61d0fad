"""Forms in multipart/form-data: their parts, however the bytes arrive, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argosy_batch.files_api import MAX_HEAD_BYTES, MAX_PARTS, MultipartParser, boundary_of
from argosy_protocol.errors import BadRequest

BOUNDARY = b"xYz"


class Parts:
    """Notes parts as name, file name and data."""

    def __init__(self) -> None:
        self.ended: list[tuple[str, str | None, bytes]] = []
        self._part: tuple[str, str | None, bytes] = ("", None, b"")

    def on_part(self, name: str, filename: str | None) -> None:
        self._part = name, filename, b""

    def on_part_data(self, data: bytes) -> None:
        assert data, "no empty pieces"
        name, filename, before = self._part
        self._part = name, filename, before + data

    def on_part_end(self) -> None:
        self.ended.append(self._part)


def part(data: bytes, disposition: bytes = b'form-data; name="file"; filename="a.jsonl"') -> bytes:
    return b"--xYz\r\nContent-Disposition: %b\r\nContent-Type: text/plain\r\n\r\n%b\r\n" % (disposition, data)


def parse(body: bytes, *cuts: int) -> tuple[Parts, MultipartParser]:
    parts = Parts()
    parser = MultipartParser(BOUNDARY, parts)
    for start, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(body)], strict=True):
        parser.feed(body[start:end])
    return parts, parser


TRICKY = (
    st.lists(
        st.sampled_from([b"\r", b"\n", b"\r\n", b"--", b"--xY", b"\r\n--xY", b"\r\n-", b"xYz", b"a"]),
        max_size=12,
    )
    .map(b"".join)
    .filter(lambda content: b"\r\n--" + BOUNDARY not in content)
)


@given(first=TRICKY, second=TRICKY, data=st.data())
def test_any_split_of_a_form_gives_the_same_parts(first: bytes, second: bytes, data: st.DataObject) -> None:
    body = part(first) + part(second, b"form-data; name=purpose") + b"--xYz--\r\nepilogue"
    cuts = data.draw(st.lists(st.integers(0, len(body)), max_size=20))
    for each in (cuts, [], range(len(body))):
        parts, parser = parse(body, *each)
        assert parts.ended == [("file", "a.jsonl", first), ("purpose", None, second)]
        assert parser.is_complete


@pytest.mark.parametrize(
    ("disposition", "names"),
    [
        (b'form-data; name="file"; filename="../../etc/passwd"', ("file", "../../etc/passwd")),
        (rb'form-data; name="a\"b"; filename="c:\\d"', ('a"b', "c:\\d")),
        (b'FORM-DATA; NAME=x; filename=""', ("x", "")),
        ('form-data; name="x"; filename="ä.jsonl"'.encode(), ("x", "ä.jsonl")),
        (b'form-data; name="x"; filename="\xff"', ("x", "\ufffd")),
        (b"form-data; name=\"x\"; filename*=UTF-8''y", ("x", None)),
    ],
)
def test_names_of_parts_are_read_as_they_were_sent(disposition: bytes, names: tuple[str, str | None]) -> None:
    parts, _ = parse(part(b"1", disposition) + b"--xYz--")
    assert parts.ended == [(*names, b"1")]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"no boundary at all",
        part(b"1"),
        part(b"1") + b"--xY",
        b"--xYz\r\nContent-Disposition: form-data; name=x\r\n",
    ],
)
def test_an_incomplete_form_is_told(body: bytes) -> None:
    assert not parse(body)[1].is_complete


@pytest.mark.parametrize(
    "body",
    [
        b"--xYz\r\n\r\nno head\r\n--xYz--",
        b"--xYz\r\nContent-Type: text/plain\r\n\r\n1\r\n--xYz--",
        part(b"1", b"attachment; name=x"),
        part(b"1", b"form-data"),
        b"--xYzabc\r\n\r\n",
        b"--xYz" + b"a" * 100,
        b"--xYz\r\nX: " + b"a" * MAX_HEAD_BYTES,
        part(b"1") * (MAX_PARTS + 1),
    ],
)
def test_a_malformed_form_is_refused_however_it_arrives(body: bytes) -> None:
    for cuts in ((), range(len(body))):
        with pytest.raises(BadRequest):
            parse(body, *cuts)


def test_a_boundary_is_read_from_the_content_type() -> None:
    assert boundary_of(b"multipart/form-data; boundary=abc") == b"abc"
    assert boundary_of(b'Multipart/Form-Data; charset=utf-8; Boundary="a b"') == b"a b"
    for wrong in (
        b"",
        b"application/json",
        b"multipart/form-data",
        b"multipart/form-data; boundary=",
        b"multipart/mixed; boundary=a",
        b"multipart/form-data; boundary=" + b"a" * 71,
    ):
        with pytest.raises(BadRequest):
            boundary_of(wrong)
