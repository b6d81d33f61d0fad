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
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.routing import APIRoute
from starlette.types import Message, Receive, Scope, Send

_Endpoint = Callable[[Request], Coroutine[Any, Any, Response]]


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

        request = Request(scope, receive)
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
