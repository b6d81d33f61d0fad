"""`spec.scaling`: how many replicas a service may have, and what decides their number.

Owns what a user may write about scaling, and cron's notation for its schedules: five fields of numbers, ranges, lists
and steps; a day matches by the day of the month or by that of the week if both are restricted, as in Vixie cron. Must
not know how load is measured, nor how a number is decided (`argosy_operator.desired.scaling`), nor look at a clock.
Invariant: finding when a schedule last began takes some 100 us at most, whatever the schedule, since every service may
have several, and each is looked at every few seconds.
"""

from __future__ import annotations

import calendar
import datetime
import functools
from collections.abc import Iterator
from typing import Annotated, ClassVar, Final, NamedTuple

from msgspec import Meta, Struct

from argosy_resource.schema_types import MAP_BY_NAME, Rule, matches

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
DEFAULT_IDLE_SECONDS: Final = 600
"""As long as OpenAI's SDKs wait for an answer: a conversation that goes on within ten minutes meets a warm cache."""
DEFAULT_HOLD_SECONDS: Final = 600
"""How long requests are held for a service that scales to zero, unless the service says otherwise."""
MAX_COLD_START_SECONDS: Final = 86_400
"""A pod that waited for a day says nothing of how long a start takes."""
CronText = Annotated[
    str,
    Meta(
        min_length=9,
        max_length=100,
        pattern=CRON_PATTERN,
        extra_json_schema=matches(
            CRON_PATTERN,
            "must be a cron schedule: minute, hour, day of month, month and day of week (0 to 7, Sunday is 0 or 7), "
            "each a number, a range, a list or *, perhaps with a step, such as 30 8 * * 1-5",
        ),
    ),
]
TimeZone = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=64,
        pattern=TIME_ZONE_PATTERN,
        extra_json_schema=matches(
            TIME_ZONE_PATTERN, "must be the name of a time zone, such as Europe/Berlin"
        ),
    ),
]
ScheduleName = Annotated[str, Meta(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]


class ScalingMetrics(Struct, frozen=True, kw_only=True, rename="camel"):
    """Targets for each replica. The metric that asks for most replicas decides."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            rule=(
                "has(self.queuedTokens) || has(self.concurrency) || has(self.kvCacheUtilization) || "
                "has(self.ttftP90Seconds)"
            ),
            message="set a target for at least one metric",
        ),
    )
    queued_tokens: Annotated[int, Meta(ge=1, le=1_000_000_000)] | None = None
    """Uncached prompt tokens that wait at a replica, with its share of what waits in the routers."""
    concurrency: Annotated[float, Meta(ge=0.1, le=65_536)] | None = None
    """Sequences that a replica computes or that wait for it, with its share of the requests queued in the routers."""
    kv_cache_utilization: Annotated[float, Meta(ge=0.05, le=1.0)] | None = None
    """Share of a replica's KV cache in use by requests that run."""
    ttft_p90_seconds: Annotated[float, Meta(ge=0.01, le=600)] | None = None
    """Time to first token that nine of ten streamed answers of the last minute stay below. Replicas are removed one by
    one, and only below half of it."""


class ScalingSchedule(Struct, frozen=True, kw_only=True, rename="camel"):
    """A time in which a service has more replicas than minReplicas, whatever its load."""

    name: ScheduleName
    """Name of the schedule, for people."""
    start: CronText
    """When it begins, in cron's notation, such as `30 8 * * 1-5`."""
    end: CronText
    """When it ends, in cron's notation."""
    time_zone: TimeZone = "Etc/UTC"
    """Time zone of start and end, such as `Europe/Berlin`."""
    min_replicas: Annotated[int, Meta(ge=1, le=1000)]
    """Smallest number of replicas meanwhile."""


class ScaleUp(Struct, frozen=True, kw_only=True, rename="camel"):
    """How fast replicas are added."""

    stabilization_window_seconds: Annotated[int, Meta(ge=0, le=3600)] = 0
    """How long the load must ask for more replicas before any is added."""
    max_step: Annotated[int, Meta(ge=1, le=1000)] = 4
    """Most replicas added at once."""
    period_seconds: Annotated[int, Meta(ge=1, le=3600)] = 15
    """Shortest time between two steps."""


class ScaleDown(Struct, frozen=True, kw_only=True, rename="camel"):
    """How fast replicas, and the caches that they hold, are removed."""

    stabilization_window_seconds: Annotated[int, Meta(ge=0, le=3600)] = 300
    """How long the load must ask for fewer replicas before any is removed."""
    max_step: Annotated[int, Meta(ge=1, le=1000)] = 1
    """Most replicas removed at once."""
    period_seconds: Annotated[int, Meta(ge=1, le=3600)] = 60
    """Shortest time between two steps."""


class Scaling(Struct, frozen=True, kw_only=True, rename="camel"):
    """Scaling by load. It decides the number of replicas in place of spec.replicas, which stays the user's: the number
    that the service starts with."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            rule="!has(self.minReplicas) || self.minReplicas <= self.maxReplicas",
            message="minReplicas must not exceed maxReplicas",
            field_path=".minReplicas",
        ),
        Rule(
            rule="!has(self.schedules) || self.schedules.all(each, each.minReplicas <= self.maxReplicas)",
            message="the minReplicas of a schedule must not exceed maxReplicas",
            field_path=".schedules",
        ),
        Rule(
            rule="!has(self.idleSeconds) || (has(self.minReplicas) && self.minReplicas == 0)",
            message="idleSeconds is for services that scale to zero; set minReplicas to 0",
            field_path=".idleSeconds",
        ),
        Rule(
            rule=(
                "has(self.metrics) || (has(self.schedules) && size(self.schedules) > 0) || "
                "(has(self.minReplicas) && self.minReplicas == 0 && self.maxReplicas == 1)"
            ),
            message=(
                "without metrics or schedules only maxReplicas 1 with minReplicas 0 is possible; set metrics, such as "
                "concurrency, or schedules"
            ),
            field_path=".metrics",
        ),
    )
    min_replicas: Annotated[int, Meta(ge=0, le=1000)] = 1
    """Smallest number of replicas. With 0 a service without requests has none; routers hold the next request until a
    replica can answer it."""
    max_replicas: Annotated[int, Meta(ge=1, le=1000)]
    """Largest number of replicas."""
    idle_seconds: Annotated[int, Meta(ge=10, le=86_400)] | None = None
    """With minReplicas 0: how long a service must be without any request before its last replicas are removed; 600 if
    left out."""
    metrics: ScalingMetrics | None = None
    """What replicas are added and removed by."""
    schedules: Annotated[tuple[ScalingSchedule, ...], Meta(max_length=16, extra_json_schema=MAP_BY_NAME)] = ()
    """Times with more replicas than minReplicas."""
    scale_up: ScaleUp = ScaleUp()
    """How fast replicas are added."""
    scale_down: ScaleDown = ScaleDown()
    """How fast replicas are removed."""

    @property
    def idle_after(self) -> int:
        """idleSeconds in effect."""
        return DEFAULT_IDLE_SECONDS if self.idle_seconds is None else self.idle_seconds


class ScalingStatus(Struct, frozen=True, kw_only=True, rename="camel"):
    """What spec.scaling has decided."""

    wanted: Annotated[int, Meta(ge=0)] = 0
    """Number of replicas decided last."""
    reason: Annotated[str, Meta(max_length=64)] = ""
    """Why, as one CamelCase word: the metric or the bound that decided."""
    message: Annotated[str, Meta(max_length=1024)] = ""
    """Why, with the figures at the time of the decision."""
    time: Annotated[str, Meta(max_length=64)] = ""
    """When the number last changed."""
    cold_start_seconds: Annotated[int, Meta(ge=0, le=MAX_COLD_START_SECONDS)] = 0
    """How long the last new replica took from its creation until a router sent it requests; 0 before one has."""


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
