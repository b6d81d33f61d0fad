"""Policies: pure functions that choose a replica.

Owns: the choice. Must not know: connections, telemetry, clocks; state comes in as arguments and leaves as a
`Decision`, so the router, `argosy route` and a simulator get the same answer from the same code.
Invariant: a policy chooses among the candidates it is given and nothing else; randomness comes from the caller.
"""

from __future__ import annotations

from argosy_router.policy.base import Candidate, Decision, Policy, RouteRequest
from argosy_router.policy.cost import choose as _cost
from argosy_router.policy.least_load import choose as _least_load
from argosy_router.policy.round_robin import choose as _round_robin

POLICIES: dict[str, Policy] = {"cost": _cost, "least-load": _least_load, "round-robin": _round_robin}

__all__ = ["POLICIES", "Candidate", "Decision", "Policy", "RouteRequest"]
