"""Lower bound of a JSON value's size as text, found without writing the text."""

from __future__ import annotations

from typing import Any


def least_json_size(value: Any, limit: int) -> int:
    """Return a lower bound of the characters that `json.dumps` writes for a value.

    The time is bounded by `limit`: once the bound exceeds it, the rest of the value is not looked at.
    """
    size, stack = 0, [value]
    while stack and size <= limit:
        item = stack.pop()
        if isinstance(item, str):
            size += len(item) + 2
        elif isinstance(item, dict):
            size += max(4 * len(item), 2)  # braces, and the separators after names and between items
            if size <= limit:
                stack.extend(item)
                stack.extend(item.values())
        elif isinstance(item, list | tuple):
            size += max(2 * len(item), 2)
            if size <= limit:
                stack.extend(item)
        else:
            size += 1
    return size
