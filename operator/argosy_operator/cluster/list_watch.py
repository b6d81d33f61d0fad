"""What each list and watch beside kopf's has in common: how long it waits, and what an answer means.

Must not know kinds, nor what is kept of an object.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Final

from argosy_operator.cluster.api_server import Api
from argosy_operator.kinds import Kind, Object

RETRY: Final = 5.0
"""Seconds until the next attempt after a failure, and after a watch that lasted no longer."""
REFUSED_RETRY: Final = 300.0
"""Seconds until the next attempt where there is no permission, or no such kind."""
REFUSALS: Final = (401, 403, 404)
EXPIRED: Final = 410


async def changes_since(
    api: Api, kind: Kind, *, namespace: str | None, version: str
) -> AsyncGenerator[tuple[str, Object], None]:
    """What changes after the list of `version` (`Api.watch`). It ends no sooner than RETRY, as a proxy may end every
    watch at once."""
    began = asyncio.get_running_loop().time()
    async with aclosing(api.watch(kind, namespace=namespace, version=version)) as events:
        async for event in events:
            yield event
    if asyncio.get_running_loop().time() - began < RETRY:
        await asyncio.sleep(RETRY)
