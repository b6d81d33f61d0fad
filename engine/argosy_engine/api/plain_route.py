"""PlainApp and PlainRoute: FastAPI without its parameters and layers, for endpoints that take the request alone.

FastAPI makes an endpoint's arguments by declared types and validates its result, and every request passes seven layers
and a search through all routes before that. Our endpoints decode with msgspec and return responses, so they are called
at once. A route with a parameter in its path, and one whose endpoint has further parameters, is FastAPI's own.

Invariant: a request is answered as FastAPI would answer it, errors included; only the layers that the application adds
by `add_middleware` do not see it, and there are none (`http_layers` has ours).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from functools import cached_property
from typing import Any, overload

from fastapi import FastAPI, Request, Response
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

_Endpoint = Callable[[Request], Coroutine[Any, Any, Response]]


class _IndexedHeaders(Headers):
    """Headers that are found by a dictionary: an endpoint asks for a dozen names, and few are there."""

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope=scope)
        self._first = dict(reversed(self._list))
        """Of a header that was sent twice, the first line, as in Starlette's."""

    def __getitem__(self, key: str) -> str:
        return self._first[key.lower().encode("latin-1")].decode("latin-1")

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and key.lower().encode("latin-1") in self._first

    @overload
    def get(self, key: str, /) -> str | None: ...
    @overload
    def get(self, key: str, /, default: Any) -> Any: ...
    def get(self, key: str, default: Any = None) -> Any:
        found = self._first.get(key.lower().encode("latin-1"))
        return default if found is None else found.decode("latin-1")


class _PlainRequest(Request):
    @cached_property
    def headers(self) -> Headers:
        return _IndexedHeaders(self.scope)


class PlainRoute(APIRoute):
    @property
    def is_plain(self) -> bool:
        """Whether the endpoint takes the request and nothing else."""
        return list(inspect.signature(self.endpoint).parameters) == ["request"]

    def get_route_handler(self) -> _Endpoint:
        return self.endpoint if self.is_plain else super().get_route_handler()


class PlainApp(FastAPI):
    """A FastAPI application that calls its plain endpoints itself, once `find_plain_routes` was called."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.router.route_class = PlainRoute
        self._endpoints: dict[tuple[str, str], _Endpoint] = {}
        """By method and path."""

    def find_plain_routes(self) -> None:
        """Call the plain routes that there are by now directly, unless another one comes before them."""
        taken: list[APIRoute] = []
        for route in self.routes:
            if not isinstance(route, APIRoute):
                continue
            is_direct = isinstance(route, PlainRoute) and route.is_plain and "{" not in route.path
            for method in route.methods or () if is_direct else ():
                if not any(
                    method in (other.methods or ()) and other.path_regex.match(route.path) for other in taken
                ):
                    self._endpoints[method, route.path] = route.endpoint
            taken.append(route)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = None
        if scope["type"] == "http" and not scope.get("root_path"):
            endpoint = self._endpoints.get((scope["method"], scope["path"]))
        if endpoint is None:
            await super().__call__(scope, receive, send)
            return
        scope["app"] = self
        has_started = False

        async def noting_start(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        request = _PlainRequest(scope, receive)
        try:
            response = await endpoint(request)
            await response(scope, receive, noting_start)
        except Exception as error:
            if has_started:
                raise
            await self._answer_error(error, request, send)

    async def _answer_error(self, error: Exception, request: Request, send: Send) -> None:
        """Let the handler of the error's class answer; an unexpected error is raised once more, for the log."""
        for kind in type(error).__mro__:
            handler = self.exception_handlers.get(kind)
            if handler is not None:
                made = handler(request, error)
                response = await made if inspect.isawaitable(made) else made
                await response(request.scope, request.receive, send)
                if kind is not Exception:
                    return
                break
        raise error
