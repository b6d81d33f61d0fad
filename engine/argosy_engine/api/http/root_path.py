"""RootPath: the ASGI layer that removes the prefix that a path-based proxy puts before all paths (`--root-path`).

It stands in front of all others, so that they compare the paths that the routes have: a prefix can hide no
administrative path from `auth_middleware`. Proxies that strip the prefix themselves work as well.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class RootPath:
    """
    Args:
        prefix: such as `/models/tiny`; empty for none.
    """

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app = app
        self._prefix = prefix.rstrip("/")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._prefix and scope["type"] == "http" and scope["path"].startswith(f"{self._prefix}/"):
            raw = scope.get("raw_path")
            start = len(self._prefix)
            scope = {**scope, "path": scope["path"][start:]}
            if raw is not None and raw.startswith(self._prefix.encode()):
                scope["raw_path"] = raw[len(self._prefix.encode()) :]
        await self._app(scope, receive, send)
