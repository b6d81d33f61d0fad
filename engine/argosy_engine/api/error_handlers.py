"""Errors that no route has answered, in the shape of the API that the path belongs to."""

from __future__ import annotations

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from argosy_engine.api.answers import message_headers
from argosy_engine.api.http.error_response import error_body
from argosy_engine.api.http.request_ids import is_request_id
from argosy_engine.api.openai.openai_serving import to_api_error
from argosy_engine.api.request_headers import request_id_of
from argosy_protocol import headers
from argosy_protocol.anthropic import (
    is_messages_path,
)
from argosy_protocol.errors import (
    ApiError,
    MethodNotAllowed,
    no_route,
)

_CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that disconnected before its response."""


def _allowed(error: HTTPException) -> list[str]:
    return [] if error.headers is None else error.headers.get("Allow", "").split(", ")


def handle_errors(app: FastAPI) -> None:
    """Send all errors in the shape of the API that the path belongs to."""

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        path, lines = request.url.path, error.headers()
        if is_messages_path(path):
            lines |= message_headers(request_id_of(request, None))
        elif is_request_id(given := request.headers.get(headers.REQUEST_ID)):
            lines[headers.REQUEST_ID] = str(given)
        return Response(error_body(error, path), error.http_status, lines, "application/json")

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        method, path = request.method, request.url.path[:128]
        known = {
            404: no_route(method, path),
            405: MethodNotAllowed(f"{path} does not take {method}", _allowed(error)),
        }
        return await api_error(request, known.get(error.status_code) or to_api_error(error))

    @app.exception_handler(ClientDisconnect)
    async def left(_: Request, __: ClientDisconnect) -> Response:
        return Response(status_code=_CLIENT_CLOSED_REQUEST)  # the client has left

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        # Not logged here: Starlette raises it once more, and uvicorn logs it.
        return await api_error(request, to_api_error(error))
