"""Hashes of KV blocks: a block's hash covers everything that its content depends on.

Each hash includes its parent's and so identifies the whole prefix: tokens, the salt that separates tenants, the adapter
whose weights computed it, and the multimodal items behind placeholder tokens. Salt, adapter and items are tagged and
length-prefixed, so that none can be mistaken for another. SHA-256 is collision resistant even against an attacker who
chooses the tokens (CVE-2025-25183), so a hit needs no comparison of content.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from argosy_engine.messages.scheduler_output import MultimodalFeature


def root_hash(cache_salt: str | None, adapter: str | None = None) -> bytes:
    """Return the parent hash of a request's first block."""
    parts = b"argosy-block/2\0" + _part(b"salt", cache_salt or "")
    if adapter is not None:
        parts += _part(b"adapter", adapter)
    return hashlib.sha256(parts).digest()


def hash_block(
    parent: bytes, token_ids: list[int], features: Sequence[MultimodalFeature] = (), start: int = 0
) -> bytes:
    """Hash a full block.

    Args:
        parent: hash of the previous block, or `root_hash`.
        token_ids: the block's tokens.
        features: all multimodal items of the request; those that overlap the block are hashed.
        start: position of the block's first token.
    """
    parts = parent + array("q", token_ids).tobytes()
    for feature in features:
        if feature.offset < start + len(token_ids) and feature.offset + feature.length > start:
            # The offset is hashed too: placeholder tokens do not tell which part of the item falls into this block.
            parts += _part(b"feature", feature.identifier) + (feature.offset - start).to_bytes(
                8, "little", signed=True
            )
    return hashlib.sha256(parts).digest()


def _part(tag: bytes, value: str) -> bytes:
    encoded = value.encode("utf-8", "surrogatepass")
    return tag + len(encoded).to_bytes(8, "little") + encoded
