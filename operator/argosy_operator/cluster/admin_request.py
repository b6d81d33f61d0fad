"""A request to a router's admin port, with a key that the router accepts.

Owns: which of the valid keys is sent. Must not know: routes, what an answer means.
"""

from __future__ import annotations

import aiohttp

from argosy_protocol.bearer_keys import internal_key
from argosy_protocol.fleet_keys import FleetKeys
from argosy_protocol.routable_report import ADMIN_KEY_UID


async def get_as_admin(
    session: aiohttp.ClientSession, url: str, keys: FleetKeys, timeout: aiohttp.ClientTimeout
) -> bytes:
    """GET `url` with the newest key, or with the next one where the router does not have that yet: while the fleet key
    is rotated, either of the two may have it first.

    With TLS the certificate is not verified, because it is for the name that clients use, not for a pod's address:
    traffic is encrypted, and a pod is trusted because the API server lists it, as without TLS.

    Raises:
        aiohttp.ClientError: no answer, or none that is good; with status 401 if the router refuses every key.
        TimeoutError: no answer in time.
    """
    *newer, oldest = keys.keys
    for fleet_key in (*newer, oldest):
        headers = {"Authorization": f"Bearer {internal_key(fleet_key, ADMIN_KEY_UID)}"}
        async with session.get(url, headers=headers, timeout=timeout, ssl=False) as response:
            if response.status == 401 and fleet_key != oldest:
                continue
            response.raise_for_status()
            return await response.read()
    raise AssertionError("the last key's answer was returned or raised")
