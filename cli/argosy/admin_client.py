"""JSON calls to an admin port, with the standard library's HTTP client.

Owns: the request, and errors written for people. Must not know: what is asked.
"""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Mapping
from typing import Any
from urllib.parse import SplitResult, urlsplit

import msgspec

from argosy.errors import CommandError, UsageError, reason


class _Problem(msgspec.Struct):
    message: str = ""


class _Refusal(msgspec.Struct):
    error: _Problem = msgspec.field(default_factory=_Problem)


def call(
    method: str,
    url: str,
    key: str = "",
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    *,
    timeout_s: float,
    verifies: bool = True,
) -> Any:
    """Send a request; return the response's JSON value.

    Args:
        verifies: whether to verify the certificate of an https:// URL by the system's authorities.

    Raises:
        UsageError: not an http:// or https:// URL.
        CommandError: there is no answer, or the answer is an error.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"{url!r} is not an http:// or https:// URL")
    sent = {"content-type": "application/json", **(headers or {})}
    if key:
        sent["authorization"] = f"Bearer {key}"
    try:
        connection = _connection(parts, timeout_s, verifies=verifies)
        try:
            connection.request(
                method, f"{parts.path}?{parts.query}" if parts.query else parts.path, body, sent
            )
            response = connection.getresponse()
            data = response.read()
        finally:
            connection.close()
    except (OSError, http.client.HTTPException, ValueError) as error:
        hint = (
            "; --insecure believes any certificate" if isinstance(error, ssl.SSLCertVerificationError) else ""
        )
        raise CommandError(
            f"no answer from {parts.scheme}://{parts.netloc}: {reason(error)}{hint}"
        ) from error
    try:
        if response.status == 200:
            return msgspec.json.decode(data)
        message = msgspec.json.decode(data, type=_Refusal).error.message
    except msgspec.DecodeError:
        message = ""
    if response.status == 401:
        message += "; pass --admin-key KEY, or set ARGOSY_FLEET_KEY"
    raise CommandError(f"{response.status} {message or response.reason}")


def _connection(url: SplitResult, timeout_s: float, *, verifies: bool) -> http.client.HTTPConnection:
    host = url.hostname or ""
    if url.scheme == "http":
        return http.client.HTTPConnection(host, url.port, timeout=timeout_s)
    context = ssl.create_default_context()
    if not verifies:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return http.client.HTTPSConnection(host, url.port, timeout=timeout_s, context=context)
