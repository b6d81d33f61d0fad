"""Arguments of a call as JSON text."""

from __future__ import annotations

import json
from typing import Any


def arguments_text(value: Any) -> str | None:
    """Return arguments as JSON text; None if they are no object, or JSON or text cannot express them."""
    if not isinstance(value, dict):
        return None
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (
        ValueError,
        RecursionError,
    ):  # NaN and infinities, which Python's parser accepts but JSON does not have
        return None
    # Half of a surrogate pair can only be written as an escape.
    return text if is_text(text) else json.dumps(value)


def is_text(value: str) -> bool:
    """Whether UTF-8 can express it: no half of a surrogate pair."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
