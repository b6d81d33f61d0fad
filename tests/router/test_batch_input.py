"""Input files of batches: which lines are requests, and what is told about the others."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Iterable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy_batch.batch_lines import MAX_LINE_BYTES, Validation, split_lines, validate
from argosy_protocol.batch_program import MAX_ERRORS, BatchObject

from .batch_rig import CHATS, line


async def pieces(chunks: Iterable[bytes]) -> AsyncGenerator[bytes, None]:
    for chunk in chunks:
        yield chunk


async def check(content: bytes, max_requests: int = 1000) -> Validation:
    return await validate(pieces([content]), CHATS, max_requests)


@settings(max_examples=50)
@given(st.lists(st.sampled_from([b"a", b"bb", b"\n", b"\n\n", b" ", b"\r\n", b"c" * 6]), max_size=30))
async def test_lines_do_not_depend_on_how_a_file_is_read(chunks: list[bytes]) -> None:
    whole = b"".join(chunks)
    expected = [
        (number, None if len(text) > 5 else text)
        for number, text in enumerate(whole.split(b"\n"), 1)
        if text.strip() or len(text) > 5
    ]
    for split in (chunks, [whole], [whole[at : at + 1] for at in range(len(whole))]):
        assert [each async for each in split_lines(pieces(split), 5)] == expected


async def test_a_file_of_requests_is_counted() -> None:
    found = await check(line("a") + b"\n\n" + line("b") + b"\r\n  \n" + line("c"))
    assert found == Validation(3, "tiny", [])


@pytest.mark.parametrize(
    ("faulty", "code"),
    [
        (b"{", "invalid_json_line"),
        (b"\xff\xfe", "invalid_json_line"),
        (line("b").replace(b'"messages"', b'"\xff":1,"messages"'), "invalid_json_line"),
        (b"[" * 100_000, "invalid_json_line"),
        (b"[]", "invalid_request"),
        (b"{}", "invalid_request"),
        (line(""), "invalid_request"),
        (line(7), "invalid_request"),
        (line("x" * 513), "invalid_request"),
        (line("b", url="/v1/completions"), "invalid_url"),
        (line("b", url="http://169.254.169.254/"), "invalid_url"),
        (line("b").replace(b"POST", b"GET"), "invalid_method"),
        (line("b", stream=True), "invalid_body"),
        (line("b", background=True), "invalid_body"),
        (line("b", model=None), "invalid_body"),
        (line("b", model="x" * 513), "invalid_body"),
        (
            json.dumps({"custom_id": "b", "method": "POST", "url": CHATS, "body": "x"}).encode(),
            "invalid_body",
        ),
        (line("a"), "duplicate_custom_id"),
        (line("b", "x" * MAX_LINE_BYTES), "line_too_long"),
    ],
)
async def test_a_faulty_line_is_told_with_its_number(faulty: bytes, code: str) -> None:
    found = await check(line("a") + b"\n\n" + faulty + b"\n" + line("last"))
    assert [(error.code, error.line) for error in found.errors] == [(code, 3)]


@pytest.mark.parametrize(
    ("content", "code"),
    [(b"", "empty_file"), (b"\n \n", "empty_file"), (b"\n".join([b"{}"] * 20_000), "invalid_request")],
)
async def test_a_file_without_requests_is_refused(content: bytes, code: str) -> None:
    found = await check(content, max_requests=50_000)
    assert {error.code for error in found.errors} == {code}
    assert len(found.errors) <= MAX_ERRORS


async def test_a_file_with_too_many_requests_is_refused_before_all_is_read() -> None:
    num_read = 0

    async def endless() -> AsyncGenerator[bytes, None]:
        nonlocal num_read
        while True:
            num_read += 1
            yield b"".join(line(f"{num_read}-{number}") + b"\n" for number in range(50))

    found: Any = await validate(endless(), CHATS, 100)
    assert [error.code for error in found.errors] == ["maximum_requests_exceeded"]
    assert num_read < 5


async def test_blank_lines_are_split_in_turns() -> None:
    """Only requests let other work have its turn: a megabyte of blank lines held the event loop for 80 ms."""
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    counting = asyncio.create_task(count())
    found = await check(b"\n" * (1 << 20) + line("a"))
    counting.cancel()
    assert found == Validation(1, "tiny", [])
    assert turns >= 16


async def test_the_time_for_a_line_grows_with_its_length() -> None:
    """A line of results may have 64 MiB, and comes in pieces of 256 KiB, with each of which all before were copied: one
    of 16 times the length took 256 times as long."""

    async def cpu_s(number: int) -> float:
        times = []
        for _ in range(3):
            begun = time.process_time()
            found = [each async for each in split_lines(pieces([b"x" * 16384] * number), 1 << 30)]
            times.append(time.process_time() - begun)
            assert [len(text or b"") for _, text in found] == [16384 * number]
        return min(times)

    assert await cpu_s(2048) < 64 * max(await cpu_s(128), 0.0005)


def test_no_stored_batch_has_a_long_name_of_a_model() -> None:
    """A list has a hundred batches. A record that was stored before names were bounded is put aside as malformed."""
    stored = {"id": "batch_1", "endpoint": CHATS, "input_file_id": "f", "completion_window": "24h", "created_at": 1,
              "expires_at": 2, "model": "x" * 512}  # fmt: skip
    assert msgspec.convert(stored, BatchObject).model == "x" * 512
    with pytest.raises(msgspec.ValidationError, match="model"):
        msgspec.convert({**stored, "model": "x" * 513}, BatchObject)
