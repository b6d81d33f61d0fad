"""Creates the keys of an installation, the fleet key and a key for clients, follows a fleet key that is rotated, and
restores one that was deleted.

The chart cannot create them: every upgrade, and every GitOps tool, renders templates without a look at the cluster.
Invariants: a Secret that exists is never changed, nor read; the Secrets belong to no release and no resource, so that
they outlive an uninstallation and engines keep running over a reinstallation.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import logging
import secrets
from collections.abc import Callable, Mapping
from typing import Final

from argosy_operator.cluster.api_server import Api
from argosy_operator.config import OperatorConfig
from argosy_operator.errors import ApiError, OperatorError
from argosy_operator.names import FIELD_MANAGER, MANAGED_BY_LABEL, NAME_LABEL
from argosy_protocol.fleet_keys import KEY_FIELD, LOOK_EVERY_S, PREVIOUS_FIELD, FleetKeys
from argosy_resource.engine_address import COMPONENT_LABEL

logger = logging.getLogger(__name__)

ROUTER_KEYS_FIELD: Final = "api-keys"
_KEY_BYTES: Final = 32
"""Random bytes in each key."""
_START_RETRY: Final = 1.0
_START_TIMEOUT: Final = 30.0
"""Seconds. A chart installs permissions and operator together, and the API server takes a moment to honour them."""


async def ensure_keys(api: Api, config: OperatorConfig, timeout: float = _START_TIMEOUT) -> OperatorConfig:
    """Create the Secrets that are missing, and return the settings with the fleet key. Once its Secret exists, the pod
    has it mounted, so nothing has to be read.

    Raises:
        OperatorError: the Secret exists, but this process was started without its key.
        ApiError: the API server refused for `timeout` seconds.
    """
    deadline = asyncio.get_running_loop().time() + timeout
    while True:
        try:
            return await _ensure(api, config)
        except ApiError as error:
            if asyncio.get_running_loop().time() >= deadline:
                raise
            logger.info("waiting for the API server: %s", error)
            await asyncio.sleep(_START_RETRY)


async def follow_fleet_keys(
    keys: FleetKeys, on_change: Callable[[tuple[bytes, ...], tuple[bytes, ...]], None]
) -> None:
    """Look at the mounted fleet key, and pass on its keys, and those that have left it and still count, whenever they
    change, until cancelled."""
    while True:
        await asyncio.sleep(LOOK_EVERY_S)
        if keys.look() and keys.given:
            on_change(keys.given, keys.lingering)


async def keep_fleet_key(api: Api, config: OperatorConfig, keys: FleetKeys) -> None:
    """Restore the fleet key's Secret whenever it was deleted, until cancelled. Otherwise the next start of the
    operator would create another key, which no router and no engine has."""
    while True:
        await asyncio.sleep(config.resync_seconds)
        if not config.fleet_key_secret or not keys.given:
            continue
        try:
            data = dict(zip((KEY_FIELD, PREVIOUS_FIELD), keys.given, strict=False))
            await _create_secret(api, config, config.fleet_key_secret, data)
        except ApiError as error:
            logger.warning("cannot restore the Secret %s: %s", config.fleet_key_secret, error)


async def _ensure(api: Api, config: OperatorConfig) -> OperatorConfig:
    if config.router_keys_secret:
        key = f"sk-{secrets.token_hex(_KEY_BYTES)}"
        await _create_secret(api, config, config.router_keys_secret, {ROUTER_KEYS_FIELD: key.encode()})
    if config.fleet_key or not config.fleet_key_secret:
        return config
    made = secrets.token_hex(_KEY_BYTES).encode()
    if not await _create_secret(api, config, config.fleet_key_secret, {KEY_FIELD: made}):
        raise OperatorError(
            f"the Secret {config.fleet_key_secret!r} exists, but this pod was started without its field "
            f"`{KEY_FIELD}`; if a restart does not help, add the field (at least 16 bytes) or delete the Secret"
        )
    return dataclasses.replace(config, fleet_key=made)


async def _create_secret(api: Api, config: OperatorConfig, name: str, data: Mapping[str, bytes]) -> bool:
    """Create the Secret. False if one of this name exists."""
    # No instance label: GitOps tools would take the object for part of the release, and prune it.
    labels = {NAME_LABEL: "argosy", COMPONENT_LABEL: "keys", MANAGED_BY_LABEL: FIELD_MANAGER}
    manifest = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "namespace": config.namespace, "labels": labels},
        "type": "Opaque",
        "data": {field: base64.b64encode(value).decode() for field, value in data.items()},
    }
    try:
        await api.create_only(manifest)
    except ApiError as error:
        if error.status == 409:
            return False
        raise
    logger.info("created the Secret %s/%s", config.namespace, name)
    return True
