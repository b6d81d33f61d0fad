"""Rendezvous ranking for `policy.rendezvous`: the name that a key ranks first."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

_xxh3 = xxhash.xxh3_64_intdigest


def first_ranked(names: Sequence[bytes], key: int) -> int:
    """Position of the name with the highest hash, seeded with the 64-bit key; the first of equals.

    Raises:
        ValueError: there is no name.
    """
    ranks = [_xxh3(name, key) for name in names]
    return ranks.index(max(ranks))
