"""Headers of the router's own error responses."""

from __future__ import annotations

from argosy_protocol.errors import ApiError
from argosy_router.http.messages import render_headers


def error_headers(error: ApiError) -> bytes:
    """Render the headers of an error; OpenAI's SDKs obey `x-should-retry` before the status."""
    lines = b"content-type: application/json\r\n"
    extra = error.headers()
    if extra:
        lines += render_headers([(name.encode(), value.encode()) for name, value in extra.items()])
    if error.http_status >= 500 or error.retryable:
        lines += b"x-should-retry: true\r\n" if error.retryable else b"x-should-retry: false\r\n"
    return lines
