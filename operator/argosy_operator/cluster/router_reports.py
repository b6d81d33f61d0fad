"""Asks a router for a report over HTTP.

Owns the request: address, key, deadline, decoding. Must not know what a report says, nor when it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import aiohttp
import msgspec

from argosy_operator.cluster.admin_request import get_as_admin
from argosy_operator.names import ROUTER_ADMIN_PORT
from argosy_protocol.fleet_keys import FleetKeys

Report = TypeVar("Report")


def http_fetch(
    session: aiohttp.ClientSession,
    keys: FleetKeys,
    path: str,
    report: type[Report],
    *,
    wait: int,
    is_tls: bool,
) -> Callable[..., Coroutine[Any, Any, Report]]:
    """A function `fetch(pod address, last revision, its epoch)` that returns the next report at `path` of the router's
    admin port, for which the router may hold its answer back for `wait` seconds; the present one if no revision is
    given. With an epoch a router that knows it answers with the changes since that revision. It raises
    aiohttp.ClientError, TimeoutError, OSError, or msgspec.MsgspecError for an answer that is no such report.
    """
    scheme = "https" if is_tls else "http"

    async def fetch(address: str, seen: int | None, epoch: str = "") -> Report:
        host = f"[{address}]" if ":" in address else address
        query = "" if seen is None else f"?after={seen}&wait={wait}" + (f"&epoch={epoch}" if epoch else "")
        timeout = aiohttp.ClientTimeout(total=5 if seen is None else wait + 5, connect=2)
        url = f"{scheme}://{host}:{ROUTER_ADMIN_PORT}{path}{query}"
        return msgspec.json.decode(await get_as_admin(session, url, keys, timeout), type=report)

    return fetch
