"""The account of a fetch: phases, rate, remaining time, and bounds of what is reported."""

from __future__ import annotations

import msgspec

from argosy_fetcher.progress_server import RATE_WINDOW_S, ProgressMeter
from argosy_protocol.reports import ModelProgress
from recorded_progress import RecordedProgress

MIB = 1 << 20


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def made(clock: Clock | None = None) -> tuple[ProgressMeter, RecordedProgress]:
    shown = RecordedProgress()
    return ProgressMeter("hf://acme/tiny", shown, clock or Clock()), shown


def test_phases_follow_the_fetch_and_everything_is_passed_on() -> None:
    meter, shown = made()
    assert meter.report() == ModelProgress(source="hf://acme/tiny", phase="resolving")
    meter.enter("waiting")
    meter.note("waiting for another process")
    assert (meter.report().phase, meter.report().note) == ("waiting", "waiting for another process")
    meter.enter("resolving")
    assert (meter.report().phase, meter.report().note) == ("resolving", "")
    meter.resolved("hf://acme/tiny", "abc")
    meter.begin(100, 40)
    meter.advance(60)
    report = meter.report()
    assert (report.revision, report.phase) == ("abc", "fetching")
    assert (report.fetched_bytes, report.total_bytes) == (100, 100)
    meter.enter("unpacking")
    assert meter.report().phase == "unpacking"
    meter.end()
    assert meter.report().phase == "done"
    assert shown.phases == ["waiting", "resolving", "unpacking"]
    assert shown.events == ["resolved", "begin", "end"]
    assert (shown.total, shown.present, shown.received) == (100, 40, 60)
    assert shown.notes == ["waiting for another process"]


def test_rate_and_remaining_time_are_those_of_the_last_seconds() -> None:
    clock = Clock()
    meter, _ = made(clock)
    meter.begin(1000 * MIB, 100 * MIB)
    assert (meter.report().bytes_per_second, meter.report().eta_seconds) == (0.0, None)
    for _ in range(40):
        clock.now += 1.0
        meter.advance(2 * MIB)
    for _ in range(40):
        clock.now += 1.0
        meter.advance(10 * MIB)
    report = meter.report()
    assert report.bytes_per_second == 10 * MIB
    assert report.eta_seconds == (1000 - 100 - 480) / 10


def test_a_fetch_that_stalls_has_no_remaining_time() -> None:
    clock = Clock()
    meter, _ = made(clock)
    meter.begin(100 * MIB, 0)
    clock.now += 1.0
    meter.advance(10 * MIB)
    assert meter.report().eta_seconds == 9.0
    clock.now += RATE_WINDOW_S
    meter.report()
    clock.now += RATE_WINDOW_S
    assert (meter.report().bytes_per_second, meter.report().eta_seconds) == (0.0, None)


def test_content_that_is_fetched_again_takes_nothing_below_zero() -> None:
    clock = Clock()
    meter, _ = made(clock)
    meter.begin(10, 0)
    meter.advance(-5)
    clock.now += 1.0
    report = meter.report()
    assert (report.fetched_bytes, report.bytes_per_second, report.eta_seconds) == (0, 0.0, None)


def test_a_report_keeps_its_bounds_whatever_the_source_says() -> None:
    meter = ProgressMeter("s" * 5000, RecordedProgress(), Clock())
    meter.resolved("s", "r" * 5000)
    meter.note("n\n\x1b" * 5000)
    report = meter.report()
    assert msgspec.json.decode(msgspec.json.encode(report), type=ModelProgress) == report
    assert report.note.isprintable()


def test_the_outcome_counts_what_this_process_fetched() -> None:
    clock = Clock()
    meter, _ = made(clock)
    assert meter.outcome() == "already stored"
    meter.begin(30 * MIB, 10 * MIB)
    assert meter.outcome() == "already stored"
    meter.advance(20 * MIB)
    clock.now += 70.0
    assert meter.outcome() == "20.0 MiB fetched in 70 s"
