"""Cron schedules: when one last began.

Owns cron's notation: five fields of numbers, ranges, lists and steps; a day matches by the day of the month or by that
of the week if both are restricted, as in Vixie cron. Must not know what a schedule is for, nor look at a clock.
Invariant: a look-up takes some 100 us at most, whatever the schedule, since every service may have several, and each is
looked at every few seconds.
"""

from __future__ import annotations

import calendar
import datetime
import functools
from collections.abc import Iterator
from typing import Final, NamedTuple

_RANGES: Final = ((0, 59), (0, 23), (1, 31), (1, 12), (0, 7))
_NUMBERS: Final = (
    "[0-5]?[0-9]",
    "([01]?[0-9]|2[0-3])",
    "(0?[1-9]|[12][0-9]|3[01])",
    "(0?[1-9]|1[0-2])",
    "[0-7]",
)


def _field_pattern(number: str) -> str:
    return f"([*]|{number}(-{number})?(,{number}(-{number})?)*)(/[1-9][0-9]?)?"


CRON_PATTERN: Final = f"^{' +'.join(map(_field_pattern, _NUMBERS))}$"
TIME_ZONE_PATTERN: Final = "^[A-Za-z][A-Za-z0-9_+-]*(/[A-Za-z0-9_+-]+)*$"
_LOOK_BACK_DAYS: Final = 366
_DAY: Final = datetime.timedelta(days=1)
_MINUTE: Final = datetime.timedelta(minutes=1)
_LAST_MINUTE: Final = (23, 59)


class Cron(NamedTuple):
    """A schedule: the numbers that match in each field."""

    minutes: frozenset[int]
    hours: frozenset[int]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]
    """0 is Sunday."""
    any_day: bool
    """Whether the day of the month is `*`."""
    any_weekday: bool

    def matches_day(self, day: datetime.date) -> bool:
        if day.month not in self.months:
            return False
        by_month, by_week = day.day in self.days, day.isoweekday() % 7 in self.weekdays
        return by_month and by_week if self.any_day or self.any_weekday else by_month or by_week

    def last(self, now: datetime.datetime) -> datetime.datetime | None:
        """The last time it matched, at most a year before `now` (a local time without zone); None if it did not."""
        today = now.date()
        first = today - _LOOK_BACK_DAYS * _DAY
        year, month = today.year, today.month
        while (year, month) >= (first.year, first.month):
            for day in self._days_of(year, month) if month in self.months else ():
                if not first <= day <= today:
                    continue
                found = self._last_of_day(*((now.hour, now.minute) if day == today else _LAST_MINUTE))
                if found is not None:
                    return datetime.datetime(day.year, day.month, day.day, *found)
            year, month = (year, month - 1) if month > 1 else (year - 1, 12)
        return None

    def _days_of(self, year: int, month: int) -> Iterator[datetime.date]:
        """The days of a month that match, the last one first."""
        _, length = calendar.monthrange(year, month)
        by_number_alone = self.any_weekday and not self.any_day
        for number in sorted(self.days, reverse=True) if by_number_alone else range(length, 0, -1):
            if number <= length and self.matches_day(day := datetime.date(year, month, number)):
                yield day

    def _last_of_day(self, hour: int, minute: int) -> tuple[int, int] | None:
        """The last matching hour and minute of a day, at most those given."""
        for each in sorted(self.hours, reverse=True):
            if each > hour:
                continue
            found = max((at for at in self.minutes if each < hour or at <= minute), default=None)
            if found is not None:
                return each, found
        return None


@functools.lru_cache(maxsize=4096)
def parse_cron(text: str) -> Cron:
    """Read a schedule that CRON_PATTERN matches. A range may wrap, such as `22-4` or `6-1`."""
    fields = text.split()
    minutes, hours, days, months, weekdays = (
        _numbers(field, *bounds) for field, bounds in zip(fields, _RANGES, strict=True)
    )
    return Cron(
        minutes,
        hours,
        days,
        months,
        frozenset(number % 7 for number in weekdays),
        any_day=fields[2].startswith("*"),
        any_weekday=fields[4].startswith("*"),
    )


def _numbers(field: str, low: int, high: int) -> frozenset[int]:
    listed, _, step = field.partition("/")
    found: set[int] = set()
    for part in listed.split(","):
        first, _, last = part.partition("-")
        if first == "*":
            values = list(range(low, high + 1))
        elif last:
            start, end = int(first), int(last)
            values = (
                list(range(start, end + 1))
                if start <= end
                else [*range(start, high + 1), *range(low, end + 1)]
            )
        else:
            values = list(range(int(first), high + 1)) if step else [int(first)]
        found.update(values[:: int(step or 1)])
    return frozenset(found)


def is_between(start: str, end: str, now: datetime.datetime) -> bool:
    """Whether `start` matched later than `end`, as of `now` (a local time without zone)."""
    began, ended = parse_cron(start).last(now), parse_cron(end).last(now)
    return began is not None and (ended is None or began > ended)


def passed_local_time(now: datetime.datetime, zone: datetime.tzinfo) -> datetime.datetime:
    """The latest time that a clock in the zone has shown by `now` (with any zone), without a zone.

    In autumn a clock shows an hour twice. A schedule begins and ends in the first pass, so in the second one the whole
    hour has passed.
    """
    local = now.astimezone(zone)
    shown = local.replace(tzinfo=None, fold=0)
    while local.fold and _is_shown_twice(shown + _MINUTE, zone):
        shown += _MINUTE
    return shown


def _is_shown_twice(time: datetime.datetime, zone: datetime.tzinfo) -> bool:
    first, second = (time.replace(tzinfo=zone, fold=fold).utcoffset() for fold in (0, 1))
    return first is not None and second is not None and first > second
