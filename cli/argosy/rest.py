"""One JSON call to an admin port.

Owns the request and its errors as a person reads them, over the standard library. Must not know what is asked.
"""

from __future__ import annotations

import http.client
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import msgspec

from argosy.errors import CommandError, UsageError


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
) -> Any:
    """The answer's JSON value.

    Raises:
        UsageError: not an http:// or https:// URL.
        CommandError: nobody answers, or the answer is a refusal.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"{url!r} is not an http:// or https:// URL")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    sent = {"content-type": "application/json", **(headers or {})}
    if key:
        sent["authorization"] = f"Bearer {key}"
    try:
        connection = kind(parts.hostname, parts.port, timeout=timeout_s)
        try:
            connection.request(
                method, f"{parts.path}?{parts.query}" if parts.query else parts.path, body, sent
            )
            response = connection.getresponse()
            data = response.read()
        finally:
            connection.close()
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise CommandError(f"no answer from {parts.scheme}://{parts.netloc}: {error}") from error
    try:
        if response.status == 200:
            return msgspec.json.decode(data)
        message = msgspec.json.decode(data, type=_Refusal).error.message
    except msgspec.DecodeError:
        message = ""
    if response.status == 401:
        message += "; pass --admin-key KEY"
    raise CommandError(f"{response.status} {message or response.reason}")
