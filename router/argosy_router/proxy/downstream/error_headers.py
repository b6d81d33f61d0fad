"""Headers of the router's own error responses."""

from __future__ import annotations

from argosy_protocol.errors import ApiError
from argosy_router.http.messages import render_headers


def error_headers(error: ApiError) -> bytes:
    """Render the headers of an error."""
    lines = b"content-type: application/json\r\n"
    extra = error.headers() | error.retry_advice()
    if extra:
        lines += render_headers([(name.encode(), value.encode()) for name, value in extra.items()])
    return lines
