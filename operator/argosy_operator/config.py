"""The operator's settings, read from its environment, which the Helm chart writes.

Owns each setting, its default and its variable. Knows nothing of resources. Invariant: an invalid setting stops the
operator at its start, with the name of the variable.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Final, TypeVar

import msgspec
from msgspec import Struct

from argosy_resource.engine_arguments import EngineType
from argosy_resource.types import UpgradePolicy

T = TypeVar("T")
_STRINGS: Final = 'strings, such as {"a": "b"}'
_LISTS: Final = 'lists of strings, such as {"a": ["b"]}'
ANY_ACCOUNT: Final = "*"
"""In `engine_service_accounts`: every account."""
VLLM_IMAGE: Final = "vllm/vllm-openai:v0.32.0"
SGLANG_IMAGE: Final = "lmsysorg/sglang:v0.5.3"
MAX_ROLLOUTS: Final = 10_000
"""Services that the operator's own changes may be rolled out to at once, at most."""


class ConfigError(Exception):
    """An environment variable of the operator is missing or invalid."""


class RolloutShare(Struct, frozen=True):
    """How many services the operator's own changes are rolled out to at once: a number, or a share of those of which a
    replica is ready."""

    amount: int
    is_percent: bool

    def __str__(self) -> str:
        return f"{self.amount}%" if self.is_percent else str(self.amount)

    def of(self, services: int) -> int:
        """The number for so many services: at least one, rounded down as Kubernetes' maxUnavailable is."""
        return max(1, services * self.amount // 100 if self.is_percent else self.amount)


DEFAULT_SHARE: Final = RolloutShare(5, is_percent=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorConfig:
    """Settings of one operator process."""

    namespace: str
    """Namespace of operator, routers and fleet document (`POD_NAMESPACE`)."""
    fleet_key: bytes
    """Key from which every service's internal key is derived, shared with the routers (`ARGOSY_FLEET_KEY`). Empty only
    at the first start, when the operator creates it."""
    previous_fleet_keys: tuple[bytes, ...] = ()
    """Keys before it that its Secret still has while it is rotated, newest first (`argosy_protocol.fleet_keys`)."""
    lingering_fleet_keys: tuple[bytes, ...] = ()
    """Keys that have left the Secret and count for some minutes more, newest first. Engines that follow their keys
    remember these by themselves."""
    fleet_key_dir: Path | None = None
    """Mounted Secret with the key (`ARGOSY_FLEET_KEY_DIR`), which is followed. Instead of `ARGOSY_FLEET_KEY`."""
    engine_image: str
    """Image of services that name none (`ARGOSY_ENGINE_IMAGE`)."""
    vllm_image: str = VLLM_IMAGE
    """The same for services of engine type vllm (`ARGOSY_VLLM_IMAGE`)."""
    sglang_image: str = SGLANG_IMAGE
    """The same for services of engine type sglang (`ARGOSY_SGLANG_IMAGE`)."""
    engine_upgrade_policy: UpgradePolicy = "OnSpecChange"
    """What a new default image does to services that say nothing else (`ARGOSY_ENGINE_UPGRADE_POLICY`)."""
    image_pull_policy: str = "IfNotPresent"
    """Pull policy of engine images (`ARGOSY_IMAGE_PULL_POLICY`). Images are large, so they are not pulled again by
    default."""
    fleet_key_secret: str = ""
    """Secret of the operator's namespace whose field `key` is the fleet key; the operator creates it if it does not
    exist (`ARGOSY_FLEET_KEY_SECRET`). Empty: the administrator provides the key."""
    router_keys_secret: str = ""
    """Secret of the operator's namespace whose field `api-keys` holds the clients' keys; the operator creates it if it
    does not exist (`ARGOSY_ROUTER_KEYS_SECRET`). Empty: the administrator provides the keys, or none are required."""
    image_pull_secrets: tuple[str, ...] = ()
    """Secrets for the registry of engine images, by name in each service's own namespace
    (`ARGOSY_IMAGE_PULL_SECRETS`, separated by commas)."""
    reserved_secrets: tuple[str, ...] = ()
    """Further Secrets of the operator's namespace that no service may name: those of routers and `argosy batch`
    (`ARGOSY_RESERVED_SECRETS`, separated by commas)."""
    reserved_claims: tuple[str, ...] = ()
    """PersistentVolumeClaims of the operator's namespace that no service may name: that of files and batches
    (`ARGOSY_RESERVED_CLAIMS`, separated by commas)."""
    engine_service_accounts: tuple[str, ...] = ()
    """ServiceAccounts that services may name, in each service's own namespace (`ARGOSY_ENGINE_SERVICE_ACCOUNTS`,
    separated by commas); `*` is every one. Who may write an InferenceService chooses the engine's image, and so gets
    whatever these accounts may do."""
    router_url: str = ""
    """URL at which clients reach the router, without a path (`ARGOSY_ROUTER_URL`); shown in the status. Empty: no
    router is expected, and services become ready without one."""
    fetch_env: Mapping[str, str] = field(default_factory=dict)
    """Variables of the containers that fetch models: a proxy, or the mirror of a cluster without the internet
    (`ARGOSY_MODEL_FETCH_ENV`, a JSON object)."""
    node_cache_path: str = ""
    """Directory of the nodes in which `models` is the node cache (`ARGOSY_NODE_CACHE_PATH`). Empty: there is none."""
    node_cache_selector: Mapping[str, str] = field(default_factory=dict)
    """Labels of the nodes that have the node cache (`ARGOSY_NODE_CACHE_SELECTOR`, a JSON object); all if empty."""
    image_volumes: bool = False
    """Whether models of `oci://` are mounted as image volumes (KEP-4639) instead of being fetched
    (`ARGOSY_IMAGE_VOLUMES=1`)."""
    arbitrary_uids: bool = False
    """Whether pods run as the user that the cluster chooses for their namespace, as OpenShift does, instead of as the
    images' own (`ARGOSY_ARBITRARY_UIDS=1`)."""
    model_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Patterns of the model names that the services of a namespace may claim, `*` for the namespaces that are not
    listed; those without patterns may claim any (`ARGOSY_MODEL_NAMES`, a JSON object of lists)."""
    lease: str = ""
    """Lease in the operator's namespace without which it writes nothing (`ARGOSY_LEASE`). Empty: it writes always, so
    there must be no other operator."""
    identity: str = ""
    """Name of this process in the Lease (`POD_NAME`). A pod's next container may use the name of the one that died."""
    watch_namespaces: tuple[str, ...] = ()
    """Namespaces to serve (`ARGOSY_WATCH_NAMESPACES`, separated by commas); all if empty."""
    resync_seconds: float = 300.0
    """Seconds between two resyncs, which list and reconcile everything and so repair a missed event."""
    max_concurrent_rollouts: RolloutShare = DEFAULT_SHARE
    """How many services the operator's own changes are rolled out to at once (`ARGOSY_MAX_CONCURRENT_ROLLOUTS`, a
    number or a percentage). A change that fails reaches few services, and 1000 services of ten minutes take hours."""
    workers: int = 8
    """Number of resources reconciled at the same time. Bounds the load on the API server after a restart."""

    def with_fleet_keys(self, given: tuple[bytes, ...], lingering: tuple[bytes, ...] = ()) -> OperatorConfig:
        """The same with these keys of the Secret, of which there is at least one, and these that have left it."""
        return replace(
            self, fleet_key=given[0], previous_fleet_keys=given[1:], lingering_fleet_keys=lingering
        )

    @property
    def router_speaks_tls(self) -> bool:
        """Whether the routers have a certificate; their admin port then speaks TLS as well."""
        return self.router_url.startswith("https://")

    def default_image(self, engine_type: EngineType) -> str:
        return {"argosy": self.engine_image, "vllm": self.vllm_image, "sglang": self.sglang_image}[
            engine_type
        ]

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> OperatorConfig:
        """Read the environment.

        Raises:
            ConfigError: a variable is missing or has an invalid value.
        """
        fleet_key_secret = env.get("ARGOSY_FLEET_KEY_SECRET", "")
        fleet_key_dir = _directory(env, "ARGOSY_FLEET_KEY_DIR")
        is_optional = fleet_key_secret or fleet_key_dir
        fleet_key = (
            env.get("ARGOSY_FLEET_KEY", "") if is_optional else _required(env, "ARGOSY_FLEET_KEY")
        ).encode()
        if len(fleet_key) < 16 and (fleet_key or not is_optional):
            raise ConfigError("ARGOSY_FLEET_KEY must have at least 16 bytes")
        pull_policy = env.get("ARGOSY_IMAGE_PULL_POLICY") or "IfNotPresent"
        if pull_policy not in ("Always", "IfNotPresent", "Never"):
            raise ConfigError("ARGOSY_IMAGE_PULL_POLICY must be Always, IfNotPresent or Never")
        lease = env.get("ARGOSY_LEASE", "")
        return cls(
            namespace=_required(env, "POD_NAMESPACE"),
            fleet_key=fleet_key,
            fleet_key_dir=Path(fleet_key_dir) if fleet_key_dir else None,
            engine_image=_required(env, "ARGOSY_ENGINE_IMAGE"),
            vllm_image=env.get("ARGOSY_VLLM_IMAGE") or VLLM_IMAGE,
            sglang_image=env.get("ARGOSY_SGLANG_IMAGE") or SGLANG_IMAGE,
            engine_upgrade_policy=_upgrade_policy(env),
            image_pull_policy=pull_policy,
            fleet_key_secret=fleet_key_secret,
            router_keys_secret=env.get("ARGOSY_ROUTER_KEYS_SECRET", ""),
            image_pull_secrets=_names(env, "ARGOSY_IMAGE_PULL_SECRETS"),
            reserved_secrets=_names(env, "ARGOSY_RESERVED_SECRETS"),
            reserved_claims=_names(env, "ARGOSY_RESERVED_CLAIMS"),
            engine_service_accounts=_names(env, "ARGOSY_ENGINE_SERVICE_ACCOUNTS"),
            router_url=env.get("ARGOSY_ROUTER_URL", "").rstrip("/"),
            fetch_env=_json(env, "ARGOSY_MODEL_FETCH_ENV", dict[str, str], _STRINGS),
            node_cache_path=_directory(env, "ARGOSY_NODE_CACHE_PATH"),
            node_cache_selector=_json(env, "ARGOSY_NODE_CACHE_SELECTOR", dict[str, str], _STRINGS),
            image_volumes=_is_set(env, "ARGOSY_IMAGE_VOLUMES"),
            arbitrary_uids=_is_set(env, "ARGOSY_ARBITRARY_UIDS"),
            model_names=_json(env, "ARGOSY_MODEL_NAMES", dict[str, tuple[str, ...]], _LISTS),
            lease=lease,
            identity=_required(env, "POD_NAME") if lease else "",
            watch_namespaces=_names(env, "ARGOSY_WATCH_NAMESPACES"),
            max_concurrent_rollouts=_rollout_share(env),
        )


def _upgrade_policy(env: Mapping[str, str]) -> UpgradePolicy:
    try:
        return msgspec.convert(env.get("ARGOSY_ENGINE_UPGRADE_POLICY") or "OnSpecChange", UpgradePolicy)
    except msgspec.ValidationError:
        raise ConfigError("ARGOSY_ENGINE_UPGRADE_POLICY must be OnSpecChange or Automatic") from None


def _rollout_share(env: Mapping[str, str]) -> RolloutShare:
    variable = "ARGOSY_MAX_CONCURRENT_ROLLOUTS"
    text = env.get(variable) or str(DEFAULT_SHARE)
    digits, is_percent = text.removesuffix("%"), text.endswith("%")
    bound = 100 if is_percent else MAX_ROLLOUTS
    if not (digits.isascii() and digits.isdigit() and len(digits) < 6 and 1 <= int(digits) <= bound):
        raise ConfigError(
            f"{variable} must be a number of services, 1 to {MAX_ROLLOUTS}, or a percentage, 1% to 100%"
        )
    return RolloutShare(int(digits), is_percent=is_percent)


def _required(env: Mapping[str, str], name: str) -> str:
    value = env.get(name, "")
    if not value:
        raise ConfigError(f"environment variable {name} is not set")
    return value


def _names(env: Mapping[str, str], variable: str) -> tuple[str, ...]:
    """The names in a variable, separated by commas."""
    names = (name.strip() for name in env.get(variable, "").split(","))
    return tuple(name for name in names if name)


def _json(env: Mapping[str, str], variable: str, kind: type[T], told: str) -> T:
    """The JSON object in a variable; empty if it is not set. `told` says what it must be, with an example."""
    try:
        return msgspec.json.decode(env.get(variable) or "{}", type=kind)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{variable} must be a JSON object of {told}: {error}") from None


def _directory(env: Mapping[str, str], variable: str) -> str:
    """The absolute path in a variable; empty if it is not set."""
    text = env.get(variable, "")
    path = PurePosixPath(text)
    if text and (not path.is_absolute() or ".." in path.parts or len(path.parts) < 2):
        raise ConfigError(f"{variable} must be an absolute path below /, without '..'")
    return str(path) if text else ""


def _is_set(env: Mapping[str, str], variable: str) -> bool:
    value = env.get(variable, "")
    if value not in ("", "0", "1"):
        raise ConfigError(f"{variable} must be 1 or 0")
    return value == "1"
