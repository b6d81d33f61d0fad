"""How many values a JSON text may have: what it costs to decode grows with them, hardly with its bytes.

Owns: the bound, and a count that costs a few milliseconds for the largest body and nothing for ordinary ones.
Must not know: what the values mean.
"""

from __future__ import annotations

from argosy_engine.protocol.errors import PayloadTooLarge

MAX_VALUES = 1 << 20
"""A prompt of a million token ids. Ten million empty lists fit into the largest body and take seconds to decode, which
a thread would not help: the decoder keeps the interpreter's lock."""


def check_values(body: bytes) -> None:
    """
    Raises:
        PayloadTooLarge: there are more than `MAX_VALUES` values outside of strings.
    """
    if len(body) <= MAX_VALUES or _separators(body) <= MAX_VALUES:
        return  # prose; what looks like a separator inside a string is counted here, too
    bare = body.replace(rb"\\", b"").replace(rb"\"", b"")
    if bare.count(b'"') > 2 * MAX_VALUES or _separators(b"".join(bare.split(b'"')[::2])) > MAX_VALUES:
        raise PayloadTooLarge(f"the request has more than {MAX_VALUES} JSON values")


def _separators(text: bytes) -> int:
    """At least the number of values less one."""
    return text.count(b",") + text.count(b"[") + text.count(b"{")
