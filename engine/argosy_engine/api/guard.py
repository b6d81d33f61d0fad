"""Guard: the ASGI layer every request passes before any route: keys, body size, content type, drain.

Deny by default: only `PUBLIC_PATHS` are open, everything else needs a key when the engine has one; a route that
nobody thought of is thus guarded. `ADMIN_PATHS` change the engine for everybody: they need an admin key, or where there
is none the engine's own (in a cluster only routers hold it), and without any key they are closed. Paths are compared as
the parser gave them, never rebuilt from headers (CVE-2026-48710).
"""

from __future__ import annotations

from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from argosy_protocol.bearer_keys import KeyRing
from argosy_protocol.errors import ApiError, BadRequest, Forbidden, PayloadTooLarge, Unauthorized

PUBLIC_PATHS = frozenset({"/health", "/ready", "/version", "/metrics"})
ADMIN_PATHS = frozenset({"/sleep", "/wake_up", "/is_sleeping", "/reset_prefix_cache"})
"""vLLM's names; it has them only with VLLM_SERVER_DEV_MODE."""
MAX_BODY_BYTES = 32 << 20
"""A chat of four million characters; images are not accepted."""


class Guard:
    """
    Args:
        admin_keys: for `ADMIN_PATHS`; `keys` where there are none.
    """

    def __init__(
        self, app: ASGIApp, keys: KeyRing, guard_metrics: bool = False, admin_keys: KeyRing | None = None
    ) -> None:
        self._app = app
        self._keys = keys
        self._admin_keys = admin_keys or keys
        self._public = PUBLIC_PATHS - {"/metrics"} if guard_metrics else PUBLIC_PATHS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        try:
            is_admin = scope["path"] in ADMIN_PATHS
            keys = self._admin_keys if is_admin else self._keys
            if is_admin and not keys:
                raise Forbidden(
                    f"{scope['path']} is closed: start the engine with --admin-api-key or --api-key"
                )
            if keys and scope["path"] not in self._public:
                authorization = headers.get(b"authorization")
                if not keys.accepts(authorization.decode("latin-1") if authorization else None):
                    raise Unauthorized(
                        "missing or wrong API key: send the header 'Authorization: Bearer KEY'"
                    )
            if not is_admin:  # those take no body, and no browser has their key
                _check_body_headers(scope, headers)
        except ApiError as error:
            await send_error(send, error)
            return
        await self._app(scope, _limited(receive), send)


def _check_body_headers(scope: Scope, headers: dict[bytes, bytes]) -> None:
    if int(headers.get(b"content-length") or 0) > MAX_BODY_BYTES:
        raise PayloadTooLarge(f"request body exceeds {MAX_BODY_BYTES} bytes")
    if scope["method"] == "POST":
        # Browsers send other types across origins without asking first.
        kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        if kind != b"application/json":
            raise BadRequest("Content-Type must be application/json", code="unsupported_media_type")


def _limited(receive: Receive) -> Receive:
    """Counts a chunked body, which announces no length."""
    total = 0

    async def limited() -> Message:
        nonlocal total
        message = await receive()
        total += len(message.get("body", b""))
        if total > MAX_BODY_BYTES:
            raise PayloadTooLarge(f"request body exceeds {MAX_BODY_BYTES} bytes")
        return message

    return limited


async def send_error(send: Send, error: ApiError) -> None:
    body = error.body()
    headers: list[tuple[bytes, bytes]] = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    headers += [(name.encode(), value.encode()) for name, value in error.headers().items()]
    start: dict[str, Any] = {"type": "http.response.start", "status": error.http_status, "headers": headers}
    await send(start)
    await send({"type": "http.response.body", "body": body})
