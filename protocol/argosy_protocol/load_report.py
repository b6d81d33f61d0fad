"""A router's load report to the operator: how busy each service is, and what each replica's cache is worth.

The router's admin port serves it at `GET /internal/load`, with the key of the routable report. The operator scales
services and judges canaries by these reports; without either it asks only when it removes replicas. Unlike the routable
report it changes all the time, so it has a path and a revision of its own: `?after=N&wait=SECONDS` is a long poll that
answers early only when a service begins to hold requests for want of a replica.
"""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta, Struct

LOAD_PATH: Final = "/internal/load"

TTFT_BOUNDS_S: Final = (
    *(0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7),
    *(1.0, 1.5, 2.0, 3.0, 5.0, 7.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0),
)
"""Upper bounds of the buckets of times to first token; a last bucket has no bound."""
TTFT_WINDOW_S: Final = 60.0
"""Seconds of answers that a report counts."""
SIDE_BOUNDS_S: Final = tuple(0.001 * 2 ** (step / 8) for step in range(137))
"""Upper bounds of the buckets in which the latencies of a canary rollout's sides are counted, from 1 ms to 131 s: eight
to each doubling, so that a ratio of two latencies is known to 9 %. A last bucket has no bound."""
WINDOW_SLICES: Final = 12
"""Parts of the window of a canary rollout's figures. The window moves by a part."""


class ReplicaLoadReport(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One replica's load as one router knows it. What the replica reported includes the work of all routers."""

    name: str
    uid: str = ""
    routable: bool = False
    requests: int = 0
    """Sequences at the replica: those that it reported, corrected by what this router has sent since."""
    inflight: int = 0
    """Sequences that this router has sent it and that have not ended."""
    queued_tokens: int = 0
    """Uncached prompt tokens that wait there, over all cores of the replica."""
    kv_usage: float = 0.0
    """Share of its KV cache in use, from 0 to 1."""
    cache_value: float = 0.0
    """Prompt tokens per second, averaged over some minutes, that this router's requests would have had to compute
    without the replica's cache."""


Count = Annotated[int, Meta(ge=0)]
SideCounts = Annotated[tuple[Count, ...], Meta(max_length=len(SIDE_BOUNDS_S) + 1)]


class SideReport(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one router's attempts at the replicas of one revision came to."""

    attempts: Count = 0
    """Attempts that ended, those of retries, hedges and migrations included. One that is given up, since its client
    left or another attempt was faster, says nothing, and neither does the refusal of a replica that is full."""
    failures: Count = 0
    """Those that ended with an error of the engine (5xx) or of the connection, or without an answer in time."""
    client_errors: Count = 0
    """Those that the engine answered with another error (4xx)."""
    prompt_tokens: Count = 0
    """Of the answers that reported their usage."""
    predicted_tokens: Count = 0
    """Prompt tokens of these that the router expected to be cached."""
    cached_tokens: Count = 0
    """Prompt tokens of these that were cached."""
    ttft_counts: Annotated[tuple[Count, ...], Meta(max_length=len(TTFT_BOUNDS_S) + 1)] = ()
    """Streamed attempts by the time to their first token, one count for each bucket of TTFT_BOUNDS_S; empty if there
    were none. An attempt that had none counts with the time that it was waited for."""
    ttft: SideCounts = ()
    """The same attempts by the buckets of SIDE_BOUNDS_S; empty also from routers that do not know these."""
    itl: SideCounts = ()
    """Streamed answers that ended, by the mean time between their tokens, likewise."""
    sampled: Count = 0
    """Answers that reported their usage. Of each, one prompt token is drawn, so that these are independent."""
    sampled_cached: Count = 0
    """Those whose token was cached."""
    expected: Count = 0
    """Answers of which the router expected a part to be cached. Of each, one token of that part is drawn."""
    expected_cached: Count = 0
    """Those whose token was cached."""


class RolloutReport(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The two sides of a service that the fleet document divides, since it divides it so."""

    canary_revision: Annotated[str, Meta(max_length=63)]
    weight: Annotated[int, Meta(ge=0, le=100)] = 0
    """The canary's share in per cent, as the fleet document has it."""
    stable: SideReport = SideReport()
    """Of the window that the fleet document asks for (`fleet.RevisionSplit`)."""
    canary: SideReport = SideReport()
    stable_total: SideReport | None = None
    """Since this router divides so; None from routers that count windows only."""
    canary_total: SideReport | None = None


class ServiceLoadReport(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One service's load at one router."""

    service: str
    """`namespace/name`"""
    held: int = 0
    """Queued requests, while no replica can answer any."""
    queued: int = 0
    """Queued requests, those held included."""
    queued_tokens: int = 0
    """Tokens that the queued requests are expected to cost, prompts and output together."""
    idle_s: float = 0.0
    """Seconds since the last request ended; 0 while one is queued or in flight."""
    ttft_counts: tuple[int, ...] = ()
    """Streamed answers that began within the last TTFT_WINDOW_S, one count for each bucket of TTFT_BOUNDS_S; empty if
    there were none. Requests that were held are left out, since their time says nothing of the replicas' load."""
    replicas: tuple[ReplicaLoadReport, ...] = ()
    rollout: RolloutReport | None = None
    """None unless the service is divided, and from routers that do not know how."""


class LoadReport(Struct, frozen=True, kw_only=True):
    """The whole load report of one router."""

    router: str
    version: int = 1
    revision: int = 0
    """Incremented whenever a service begins to hold requests."""
    uptime_s: float | None = None
    """Seconds since the router started: it knows of no earlier answer. None from routers that do not say."""
    services: tuple[ServiceLoadReport, ...] = ()
