"""Renaming of the model in answers, if the engine knows it by another name than the client used.

Owns: the value of `model` in answers. Must not know: why the names differ.
Invariant: nothing but that value changes: quotes inside of JSON strings are escaped, so `"model":"NAME"` is a field;
only whole answers of Anthropic's API and of OpenAI's Responses API have other fields that may be called so, within a
tool.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from argosy_router.http.server_interface import Client, ClientListener
from argosy_router.proxy.request.model_names import Renaming

MAX_RENAMED: Final = 16_384
"""Fields that are renamed in one piece of an answer, which takes some milliseconds: each event has one."""
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


class RenamingClient:
    """Wraps a client, and renames the model in everything that it is sent.

    Data comes in whole events or as a whole answer, except for answers over `upstream.relay.MAX_BUFFERED_BYTES`: if
    such an answer is split within the field, the field keeps the engine's name.
    """

    def __init__(self, client: Client, renaming: Renaming, *, has_own_fields: bool = False) -> None:
        """`has_own_fields`: answers may have fields of that name that are the client's own."""
        self._client = client
        self._has_own_fields = has_own_fields
        self._engine = msgspec.json.encode(renaming.engine)
        self._field = re.compile(rb'("model":\s?)' + re.escape(self._engine))
        self._value = msgspec.json.encode(renaming.client)

    def _renamed(self, data: bytes) -> bytes:
        return self._field.sub(lambda found: found[1] + self._value, data, count=MAX_RENAMED)

    def _renamed_answer(self, body: bytes) -> bytes:
        try:
            fields = _fields.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return body
        if bytes(fields.get("model", b"")) != self._engine:
            return body
        fields["model"] = msgspec.Raw(self._value)
        return msgspec.json.encode(fields)

    def attach(self, listener: ClientListener) -> None:
        self._client.attach(listener)

    def respond(self, status: int, headers: bytes, body: bytes) -> None:
        renamed = self._renamed_answer(body) if self._has_own_fields else self._renamed(body)
        self._client.respond(status, headers, renamed)

    def start(self, status: int, headers: bytes, first: bytes) -> None:
        self._client.start(status, headers, self._renamed(first))

    def send(self, data: bytes) -> None:
        self._client.send(self._renamed(data))

    def finish(self) -> None:
        self._client.finish()

    def abort(self) -> None:
        self._client.abort()
