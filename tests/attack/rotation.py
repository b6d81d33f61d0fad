"""Registry of all attacks, and their order.

Attacks that kill replicas are spread among the others, so that every family runs on a fleet that just lost a replica.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from .families import (
    connections,
    grammars,
    identities,
    jobs,
    leaving,
    markers,
    nesting,
    processes,
    sampling,
    scraping,
    tenants,
)
from .target import Attack

FAMILIES = {
    "grammars": grammars.ATTACKS,
    "nesting": nesting.ATTACKS,
    "markers": markers.ATTACKS,
    "sampling": sampling.ATTACKS,
    "connections": connections.ATTACKS,
    "identities": identities.ATTACKS,
    "leaving": leaving.ATTACKS,
    "scraping": scraping.ATTACKS,
    "jobs": jobs.ATTACKS,
    "tenants": tenants.ATTACKS,
    "processes": processes.ATTACKS,
}


def rotation(families: Sequence[str], *, has_bucket: bool = False) -> list[Attack]:
    """Interleave the families: one attack of each in turn, until all that can run are taken."""
    columns = zip_longest(*(FAMILIES[name] for name in families))
    return [
        attack
        for column in columns
        for attack in column
        if attack is not None and attack.needs_bucket in (None, has_bucket)
    ]


def endless(attacks: Sequence[Attack]) -> Iterator[Attack]:
    while True:
        yield from attacks
