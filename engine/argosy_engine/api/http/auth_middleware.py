"""AuthMiddleware: the ASGI layer that rejects requests without a valid API key before they reach a route.

It denies by default: if the engine has keys, every path but `PUBLIC_PATHS` needs one, also a path that no route has.
`ADMIN_PATHS` change the engine for all clients, or tell how it is set up. They need an admin key, or, if there is
none, one of the engine's keys (in a cluster only routers have it); an engine without any key rejects them. A key may
come as `x-api-key`, as Anthropic's clients send it, which counts if there is no `Authorization`. Paths are compared as
the parser returned them, never rebuilt from headers (CVE-2026-48710).
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from argosy_engine.api.http.error_response import send_error
from argosy_protocol.bearer_keys import KeyRing
from argosy_protocol.errors import ApiError, Forbidden, Unauthorized
from argosy_protocol.hot_prefixes import HOT_PREFIXES_PATH

PUBLIC_PATHS = frozenset({"/health", "/ping", "/ready", "/version", "/metrics"})
ADMIN_PATHS = frozenset(
    {"/sleep", "/wake_up", "/is_sleeping", "/reset_prefix_cache", "/server_info", HOT_PREFIXES_PATH}
)
"""vLLM's names, which vLLM has only with VLLM_SERVER_DEV_MODE, and the prefixes of all clients' prompts."""


class AuthMiddleware:
    """
    Args:
        keys: keys for all paths but `PUBLIC_PATHS`; if there are none, no key is needed.
        guard_metrics: whether /metrics needs a key, too.
        admin_keys: keys for `ADMIN_PATHS`; `keys` if there are none.
    """

    def __init__(
        self, app: ASGIApp, keys: KeyRing, guard_metrics: bool = False, admin_keys: KeyRing | None = None
    ) -> None:
        self._app = app
        self._keys = keys
        self._admin_keys = admin_keys or keys
        self._public = PUBLIC_PATHS - {"/metrics"} if guard_metrics else PUBLIC_PATHS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check_key(scope)
            except ApiError as error:
                await send_error(send, error, scope["path"])
                return
        await self._app(scope, receive, send)

    def _check_key(self, scope: Scope) -> None:
        """Check a request's key.

        Raises:
            Forbidden: the path is administrative, and the engine has no key.
            Unauthorized: the key is missing or wrong.
        """
        is_admin = scope["path"] in ADMIN_PATHS
        keys = self._admin_keys if is_admin else self._keys
        if is_admin and not keys:
            raise Forbidden(f"{scope['path']} is closed: start the engine with --admin-api-key or --api-key")
        if keys and scope["path"] not in self._public:
            headers = Headers(scope=scope)
            given = headers.get("authorization")  # the first one, as a router reads it, and `client_key`
            if given is None and "x-api-key" in headers:
                given = "Bearer " + headers["x-api-key"]
            if not keys.accepts(given):
                raise Unauthorized(
                    "missing or wrong API key: send the header 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
                )
