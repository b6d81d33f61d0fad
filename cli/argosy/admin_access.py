"""Find the address and key of a router's admin port.

Owns: finding both, from flags, the environment or the running fleet. Must not know: what is asked there.
"""

from __future__ import annotations

import os
from typing import Final

from argosy.errors import CommandError, UsageError
from argosy.local.control_client import ControlClient, connect
from argosy.local.control_messages import Watch
from argosy.local.state_dir import choose_state_dir
from argosy_protocol.bearer_keys import internal_key
from argosy_protocol.routable_report import ADMIN_KEY_UID

ADMIN_KEY_ENV: Final = "ARGOSY_ROUTER_ADMIN_KEY"
FLEET_KEY_ENV: Final = "ARGOSY_FLEET_KEY"
_ANSWER_S: Final = 10.0


def admin_port(
    url: str | None, state_dir: str | None, key: str = "", *, in_cluster: str = ""
) -> tuple[str, str]:
    """Return address and key: those of the running fleet, unless an address is given.

    Args:
        key: the key of the port at `url`; that of the environment if left out.
        in_cluster: how a cluster is asked the same, for the message without a fleet.

    Raises:
        UsageError: the environment's fleet key is too short.
        CommandError: no fleet runs here, or its router does not.
    """
    if url is not None:
        return url.rstrip("/"), _admin_key(key)
    state = choose_state_dir(state_dir)
    client = ControlClient(connect(state, in_cluster=in_cluster), Watch())
    try:
        status = client.next_status(_ANSWER_S)
    except TimeoutError:
        status = None
    finally:
        client.close()
    if status is None or not status.router.admin_url:
        raise CommandError("the fleet's router is not running; `argosy ps` shows why")
    return status.router.admin_url, internal_key(state.fleet_key(), ADMIN_KEY_UID)


def _admin_key(given: str) -> str:
    """Return the given key, else that of the environment, else the one that belongs to the environment's fleet key,
    else an empty text.

    Raises:
        UsageError: the fleet key is too short.
    """
    if key := given or os.environ.get(ADMIN_KEY_ENV, ""):
        return key
    fleet_key = os.environ.get(FLEET_KEY_ENV, "")
    try:
        return internal_key(fleet_key.encode(), ADMIN_KEY_UID) if fleet_key else ""
    except ValueError as error:
        raise UsageError(f"{FLEET_KEY_ENV}: {error}") from None
