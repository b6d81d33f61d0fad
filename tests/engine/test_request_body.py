"""The body of a request, read without Starlette's generator."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.requests import ClientDisconnect, Request

from argosy_engine.api.http.http_responses import read_body


def request_with(*messages: dict[str, Any]) -> Request:
    left = iter(messages)

    async def receive() -> dict[str, Any]:
        return next(left)

    return Request({"type": "http"}, receive)


@pytest.mark.parametrize(
    "pieces", [[b"whole"], [b""], [b"in ", b"three ", b"pieces"], [b"with an empty end", b""]], ids=str
)
async def test_a_body_is_read_to_its_end(pieces: list[bytes]) -> None:
    messages = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
    messages[-1]["more_body"] = False
    assert await read_body(request_with(*messages)) == b"".join(pieces)


async def test_an_endpoint_that_another_one_calls_reads_the_same_body() -> None:
    request = request_with({"type": "http.request", "body": b"once"})
    assert [await read_body(request) for _ in range(2)] == [b"once", b"once"]


async def test_a_message_may_lack_a_body() -> None:
    assert await read_body(request_with({"type": "http.request"})) == b""


async def test_a_client_that_leaves_is_told_from_an_end() -> None:
    messages = {"type": "http.request", "body": b"a", "more_body": True}, {"type": "http.disconnect"}
    with pytest.raises(ClientDisconnect):
        await read_body(request_with(*messages))
