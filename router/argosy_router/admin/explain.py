"""Explanation of a routing decision: which replica a request would get, and why.

Owns: the report of a choice. Must not know: HTTP.
Invariant: explaining changes nothing, neither the sequence counter nor the random generator, so the next request goes
where the explanation says unless something happens in between.
"""

from __future__ import annotations

import random
from collections.abc import Collection

from msgspec import Struct

from argosy_protocol.errors import ApiError
from argosy_router.fleet.candidates import Candidates
from argosy_router.fleet.fleet import Fleet
from argosy_router.fleet.replica import Replica
from argosy_router.fleet.revision_sides import in_parts
from argosy_router.fleet.service import Service
from argosy_router.policy import POLICIES
from argosy_router.prompts.prompt_hash import Prompt


class CandidateReport(Struct, frozen=True, kw_only=True):
    """One replica that could get the request."""

    replica: str
    state: str
    hit_tokens: int
    """Prompt tokens expected in its cache."""
    hit_source: str
    """`announced` by the replica, `expected` because the replica was sent the prefix, or `none`."""
    terms: dict[str, float]
    """The policy's figures, in seconds if the name ends in `_s`."""
    cost_s: float
    """Sum of the terms that are in seconds."""
    queued_tokens: int
    requests: int
    kv_usage: float
    prefill_tokens_per_s: float
    decode_step_s: float
    is_measured: bool
    """Whether the speed of its prefill was measured; else its peers' or a prior is assumed."""


class ExcludedReport(Struct, frozen=True, kw_only=True):
    """One replica that could not get the request."""

    replica: str
    state: str
    reason: str


class Explanation(Struct, frozen=True, kw_only=True):
    """The whole choice."""

    model: str
    service: str
    policy: str
    prompt_tokens: int
    prompt_chunks: int
    replica: str | None
    """The replica that the request would go to."""
    reason: str
    """Value of the `x-argosy-route` header, or why no replica is available."""
    predicted_cached_tokens: int = 0
    predicted_ttft_s: float | None = None
    """None: the replica's speed was not measured yet."""
    candidates: tuple[CandidateReport, ...] = ()
    excluded: tuple[ExcludedReport, ...] = ()


def explain(fleet: Fleet, service: Service, prompt: Prompt, now: float) -> Explanation:
    """Explain the choice for a request that would arrive now."""
    policy = fleet.policy or service.spec.policy
    rng = random.Random()  # noqa: S311 - a copy of the one that breaks ties
    rng.setstate(fleet.rng.getstate())
    tokens = service.lengths.tokens(prompt)
    try:
        candidates = service.candidates.below_limit(now, name=prompt.name)
        choice = service.choose(prompt, now, rng, policy=policy, is_trial=True)
    except ApiError as error:
        return Explanation(
            model=service.spec.model,
            service=service.spec.qualified_name,
            policy=policy,
            prompt_tokens=tokens,
            prompt_chunks=len(prompt.hashes),
            replica=None,
            reason=error.message,
            excluded=_excluded(service, prompt, (), now),
        )
    return Explanation(
        model=service.spec.model,
        service=service.spec.qualified_name,
        policy=policy,
        prompt_tokens=tokens,
        prompt_chunks=len(prompt.hashes),
        replica=choice.replica.name,
        reason=choice.decision.reason,
        predicted_cached_tokens=choice.decision.predicted_tokens,
        predicted_ttft_s=choice.measured_ttft_s,
        candidates=_candidates(service, prompt, candidates, policy),
        excluded=_excluded(service, prompt, candidates.replicas, now),
    )


def _candidates(
    service: Service, prompt: Prompt, candidates: Candidates, policy: str
) -> tuple[CandidateReport, ...]:
    request, length = service.route_request(prompt, candidates)
    rows = POLICIES[policy].terms(request, candidates.loads)
    reports = []
    for position, (replica, terms) in enumerate(zip(candidates.replicas, rows, strict=True)):
        hit = request.hits.get(position, 0)
        source = "none"
        if hit:
            source = "announced" if service.is_announced(replica, prompt.hashes, length) else "expected"
        load = replica.load
        reports.append(
            CandidateReport(
                replica=replica.name,
                state=replica.state,
                hit_tokens=hit,
                hit_source=source,
                terms=terms,
                cost_s=sum(value for name, value in terms.items() if name.endswith("_s")),
                queued_tokens=load.queued_tokens,
                requests=load.requests,
                kv_usage=load.kv_usage,
                prefill_tokens_per_s=load.prefill_tokens_per_s,
                decode_step_s=load.decode_step_s,
                is_measured=load.measured.prefill_tokens_per_s > 0.0,
            )
        )
    return tuple(reports)


def _excluded(
    service: Service, prompt: Prompt, among: Collection[Replica], now: float
) -> tuple[ExcludedReport, ...]:
    return tuple(
        ExcludedReport(
            replica=replica.name, state=replica.state, reason=_why_not(service, prompt, replica, now)
        )
        for replica in sorted(service.replicas.values(), key=lambda replica: replica.name)
        if replica not in among
    )


def _why_not(service: Service, prompt: Prompt, replica: Replica, now: float) -> str:
    side, name = in_parts(prompt.name)
    if not replica.serves(name):
        return f"it does not have {name!r}"
    if not replica.serves(side):
        return "it is on the other side of the canary rollout"
    if replica.is_draining or replica.has_announced_drain:
        return "it is draining"
    if not replica.is_routable:
        return "its health check fails" if replica.link == "foreign" else "it has not been reached yet"
    if not replica.health.admits(now):
        return "its last requests failed; it is tried again soon"
    if replica.health.is_suspect:
        return "its engine core has not turned for a while"
    if replica.health.is_in_cooldown(now):
        return f"it said that it is full; it is asked again in {replica.health.cooldown_until - now:.1f} s"
    limit = service.spec.limits.max_inflight_per_replica
    return f"it has its limit of {limit} requests" if limit else "others are healthier"
