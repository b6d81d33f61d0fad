"""Ids of client requests, as answers and logs show them.

Engines get an id of each attempt's own instead (`upstream.upstream_ids`).
"""

from __future__ import annotations

import re
import secrets
from itertools import count
from typing import Final

from argosy_protocol.headers import REQUEST_ID_FORM

_REQUEST_ID: Final = re.compile(REQUEST_ID_FORM.encode())
_process: Final = secrets.token_hex(8).encode()
_numbers: Final = count(1)


def request_id_in_body(asked: str | None, sent: bytes | None, made: bytes) -> bytes:
    """Return the id that the body asks for (vLLM's `request_id`), if no header does and it is safe to pass on.

    Args:
        sent: the header's value.
        made: the request's id otherwise.
    """
    if asked is None or made == sent:
        return made
    name = asked.encode()
    return name if _REQUEST_ID.fullmatch(name) else made


def request_id_for(sent: bytes | None) -> bytes:
    """Return the id that the client sent if it is safe to pass on, else a new one."""
    if sent is not None and _REQUEST_ID.fullmatch(sent):
        return sent
    return b"%b-%d" % (_process, next(_numbers))
