"""The keys of an installation, made at the operator's first start: the fleet key, and a key for clients.

Owns when a key is made and what of. Templates cannot make them: they are rendered anew by every upgrade and by GitOps
tools, without a look at the cluster. Invariants: a Secret that exists is never changed, nor read; the Secrets belong to
no release and no resource, so that they outlive an uninstallation and engines keep running over a reinstallation.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import logging
import secrets
from typing import Final

from argosy_operator.cluster.api import Api
from argosy_operator.config import OperatorConfig
from argosy_operator.errors import ApiError, OperatorError
from argosy_operator.names import COMPONENT_LABEL, FIELD_MANAGER, MANAGED_BY_LABEL, NAME_LABEL

logger = logging.getLogger(__name__)

FLEET_KEY_FIELD: Final = "key"
ROUTER_KEYS_FIELD: Final = "api-keys"
_KEY_BYTES: Final = 32
"""Of randomness in each key."""
_START_RETRY: Final = 1.0
_START_PATIENCE: Final = 30.0
"""A chart installs permissions and operator together, and the API server takes a moment to honour the former."""


async def ensure_keys(api: Api, config: OperatorConfig, patience: float = _START_PATIENCE) -> OperatorConfig:
    """Makes what is missing, and returns the settings with the fleet key. The key is part of the pod's environment
    once its Secret exists, so nothing has to be read.

    Raises:
        OperatorError: there is a Secret, but it had no key when this process was started.
        ApiError: the API server refused for `patience` seconds.
    """
    deadline = asyncio.get_running_loop().time() + patience
    while True:
        try:
            return await _ensure(api, config)
        except ApiError as error:
            if asyncio.get_running_loop().time() >= deadline:
                raise
            logger.info("waiting for the API server: %s", error)
            await asyncio.sleep(_START_RETRY)


async def keep_fleet_key(api: Api, config: OperatorConfig) -> None:
    """Makes the Secret again if it was deleted, with the same key, until cancelled: the next start of the operator
    would make another key, and every engine would roll."""
    while True:
        await asyncio.sleep(config.resync_seconds)
        if not config.fleet_key_secret:
            continue
        try:
            key = config.fleet_key.decode()
            await _made(api, config, config.fleet_key_secret, FLEET_KEY_FIELD, key)
        except ApiError as error:
            logger.warning("cannot keep the Secret %s: %s", config.fleet_key_secret, error)


async def _ensure(api: Api, config: OperatorConfig) -> OperatorConfig:
    if config.router_keys_secret:
        key = f"sk-{secrets.token_hex(_KEY_BYTES)}"
        await _made(api, config, config.router_keys_secret, ROUTER_KEYS_FIELD, key)
    if config.fleet_key or not config.fleet_key_secret:
        return config
    key = secrets.token_hex(_KEY_BYTES)
    if not await _made(api, config, config.fleet_key_secret, FLEET_KEY_FIELD, key):
        raise OperatorError(
            f"the Secret {config.fleet_key_secret!r} exists, but this pod was started without its field "
            f"`{FLEET_KEY_FIELD}`; if a restart does not help, add the field (at least 16 bytes) or delete the Secret"
        )
    return dataclasses.replace(config, fleet_key=key.encode())


async def _made(api: Api, config: OperatorConfig, name: str, field: str, value: str) -> bool:
    """Creates the Secret. False if there is one of this name."""
    # No instance label: by it GitOps tools take an object for part of the release, and prune it.
    labels = {NAME_LABEL: "argosy", COMPONENT_LABEL: "keys", MANAGED_BY_LABEL: FIELD_MANAGER}
    manifest = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "namespace": config.namespace, "labels": labels},
        "type": "Opaque",
        "data": {field: base64.b64encode(value.encode()).decode()},
    }
    try:
        await api.create_only(manifest)
    except ApiError as error:
        if error.status == 409:
            return False
        raise
    logger.info("made the Secret %s/%s", config.namespace, name)
    return True
