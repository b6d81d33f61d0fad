"""CustomMiddleware: the ASGI layers of the user's own (`--middleware`), by import path as in vLLM.

They stand in front of the check of keys: what they let through, its path as they leave it, is checked as if they were
not there. They are made when the server starts and see HTTP requests only, no events of its start and end.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, cast

from starlette.middleware.base import BaseHTTPMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from argosy_engine.api.http.departure import without_departure
from argosy_engine.api.http.direct_body import without_direct_body
from argosy_engine.api.http.error_response import send_error
from argosy_engine.errors import ConfigError
from argosy_protocol.errors import InternalError


class CustomMiddleware:
    """Puts the user's layers around `inner`. If one of them fails before its answer, the client gets a 500.

    Args:
        app: the application, which the layers find as `request.app`.
        paths: import paths `package.module.Name`, the outermost layer last. A class is called with the layer below and
            returns an ASGI application; a coroutine function takes a `Request` and `call_next`, as FastAPI's
            `middleware("http")`.

    Raises:
        ConfigError: a path cannot be imported, or is neither, or a class cannot be made.
    """

    def __init__(self, inner: ASGIApp, app: ASGIApp, paths: Sequence[str]) -> None:
        for path in paths:
            inner = _around(inner, path)
        self._inner = inner
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_started = False

        async def noting_start(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            seen = {**without_departure(without_direct_body(scope)), "app": self._app}
            await self._inner(seen, receive, noting_start)
        except Exception:
            if not has_started:
                await send_error(send, InternalError("internal error"), scope["path"])
            raise  # uvicorn logs it


def _around(inner: ASGIApp, path: str) -> ASGIApp:
    """Return the layer that an import path names, around `inner`."""
    module, _, name = path.rpartition(".")
    try:
        found: Any = getattr(import_module(module), name)
        is_class = inspect.isclass(found)
        made: ASGIApp | None = cast(Callable[[ASGIApp], ASGIApp], found)(inner) if is_class else None
    except Exception as error:  # whatever the module's code raises
        raise ConfigError(
            f"--middleware {path} cannot be loaded: {type(error).__name__}: {' '.join(str(error).split())}; give "
            "package.module.Name, importable from PYTHONPATH or site-packages"
        ) from error
    if made is not None:
        return made
    if inspect.iscoroutinefunction(found):
        return BaseHTTPMiddleware(inner, dispatch=found)
    raise ConfigError(f"--middleware {path} must be a class or an `async def` function")
