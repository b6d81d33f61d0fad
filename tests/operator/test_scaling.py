"""The number of replicas that spec.scaling decides."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import convert

from argosy_operator.desired import scaling as scaling_decisions
from argosy_operator.desired.scaling import (
    INTERVAL,
    ScalingDecision,
    ScalingHistory,
    decide,
    lower_bound,
    unknown_time_zones,
)
from argosy_operator.observation import FleetLoad, ReplicaUse, ServiceLoad, quantile
from argosy_protocol.reports import (
    TTFT_BOUNDS_S,
    TTFT_WINDOW_S,
    LoadReport,
    ReplicaLoadReport,
    ServiceLoadReport,
)
from argosy_resource.scaling import Scaling

NOON = datetime.datetime(2026, 7, 15, 12, 0, tzinfo=datetime.UTC)
LONG_AGO = ScalingHistory(since=-100_000.0, served_since=-100_000.0, complete_since=-100_000.0)
DEADLINE = 600.0


def scaling(**fields: Any) -> Scaling:
    return convert({"maxReplicas": 10, "metrics": {"concurrency": 10}, **fields}, Scaling)


def load(sequences: int = 0, *, replicas: int = 2, **fields: Any) -> ServiceLoad:
    """A load of so many sequences, all at the first of the replicas p0, p1, ..."""
    each = {f"p{number}": ReplicaUse(is_routable=True) for number in range(replicas)}
    if replicas:
        each["p0"] = ReplicaUse(is_routable=True, sequences=sequences)
    return ServiceLoad(**{"replicas": each, **fields})


def slow(ttft_p90_s: float, *, replicas: int = 2, **fields: Any) -> ServiceLoad:
    """A busy service whose answers begin so late."""
    return load(40, replicas=replicas, ttft_p90_s=ttft_p90_s, **{"answers": 100, **fields})


def decided(
    spec: Scaling,
    load: ServiceLoad | None,
    current: int,
    *,
    now: float = 0.0,
    history: ScalingHistory = LONG_AGO,
    serving: frozenset[str] = frozenset(),
) -> ScalingDecision:
    decision, _ = decide(
        spec,
        load=load,
        current=current,
        serving=serving,
        history=history,
        now=now,
        wall=NOON,
        start_deadline=DEADLINE,
    )
    return decision


@pytest.mark.parametrize(
    ("metrics", "found", "wanted", "reason"),
    [
        ({"concurrency": 10}, load(45), 5, "Concurrency"),
        ({"concurrency": 10}, load(21), 2, "Concurrency"),
        ({"concurrency": 10}, load(20, queued=15), 4, "Concurrency"),
        ({"queuedTokens": 1000}, load(queued_tokens=3500), 4, "QueuedTokens"),
        (
            {"kvCacheUtilization": 0.5},
            ServiceLoad(replicas={"p0": ReplicaUse(kv_usage=0.9), "p1": ReplicaUse(kv_usage=0.8)}),
            4,
            "KVCacheUtilization",
        ),
        ({"ttftP90Seconds": 1}, slow(1.4), 3, "TTFTP90"),
        ({"ttftP90Seconds": 1}, slow(90.0), 4, "TTFTP90"),
        ({"ttftP90Seconds": 1}, slow(0.6), 2, "TTFTP90"),
        ({"concurrency": 10, "queuedTokens": 1000}, load(45, queued_tokens=6000), 6, "QueuedTokens"),
    ],
)
def test_the_metric_that_asks_for_most_decides(
    metrics: dict[str, float], found: ServiceLoad, wanted: int, reason: str
) -> None:
    decision = decided(scaling(metrics=metrics), found, 2)
    assert (decision.wanted, decision.reason) == (wanted, reason)


def test_slow_first_tokens_wait_for_replicas_that_start() -> None:
    spec = scaling(metrics={"ttftP90Seconds": 1})
    assert decided(spec, slow(5.0, replicas=2), 3).wanted == 3


@pytest.mark.parametrize("cold_start", [10.0, 60.0, 180.0])
def test_slow_first_tokens_of_fewer_replicas_add_none(cold_start: float) -> None:
    """Four replicas suffice for an overload of two. The answers of the last minute began with two long after that."""
    spec, history, current = scaling(metrics={"ttftP90Seconds": 2}, maxReplicas=32), LONG_AGO, 2
    moves, complete = [], 0.0
    for tick in range(120):
        now = tick * 5.0
        routable = current if now >= complete else 2
        is_slow = routable < 4 or now < complete + TTFT_WINDOW_S
        decision, history = decide(
            spec,
            load=slow(8.0 if is_slow else 1.5, replicas=routable),
            current=current,
            serving=frozenset(),
            history=history,
            now=now,
            wall=NOON,
            start_deadline=DEADLINE,
        )
        if decision.wanted != current:
            moves.append(decision.wanted)
            complete = now + cold_start
        current = decision.wanted
    assert moves == [4]


def reached(found: Callable[[int, int], ServiceLoad], *, start: int = 1, minutes: int = 30) -> int:
    """How many replicas `found(tick, replicas)`, a load every five seconds, comes to."""
    spec, history, current = scaling(metrics={"ttftP90Seconds": 2}, maxReplicas=32), LONG_AGO, start
    for tick in range(minutes * 12):
        decision, history = decide(
            spec,
            load=found(tick, current),
            current=current,
            serving=frozenset(),
            history=history,
            now=tick * 5.0,
            wall=NOON,
            start_deadline=DEADLINE,
        )
        current = decision.wanted
    return current


def test_a_slow_answer_a_minute_adds_no_replica() -> None:
    """A long prompt takes as long on any number of replicas."""
    assert reached(lambda tick, replicas: load(replicas=replicas, ttft_p90_s=8.0, answers=1)) == 1
    running = reached(
        lambda tick, replicas: load(int(tick % 12 < 2), replicas=replicas, ttft_p90_s=8.0, answers=1)
    )
    assert running == 1, "also while it runs"


@pytest.mark.parametrize("running", [0, 1])
def test_a_slow_answer_a_minute_keeps_no_replica_that_a_burst_has_left(running: int) -> None:
    assert (
        reached(lambda tick, replicas: load(running, replicas=replicas, ttft_p90_s=8.0, answers=1), start=3)
        == 1
    )


@pytest.mark.parametrize("clients", [2, 5])
def test_slow_first_tokens_add_no_more_replicas_than_there_are_sequences(clients: int) -> None:
    """Clients that send one long prompt after another: a replica for each is all that can help."""
    assert (
        reached(lambda tick, replicas: load(clients, replicas=replicas, ttft_p90_s=8.0, answers=10 * clients))
        == clients
    )


def test_slow_first_tokens_of_few_answers_add_none_unless_requests_wait() -> None:
    spec = scaling(metrics={"ttftP90Seconds": 1})
    few = decided(spec, slow(5.0, answers=4), 2)
    assert (few.wanted, few.reason) == (2, "TTFTP90")
    assert "4 answers" in few.message
    assert decided(spec, slow(5.0, answers=5), 2).wanted == 4
    assert decided(spec, slow(5.0, answers=3, queued=2), 2).wanted == 4, "each will be a slow one"


def test_no_answers_count_as_no_load_once_all_routers_have_counted_for_the_window() -> None:
    spec = scaling(metrics={"ttftP90Seconds": 1}, scaleDown={"stabilizationWindowSeconds": 0})

    def restarted(uptime_s: float | None) -> ServiceLoad:
        service = ServiceLoadReport(
            service="team/tiny",
            replicas=tuple(ReplicaLoadReport(name=f"p{number}", routable=True) for number in range(4)),
        )
        reports = [
            LoadReport(router="a", services=(service,), uptime_s=5000.0),
            LoadReport(router="b", services=(service,), uptime_s=uptime_s),
        ]
        return FleetLoad(reports, is_complete=True)["team/tiny"]

    new = decided(spec, restarted(TTFT_WINDOW_S - 1), 4)
    assert new.wanted == 4
    assert "router" in new.message
    assert decided(spec, restarted(TTFT_WINDOW_S), 4).wanted == 3
    assert decided(spec, restarted(None), 4).wanted == 3, "a router of an earlier version does not say"


def test_replicas_are_added_in_steps() -> None:
    spec = scaling(scaleUp={"maxStep": 3, "periodSeconds": 20})
    decision, history = decide(
        spec,
        load=load(95),
        current=1,
        serving=frozenset(),
        history=LONG_AGO,
        now=0.0,
        wall=NOON,
        start_deadline=DEADLINE,
    )
    assert decision.wanted == 4
    assert decided(spec, load(95), 4, now=19.0, history=history).wanted == 4
    assert decided(spec, load(95), 4, now=20.0, history=history).wanted == 7


def test_more_replicas_wait_for_the_window() -> None:
    spec = scaling(scaleUp={"stabilizationWindowSeconds": 30})
    history, wanted = ScalingHistory(since=0.0), []
    for now, sequences in ((0.0, 40), (10.0, 15), (20.0, 40), (30.0, 40), (40.0, 40), (41.0, 40)):
        decision, history = decide(
            spec,
            load=load(sequences),
            current=2,
            serving=frozenset(),
            history=history,
            now=now,
            wall=NOON,
            start_deadline=DEADLINE,
        )
        wanted.append(decision.wanted)
    assert wanted == [2, 2, 2, 2, 2, 4], "the dip at 10 s counts for 30 s"


def test_fewer_replicas_wait_for_the_window_and_go_one_by_one() -> None:
    spec = scaling(scaleDown={"stabilizationWindowSeconds": 100, "maxStep": 1, "periodSeconds": 60})
    current, history, changes = 4, ScalingHistory(since=0.0), []
    for now in range(0, 400, 5):
        decision, history = decide(
            spec,
            load=load(35 if now == 20 else 5, replicas=4),
            current=current,
            serving=frozenset(),
            history=history,
            now=float(now),
            wall=NOON,
            start_deadline=DEADLINE,
        )
        if decision.wanted != current:
            changes.append((now, decision.wanted))
        current = decision.wanted
    assert changes == [(125, 3), (185, 2), (245, 1)]


def test_many_decisions_leave_a_short_history() -> None:
    spec = scaling(scaleDown={"stabilizationWindowSeconds": 100})
    history = LONG_AGO
    for tick in range(2000):
        _, history = decide(
            spec,
            load=load(15 if tick % 2 else 35),
            current=2,
            serving=frozenset(),
            history=history,
            now=tick / 10,
            wall=NOON,
            start_deadline=DEADLINE,
        )
    assert len(history.recommendations) <= 100 / INTERVAL + 1
    assert {(each.least, each.most) for each in history.recommendations} == {(2, 4)}


def test_nothing_is_removed_while_reports_are_missing() -> None:
    spec = scaling()
    assert decided(spec, load(0, replicas=4), 4).wanted == 3
    assert decided(spec, None, 4).wanted == 4
    assert decided(spec, load(0, replicas=4, is_complete=False), 4).wanted == 4
    assert decided(spec, load(0, replicas=3), 4, serving=frozenset({"p0", "p3"})).wanted == 4


def test_after_a_time_without_reports_fewer_replicas_wait_for_the_window() -> None:
    spec = scaling(scaleDown={"stabilizationWindowSeconds": 100, "maxStep": 4})
    current, history, changes = 4, LONG_AGO, []
    for now in range(0, 500, 5):
        found = None if 50 <= now < 300 else load(35 if now < 50 else 0, replicas=4)
        decision, history = decide(
            spec,
            load=found,
            current=current,
            serving=frozenset(),
            history=history,
            now=float(now),
            wall=NOON,
            start_deadline=DEADLINE,
        )
        if decision.wanted != current:
            changes.append((now, decision.wanted))
        current = decision.wanted
    assert changes == [(400, 1)]


def test_replicas_are_removed_without_a_router_that_stays_silent_but_not_the_last() -> None:
    known = {"is_complete": False, "is_settled": True}
    assert decided(scaling(), load(0, replicas=4, **known), 4).wanted == 3
    assert decided(scaling(), load(35, replicas=4, **known), 4).wanted == 4
    idle = scaling(minReplicas=0, idleSeconds=60)
    assert decided(idle, load(idle_s=9999.0, replicas=1, **known), 1).wanted == 1
    assert decided(idle, load(idle_s=9999.0, replicas=2, **known), 2).wanted == 1
    by_answers = scaling(metrics={"ttftP90Seconds": 1.0})
    assert decided(by_answers, load(0, replicas=4, **known), 4).wanted == 4, "it may have had answers"
    assert decided(by_answers, load(0, replicas=4), 4).wanted == 3
    assert decided(by_answers, slow(0.1, replicas=4, **known), 4).wanted == 3


def test_partial_reports_may_add_replicas() -> None:
    assert decided(scaling(), load(45, is_complete=False), 2).wanted == 5


def test_bounds_do_not_wait() -> None:
    new = ScalingHistory(since=0.0)
    assert decided(scaling(minReplicas=3), load(0), 1, history=new).wanted == 3
    assert decided(scaling(maxReplicas=3), load(200), 7, history=new).wanted == 3
    assert decided(scaling(maxReplicas=3), None, 7, history=new).wanted == 3


# to zero and back

ZERO: dict[str, Any] = {"minReplicas": 0, "idleSeconds": 60}


def test_an_idle_service_has_no_replica() -> None:
    spec = scaling(**ZERO)
    assert decided(spec, load(idle_s=59.0), 3).wanted > 0
    idle = decided(spec, load(idle_s=60.0), 3)
    assert (idle.wanted, idle.reason) == (0, "Idle")
    assert decided(spec, load(1, idle_s=60.0), 3).wanted > 0
    assert decided(spec, load(idle_s=60.0, is_complete=False), 3).wanted == 3
    assert decided(spec, load(idle_s=60.0), 3, history=ScalingHistory(since=-30.0)).wanted == 3


def test_a_service_that_is_not_idle_keeps_its_last_replica() -> None:
    assert decided(scaling(**ZERO), load(idle_s=5.0, replicas=1), 1).wanted == 1
    assert (
        decided(scaling(minReplicas=0, maxReplicas=1, metrics=None), load(idle_s=5.0, replicas=1), 1).wanted
        == 1
    )


@pytest.mark.parametrize(
    "history", [LONG_AGO, ScalingHistory(since=0.0), ScalingHistory(since=-9.0, last_down=0.0)]
)
def test_a_held_request_starts_a_replica_at_once(history: ScalingHistory) -> None:
    spec = scaling(**ZERO, scaleUp={"stabilizationWindowSeconds": 300})
    held = decided(spec, load(replicas=0, held=1, queued=1), 0, history=history)
    assert (held.wanted, held.reason) == (1, "Held")
    assert decided(spec, load(replicas=0, held=25, queued=25), 0, history=history).wanted == 3


def test_nothing_starts_without_a_request() -> None:
    assert decided(scaling(**ZERO), load(replicas=0), 0).wanted == 0
    assert decided(scaling(**ZERO), None, 0).wanted == 0


def first_answer(*, cold_start: float, gives_up_after: float, returns_after: float) -> float | None:
    """When a client is served that waits and comes back again and again, if it is within an hour."""
    spec, history, current = scaling(**ZERO, metrics=None), LONG_AGO, 0
    started, last_request = 0.0, 0.0
    for tick in range(720):
        now = tick * 5.0
        is_up = current > 0 and now - started >= cold_start
        waits = now % (gives_up_after + returns_after) < gives_up_after
        if waits and is_up:
            return now
        last_request = now if waits else last_request
        seen = load(replicas=int(is_up), held=int(waits), queued=int(waits), idle_s=now - last_request)
        decision, history = decide(
            spec,
            load=seen,
            current=current,
            serving=frozenset({"p0"} if is_up else ()),
            history=history,
            now=now,
            wall=NOON,
            start_deadline=DEADLINE,
        )
        started = now if not current else started
        current = decision.wanted
    return None


def test_a_replica_that_starts_is_waited_for() -> None:
    """Without that, this client stops at every return the replica that its last visit started."""
    assert first_answer(cold_start=150.0, gives_up_after=30.0, returns_after=100.0) is not None


def test_a_service_is_idle_for_so_long_since_it_could_serve() -> None:
    spec, history, wanted = scaling(**ZERO), ScalingHistory(since=-1000.0, last_up=0.0), []
    for now in (100.0, 150.0, 160.0, 210.0):
        is_up = now >= 150.0
        decision, history = decide(
            spec,
            load=load(replicas=int(is_up), idle_s=now),
            current=1,
            serving=frozenset({"p0"} if is_up else ()),
            history=history,
            now=now,
            wall=NOON,
            start_deadline=DEADLINE,
        )
        wanted.append(decision.wanted)
    assert wanted == [1, 1, 1, 0]


def test_a_replica_that_never_starts_is_given_up_at_the_progress_deadline() -> None:
    spec, history = scaling(**ZERO), ScalingHistory(since=-1000.0, last_up=0.0)
    idle = load(replicas=0, idle_s=5000.0)
    assert decided(spec, idle, 1, now=DEADLINE - 1, history=history).wanted == 1
    assert decided(spec, idle, 1, now=DEADLINE, history=history).wanted == 0


# schedules

OFFICE = {"name": "office", "start": "30 8 * * 1-5", "end": "0 18 * * 1-5", "minReplicas": 5}


@pytest.mark.parametrize(
    ("zone", "hour", "least"),
    [
        ("Etc/UTC", 8, 1),
        ("Etc/UTC", 9, 5),
        ("Etc/UTC", 18, 1),
        ("Europe/Berlin", 7, 5),
        ("Europe/Berlin", 17, 1),
    ],
)
def test_schedules_raise_the_lower_bound(zone: str, hour: int, least: int) -> None:
    spec = scaling(schedules=[{**OFFICE, "timeZone": zone}])
    assert lower_bound(spec, NOON.replace(hour=hour))[0] == least


def test_a_schedule_alone_adds_and_removes() -> None:
    spec = scaling(metrics=None, schedules=[OFFICE])
    began = decided(spec, load(replicas=1), 1)
    assert (began.wanted, began.reason) == (5, "MinReplicas")
    assert "schedule office" in began.message
    ended, _ = decide(
        spec,
        load=load(replicas=5),
        current=5,
        serving=frozenset(),
        history=LONG_AGO,
        now=0.0,
        wall=NOON.replace(hour=19),
        start_deadline=DEADLINE,
    )
    assert ended.wanted == 4


def test_schedules_of_unknown_time_zones_are_told_of() -> None:
    spec = scaling(schedules=[{**OFFICE, "timeZone": "Europe/Nowhere"}, {**OFFICE, "name": "other"}])
    assert unknown_time_zones(spec) == ["Europe/Nowhere"]
    assert lower_bound(spec, NOON) == (5, "schedule other")


# properties

SPECS = st.builds(
    lambda low, more, up, down, step, idle: scaling(
        minReplicas=low,
        maxReplicas=max(1, low + more),
        scaleUp={"stabilizationWindowSeconds": up, "maxStep": step},
        scaleDown={"stabilizationWindowSeconds": down, "maxStep": step, "periodSeconds": 5},
        **({"idleSeconds": idle} if low == 0 else {}),
    ),
    st.integers(0, 4),
    st.integers(0, 8),
    st.sampled_from([0, 10, 30]),
    st.sampled_from([0, 20, 60]),
    st.integers(1, 5),
    st.sampled_from([20, 60]),
)
MOMENTS = st.lists(
    st.one_of(
        st.none(),
        st.builds(
            lambda sequences, idle, whole: load(
                sequences, idle_s=0.0 if sequences else idle, is_complete=whole
            ),
            st.integers(0, 120),
            st.floats(0, 100),
            st.booleans(),
        ),
    ),
    min_size=1,
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(SPECS, MOMENTS, st.integers(0, 12))
def test_bounds_windows_and_missing_reports(
    spec: Scaling, moments: list[ServiceLoad | None], start: int
) -> None:
    current, history, last_up = start, ScalingHistory(since=0.0), -1000.0
    for number, seen in enumerate(moments):
        now = number * 5.0
        before = current
        decision, history = decide(
            spec,
            load=seen,
            current=current,
            serving=frozenset(),
            history=history,
            now=now,
            wall=NOON,
            start_deadline=DEADLINE,
        )
        current = decision.wanted
        assert spec.min_replicas <= current <= spec.max_replicas
        if current < min(before, spec.max_replicas):
            assert seen is not None
            assert seen.is_complete, "reports were missing"
            window = spec.scale_down.stabilization_window_seconds
            assert decision.reason == "Idle" or now - last_up > window or last_up < 0, (
                "added and removed again"
            )
            assert (
                decision.reason == "Idle"
                or min(before, spec.max_replicas) - current <= spec.scale_down.max_step
            )
        if current > max(before, spec.min_replicas):
            assert current - max(before, spec.min_replicas) <= spec.scale_up.max_step
            last_up = now


# merging reports


def test_reports_of_two_routers_are_merged() -> None:
    def router(
        name: str, *, requests: int, inflight: int, counts: tuple[int, ...], **fields: Any
    ) -> LoadReport:
        replica = ReplicaLoadReport(
            name="p", uid="u", routable=name == "a", requests=requests, inflight=inflight, cache_value=2.0
        )
        service = ServiceLoadReport(service="team/tiny", replicas=(replica,), ttft_counts=counts, **fields)
        return LoadReport(router=name, services=(service,))

    counts = tuple(int(bound == 1.0) for bound in (*TTFT_BOUNDS_S, 0.0))
    merged = FleetLoad(
        [
            router("a", requests=7, inflight=4, counts=counts, queued=2, held=0, idle_s=9.0),
            router("b", requests=6, inflight=5, counts=(), queued=1, held=1, idle_s=3.0),
        ],
        is_complete=True,
    )["team/tiny"]
    assert (merged.queued, merged.held, merged.idle_s) == (3, 1, 3.0)
    use = merged.replicas["u"]
    assert (use.sequences, use.is_routable, use.cache_value) == (9, True, 4.0)
    assert merged.sequences == 12
    assert merged.ttft_p90_s == pytest.approx(0.97)
    assert merged.answers == 1


def test_a_quantile_lies_in_the_bucket_of_its_rank() -> None:
    counts = [0] * (len(TTFT_BOUNDS_S) + 1)
    assert quantile(counts, 0.9) is None
    counts[3], counts[7] = 90, 10
    assert quantile(counts, 0.9) == TTFT_BOUNDS_S[3]
    assert TTFT_BOUNDS_S[6] < (quantile(counts, 0.95) or 0) < TTFT_BOUNDS_S[7]
    counts[-1] = 1000
    assert quantile(counts, 0.9) == TTFT_BOUNDS_S[-1]


def test_schedules_are_looked_up_once_a_minute_by_all_who_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up: list[str] = []

    def look_up(start: str, end: str, now: datetime.datetime) -> bool:
        looked_up.append(start)
        return False

    monkeypatch.setattr(scaling_decisions, "is_between", look_up)
    schedules = [
        {"name": f"s{each}", "start": f"{each} 0 */31 * */7", "end": "0 1 * * *", "minReplicas": 2}
        for each in range(16)
    ]
    spec = scaling(schedules=schedules)
    minute = datetime.datetime(2026, 7, 15, 12, 7, tzinfo=datetime.UTC)
    for second in range(60):
        assert lower_bound(spec, minute + datetime.timedelta(seconds=second)) == (1, "minReplicas")
    assert len(looked_up) == 16
    lower_bound(spec, minute + datetime.timedelta(minutes=1))
    assert len(looked_up) == 32
