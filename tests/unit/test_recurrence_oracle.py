"""The time rule against a walk over real minutes that shares no code with the product.

The oracle knows a cron entry as sets of numbers, not as text, and a zone as what
``astimezone`` says of each real minute (or second) around a change of the clock.
"""

from __future__ import annotations

import calendar
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime, timedelta, timezone
from functools import lru_cache
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from celery_durable.core.recurrence import Cron, Crontab, RecurrenceError
from celery_durable.core.zones import as_zone

UTC = timezone.utc
MINUTE = timedelta(minutes=1)
MOMENT = timedelta(microseconds=1)

#: Zone, first instant of the new offset, minutes by which the clock moves.
CHANGES = [
    ("America/New_York", "2025-03-09T07:00", 60),
    ("America/New_York", "2025-11-02T06:00", -60),
    ("America/New_York", "2040-11-04T06:00", -60),
    ("Europe/London", "2025-03-30T01:00", 60),
    ("Europe/London", "2025-10-26T01:00", -60),
    ("Europe/Dublin", "2025-10-26T01:00", -60),
    ("Australia/Lord_Howe", "2025-10-04T15:30", 30),
    ("Australia/Lord_Howe", "2025-04-05T15:00", -30),
    ("Asia/Kathmandu", "1985-12-31T18:30", 15),
    ("America/Guyana", "1975-08-01T03:45", 45),
    ("America/St_Johns", "2010-03-14T03:31", 60),
    ("America/St_Johns", "2010-11-07T02:31", -60),
    ("Africa/Casablanca", "2025-02-23T02:00", -60),
    ("Africa/Casablanca", "2025-04-06T02:00", 60),
    ("Pacific/Apia", "2011-12-30T10:00", 1440),
    ("Pacific/Kwajalein", "1993-08-21T12:00", 1440),
    ("Pacific/Kwajalein", "1969-09-30T13:00", -1380),
    ("America/Sao_Paulo", "2018-11-04T03:00", 60),
    ("America/Sao_Paulo", "2018-02-18T02:00", -60),
    ("America/Nuuk", "2024-03-31T01:00", 60),
    ("Asia/Pyongyang", "2018-05-04T15:00", 30),
    ("Asia/Pyongyang", "2015-08-14T15:00", -30),
    ("America/Caracas", "2016-05-01T07:00", 30),
    ("America/Caracas", "2007-12-09T07:00", -30),
    ("Antarctica/Troll", "2025-03-30T01:00", 120),
    ("Antarctica/Troll", "2025-10-26T01:00", -120),
    ("Africa/Cairo", "2024-04-25T22:00", 60),
    ("Pacific/Chatham", "2025-09-27T14:00", 60),
    ("Pacific/Chatham", "2025-04-05T14:00", -60),
]


def instant(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


@dataclass(frozen=True)
class Entry:
    """A cron entry as text and, for the oracle, as what it means."""

    text: str
    seconds: frozenset[int]
    minutes: frozenset[int]
    hours: frozenset[int]
    day_matches: Callable[[date], bool]
    frequent: bool

    def names(self, wall: datetime) -> bool:
        in_day = wall.second in self.seconds and wall.minute in self.minutes and wall.hour in self.hours
        return in_day and self.day_matches(wall.date())


@lru_cache(maxsize=64)
def walk(zone: str, around: str, span: timedelta, step: timedelta) -> list[tuple[datetime, datetime]]:
    """Each real instant within ``span`` of a change, with the wall clock it shows."""
    tz = ZoneInfo(zone)
    start, end = instant(around) - span, instant(around) + span
    shown = []
    while start <= end:
        shown.append((start, start.astimezone(tz).replace(tzinfo=None, fold=0)))
        start += step
    return shown


def oracle(entry: Entry, shown: list[tuple[datetime, datetime]]) -> list[datetime]:
    """When the entry runs, by walking."""
    if entry.frequent:
        return [real for real, wall in shown if entry.names(wall)]
    step = shown[1][0] - shown[0][0]
    dates = {wall.date() for _, wall in shown}
    seen: set[datetime] = set()
    runs: list[datetime] = []
    before = shown[0][1] - step
    for real, wall in shown:
        due = entry.names(wall) and wall not in seen
        skipped = before + step
        while skipped < wall and not due:
            due = entry.names(skipped) and skipped not in seen and skipped.date() in dates
            skipped += step
        if due:
            runs.append(real)
        seen.add(wall)
        before = wall
    return runs


def field(low: int, high: int) -> st.SearchStrategy[tuple[str, frozenset[int]]]:
    """A field's text and what it means: star, step, number, list, range, also a wrapping one."""
    every = range(low, high + 1)
    number = st.integers(low, high)
    return st.one_of(
        st.just(("*", frozenset(every))),
        st.integers(1, high + 5).map(lambda n: (f"*/{n}", frozenset(every[::n]))),
        number.map(lambda n: (str(n), frozenset({n}))),
        st.sets(number, min_size=1, max_size=5).map(lambda s: (",".join(map(str, sorted(s))), frozenset(s))),
        st.tuples(number, number).map(
            lambda p: (
                f"{p[0]}-{p[1]}",
                frozenset(n for n in every if (p[0] <= n <= p[1] if p[0] <= p[1] else n >= p[0] or n <= p[1])),
            )
        ),
        st.tuples(number, st.integers(1, 9)).map(lambda p: (f"{p[0]}/{p[1]}", frozenset(range(p[0], high + 1, p[1])))),
    )


def both_or_either(day: tuple[str, frozenset[int]], weekday: tuple[str, frozenset[int]]) -> Callable[[date], bool]:
    either = day[0][0] != "*" and weekday[0][0] != "*"

    def matches(when: date) -> bool:
        in_month, in_week = when.day in day[1], when.isoweekday() % 7 in weekday[1]
        return in_month or in_week if either else in_month and in_week

    return matches


@st.composite
def entries(draw: st.DrawFn, seconds: bool = False) -> Entry:
    second = draw(field(0, 59)) if seconds else ("0", frozenset({0}))
    minute, hour = draw(field(0, 59)), draw(field(0, 23))
    # Most days match, or the window around the change would mostly stay empty.
    day = draw(st.one_of(st.just(("*", frozenset(range(1, 32)))), field(1, 31)))
    weekday = draw(st.one_of(st.just(("*", frozenset(range(7)))), field(0, 6)))
    parts = [minute[0], hour[0], day[0], "*", weekday[0]]
    return Entry(
        " ".join([second[0], *parts] if seconds else parts),
        second[1],
        minute[1],
        hour[1],
        both_or_either(day, weekday),
        frequent=any(part[0] == "*" for part in (second[0], minute[0], hour[0])),
    )


def compare(
    recurrence: Cron | Crontab, entry: Entry, shown: list[tuple[datetime, datetime]], margin: timedelta
) -> None:
    """Within the walk, less a margin in which the oracle does not see enough of either side."""
    start, end = shown[0][0] + margin, shown[-1][0] - margin
    expected = [run for run in oracle(entry, shown) if start < run <= end]
    found: list[datetime] = []
    run = recurrence.next_after(start)
    while run is not None and run <= end:
        found.append(run)
        run = recurrence.next_after(run)
    assert found == expected
    for at in [start + (end - start) * n / 7 for n in range(1, 8)] + [r - MOMENT for r in expected[:3]] + expected[-2:]:
        past = [r for r in expected if r <= at]
        newest = recurrence.latest_before(at)
        assert newest == past[-1] if past else newest is None or newest <= start
        ahead = [r for r in expected if r > at]
        following = recurrence.next_after(at)
        assert following == ahead[0] if ahead else following is None or following > end


@pytest.mark.parametrize(("zone", "around", "minutes"), CHANGES, ids=[f"{c[0]}-{c[1][:10]}" for c in CHANGES])
@settings(max_examples=25, deadline=None)
@given(entry=entries())
def test_minutes_around_a_change(zone: str, around: str, minutes: int, entry: Entry) -> None:
    shown = walk(zone, around, timedelta(days=3), MINUTE)
    clock = dict(shown)
    moved = clock[instant(around)] - clock[instant(around) - MINUTE] - MINUTE
    assert moved == timedelta(minutes=minutes), "the zone no longer changes here"
    compare(Cron(entry.text, zone), entry, shown, timedelta(days=1, hours=2))


@settings(max_examples=40, deadline=None)
@given(entry=entries(seconds=True), change=st.sampled_from([c for c in CHANGES if abs(c[2]) <= 60]))
def test_seconds_around_a_change(entry: Entry, change: tuple[str, str, int]) -> None:
    shown = walk(change[0], change[1], timedelta(minutes=100), timedelta(seconds=1))
    compare(Cron(entry.text, change[0]), entry, shown, timedelta(minutes=65))


@settings(max_examples=60, deadline=None)
@given(entry=entries(), change=st.sampled_from(CHANGES))
def test_crontab_sets_around_a_change(entry: Entry, change: tuple[str, str, int]) -> None:
    """The five sets of a crontab: both day fields must match, whatever their text."""
    minute, hour, day, month, weekday = entry.text.split()
    days, weekdays = _expand(day, 1, 31), _expand(weekday, 0, 6)
    crontab = Crontab(
        entry.minutes,
        entry.hours,
        days,
        frozenset(range(1, 13)),
        weekdays,
        " ".join([minute, hour, day, month, weekday]),
        change[0],
    )
    both = Entry(
        entry.text,
        entry.seconds,
        entry.minutes,
        entry.hours,
        lambda when: when.day in days and when.isoweekday() % 7 in weekdays,
        entry.frequent,
    )
    compare(crontab, both, walk(change[0], change[1], timedelta(days=3), MINUTE), timedelta(days=1, hours=2))


def _expand(text: str, low: int, high: int) -> frozenset[int]:
    """The numbers a day field of :func:`field` names, read by trying each."""
    return frozenset(n for n in range(low, high + 1) if any(_covers(item, n, low, high) for item in text.split(",")))


def _covers(item: str, n: int, low: int, high: int) -> bool:
    span, _, step = item.partition("/")
    first, _, last = span.partition("-")
    if span == "*":
        return (n - low) % int(step or 1) == 0
    if last:
        a, b = int(first), int(last)
        return a <= n <= b if a <= b else n >= a or n <= b
    return n == int(first) if not step else n >= int(first) and (n - int(first)) % int(step) == 0


def last_of(when: date) -> int:
    return calendar.monthrange(when.year, when.month)[1]


def nearest_weekday(when: date, day: int) -> bool:
    target = date(when.year, when.month, min(day, last_of(when)))
    candidates = [target + timedelta(days=n) for n in (0, -1, 1, -2, 2)]
    return when == next(c for c in candidates if c.month == when.month and c.isoweekday() < 6)


DayField = tuple[str, Callable[[date], bool]]

month_days = st.one_of(
    st.just(("*", lambda when: True)),
    st.just(("L", lambda when: when.day == last_of(when))),
    st.integers(1, 31).map(lambda n: (f"{n}W", lambda when: nearest_weekday(when, n))),
    st.sets(st.integers(1, 31), min_size=1, max_size=4).map(
        lambda s: (",".join(map(str, sorted(s))), lambda when: when.day in s)
    ),
    st.integers(2, 31).map(lambda n: (f"*/{n}", lambda when: (when.day - 1) % n == 0)),
)
week_days = st.one_of(
    st.just(("*", lambda when: True)),
    st.integers(0, 7).map(lambda n: (str(n), lambda when: when.isoweekday() % 7 == n % 7)),
    st.tuples(st.integers(0, 7), st.integers(1, 5)).map(
        lambda p: (
            f"{p[0]}#{p[1]}",
            lambda when: when.isoweekday() % 7 == p[0] % 7 and (when.day + 6) // 7 == p[1],
        )
    ),
    st.integers(0, 7).map(
        lambda n: (f"{n}L", lambda when: when.isoweekday() % 7 == n % 7 and when.day > last_of(when) - 7)
    ),
    st.integers(2, 6).map(lambda n: (f"*/{n}", lambda when: when.isoweekday() % 7 % n == 0)),
)


@settings(max_examples=150, deadline=None)
@given(day=month_days, weekday=week_days, months=st.sets(st.integers(1, 12), min_size=4))
def test_dates_of_four_years(day: DayField, weekday: DayField, months: set[int]) -> None:
    either = day[0][0] != "*" and weekday[0][0] != "*"
    first = date(2026, 1, 1)

    def matches(when: date) -> bool:
        hits = day[1](when), weekday[1](when)
        return when.month in months and (any(hits) if either else all(hits))

    expected = [when for n in range(1461) if matches(when := first + timedelta(days=n))]
    if not expected:
        return  # rarer than four years, or impossible: other tests
    cron = Cron(f"0 12 {day[0]} {','.join(map(str, months))} {weekday[0]}")
    found = cron.upcoming(datetime(2026, 1, 1, tzinfo=UTC), len(expected))
    assert [run.date() for run in found] == expected
    back = found[-1]
    for when in reversed(expected):
        newest = cron.latest_before(back)
        assert newest is not None
        assert newest.date() == when
        back = newest - timedelta(seconds=1)


@settings(max_examples=200, deadline=None)
@given(
    text=st.text("0123456789*/-,#LWHR?@ adeflmnrstuw", max_size=24)
    | st.lists(st.text("0123456789*/-,#LWH?", min_size=1, max_size=6), min_size=5, max_size=6).map(" ".join)
)
def test_any_text_is_refused_or_runs(text: str) -> None:
    try:
        cron = Cron(text, name="x")
    except RecurrenceError:
        return
    after = datetime(2026, 1, 1, tzinfo=UTC)
    run = cron.next_after(after)
    assert run is not None
    assert run > after
    assert cron.latest_before(run) == run
    assert cron.describe()


@pytest.mark.parametrize("zone", sorted({change[0] for change in CHANGES}))
def test_changes_are_all_found(zone: str) -> None:
    """The scan for changes sees exactly those that an hour-by-hour walk sees."""
    tz = ZoneInfo(zone)
    start, end = datetime(2005, 1, 1), datetime(2020, 1, 1)
    expected = 0
    hour, before = start, None
    while hour <= end:
        offset = hour.replace(tzinfo=UTC).astimezone(tz).utcoffset()
        expected += before is not None and offset != before
        before = offset
        hour += timedelta(hours=1)
    found = []
    change = as_zone(zone).first_change(start, end)
    while change is not None:
        found.append(change)
        change = as_zone(zone).first_change(change, end)
    assert len(found) == expected
    for change in found:
        assert as_zone(zone).last_change(change - timedelta(days=1), change) == change
        assert as_zone(zone).offset(change) != as_zone(zone).offset(change - timedelta(seconds=1))
