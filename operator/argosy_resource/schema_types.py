"""Bounded field types of the custom resource, and its CEL rules.

Owns the small types that the resource's types are written in, and `Rule`, which a struct carries in its `rules`. Knows
nothing of what the fields mean. Invariant: every string, number and list has a limit, so that the API server can bound
the cost of CEL rules, and no field takes unbounded memory.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Annotated, Any, Final

from msgspec import Meta, Struct


class Rule(Struct, frozen=True, kw_only=True):
    """One `x-kubernetes-validations` entry.

    Uses the common core of CEL only (`has`, `in`, `size`, `matches`, `startsWith`, `contains`, `all`, `exists`,
    `filter`), and of Kubernetes' libraries `quantity(...).isGreaterThan(...)`, because the same text runs in the API
    server and in `validation`.
    """

    rule: str
    message: str
    """Says what to do, not only what is wrong."""
    message_expression: str = ""
    """CEL of the message with the resource's own values: `format` of a literal, since the API server bounds no string
    that is made in another way. It falls back to `message` if the evaluation fails."""
    field_path: str = ""
    """Where the error is reported, relative to the struct, such as `.engine.device`."""


def rules_of(*rules: Rule) -> dict[str, Any]:
    """`extra_json_schema` of a field whose rules look at its own value only (a string's format, say)."""
    return {"x-kubernetes-validations": [rule_schema(rule) for rule in rules]}


def rule_schema(rule: Rule) -> dict[str, str]:
    schema = {"rule": rule.rule, "message": rule.message}
    if rule.message_expression:
        schema["messageExpression"] = rule.message_expression
    if rule.field_path:
        schema["fieldPath"] = rule.field_path
    return schema


def matches(pattern: str, message: str) -> dict[str, Any]:
    """`extra_json_schema` of a string whose format is explained by a message. In the CRD this rule replaces the type's
    own `pattern`, since the API server would quote the pattern as the only explanation.

    Args:
        pattern: that of the type's `Meta`. Without quotes and backslashes, which CEL would interpret.
    """
    assert not {"'", "\\"} & set(pattern)
    return rules_of(Rule(rule=f"self.matches('{pattern}')", message=message))


def number_or_matches(pattern: str, message: str) -> dict[str, Any]:
    """`matches` for a field that is a whole number or a string."""
    assert not {"'", "\\"} & set(pattern)
    return rules_of(Rule(rule=f"type(self) == int || self.matches('{pattern}')", message=message))


SET: Final[dict[str, Any]] = {"x-kubernetes-list-type": "set"}
MAP_BY_TYPE: Final[dict[str, Any]] = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}
MAP_BY_NAME: Final[dict[str, Any]] = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}

QUANTITY_PATTERN: Final = r"^[0-9]+([.][0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?$"

_WholeQuantity = Annotated[int, Meta(ge=0, le=10**18)]
_QuantityText = Annotated[str, Meta(pattern=QUANTITY_PATTERN, max_length=32)]
Quantity = Annotated[
    _WholeQuantity | _QuantityText,
    Meta(
        extra_json_schema=number_or_matches(
            QUANTITY_PATTERN,
            "must be a quantity: a number, perhaps followed by m, k, Ki, M, Mi, G, Gi, T or Ti, such as 500m or 16Gi",
        )
    ),
]
"""A Kubernetes quantity: a string such as `500m` or `16Gi`, or a whole number."""
ListedQuantity = _WholeQuantity | _QuantityText
"""A `Quantity` inside a list. Its pattern is no CEL rule: an API server that does not apply `maxLength` to the cost of
an int-or-string (Kubernetes 1.33) would refuse the definition, as it multiplies the cost by the list's length."""

PERCENT_PATTERN: Final = "^([0-9]|[1-9][0-9]|100)%$"
CountOrPercent = Annotated[
    Annotated[int, Meta(ge=0, le=1000)] | Annotated[str, Meta(pattern=PERCENT_PATTERN, max_length=4)],
    Meta(
        extra_json_schema=number_or_matches(
            PERCENT_PATTERN, "must be a number, 0 to 1000, or a percentage between 0% and 100%, such as 10%"
        )
    ),
]
"""A number of replicas, or a share of them: Kubernetes' int-or-string."""

CACHE_PATTERN: Final = (
    r"^([1-9][0-9]{6,12}|[1-9][0-9]{3,9}(k|Ki)|[1-9][0-9]{0,6}(M|Mi)|[1-9][0-9]{0,3}(G|Gi)"
    r"|([1-9]|[1-5][0-9]|6[0-3])(T|Ti))$"
)
"""A number of bytes that an engine's KV cache may have (`program.flags.KvCacheBytes`), whatever its suffix."""
CacheQuantity = Annotated[
    Annotated[int, Meta(ge=10**6, le=63 << 40)] | Annotated[str, Meta(pattern=CACHE_PATTERN, max_length=32)],
    Meta(
        extra_json_schema=number_or_matches(
            CACHE_PATTERN,
            "must be a number of bytes between 1M and 63Ti: a whole number, perhaps with k, Ki, M, Mi, G, Gi, T or Ti, "
            "such as 2Gi or 512Mi",
        )
    ),
]
"""Bytes between 1M and 63Ti, such as `2Gi`."""

LabelValue = Annotated[str, Meta(max_length=63, pattern=r"^([A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?)?$")]
LabelKey = Annotated[str, Meta(max_length=317)]
AnnotationValue = Annotated[str, Meta(max_length=16384)]
ObjectName = Annotated[str, Meta(min_length=1, max_length=253, pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$")]
ENGINE_KEY_SUFFIX: Final = "engine-key"
"""The Secret with the internal key of a service's engines is `NAME-engine-key`."""
OWN_SECRETS: Final = ("argosy-fleet-key", "argosy-router-given-keys", "argosy-router-keys")
"""Secrets that operator and chart make with the keys of an installation."""
_own_secret_rules: Final = rules_of(
    Rule(
        rule=(
            f"!self.endsWith('-{ENGINE_KEY_SUFFIX}') && "
            f"!(self in [{', '.join(repr(name) for name in OWN_SECRETS)}])"
        ),
        message=(
            f"names that end in -{ENGINE_KEY_SUFFIX}, and {', '.join(OWN_SECRETS)}, are those of Secrets with keys of "
            "Argosy, which no service may name"
        ),
    )
)
SecretObjectName = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=253,
        pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$",
        extra_json_schema=_own_secret_rules,
    ),
]
"""Name of a Secret. Pods of a service run what its writer chooses, who so reads each Secret that it names."""
SecretName = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=247,
        pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$",
        extra_json_schema=_own_secret_rules,
    ),
]
"""The same where a directory of a cache is named after the Secret, so that it is shorter than a file's name may be."""


def is_own_secret(name: str) -> bool:
    """Whether a Secret of this name has keys of Argosy."""
    return name.endswith(f"-{ENGINE_KEY_SUFFIX}") or name in OWN_SECRETS


InferenceServiceName = Annotated[str, Meta(max_length=63, pattern=r"^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$")]
_DOMAIN: Final = r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?"
_RESOURCE_PATTERN: Final = rf"^{_DOMAIN}/[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$"
ResourceName = Annotated[
    str,
    Meta(
        min_length=3,
        max_length=253,
        pattern=_RESOURCE_PATTERN,
        extra_json_schema=matches(
            _RESOURCE_PATTERN, "must be an extended resource with its domain, such as nvidia.com/gpu"
        ),
    ),
]
_SERVED_PATTERN: Final = r"^[A-Za-z0-9][A-Za-z0-9._:/-]*$"
ServedName = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=256,
        pattern=_SERVED_PATTERN,
        extra_json_schema=matches(
            _SERVED_PATTERN,
            "must be a model name: a letter or digit, then letters, digits and . _ : / -, such as org/model-8b",
        ),
    ),
]

_SUFFIXES: Final[dict[str, Fraction | int]] = {
    "m": Fraction(1, 1000),
    "": 1,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}


def quantity_text(quantity: int | str | None) -> str | None:
    """The quantity as Kubernetes stores it, so that pods do not depend on how it was written; None stays None."""
    return None if quantity is None else str(quantity)


def quantity_value(quantity: int | str) -> Fraction:
    """The number that a `Quantity` means.

    Raises:
        ValueError: a string that is not a number with a known suffix.
    """
    if isinstance(quantity, int):
        return Fraction(quantity)
    digits = quantity.rstrip("mkKMGTi")
    suffix = quantity[len(digits) :]
    if suffix not in _SUFFIXES or not digits.replace(".", "", 1).isdecimal():
        raise ValueError(f"not a quantity: {quantity!r}")
    return Fraction(digits) * _SUFFIXES[suffix]


def quantity_bytes(quantity: int | str) -> int:
    """Whole bytes of a `Quantity`; a part of a byte does not count.

    Raises:
        ValueError: a string that is not a number with a known suffix.
    """
    return int(quantity_value(quantity))
