"""Find the address and key of a router's admin port.

Owns: finding both, from flags or from the running fleet. Must not know: what is asked there.
"""

from __future__ import annotations

from typing import Final

from argosy.errors import CommandError
from argosy.local.control_client import ControlClient, connect
from argosy.local.control_messages import Watch
from argosy.local.state_dir import choose_state_dir
from argosy_protocol.bearer_keys import internal_key
from argosy_protocol.routable_report import ADMIN_KEY_UID

_ANSWER_S: Final = 10.0


def admin_port(url: str | None, key: str, state_dir: str | None) -> tuple[str, str]:
    """Return address and key: the given ones, else those of the running fleet.

    Raises:
        CommandError: no fleet runs here, or its router does not.
    """
    if url is not None:
        return url.rstrip("/"), key
    state = choose_state_dir(state_dir)
    client = ControlClient(connect(state), Watch())
    try:
        status = client.next_status(_ANSWER_S)
    except TimeoutError:
        status = None
    finally:
        client.close()
    if status is None or not status.router.admin_url:
        raise CommandError("the fleet's router is not running; `argosy ps` shows why")
    return status.router.admin_url, internal_key(state.fleet_key(), ADMIN_KEY_UID)
