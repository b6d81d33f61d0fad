"""Drift detection: whether a live object differs from the wanted manifest, so that it has to be applied, and what
others have added to it, which applying does not remove.

Must not talk to an API server. Invariant: an object that was applied as wanted, and that has not been changed since, is
never written again.
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Any, Final

import msgspec
import xxhash

from argosy_operator.kinds import Object
from argosy_operator.names import APPLIED_ANNOTATION

_QUANTITY_FIELDS: Final = ("limits", "requests", "sizeLimit")
_ATOMIC_FIELDS: Final = ("selector", "nodeSelector")
"""Maps that have one owner as a whole (`x-kubernetes-map-type: atomic`), where a further key changes what is meant: a
Service that also asks for another label has no endpoints."""
_KEYED_LISTS: Final[Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys(("containers", "initContainers", "env", "volumes", "imagePullSecrets"), ("name",)),
    **dict.fromkeys(("resourceClaims", "schedulingGates", "claims"), ("name",)),
    "volumeMounts": ("mountPath",),
    "volumeDevices": ("devicePath",),
    "ports": ("containerPort", "port", "protocol"),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
    "hostAliases": ("ip",),
}
"""Lists whose entries may have different owners, and the fields by which server-side apply tells the entries apart
(`x-kubernetes-list-map-keys`). Applying leaves entries of others in them."""
_KEY_DEFAULTS: Final = {"protocol": "TCP"}
_FREE_MAPS: Final = ("labels", "annotations", "matchLabels")
"""Maps whose keys users choose: one that is called as a field is none."""
_AMOUNTS: Final = ("limits", "requests")
"""Maps whose keys are never filled in, whatever they are."""
_NEVER_DEFAULTED: Final = frozenset(
    {
        *_KEYED_LISTS,
        *_AMOUNTS,
        *("affinity", "nodeName", "nodeSelector", "tolerations", "priorityClassName", "runtimeClassName"),
        *("hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"),
        *("serviceAccountName", "serviceAccount", "hostname", "subdomain", "setHostnameAsFQDN", "dnsConfig"),
        *("command", "args", "envFrom", "workingDir", "lifecycle", "stdin", "stdinOnce", "tty"),
        *("livenessProbe", "readinessProbe", "startupProbe", "hostPort", "hostIP"),
        *("add", "privileged", "runAsUser", "runAsGroup", "fsGroup", "supplementalGroups", "sysctls"),
        *("seLinuxOptions", "windowsOptions"),
    }
)
"""Fields of pod templates, their containers and security contexts which the API server leaves empty: a value that is
not wanted is somebody's addition."""
_SECOND_NAMES: Final = {"serviceAccount": "serviceAccountName"}
"""Old names of fields. The API server fills each in from the other, so that removing one alone has no effect; nor has
it when a manifest that is applied does not have the field any more."""
_ONE_OF: Final = ("env", "volumes")
"""Lists whose entries have exactly one of several fields besides their name."""
Path = tuple[str | int, ...]
"""Names of fields and indices of entries, from an object to a part of it."""
_SUFFIXES: Final = {
    "n": Decimal("0.000000001"),
    "u": Decimal("0.000001"),
    "m": Decimal("0.001"),
    **{suffix: Decimal(10 ** (3 * power)) for power, suffix in enumerate("kMGTPE", 1)},
    **{f"{suffix}i": Decimal(2 ** (10 * power)) for power, suffix in enumerate("KMGTPE", 1)},
}
"""The API server's own forms, which are more than the resource takes: 2048Ti is stored as 2Pi, and 0.0005 as 500u."""


def with_applied_hash(manifest: Object) -> Object:
    """The manifest to send: with a hash of itself as annotation, by which removed fields are noticed."""
    digest = xxhash.xxh3_64_hexdigest(msgspec.json.encode(manifest, order="deterministic"))
    metadata = manifest["metadata"]
    annotations = {**metadata.get("annotations", {}), APPLIED_ANNOTATION: digest}
    return {**manifest, "metadata": {**metadata, "annotations": annotations}}


def must_apply(wanted: Object, live: Mapping[str, Any] | None) -> bool:
    """Whether `wanted` (with its hash) has to be applied: it never was, has other contents, or was changed since."""
    return live is None or not contains(live, wanted)


def contains(live: Any, wanted: Any, *, field: str = "") -> bool:
    """Whether every value of `wanted` is in `live`. Further fields of `live` (server defaults, status, other managers')
    are ignored, but not within a selector, and not if they are additions of others to a pod template; quantities are
    compared by value, since the API server rewrites them."""
    if field in _ATOMIC_FIELDS:
        return bool(live == wanted)
    if isinstance(wanted, Mapping):
        return (
            isinstance(live, Mapping)
            and not _added_fields(live, wanted, field)
            and all(
                contains(live.get(name), value, field=field if field in _QUANTITY_FIELDS else name)
                for name, value in wanted.items()
            )
        )
    if isinstance(wanted, list):
        return (
            isinstance(live, list)
            and len(live) == len(wanted)
            and all(contains(*pair, field=field) for pair in zip(live, wanted, strict=True))
        ) or (not wanted and live is None)
    if live is None:
        return wanted in ("", None, False)  # the API server omits what is empty
    if field in _QUANTITY_FIELDS:
        return _quantity(live) == _quantity(wanted)
    return live == wanted


def additions(live: Any, wanted: Any, *, field: str = "") -> list[Path]:
    """What `live` has in its pod template beyond `wanted`: fields that the API server never fills in, and entries of
    lists. In an order in which they can be removed one by one: later entries of a list before earlier ones."""
    if isinstance(wanted, Mapping) and isinstance(live, Mapping):
        if field in _ATOMIC_FIELDS:
            return []  # applying replaces it
        found: list[Path] = [(name,) for name in _added_fields(live, wanted, field)]
        for name, value in wanted.items():
            found += [(name, *rest) for rest in additions(live.get(name), value, field=name)]
        return found
    if isinstance(wanted, list) and isinstance(live, list) and field in _KEYED_LISTS:
        entries = {_entry_key(entry, field): entry for entry in wanted}
        found = []
        for index, entry in reversed(list(enumerate(live))):
            key = _entry_key(entry, field)
            if key in entries:
                found += [(index, *rest) for rest in additions(entry, entries[key])]
            else:
                found.append((index,))
        return found
    return []


def clashes(live: Any, wanted: Any, *, field: str = "") -> bool:
    """Whether others have given an entry of a list a value of another kind, so that a variable which came from a Secret
    has a value, say. Applying is refused then: it would leave both."""
    if isinstance(wanted, Mapping) and isinstance(live, Mapping):
        return any(clashes(live.get(name), value, field=name) for name, value in wanted.items())
    if not (isinstance(wanted, list) and isinstance(live, list) and field in _KEYED_LISTS):
        return False
    entries = {_entry_key(entry, field): entry for entry in wanted}
    pairs = [(each, entries[key]) for each in live if (key := _entry_key(each, field)) in entries]
    if field in _ONE_OF:
        return any(entry[name] and name not in own for entry, own in pairs for name in entry)
    return any(clashes(*pair) for pair in pairs)


def _added_fields(live: Mapping[str, Any], wanted: Mapping[str, Any], field: str) -> list[str]:
    if field in _FREE_MAPS:
        return []
    return [
        name
        for name in live
        if (name in _NEVER_DEFAULTED or field in _AMOUNTS)
        and name not in wanted
        and _SECOND_NAMES.get(name) not in wanted
        and live[name] is not False
        and live[name] not in ("", None, [], {})  # but 0 is a value: a user id, say
    ]


def _entry_key(entry: Any, field: str) -> tuple[Any, ...]:
    given = entry if isinstance(entry, Mapping) else {}
    return tuple(given.get(name, _KEY_DEFAULTS.get(name)) for name in _KEYED_LISTS[field])


def _quantity(text: object) -> Decimal | str:
    digits = str(text).rstrip("numkKMGTPEi")
    suffix = str(text)[len(digits) :]
    if not digits.replace(".", "", 1).isdecimal() or (suffix and suffix not in _SUFFIXES):
        return str(text)
    return Decimal(digits) * _SUFFIXES.get(suffix, Decimal(1))
