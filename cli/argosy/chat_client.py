"""Client for streamed chats with an OpenAI endpoint, with the standard library's HTTP client.

Owns: sending the request, and reading the server-sent events. Must not know: terminals.
Invariant: text is yielded as it arrives; a stream that breaks off raises and never ends silently.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from argosy.errors import CommandError, UsageError, reason


class Delta(NamedTuple):
    """A piece of the answer."""

    text: str
    is_reasoning: bool = False
    finish_reason: str = ""
    """Why the answer ended, in its last piece: `stop`, `length` or another reason of the API."""


class ChatClient:
    """One OpenAI base URL, with or without `/v1`."""

    def __init__(self, url: str, api_key: str, timeout_s: float) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"{url!r} is not an http:// or https:// URL")
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._url = url
        self._connection = kind(parts.hostname, parts.port, timeout=timeout_s)
        self._path = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def __enter__(self) -> ChatClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def models(self) -> list[str]:
        """Names of the models at `/v1/models`."""
        listing = json.loads(self._call("GET", "/models", None).read())
        return [str(model["id"]) for model in listing["data"]]

    def chat(self, body: dict[str, Any]) -> Iterator[Delta]:
        """Stream the answer to a chat.

        Raises:
            CommandError: the endpoint refused the request, or the stream broke off.
        """
        response = self._call("POST", "/chat/completions", {**body, "stream": True})
        try:
            for event in _events(response):
                if "error" in event:
                    raise CommandError(f"the stream ended: {_message(event)}")
                for choice in event.get("choices", ()):
                    delta = choice.get("delta", {})
                    if text := delta.get("reasoning_content") or delta.get("reasoning"):
                        yield Delta(text, is_reasoning=True)
                    if text := delta.get("content"):
                        yield Delta(text)
                    if finish_reason := choice.get("finish_reason"):
                        yield Delta("", finish_reason=str(finish_reason))
        except (OSError, http.client.HTTPException) as error:
            raise CommandError(f"the stream broke off: {reason(error)}") from error
        finally:
            response.close()

    def _call(self, method: str, path: str, body: dict[str, Any] | None) -> http.client.HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        try:
            self._connection.close()
            self._connection.request(method, self._path + path, data, self._headers)
            response = self._connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise CommandError(
                f"no answer from {self._url}: {reason(error)}; is the fleet up (`argosy ps`), or is --url another?"
            ) from error
        if response.status == 200:
            return response
        try:
            message = _message(json.loads(response.read()))
        except ValueError:
            message = response.reason
        if response.status == 401:
            message += "; pass --api-key KEY or set OPENAI_API_KEY"
        raise CommandError(f"{response.status} {message}")


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in response:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        yield json.loads(data)
    raise http.client.IncompleteRead(b"")


def _message(document: object) -> str:
    error = document.get("error") if isinstance(document, dict) else None
    if not isinstance(error, dict):
        return str(error or document)
    message, param = str(error.get("message") or document), error.get("param")
    return f"{message} ({param})" if param and str(param) not in message else message
