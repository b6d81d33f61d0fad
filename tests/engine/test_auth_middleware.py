"""The rules for administrative routes, without a server."""

from __future__ import annotations

from typing import Any

import pytest

from argosy_engine.api.http.asgi_layers import ADMIN_PATHS, AuthMiddleware
from argosy_protocol.headers import KeyRing


async def status(keys: list[str], admin_keys: list[str], path: str, *given: str | None) -> int:
    """HTTP status of a request with these keys, in this order; 200 if it reached the application."""
    sent: list[Any] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        sent.append({"status": 200})

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    middleware = AuthMiddleware(application, KeyRing(keys), False, KeyRing(admin_keys))
    headers = [(b"authorization", f"Bearer {key}".encode()) for key in given if key]
    scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
    await middleware(scope, receive, send)
    return int(sent[0]["status"])


@pytest.mark.parametrize(
    ("keys", "admin_keys", "key", "expected"),
    [
        ([], [], None, 403),
        ([], [], "anything", 403),
        (["k"], [], "k", 200),
        (["k"], [], None, 401),
        (["k"], ["admin"], "k", 401),
        (["k"], ["admin"], "admin", 200),
        ([], ["admin"], None, 401),
        ([], ["admin"], "admin", 200),
    ],
)
async def test_admin_routes_need_the_admin_key(
    keys: list[str], admin_keys: list[str], key: str | None, expected: int
) -> None:
    found = {path: await status(keys, admin_keys, path, key) for path in sorted(ADMIN_PATHS)}
    assert found == dict.fromkeys(ADMIN_PATHS, expected)


async def test_the_admin_key_opens_nothing_else() -> None:
    assert await status(["k"], ["admin"], "/v1/models", "admin") == 401
    assert await status(["k"], ["admin"], "/sleep/", "admin") == 401


async def test_of_two_keys_the_first_counts() -> None:
    """So it is with a router, and with what tells whose stored responses they are."""
    assert await status(["k"], [], "/v1/models", "k", "wrong") == 200
    assert await status(["k"], [], "/v1/models", "wrong", "k") == 401
