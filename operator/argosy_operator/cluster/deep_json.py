"""Reads the API server's JSON, however deep an object is.

What the operator reads nests two dozen levels. But whoever writes an object may set `metadata.managedFields`, in which
the API server takes 10,000 levels, more than Python's decoder: one such object would end every list and watch that has
it. Owns what is left of it. Must not know kinds. Invariant: what nests no deeper than MAX_DEPTH is read as it is.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

MAX_DEPTH: Final = 100
_TOKEN: Final = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]]')


def loads(text: str | bytes) -> Any:
    """Read a JSON text. In one that is too deep for the decoder, whatever is below MAX_DEPTH levels is null.

    Raises:
        ValueError: it is no JSON.
    """
    try:
        return json.loads(text)
    except RecursionError:
        return json.loads(_cut(text if isinstance(text, str) else text.decode()))


def _cut(text: str) -> str:
    """The text with null in place of each object or list below MAX_DEPTH levels."""
    kept, start, depth = [], 0, 0
    for token in _TOKEN.finditer(text):
        sign = token[0]
        if sign in ("{", "["):
            if depth == MAX_DEPTH:
                kept.append(text[start : token.start()])
            depth += 1
        elif sign in ("}", "]"):
            depth -= 1
            if depth == MAX_DEPTH:
                kept.append("null")
                start = token.end()
    return "".join((*kept, text[start:])) if depth == 0 else ""
