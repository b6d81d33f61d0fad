"""A request with a body must say that the body is JSON; one without a body needs to say nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from argosy_engine.api.http.asgi_layers import RequestLimits


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
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:
        answer = await client.post("/ping", content=b"{}", headers=headers)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "unsupported_media_type")
    assert "Content-Encoding" in error["message"]
