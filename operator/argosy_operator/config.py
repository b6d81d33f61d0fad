"""What the operator itself is told: by its environment, which the Helm chart writes.

Owns the operator's settings and where they come from. Knows nothing of resources.
Invariant: a wrong setting stops the operator at the start, with the name of the variable.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


class ConfigError(Exception):
    """The operator's environment must be changed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorConfig:
    """Settings of one operator process."""

    namespace: str
    """Namespace of operator, routers and fleet document (`POD_NAMESPACE`)."""
    fleet_key: bytes
    """Key that every service's internal key is derived from, shared with the routers (`ARGOSY_FLEET_KEY`). Empty
    only at the first start, when the operator is to make it."""
    engine_image: str
    """Image of services that name none (`ARGOSY_ENGINE_IMAGE`)."""
    image_pull_policy: str = "IfNotPresent"
    """Pull policy of engine images (`ARGOSY_IMAGE_PULL_POLICY`). Weights make images large, so they are not
    pulled again unless asked."""
    fleet_key_secret: str = ""
    """Secret of the operator's namespace whose field `key` is the fleet key, made by the operator if it does not
    exist (`ARGOSY_FLEET_KEY_SECRET`). Empty: the administrator gives the key."""
    router_keys_secret: str = ""
    """Secret of the operator's namespace whose field `api-keys` holds the clients' keys, made likewise
    (`ARGOSY_ROUTER_KEYS_SECRET`). Empty: the administrator gives the keys, or none are asked for."""
    image_pull_secrets: tuple[str, ...] = ()
    """Secrets for the registry of engine images, by name in each service's own namespace
    (`ARGOSY_IMAGE_PULL_SECRETS`, by comma)."""
    router_url: str = ""
    """URL clients reach the router at, without a path (`ARGOSY_ROUTER_URL`); shown in status. Empty: no
    router is expected, and services are ready without one."""
    watch_namespaces: tuple[str, ...] = ()
    """Namespaces to serve (`ARGOSY_WATCH_NAMESPACES`, by comma); all if empty."""
    resync_seconds: float = 300.0
    """How often everything is read anew and reconciled, whatever events said: heals a missed event."""
    workers: int = 8
    """Resources reconciled at the same time. Bounds the load on the API server after a restart."""

    @property
    def router_speaks_tls(self) -> bool:
        """Whether routers have a certificate, which their admin port shows, too."""
        return self.router_url.startswith("https://")

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> OperatorConfig:
        """Reads the environment.

        Raises:
            ConfigError: a variable is missing or has a value that cannot work.
        """
        fleet_key_secret = env.get("ARGOSY_FLEET_KEY_SECRET", "")
        fleet_key = (
            env.get("ARGOSY_FLEET_KEY", "") if fleet_key_secret else _required(env, "ARGOSY_FLEET_KEY")
        ).encode()
        if len(fleet_key) < 16 and (fleet_key or not fleet_key_secret):
            raise ConfigError("ARGOSY_FLEET_KEY must have at least 16 bytes")
        pull_policy = env.get("ARGOSY_IMAGE_PULL_POLICY") or "IfNotPresent"
        if pull_policy not in ("Always", "IfNotPresent", "Never"):
            raise ConfigError("ARGOSY_IMAGE_PULL_POLICY must be Always, IfNotPresent or Never")
        return cls(
            namespace=_required(env, "POD_NAMESPACE"),
            fleet_key=fleet_key,
            engine_image=_required(env, "ARGOSY_ENGINE_IMAGE"),
            image_pull_policy=pull_policy,
            fleet_key_secret=fleet_key_secret,
            router_keys_secret=env.get("ARGOSY_ROUTER_KEYS_SECRET", ""),
            image_pull_secrets=_names(env, "ARGOSY_IMAGE_PULL_SECRETS"),
            router_url=env.get("ARGOSY_ROUTER_URL", "").rstrip("/"),
            watch_namespaces=_names(env, "ARGOSY_WATCH_NAMESPACES"),
        )


def _required(env: Mapping[str, str], name: str) -> str:
    value = env.get(name, "")
    if not value:
        raise ConfigError(f"environment variable {name} is not set")
    return value


def _names(env: Mapping[str, str], variable: str) -> tuple[str, ...]:
    """Names separated by commas."""
    names = (name.strip() for name in env.get(variable, "").split(","))
    return tuple(name for name in names if name)
