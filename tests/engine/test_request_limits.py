"""What bodies may be: JSON, and of a bounded size, each and those of all requests in flight together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from argosy_engine.api.http.asgi_layers import SMALL_BODY_BYTES, RequestLimits
from argosy_engine.api.http.http_responses import send_error
from argosy_protocol import headers
from argosy_protocol.errors import ApiError


async def _accept(scope: Scope, receive: Receive, send: Send) -> None:
    await Response()(scope, receive, send)


async def _pieces() -> AsyncIterator[bytes]:
    yield b"{}"


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (None, None, 200),
        (b"", "text/plain", 200),
        (b"{}", "application/json; charset=utf-8", 200),
        (b"{}", None, 400),
        (b"{}", "text/plain", 400),
        (_pieces, "text/plain", 400),
    ],
)
async def test_only_a_body_needs_a_content_type(content: object, kind: str | None, status: int) -> None:
    transport = httpx.ASGITransport(app=RequestLimits(_accept))
    body = _pieces() if content is _pieces else content
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
        answer = await client.post(
            "/ping",
            content=body,  # type: ignore[arg-type]
            headers={"content-type": kind} if kind else {},
        )
    assert answer.status_code == status
    assert status == 200 or answer.json()["error"]["code"] == "unsupported_media_type"


async def test_a_compressed_body_is_refused_by_name() -> None:
    transport = httpx.ASGITransport(app=RequestLimits(_accept))
    lines = {"content-type": "application/json", "content-encoding": "gzip"}
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
        answer = await client.post("/ping", content=b"{}", headers=lines)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "unsupported_media_type")
    assert "Content-Encoding" in error["message"]


async def test_large_bodies_of_requests_in_flight_are_bounded() -> None:
    """A request keeps what was decoded of its body to its end: a few large ones held a gigabyte."""
    large, most = SMALL_BODY_BYTES + 1, 4 * SMALL_BODY_BYTES
    has_read, may_end = asyncio.Semaphore(0), asyncio.Event()

    async def generate(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            while (await receive()).get("more_body"):
                pass
        except ApiError as error:
            await send_error(send, error)
            return
        has_read.release()
        await may_end.wait()
        await _accept(scope, receive, send)

    transport = httpx.ASGITransport(app=RequestLimits(generate, max_held_bytes=most))
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:

        async def post(size: int, tenant: str) -> httpx.Response:
            lines = {"content-type": "application/json", headers.TENANT: tenant}
            return await client.post("/", content=b"a" * size, headers=lines)

        held = []
        for size, tenant in [(large, "a"), (large, "a"), (SMALL_BODY_BYTES, "a"), (large, "b")]:
            held.append(asyncio.create_task(post(size, tenant)))
            await has_read.acquire()
        for tenant, reason in [("a", "of the same key"), ("c", "in flight")]:
            refused = await post(large, tenant)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert f"the bodies of requests {reason} take too much memory" in refused.text
        may_end.set()
        assert [(await each).status_code for each in held] == [200] * 4
        assert (await post(most, "c")).status_code == 200, "their room is free again"
