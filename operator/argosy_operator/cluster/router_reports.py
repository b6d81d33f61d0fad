"""Asks a router for a report over HTTP.

Owns the request: address, key, deadline, decoding. Must not know what a report says, nor when it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import aiohttp
import msgspec

from argosy_operator.names import ROUTER_ADMIN_PORT
from argosy_protocol.bearer_keys import internal_key
from argosy_protocol.routable_report import ADMIN_KEY_UID

Report = TypeVar("Report")


def http_fetch(
    session: aiohttp.ClientSession,
    fleet_key: bytes,
    path: str,
    report: type[Report],
    *,
    wait: int,
    is_tls: bool,
) -> Callable[[str, int | None], Coroutine[Any, Any, Report]]:
    """A function `fetch(pod address, last revision)` that returns the next report at `path` of the router's admin port,
    for which the router may hold its answer back for `wait` seconds; the present one if no revision is given. It
    raises aiohttp.ClientError, TimeoutError, OSError, or msgspec.MsgspecError for an answer that is no such report.

    With `is_tls` the certificate is not verified, because it is for the name that clients use, not for a pod's address:
    traffic is encrypted, and a pod is trusted because the API server lists it, as without TLS.
    """
    scheme = "https" if is_tls else "http"
    headers = {"Authorization": f"Bearer {internal_key(fleet_key, ADMIN_KEY_UID)}"}

    async def fetch(address: str, seen: int | None) -> Report:
        host = f"[{address}]" if ":" in address else address
        query = "" if seen is None else f"?after={seen}&wait={wait}"
        timeout = aiohttp.ClientTimeout(total=5 if seen is None else wait + 5, connect=2)
        url = f"{scheme}://{host}:{ROUTER_ADMIN_PORT}{path}{query}"
        async with session.get(url, headers=headers, timeout=timeout, ssl=False) as response:
            response.raise_for_status()
            return msgspec.json.decode(await response.read(), type=report)

    return fetch
