"""PlainRoute: FastAPI's route without its parameters, for endpoints that take the request alone.

FastAPI makes an endpoint's arguments by declared types and validates its result; our endpoints decode with msgspec and
return responses, so they are called at once. A route whose endpoint has further parameters is FastAPI's own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute


class PlainRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        endpoint = self.endpoint
        if list(inspect.signature(endpoint).parameters) != ["request"]:
            return super().get_route_handler()
        return endpoint
