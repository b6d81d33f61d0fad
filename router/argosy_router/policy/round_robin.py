"""The round-robin policy: replicas take turns in the order of their names.

w = sequence mod n
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from argosy_router.policy.base import Candidate, Decision, RouteRequest


def choose(request: RouteRequest, candidates: Sequence[Candidate], rng: random.Random) -> Decision:
    """The next candidate in turn."""
    order = sorted(range(len(candidates)), key=lambda index: candidates[index].name)
    index = order[request.sequence % len(order)]
    hit = request.hits.get(candidates[index].slot, 0)
    return Decision(index, "only" if len(candidates) == 1 else "load", hit, 0.0)
