"""Policies: pure functions that choose a replica.

Owns: the choice. Must not know: connections, telemetry, clocks; state comes in as arguments and leaves as a
`Decision`, so the router, `argosy route` and the simulator get the same answer from the same code.
Invariant: a policy chooses only among the candidates it is given; randomness comes from the caller.
To add a policy, write a module with `choose` and `terms`, register it here, and add its name to
`argosy_protocol.fleet.RoutingPolicy`.

Shared by policies: `policy_interface` (requests, candidates, decisions), `wait_model` (cost of a replica's load),
`rate_priors` (assumed speed of unmeasured replicas), `rendezvous` and `bounded_load` (hashing).
"""

from __future__ import annotations

from argosy_router.policy import (
    cost,
    least_load,
    power_of_two,
    prefix_hash,
    random_choice,
    round_robin,
    session,
)
from argosy_router.policy.policy_interface import Candidate, Decision, Policy, RouteRequest

POLICIES: dict[str, Policy] = {
    "cost": Policy(cost.choose, cost.terms),
    "least-load": Policy(least_load.choose, least_load.terms),
    "prefix-hash": Policy(prefix_hash.choose, prefix_hash.terms),
    "session": Policy(session.choose, session.terms),
    "round-robin": Policy(round_robin.choose, round_robin.terms),
    "random": Policy(random_choice.choose, random_choice.terms),
    "power-of-two": Policy(power_of_two.choose, power_of_two.terms),
}

__all__ = ["POLICIES", "Candidate", "Decision", "Policy", "RouteRequest"]
