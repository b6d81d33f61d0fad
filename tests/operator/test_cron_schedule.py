"""Cron's notation: what it matches, and when that was last."""

from __future__ import annotations

import datetime
import re
import zoneinfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy_resource.scaling import CRON_PATTERN, Cron, is_between, parse_cron, passed_local_time

WEDNESDAY = datetime.datetime(2026, 7, 15, 12, 0)


@pytest.mark.parametrize(
    ("text", "last"),
    [
        ("* * * * *", "2026-07-15 12:00"),
        ("0 12 * * *", "2026-07-15 12:00"),
        ("1 12 * * *", "2026-07-14 12:01"),
        ("*/25 9 * * *", "2026-07-15 09:50"),
        ("30 8 * * 1-5", "2026-07-15 08:30"),
        ("30 8 * * 0", "2026-07-12 08:30"),
        ("30 8 * * 7", "2026-07-12 08:30"),
        ("30 8 * * 5-1", "2026-07-13 08:30"),
        ("0 0 1 * *", "2026-07-01 00:00"),
        ("0 0 29 2 *", None),
        ("0 0 1 1,3 *", "2026-03-01 00:00"),
        ("0 0 13 * 1", "2026-07-13 00:00"),
        ("0 0 14 * 5", "2026-07-14 00:00"),
        ("0 22-4 * * *", "2026-07-15 04:00"),
        ("5/20 11 * * *", "2026-07-15 11:45"),
        ("0 13,6 * * *", "2026-07-15 06:00"),
    ],
)
def test_last_match(text: str, last: str | None) -> None:
    assert re.search(CRON_PATTERN, text)
    found = parse_cron(text).last(WEDNESDAY)
    assert found == (None if last is None else datetime.datetime.fromisoformat(last))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "* * * *",
        "60 * * * *",
        "* 24 * * *",
        "* * 0 * *",
        "* * * 13 *",
        "* * * * 8",
        "*/0 * * * *",
        "a * * * *",
    ],
)
def test_other_texts_are_refused(text: str) -> None:
    assert not re.search(CRON_PATTERN, text)


@settings(max_examples=40, deadline=None)
@given(st.from_regex(CRON_PATTERN, fullmatch=True).filter(str.isascii), st.datetimes(min_value=WEDNESDAY))
def test_a_last_match_is_a_match_and_not_in_the_future(text: str, now: datetime.datetime) -> None:
    cron = parse_cron(text)
    found = cron.last(now)
    if found is not None:
        assert found <= now
        assert cron.matches_day(found.date())
        assert (found.minute in cron.minutes, found.hour in cron.hours) == (True, True)


@pytest.mark.parametrize(
    ("now", "active"),
    [
        ("2026-07-15 08:29", False),
        ("2026-07-15 08:30", True),
        ("2026-07-15 18:00", False),
        ("2026-07-18 12:00", False),
    ],
)
def test_office_hours(now: str, active: bool) -> None:
    assert is_between("30 8 * * 1-5", "0 18 * * 1-5", datetime.datetime.fromisoformat(now)) is active


def test_a_night_goes_past_midnight() -> None:
    for hour, active in ((21, False), (22, True), (3, True), (6, False)):
        assert is_between("0 22 * * *", "0 6 * * *", datetime.datetime(2026, 7, 15, hour)) is active


@pytest.mark.parametrize(
    ("start", "end", "changes"),
    [
        ("30 2 * * *", "0 22 * * *", ["00:30"]),
        ("0 1 * * *", "15 2 * * *", ["00:15"]),
        ("0 2 * * *", "59 2 * * *", ["00:00", "00:59"]),
        ("30 3 * * *", "0 22 * * *", ["02:30"]),
    ],
)
def test_a_schedule_begins_and_ends_once_on_the_day_that_is_longer(
    start: str, end: str, changes: list[str]
) -> None:
    """In Berlin clocks go back from 03:00 to 02:00 at 01:00 UTC."""
    zone = zoneinfo.ZoneInfo("Europe/Berlin")
    midnight = datetime.datetime(2026, 10, 25, tzinfo=datetime.UTC)
    found, before = [], None
    for minute in range(-1, 180):
        now = midnight + minute * datetime.timedelta(minutes=1)
        active = is_between(start, end, passed_local_time(now, zone))
        if before is not None and active is not before:
            found.append(now.strftime("%H:%M"))
        before = active
    assert found == changes


def test_the_hour_that_is_left_out_in_spring_has_passed() -> None:
    zone = zoneinfo.ZoneInfo("Europe/Berlin")
    now = datetime.datetime(2026, 3, 29, 1, 0, tzinfo=datetime.UTC)
    shown = passed_local_time(now, zone)
    assert shown == datetime.datetime(2026, 3, 29, 3, 0)
    assert is_between("30 2 * * *", "0 22 * * *", shown)


@pytest.mark.parametrize(
    "text", ["* * * * *", "0 0 31 2 *", "59 23 1 1 *", "0 0 29 2 *", "0 0 1 1 1", "*/7 */5 */31 * 1"]
)
def test_the_same_is_found_as_by_looking_at_every_day(text: str) -> None:
    cron = parse_cron(text)
    for now in (WEDNESDAY, datetime.datetime(2024, 3, 1, 0, 0), datetime.datetime(2025, 2, 28, 23, 59)):
        days = [now.date() - datetime.timedelta(days=back) for back in range(367)]
        times = [
            found
            for day in days
            if cron.matches_day(day)
            for hour in cron.hours
            for minute in cron.minutes
            if (found := datetime.datetime(day.year, day.month, day.day, hour, minute)) <= now
        ]
        assert cron.last(now) == max(times, default=None)


@pytest.mark.parametrize("text", ["* * * * *", "0 0 31 2 *", "59 23 1 1 *", "0 0 30 2 *"])
def test_a_look_up_is_cheap_whatever_the_schedule(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen schedules of each service, with a start and an end, are looked at every five seconds."""
    looked_at: list[datetime.date] = []
    matches = Cron.matches_day

    def counted(self: Cron, day: datetime.date) -> bool:
        looked_at.append(day)
        return matches(self, day)

    monkeypatch.setattr(Cron, "matches_day", counted)
    parse_cron(text).last(WEDNESDAY)
    assert len(looked_at) <= 31
