"""What makes two KV blocks equal: the hash of a block is that of everything its content depends on.

Each hash covers its parent's, so it names the whole prefix: tokens, the salt that separates tenants, the adapter whose
weights computed it, and what stands behind placeholder tokens. Every part is tagged and length-prefixed, so that no
part can pass for another. SHA-256: collisions are out of reach even for an attacker who chooses the tokens
(CVE-2025-25183), so a hit needs no content check.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from argosy_engine.worker.step import MultimodalFeature


def root_hash(cache_salt: str | None, adapter: str | None = None) -> bytes:
    """Parent of a request's first block."""
    parts = b"argosy-block/2\0" + _part(b"salt", cache_salt or "")
    if adapter is not None:
        parts += _part(b"adapter", adapter)
    return hashlib.sha256(parts).digest()


def hash_block(
    parent: bytes, token_ids: list[int], features: Sequence[MultimodalFeature] = (), start: int = 0
) -> bytes:
    """
    Args:
        parent: hash of the block before.
        token_ids: of the block.
        features: of the request.
        start: position of the block's first token.
    """
    parts = parent + array("q", token_ids).tobytes()
    for feature in features:
        if feature.offset < start + len(token_ids) and feature.offset + feature.length > start:
            # The same picture may begin in this block or before it: the tokens alone do not tell.
            parts += _part(b"feature", feature.identifier) + (feature.offset - start).to_bytes(
                8, "little", signed=True
            )
    return hashlib.sha256(parts).digest()


def _part(tag: bytes, value: str) -> bytes:
    encoded = value.encode("utf-8", "surrogatepass")
    return tag + len(encoded).to_bytes(8, "little") + encoded
