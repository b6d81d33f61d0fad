"""The number of replicas that `spec.scaling` wants: a pure function of load, time and history.

Owns the decision and the history that it needs; and which replicas a Deployment gives up first when it is made smaller,
those whose caches are worth least, with the annotation by which the ReplicaSet controller follows that (KEP-2255). Must
not ask routers, look at a clock or remember anything.

    queuedTokens, concurrency, kvCacheUtilization   sum over the service / target
    ttftP90Seconds   replicas * p90 / target, at most twice as many and at most one for each sequence, once all replicas
                     were routable for as long as the answers counted, and there were enough of these; one fewer below
                     half of the target, or if there were too few and fewer sequences than replicas
    the metric that asks for most decides, within 10 per cent of the target none does

Replicas are added when all recommendations of the scale-up window ask for more, removed when all of the scale-down
window ask for fewer, by at most a step in each period. Three things do not wait for windows: bounds (minReplicas,
maxReplicas, schedules), a request that is held for want of a replica, and a service that was idle for idleSeconds since
a replica could serve, so that none is stopped while it starts.

Invariants: the number is within the bounds; without a report of every router, and while a replica that serves is
missing from the reports, nothing is removed but by a bound; a replica that was added for the load is kept for at least
the scale-down window; replicas that do not serve are left to the ReplicaSet controller, which removes them first; only
replicas to be removed carry the annotation, so that as many pods are written as are removed, and it goes with them;
without a report no pod is written, and Kubernetes chooses.
"""

from __future__ import annotations

import datetime
import functools
import math
import zoneinfo
from collections.abc import Iterable, Iterator, Set
from typing import Any, Final

import msgspec
from msgspec import Struct

from argosy_operator.observation import ReplicaUse, ServiceLoad
from argosy_operator.pod import DELETION_COST_ANNOTATION, Pod
from argosy_protocol.reports import TTFT_WINDOW_S
from argosy_resource.scaling import Scaling, ScalingMetrics, ScalingSchedule, is_between, passed_local_time

INTERVAL: Final = 5.0
"""Seconds between two decisions. Load reports are as old. A request that is held has one made at once."""
TOLERANCE: Final = 0.1
"""As the HorizontalPodAutoscaler's."""
_MAX_TTFT_FACTOR: Final = 2.0
"""Time to first token grows without bound when a service is overloaded, far beyond what capacity is missing."""
_LEAST_ANSWERS: Final = 5
"""Answers, with requests that wait, by which TTFT adds replicas: of fewer the slowest alone would decide."""
_TTFT_SPARE: Final = 0.5
"""Below this share of the target a replica is removed. Without load the time is that of computing a prompt, which more
replicas do not shorten, so a ratio would say nothing."""


class Recommendation(Struct, frozen=True):
    """Numbers of replicas that the load asked for within one INTERVAL."""

    time: float
    """Of the last."""
    least: int
    most: int


class ScalingHistory(Struct, frozen=True, kw_only=True):
    """What a decision needs of the past. Times are of one monotonic clock."""

    since: float
    """When the history begins: windows that reach further back are not covered, and hold still."""
    recommendations: tuple[Recommendation, ...] = ()
    """Those within the longer window, oldest first; at most one for each INTERVAL."""
    last_up: float = -math.inf
    last_down: float = -math.inf
    served_since: float | None = None
    """When a replica was first seen routable since the service had none; None before that."""
    complete_since: float | None = None
    """Since when all replicas of the number decided are routable; None while some are not."""


class ScalingDecision(Struct, frozen=True):
    """A number of replicas, and why: what was decided, or what a metric asks for."""

    wanted: int
    reason: str
    message: str = ""


def decide(
    scaling: Scaling,
    *,
    load: ServiceLoad | None,
    current: int,
    serving: Set[str],
    history: ScalingHistory,
    now: float,
    wall: datetime.datetime,
    start_deadline: float,
) -> tuple[ScalingDecision, ScalingHistory]:
    """Decide the number of replicas.

    Args:
        load: None if no router has reported.
        current: the number decided last.
        serving: UIDs of the pods that are known to serve.
        now: of the history's clock.
        wall: the time, with a zone.
        start_deadline: seconds after which a replica that still starts no longer keeps an idle service from zero.
    """
    floor, why_floor = lower_bound(scaling, wall)
    ceiling = scaling.max_replicas
    history = _pruned(scaling, history, now)
    bounded = min(max(current, floor), ceiling)
    if load is None:
        unchanged = ScalingDecision(bounded, "NoReports", "no router reports; nothing is changed")
        decision = _bounded(current, floor, ceiling, why_floor) or unchanged
        # A window that is empty because nobody reported would hold nothing still.
        return decision, _with(history, Recommendation(now, bounded, bounded))
    if history.served_since is None and (serving or load.routable):
        history = msgspec.structs.replace(history, served_since=now)
    history = _with_complete(history, load, bounded, now)
    if _is_idle(scaling, load, history, now, start_deadline) and current > floor == 0:
        decision = ScalingDecision(0, "Idle", f"no request for {scaling.idle_after} s")
        return decision, _moved(history, current, 0, now)
    want = _wanted(scaling, load, bounded, floor, complete_s=_complete_s(history, now))
    want_replicas = min(max(want.wanted, floor), ceiling)
    if not (load.is_complete or load.is_settled) or any(uid not in load.replicas for uid in serving):
        want_replicas = max(want_replicas, bounded)
    recommendation = Recommendation(now, want_replicas, want_replicas)
    wanted = min(max(_stable(scaling, history, recommendation, bounded), floor), ceiling)
    history = _with(history, recommendation)
    if load.held and bounded == 0:
        step = min(max(1, want_replicas), scaling.scale_up.max_step, ceiling)
        message = f"{load.held} requests are held for want of a replica"
        return ScalingDecision(step, "Held", message), _moved(history, current, step, now)
    is_asked = wanted != bounded or want_replicas == wanted
    decision = ScalingDecision(wanted, want.reason if is_asked else "Stabilizing", want.message)
    if wanted == bounded:
        decision = _bounded(current, floor, ceiling, why_floor) or decision
    return decision, _moved(history, current, wanted, now)


def lower_bound(scaling: Scaling, wall: datetime.datetime) -> tuple[int, str]:
    """The smallest number of replicas now, and what says so."""
    if not scaling.schedules:
        return scaling.min_replicas, "minReplicas"
    minute = wall.astimezone(datetime.UTC).replace(second=0, microsecond=0)
    return _scheduled_bound(scaling.min_replicas, scaling.schedules, minute)


@functools.lru_cache(maxsize=4096)
def _scheduled_bound(
    floor: int, schedules: tuple[ScalingSchedule, ...], wall: datetime.datetime
) -> tuple[int, str]:
    """Cron's times are whole minutes. A look-up of schedules that hardly ever match takes milliseconds, and each
    decision and status asks."""
    why = "minReplicas"
    for schedule in schedules:
        zone = _zone(schedule.time_zone)
        if zone is None or schedule.min_replicas <= floor:
            continue
        if is_between(schedule.start, schedule.end, passed_local_time(wall, zone)):
            floor, why = schedule.min_replicas, f"schedule {schedule.name}"
    return floor, why


def unknown_time_zones(scaling: Scaling) -> list[str]:
    """Time zones of schedules that this machine does not know; those schedules are ignored."""
    zones = dict.fromkeys(schedule.time_zone for schedule in scaling.schedules)
    return [name for name in zones if _zone(name) is None]


@functools.lru_cache(maxsize=1024)
def _zone(name: str) -> zoneinfo.ZoneInfo | None:
    try:
        return zoneinfo.ZoneInfo(name)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        return None


def _is_idle(
    scaling: Scaling, load: ServiceLoad, history: ScalingHistory, now: float, start_deadline: float
) -> bool:
    """Whether the service has been without a request for long enough, as far as both routers and we have looked. A
    replica that starts is waited for, since a client that gave up comes back for it."""
    idle_s = min(load.idle_s, now - history.since)
    if history.served_since is not None:
        idle_s = min(idle_s, now - history.served_since)
    elif now - max(history.since, history.last_up) < start_deadline:
        return False
    return load.is_complete and not load.sequences and not load.held and idle_s >= scaling.idle_after


def _wanted(
    scaling: Scaling, load: ServiceLoad, current: int, floor: int, *, complete_s: float
) -> ScalingDecision:
    """What the load asks for. Only a service that was idle for long enough has no replica."""
    least = max(floor, 1 if current or load.held else 0)
    wants = [ScalingDecision(least, "MinReplicas", "no metric asks for more")]
    if scaling.metrics is not None:
        wants += _by_metrics(scaling.metrics, load, current, complete_s)
    return max(wants, key=lambda want: want.wanted)


def _by_metrics(
    metrics: ScalingMetrics, load: ServiceLoad, current: int, complete_s: float
) -> Iterator[ScalingDecision]:
    kv_usage = sum(each.kv_usage for each in load.replicas.values())
    sums = (
        ("QueuedTokens", float(load.tokens), metrics.queued_tokens),
        ("Concurrency", float(load.sequences), metrics.concurrency),
        ("KVCacheUtilization", kv_usage, metrics.kv_cache_utilization),
    )
    for reason, total, target in sums:
        if target is not None:
            message = f"{total:.6g} in all, {target:g} for each replica"
            yield ScalingDecision(_for_sum(total, target, current), reason, message)
    if metrics.ttft_p90_seconds is not None:
        yield _by_ttft(metrics.ttft_p90_seconds, load, current, complete_s)


def _for_sum(total: float, target: float, current: int) -> int:
    if current and abs(total / (current * target) - 1.0) <= TOLERANCE:
        return current
    return math.ceil(total / target)


def _by_ttft(target: float, load: ServiceLoad, current: int, complete_s: float) -> ScalingDecision:
    """`complete_s`: for how many seconds all replicas have been routable. Answers of the window that began earlier say
    what fewer replicas could do."""
    p90 = load.ttft_p90_s
    if p90 is None and not (load.is_window_covered and load.is_complete):
        return ScalingDecision(
            current, "TTFTP90", "a router has not counted answers for a minute yet, or does not answer"
        )
    if p90 is not None and p90 < target * _TTFT_SPARE:
        return ScalingDecision(current - 1, "TTFTP90", _ttft_message(p90, target))
    if p90 is None or load.answers + load.queued < _LEAST_ANSWERS:
        few = f"{load.answers} answers began within the last minute, too few to add replicas by"
        return ScalingDecision(max(0, current - (load.sequences < current)), "TTFTP90", few)
    message = _ttft_message(p90, target)
    if p90 <= target * (1.0 + TOLERANCE):
        return ScalingDecision(current, "TTFTP90", message)
    if load.routable < current:
        return ScalingDecision(current, "TTFTP90", f"{message}; replicas are starting")
    if complete_s < TTFT_WINDOW_S:
        return ScalingDecision(current, "TTFTP90", f"{message}; some answers began with fewer replicas")
    if load.sequences <= current:
        return ScalingDecision(
            current, "TTFTP90", f"{message}; each of {load.sequences} sequences has a replica"
        )
    wanted = math.ceil(current * min(_MAX_TTFT_FACTOR, p90 / target))
    return ScalingDecision(min(wanted, load.sequences), "TTFTP90", message)


def _ttft_message(p90: float, target: float) -> str:
    return f"p90 {p90:.3g} s, target {target:g} s"


def _with_complete(history: ScalingHistory, load: ServiceLoad, current: int, now: float) -> ScalingHistory:
    since = now if history.complete_since is None else history.complete_since
    return msgspec.structs.replace(history, complete_since=None if load.routable < current else since)


def _complete_s(history: ScalingHistory, now: float) -> float:
    return 0.0 if history.complete_since is None else now - history.complete_since


def _stable(scaling: Scaling, history: ScalingHistory, new: Recommendation, current: int) -> int:
    """The number within windows, steps and periods, `new` being what the load asks for now."""
    up, down, now = scaling.scale_up, scaling.scale_down, new.time
    start = now - up.stabilization_window_seconds
    most = min([new.least, *(each.least for each in _window(history, start))])
    if most > current:
        if history.since > start or now - history.last_up < up.period_seconds:
            return current
        return min(most, current + up.max_step)
    start = now - down.stabilization_window_seconds
    least = max([new.most, *(each.most for each in _window(history, start))])
    if least < current:
        if history.since > start or now - history.last_down < down.period_seconds:
            return current
        return max(least, current - down.max_step)
    return current


def _window(history: ScalingHistory, start: float) -> Iterator[Recommendation]:
    return (each for each in history.recommendations if each.time >= start)


def _bounded(current: int, floor: int, ceiling: int, why_floor: str) -> ScalingDecision | None:
    """The decision of a bound that the present number violates, or that holds it."""
    if current < floor:
        return ScalingDecision(floor, "MinReplicas", f"{why_floor} asks for {floor}")
    if current > ceiling:
        return ScalingDecision(ceiling, "MaxReplicas", f"maxReplicas is {ceiling}")
    return None


def _with(history: ScalingHistory, new: Recommendation) -> ScalingHistory:
    """With one more recommendation, merged into the last one if that is of the same INTERVAL: held requests have
    decisions made more often, and a history is bounded by its windows."""
    kept = history.recommendations
    if kept and kept[-1].time // INTERVAL == new.time // INTERVAL:
        last = kept[-1]
        kept, new = kept[:-1], Recommendation(new.time, min(last.least, new.least), max(last.most, new.most))
    return msgspec.structs.replace(history, recommendations=(*kept, new))


def _moved(history: ScalingHistory, before: int, after: int, now: float) -> ScalingHistory:
    return msgspec.structs.replace(
        history,
        last_up=now if after > before else history.last_up,
        last_down=now if after < before else history.last_down,
        served_since=history.served_since if before and after else None,
    )


def _pruned(scaling: Scaling, history: ScalingHistory, now: float) -> ScalingHistory:
    """Drop what no window reaches."""
    longest = max(
        scaling.scale_up.stabilization_window_seconds, scaling.scale_down.stabilization_window_seconds
    )
    kept = tuple(each for each in history.recommendations if each.time >= now - longest)
    return msgspec.structs.replace(history, recommendations=kept)


_REMOVED_FIRST: Final = -1
"""Pods without the annotation cost 0."""


class CostChange(Struct, frozen=True):
    """A pod's deletion cost is to change."""

    pod: Pod
    cost: int

    @property
    def patch(self) -> dict[str, Any]:
        """Merge patch of the pod; a cost of 0 removes the annotation."""
        value = str(self.cost) if self.cost else None
        return {"metadata": {"uid": self.pod.uid, "annotations": {DELETION_COST_ANNOTATION: value}}}


def cost_changes(pods: Iterable[Pod], load: ServiceLoad | None, removed: int) -> tuple[CostChange, ...]:
    """The costs to write before a Deployment loses `removed` replicas."""
    if load is None:
        return ()
    alive = [pod for pod in pods if pod.is_alive]
    serving = [pod for pod in alive if pod.is_routable]
    count = max(0, removed - (len(alive) - len(serving)))
    unknown = ReplicaUse()
    ranked = sorted(serving, key=lambda pod: pod.name)
    ranked.sort(key=lambda pod: pod.created, reverse=True)  # of equals the newest, as Kubernetes does
    ranked.sort(key=lambda pod: load.replicas.get(pod.uid, unknown).cache_value)
    victims = {pod.uid for pod in ranked[:count]}
    wanted = {pod.uid: _REMOVED_FIRST if pod.uid in victims else 0 for pod in alive}
    return tuple(CostChange(pod, wanted[pod.uid]) for pod in alive if pod.deletion_cost != wanted[pod.uid])
