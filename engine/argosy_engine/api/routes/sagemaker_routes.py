"""Amazon SageMaker's `/invocations`, which is whatever endpoint the body is for. Its `/ping` is in `state_routes`.

Names and rules are vLLM's (`entrypoints/serve/sagemaker`). `/invocations` needs a key like the endpoints it stands for.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from argosy_engine.api.http.request_body import read_body
from argosy_protocol.errors import BadRequest
from argosy_protocol.json_limits import decode_body

Endpoint = Callable[[Request], Awaitable[Response]]

_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_NULL = b"null"
"""A field with this value counts as absent, as everywhere in the API."""


def add_sagemaker_routes(app: FastAPI, endpoints: Mapping[str, Endpoint]) -> None:
    """Add the route to `app`.

    Args:
        endpoints: by the field that only requests to that endpoint have.
    """

    @app.post("/invocations")
    async def invocations(request: Request) -> Response:
        given = decode_body(_FIELDS, await read_body(request))
        for field, endpoint in endpoints.items():
            if bytes(given.get(field, _NULL)) != _NULL:
                return await endpoint(request)
        raise BadRequest(f"the request needs one of the fields {', '.join(endpoints)}")
