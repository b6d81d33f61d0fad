"""Ids of client requests, as answers and logs show them.

Engines get an id of each attempt's own instead (`upstream.upstream_ids`).
"""

from __future__ import annotations

import re
import secrets
from itertools import count
from typing import Final

_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._-]{1,128}")
_process: Final = secrets.token_hex(8).encode()
_numbers: Final = count(1)


def request_id_for(sent: bytes | None) -> bytes:
    """Return the id that the client sent if it is safe to pass on, else a new one."""
    if sent is not None and _REQUEST_ID.fullmatch(sent):
        return sent
    return b"%b-%d" % (_process, next(_numbers))
