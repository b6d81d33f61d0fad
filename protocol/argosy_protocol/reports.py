"""Reports to the operator: what routers know of replicas and their load, and how far a pod's fetch of a model is.

A router's admin port serves two, with one key. `GET /internal/replicas` says which replicas it is connected to and
synced with; from it the operator derives the pods' `routable` gate, of which it is the only writer. `GET
/internal/load` says how busy each service is, and what each replica's cache is worth; the operator scales services and
judges canaries by it, and without either asks only when it removes replicas. The load changes all the time, so it has a
path and a revision of its own: `?after=N&wait=SECONDS` is a long poll that answers early only when a service begins to
hold requests for want of a replica.

A fetching pod (`argosy models pull --progress-port PORT`) serves its progress as JSON at `GET PROGRESS_PATH`. Its
summary is one printable line, whatever the report says.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import Meta, Struct, structs

REPORT_PATH = "/internal/replicas"
ADMIN_KEY_UID = "argosy:router-admin"
"""`headers.internal_key(fleet_key, ADMIN_KEY_UID)` is the bearer key of the admin port's internal routes."""

ReplicaState = Literal[
    "connecting", "synced", "stale", "foreign", "suspect", "ejected", "half-open", "draining"
]
"""`synced`: the telemetry snapshot is complete. `foreign`: a healthy engine that is not ours. Both are routable.
`suspect`: used only if no better replica is left. `half-open`: ejected, and to be probed with one request."""


class ReplicaReport(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One replica as one router sees it."""

    service: str
    """`namespace/name` of the service."""
    name: str
    """Pod name, or the endpoint's name in the local fleet."""
    uid: str = ""
    """Pod UID; empty outside Kubernetes."""
    url: str
    state: ReplicaState
    routable: bool
    """Whether this router would send it a request now."""
    epoch: str = ""
    """The engine's epoch from its hello frame."""
    inflight: int = 0


class RoutableReport(Struct, frozen=True, kw_only=True):
    """The report of one router: of all services, or of those that have changed since another one (`base`).

    Whoever gives the `epoch` of the last report beside its revision gets what has changed since. A router that does not
    know epochs ignores it, and one that has started anew, or no longer knows what has changed, answers with all: so
    does either to a reader that gives none.
    """

    router: str
    version: int = 1
    revision: int = 0
    """Incremented with every change. `GET REPORT_PATH?after=N&wait=SECONDS` is a long poll, so that the gate opens
    without a polling delay: it answers once the revision differs from N, or after SECONDS (at most 60). `&epoch=E` asks
    for the changes only."""
    fleet_revision: str = ""
    """xxh3 hex digest of the fleet document that the router follows."""
    epoch: str = ""
    """Random for each process of a router: revisions of another one count differently."""
    base: int | None = None
    """The revision since which this report has the changes; None if it is whole."""
    services: tuple[str, ...] = ()
    """With `base`: the services (`namespace/name`) that have changed. `replicas` are all that they have now."""
    replicas: tuple[ReplicaReport, ...] = ()


def with_changes(before: RoutableReport | None, report: RoutableReport) -> RoutableReport | None:
    """The whole report after `before` and the changes of `report`; None if these are the changes of another one."""
    if report.base is None:
        return report
    if before is None or (before.epoch, before.revision) != (report.epoch, report.base):
        return None
    changed = frozenset(report.services)
    kept = tuple(each for each in before.replicas if each.service not in changed)
    return structs.replace(report, base=None, services=(), replicas=kept + report.replicas)


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


PROGRESS_PATH: Final = "/progress"
MAX_REPORT_BYTES: Final = 4096
"""A longer report is not read."""

Phase = Literal["waiting", "blocked", "resolving", "fetching", "unpacking", "done"]
"""`waiting`: another process fetches the model into the same store. `blocked`: that process has made no progress for
long, and the note names it. `resolving`: the source is asked for the revision and its files."""

NumBytes = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class ModelProgress(Struct, frozen=True, kw_only=True):
    """What one fetch has done so far."""

    source: Annotated[str, Meta(max_length=1024)]
    revision: Annotated[str, Meta(max_length=256)] = ""
    """Empty until it is resolved."""
    phase: Phase
    fetched_bytes: NumBytes = 0
    """Bytes that are in the store, those of earlier attempts included."""
    total_bytes: NumBytes = 0
    """0 until the files are known."""
    bytes_per_second: Annotated[float, Meta(ge=0.0)] = 0.0
    eta_seconds: Annotated[float, Meta(ge=0.0)] | None = None
    """None while it cannot be told: before the first bytes, and while none arrive."""
    note: Annotated[str, Meta(max_length=512)] = ""
    """The last event, such as a retry after a failure."""


WAITING: Final = "waiting for another pod that fetches it"
"""Summary of a fetch whose phase is `waiting`."""

_MAX_HOURS: Final = 9999.0
SIZE_UNITS: Final = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def summary(progress: ModelProgress) -> str:
    """Describe a fetch in one line: `43 % 12.1/28.0 GiB, eta 70 s`. While nothing arrives, the note says why."""
    note = "".join(char if char.isprintable() else " " for char in progress.note).strip()
    if progress.phase == "waiting":
        return WAITING
    if progress.phase == "blocked":
        return note or WAITING
    if progress.phase == "done":
        return "fetched"
    if progress.phase == "resolving":
        text = "resolving the revision"
    elif progress.phase == "unpacking":
        text = f"unpacking, {_share(progress)}" if progress.total_bytes else "unpacking"
    else:
        text = _share(progress) if progress.total_bytes else "fetching"
    if progress.eta_seconds is not None:
        return f"{text}, eta {duration_text(progress.eta_seconds)}"
    return f"{text}; {note}" if note else text


def percent(summary: str) -> int | None:
    """The share that a summary names; None if it names none."""
    head, found, _ = summary.removeprefix("unpacking, ").partition(" % ")
    return int(head) if found and head.isdecimal() and len(head) <= 3 else None


def stage(shown: str) -> str:
    """How far a fetch is, in steps of a tenth, for places that must not change with every report: `fetching 40 %`.

    Args:
        shown: a summary, or another word for the state of a fetch, such as `cached`, which stays as it is.
    """
    if (share := percent(shown)) is not None and not shown.startswith("unpacking"):
        return f"fetching {share // 10 * 10} %"
    if shown in ("", "cached", "failed", "locked"):
        return shown
    if shown.startswith("unpacking"):
        return "unpacking"
    return "waiting" if shown == WAITING else "fetching"


def _share(progress: ModelProgress) -> str:
    return share_text(min(progress.fetched_bytes, progress.total_bytes), progress.total_bytes)


def share_text(done: int, total: int) -> str:
    """Describe how much of some bytes there is: `43 % 12.1/28.0 GiB`."""
    unit, name = next((entry for entry in SIZE_UNITS if total >= entry[0]), (1, "B"))
    digits = 0 if unit == 1 else 1
    share = 100 if total <= 0 else 100 * max(done, 0) // total
    return f"{share} % {done / unit:.{digits}f}/{total / unit:.{digits}f} {name}"


def duration_text(seconds: float) -> str:
    """Format a duration in its largest fitting unit: `70 s`, `12 min`, `3.5 h`."""
    if seconds < 120.0:
        return f"{seconds:.0f} s"
    return f"{seconds / 60.0:.0f} min" if seconds < 7200.0 else f"{min(seconds / 3600.0, _MAX_HOURS):.1f} h"
