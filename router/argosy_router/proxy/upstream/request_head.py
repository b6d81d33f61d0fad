"""The head of a request as a replica gets it.

Owns: the request line and the headers of every attempt. Must not know: how the replica was chosen, connections.
"""

from __future__ import annotations

from typing import Final

from argosy_protocol import headers
from argosy_router.fleet.replica import Replica
from argosy_router.proxy.request.call import Call

_RESUME: Final = f"{headers.RESUME}: {headers.IN_COMMENTS}\r\n".encode()


def request_head(
    call: Call, replica: Replica, upstream_id: bytes, body_bytes: int, *, is_resumable: bool
) -> bytes:
    """Render everything before the body.

    Args:
        upstream_id: the attempt's own request id.
        is_resumable: ask the engine for what another one needs to continue its stream.
    """
    bearer_key = replica.key.current
    key = f"authorization: Bearer {bearer_key}\r\n".encode("latin-1") if bearer_key else b""
    resume = _RESUME if is_resumable else b""
    internal = call.internal_headers if replica.is_argosy_engine else b""
    return b"POST %b HTTP/1.1\r\nhost: %b\r\n%b%b%b%bx-request-id: %b\r\ncontent-length: %d\r\n\r\n" % (
        call.path,
        replica.pool.authority_bytes,
        key,
        resume,
        internal,
        call.headers,
        upstream_id,
        body_bytes,
    )
