"""Counts the container entries in an object tree by the attribute that owns them, to find leaks."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

_PACKAGES = ("argosy_", "prometheus_client")
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)


def census(*roots: object) -> Counter[str]:
    """Return the number of container entries by `Class.attribute`, summed over all instances.

    Follows the attributes of our own objects and of Prometheus metrics, and the entries of containers. A container
    inside another one counts under the owner's name with `[]` appended.
    """
    found: Counter[str] = Counter()
    seen: set[int] = set()
    stack: list[tuple[str, Any]] = [("", root) for root in roots]
    while stack:
        owner, value = stack.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, _CONTAINERS):
            found[owner] += len(value)
            entries = [*value.keys(), *value.values()] if isinstance(value, dict) else value
            stack += [(f"{owner}[]", entry) for entry in entries]
        elif type(value).__module__.startswith(_PACKAGES):
            stack += [(f"{type(value).__name__}.{name}", item) for name, item in _attributes(value)]
    return found


def _attributes(value: object) -> list[tuple[str, Any]]:
    names = {*getattr(value, "__dict__", ())}
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        names.update((slots,) if isinstance(slots, str) else slots)
    return [(name, getattr(value, name)) for name in sorted(names) if hasattr(value, name)]
