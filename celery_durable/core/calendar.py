"""Which naive wall-clock times a set of cron fields names, forwards and backwards.

Dates come from croniter, on naive datetimes only and with every value already spelled
out: its own zone handling runs a fixed-time job twice when a clock is set back and loses
slots at 30-minute shifts, and its OR turns into AND beside ``#``, ``L`` and ``W``. Zones
are the business of :mod:`.zones`; OR is two searches here. The answers are kept, for a
croniter search costs 30 to 170 µs and most schedules ask about the same few days. The
time of day within a date is a bisection.
"""

from __future__ import annotations

import copy
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from functools import lru_cache

from croniter import croniter

from celery_durable.core.errors import RecurrenceError

#: Where the proof of a first occurrence begins. Any date would do: without a year field
#: the widest gap between two matches is 40 years (29 February on a given weekday, across
#: a century that is no leap year), and croniter looks 50 years ahead.
_PROOF = date(2000, 1, 1)
_DAY = timedelta(days=1)
_SECOND = timedelta(seconds=1)


@dataclass(frozen=True)
class Fields:
    """Six cron fields with every value spelled out.

    Each is ``*`` or a comma list of numbers, and in the day fields croniter's ``l``,
    ``15w``, ``l5`` and ``5#3``.
    """

    second: str
    minute: str
    hour: str
    day: str
    month: str
    weekday: str
    #: Day-of-month OR day-of-week (crontab(5), both restricted); otherwise both must match.
    either_day: bool = False


class Days:
    """The dates that match the day-of-month, month and day-of-week fields.

    Raises:
        RecurrenceError: croniter refuses a field, or no date ever matches.
    """

    def __init__(self, day: str, month: str, weekday: str, either: bool) -> None:
        pairs = [(day, "*"), ("*", weekday)] if either else [(day, weekday)]
        searches = [_search(f"0 0 {d} {month} {w}") for d, w in pairs]
        # One half of an OR may be impossible ("0 0 31 2 0"): it would cost milliseconds in vain each time.
        self._searches = tuple(s for s in searches if _run(s, "get_next", _PROOF) is not None)
        if not self._searches:
            raise RecurrenceError("names no date that ever comes: its day, month and weekday exclude each other")
        #: The first matching date that is not before the given one.
        self.first_from = lru_cache(2048)(self._first_from)
        #: The last matching date that is not after the given one.
        self.last_until = lru_cache(2048)(self._last_until)

    def _first_from(self, day: date) -> date | None:
        found = [match for s in self._searches if (match := _run(s, "get_next", day)) is not None]
        return min(found, default=None)

    def _last_until(self, day: date) -> date | None:
        found = [match for s in self._searches if (match := _run(s, "get_prev", day)) is not None]
        return max(found, default=None)


def _search(text: str) -> croniter:
    try:
        return croniter(text, datetime.combine(_PROOF, time()), ret_type=datetime, day_or=False)
    except Exception as exc:  # croniter's errors have no common root; all of them mean "not a cron text"
        raise RecurrenceError(str(exc)) from exc


def _run(search: croniter, method: str, day: date) -> date | None:
    """The matching date nearest to ``day``, itself included, in the direction of the method."""
    try:
        # Strictly after the second before, strictly before the second after.
        start = datetime.combine(day, time()) + (-_SECOND if method == "get_next" else _SECOND)
        # croniter keeps its position in the object, so each search runs on a copy: safe among threads.
        found: datetime = getattr(copy.copy(search), method)(datetime, start_time=start)
    except (ValueError, OverflowError):  # nothing within 50 years, or past the ends of datetime
        return None
    return found.date()


class Calendar:
    """The slots named by some :class:`Fields`, as naive wall-clock times.

    Raises:
        RecurrenceError: The day fields cannot be used, see :class:`Days`.
    """

    def __init__(self, fields: Fields) -> None:
        self._days = _days_of(fields.day, fields.month, fields.weekday, fields.either_day)
        self._hours = _expand(fields.hour, 24)
        self._minutes = _expand(fields.minute, 60)
        self._seconds = _expand(fields.second, 60)
        self._first = time(self._hours[0], self._minutes[0], self._seconds[0])
        self._last = time(self._hours[-1], self._minutes[-1], self._seconds[-1])

    def after(self, wall: datetime) -> datetime | None:
        """The first slot later than a wall-clock time of whole seconds."""
        today = wall.date()
        day = self._days.first_from(today)
        if day == today:
            moment = self._time_after(wall.hour, wall.minute, wall.second)
            if moment is not None:
                return datetime.combine(today, moment)
            day = self._days.first_from(today + _DAY)
        return datetime.combine(day, self._first) if day else None

    def at_or_before(self, wall: datetime) -> datetime | None:
        """The newest slot not later than a wall-clock time of whole seconds."""
        today = wall.date()
        day = self._days.last_until(today)
        if day == today:
            moment = self._time_until(wall.hour, wall.minute, wall.second)
            if moment is not None:
                return datetime.combine(today, moment)
            day = self._days.last_until(today - _DAY)
        return datetime.combine(day, self._last) if day else None

    def _time_after(self, hour: int, minute: int, second: int) -> time | None:
        if hour in self._hours:
            if minute in self._minutes and (s := _above(self._seconds, second)) is not None:
                return time(hour, minute, s)
            if (m := _above(self._minutes, minute)) is not None:
                return time(hour, m, self._seconds[0])
        if (h := _above(self._hours, hour)) is not None:
            return time(h, self._minutes[0], self._seconds[0])
        return None

    def _time_until(self, hour: int, minute: int, second: int) -> time | None:
        if hour in self._hours:
            if minute in self._minutes and (s := _below(self._seconds, second + 1)) is not None:
                return time(hour, minute, s)
            if (m := _below(self._minutes, minute)) is not None:
                return time(hour, m, self._seconds[-1])
        if (h := _below(self._hours, hour)) is not None:
            return time(h, self._minutes[-1], self._seconds[-1])
        return None


def _expand(values: str, size: int) -> tuple[int, ...]:
    return tuple(range(size)) if values == "*" else tuple(sorted(map(int, values.split(","))))


def _above(values: Sequence[int], than: int) -> int | None:
    at = bisect_right(values, than)
    return values[at] if at < len(values) else None


def _below(values: Sequence[int], than: int) -> int | None:
    at = bisect_left(values, than)
    return values[at - 1] if at else None


_days_of = lru_cache(maxsize=1024)(Days)


@lru_cache(maxsize=8192)
def calendar_of(fields: Fields) -> Calendar:
    """The calendar of these fields, made once for all schedules that use them."""
    return Calendar(fields)
