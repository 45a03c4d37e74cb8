"""When a recurring schedule comes due, as pure functions of an instant.

One time rule, "Debian cron on real calendar dates" (after cron(8) of Debian, with its
three-hour threshold for clock corrections replaced by "does the date exist"):

* A cron entry whose minute or hour field (or seconds field) begins with ``*`` is
  *frequent*: it runs at every real instant whose wall clock matches. An hour shown twice
  counts twice, a skipped hour not at all.
* Any other entry is a *fixed-time* one and each of its slots runs exactly once: in the
  first pass if the clock repeats it, at the first instant after the gap if the clock skips
  it, not at all if the zone skips the whole date. Slots that land on one instant make one run.
* Intervals are elapsed time from an anchor and know nothing of zones.

Instants go in aware, in any zone, and come out aware in UTC; naive ones are refused.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import datetime, timedelta, tzinfo
from functools import cached_property
from typing import Protocol, runtime_checkable

from celery_durable.core import words
from celery_durable.core.calendar import Calendar, Fields, calendar_of
from celery_durable.core.cron_text import DAY, HOUR, MINUTE, MONTH, WEEKDAY, CronText, Field, parse
from celery_durable.core.errors import RecurrenceError
from celery_durable.core.zones import SECOND, UTC, Zone, as_zone

__all__ = ["EPOCH", "MINIMUM_INTERVAL", "Cron", "Crontab", "Every", "Recurrence", "RecurrenceError"]

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

#: A schedule is one database transaction per occurrence: shorter intervals would only grow a backlog.
MINIMUM_INTERVAL = timedelta(milliseconds=100)


@runtime_checkable
class Recurrence(Protocol):
    """What a schedule needs to know of its definition."""

    def next_after(self, instant: datetime) -> datetime | None:
        """The first occurrence strictly after ``instant``, None if there is none any more."""

    def latest_before(self, instant: datetime) -> datetime | None:
        """The newest occurrence at or before ``instant``, None if there was none yet."""

    def upcoming(self, instant: datetime, n: int) -> list[datetime]:
        """The next ``n`` occurrences strictly after ``instant``, oldest first."""

    def describe(self) -> str:
        """The recurrence in plain words."""


def to_utc(instant: datetime) -> datetime:
    """An aware datetime in UTC.

    Raises:
        RecurrenceError: It is naive.
    """
    if instant.utcoffset() is None:
        raise RecurrenceError(f"{instant!r} is naive: give an aware datetime, such as datetime.now(timezone.utc)")
    return instant.astimezone(UTC)


class Stepping:
    """``upcoming`` for anything that has ``next_after``."""

    def next_after(self, instant: datetime) -> datetime | None:
        raise NotImplementedError

    def upcoming(self, instant: datetime, n: int) -> list[datetime]:
        """The next ``n`` occurrences strictly after ``instant``, oldest first; fewer if they end."""
        found: list[datetime] = []
        at: datetime | None = instant
        while len(found) < n:
            at = self.next_after(at) if at is not None else None
            if at is None:
                break
            found.append(at)
        return found


class Slots(Stepping):
    """The time rule over a calendar and a zone: what :class:`Cron` and :class:`Crontab` share."""

    zone: Zone
    calendar: Calendar
    frequent: bool

    def next_after(self, instant: datetime) -> datetime | None:
        """The first occurrence strictly after ``instant`` (aware), in UTC; None past the year 9999."""
        moment = to_utc(instant).replace(tzinfo=None)
        try:
            found = self._next_frequent(moment) if self.frequent else self._next_fixed(moment)
        except OverflowError:  # at the end of what datetime can express
            return None
        return found.replace(tzinfo=UTC) if found else None

    def latest_before(self, instant: datetime) -> datetime | None:
        """The newest occurrence at or before ``instant`` (aware), in UTC; searches backwards, never walks."""
        moment = to_utc(instant).replace(tzinfo=None)
        try:
            found = self._latest_frequent(moment) if self.frequent else self._latest_fixed(moment)
        except OverflowError:
            return None
        return found.replace(tzinfo=UTC) if found else None

    def _next_fixed(self, moment: datetime) -> datetime | None:
        # Zone.instant never decreases from slot to slot, so all slots up to the settled one are
        # over, and the first one beyond it that runs at all is the next.
        slot = self.calendar.after(self.zone.settled(moment))
        while slot is not None:
            run = self.zone.instant(slot)
            if run is not None and run > moment:
                return run
            slot = self.calendar.after(slot if run else _last_second(slot))
        return None

    def _latest_fixed(self, moment: datetime) -> datetime | None:
        slot = self.calendar.at_or_before(self.zone.settled(moment))
        while slot is not None:
            run = self.zone.instant(slot)
            if run is not None:
                return run
            slot = self.calendar.at_or_before(slot.replace(hour=0, minute=0, second=0) - SECOND)
        return None

    def _next_frequent(self, moment: datetime) -> datetime | None:
        # Within a stretch of one offset the wall clock is plain arithmetic; at a change start over.
        wall = self.zone.wall(moment).replace(microsecond=0, fold=0)
        offset = wall - moment.replace(microsecond=0)
        while (slot := self.calendar.after(wall)) is not None:
            run = slot - offset
            change = self.zone.first_change(moment, run)
            if change is None:
                return run
            moment, offset = change, self.zone.offset(change)
            wall = moment + offset - SECOND
        return None

    def _latest_frequent(self, moment: datetime) -> datetime | None:
        moment = moment.replace(microsecond=0)
        while True:
            offset = self.zone.offset(moment)
            slot = self.calendar.at_or_before(moment + offset)
            if slot is None:
                return None
            run = slot - offset
            change = self.zone.last_change(run, moment)
            if change is None:
                return run
            moment = change - SECOND


def _last_second(wall: datetime) -> datetime:
    return wall.replace(hour=23, minute=59, second=59)


@dataclass(frozen=True)
class Cron(Slots):
    """Cron text in a zone; day-of-month OR day-of-week where both are restricted, as in crontab(5).

    Arguments:
        text: Five fields (minute hour day-of-month month day-of-week), six with the seconds
            first, or an alias such as ``@daily``; see :mod:`.cron_text`.
        tz: IANA name or tzinfo in which the fields are read.
        name: What ``H`` fields take their values from: the schedule's name.

    Raises:
        RecurrenceError: Text, zone or name cannot be used, or no date within 50 years matches.
    """

    text: str
    tz: str | tzinfo = "UTC"
    name: str | None = None

    def __post_init__(self) -> None:
        self.parsed, self.zone, self.calendar  # noqa: B018 - all refusals happen at construction

    @cached_property
    def parsed(self) -> CronText:
        """The text, understood."""
        return parse(self.text, self.name)

    @cached_property
    def zone(self) -> Zone:  # type: ignore[override]  # computed once from tz, otherwise the attribute Slots asks for
        """The zone of ``tz``."""
        return as_zone(self.tz)

    @cached_property
    def calendar(self) -> Calendar:  # type: ignore[override]  # as above
        """The slots the text names."""
        try:
            return calendar_of(self.parsed.fields)
        except RecurrenceError as exc:
            raise RecurrenceError(f"cron text {self.text!r} {exc}") from exc.__cause__

    @property
    def frequent(self) -> bool:  # type: ignore[override]  # as above
        """Whether the entry follows the real clock instead of running each slot once."""
        return self.parsed.frequent

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.text, self.tz, self.name)  # what follows from them is computed anew

    def describe(self) -> str:
        """For instance ``at 02:00 on Monday to Friday (Europe/Berlin)``."""
        return words.of_cron(self.parsed.parts, self.parsed.fields, str(self.zone))


@dataclass(frozen=True)
class Crontab(Slots):
    """The five sets of a Celery ``crontab``: all must match, also day-of-month AND day-of-week.

    Arguments:
        minute, hour, day_of_month, month_of_year, day_of_week: The numbers that match (Sunday is 0).
        text: The five fields as written, blank-separated in that order. It tells whether
            minute or hour begin with ``*``, and is what gets stored and shown.
        tz: IANA name or tzinfo in which the fields are read.

    Raises:
        RecurrenceError: A set is empty or out of range, or no date ever matches.
    """

    minute: frozenset[int]
    hour: frozenset[int]
    day_of_month: frozenset[int]
    month_of_year: frozenset[int]
    day_of_week: frozenset[int]
    text: str
    tz: str | tzinfo = "UTC"
    fields: Fields = field(init=False, repr=False, compare=False)
    calendar: Calendar = field(init=False, repr=False, compare=False)
    zone: Zone = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        fields = Fields(
            "0",
            _numbers(self.minute, MINUTE),
            _numbers(self.hour, HOUR),
            _numbers(self.day_of_month, DAY),
            _numbers(self.month_of_year, MONTH),
            _numbers(self.day_of_week, WEEKDAY),
        )
        if len(self.text.split()) != 5:
            raise RecurrenceError(f"crontab text {self.text!r} must have 5 fields separated by blanks")
        object.__setattr__(self, "fields", fields)
        try:
            object.__setattr__(self, "calendar", calendar_of(fields))
        except RecurrenceError as exc:
            raise RecurrenceError(f"crontab {self.text!r} {exc}") from exc.__cause__
        object.__setattr__(self, "zone", as_zone(self.tz))

    @property
    def frequent(self) -> bool:  # type: ignore[override]  # computed, otherwise the attribute Slots asks for
        """Whether the entry follows the real clock instead of running each slot once."""
        return any(part.startswith("*") for part in self.text.split()[:2])

    def __reduce__(self) -> tuple[object, ...]:
        sets = (self.minute, self.hour, self.day_of_month, self.month_of_year, self.day_of_week)
        return type(self), (*sets, self.text, self.tz)

    def describe(self) -> str:
        """For instance ``at 02:00 on day 13 and on Friday (Europe/Berlin)``."""
        return words.of_cron(("0", *self.text.split()), self.fields, str(self.zone))


def _numbers(values: Collection[int], of: Field) -> str:
    if not values:
        raise RecurrenceError(f"crontab {of.label} is empty: it would never run")
    wrong = sorted(value for value in values if not of.low <= value <= of.high)
    if wrong:
        raise RecurrenceError(f"crontab {of.label} {wrong[0]} is outside {of.low}-{of.high}")
    if len(values) == of.high - of.low + 1:
        return "*"
    return ",".join(map(str, sorted(values)))


@dataclass(frozen=True)
class Every(Stepping):
    """An interval: occurrences are ``anchor + k * every`` for k = 0, 1, 2, …, in elapsed time.

    Arguments:
        every: The interval, at least 0.1 s.
        anchor: Aware datetime of the first occurrence; the Unix epoch unless given, which
            aligns the interval to the UTC clock.

    Raises:
        RecurrenceError: The interval is too short, or the anchor naive.
    """

    every: timedelta
    anchor: datetime = EPOCH

    def __post_init__(self) -> None:
        if not isinstance(self.every, timedelta):
            raise RecurrenceError(f"interval must be a timedelta, not {self.every!r}")
        if self.every < MINIMUM_INTERVAL:
            raise RecurrenceError(
                f"interval of {self.every.total_seconds():g} s is too short: the minimum is "
                f"{MINIMUM_INTERVAL.total_seconds():g} s"
            )
        object.__setattr__(self, "anchor", to_utc(self.anchor))

    def next_after(self, instant: datetime) -> datetime | None:
        """The first occurrence strictly after ``instant`` (aware), in UTC; the anchor if that is still ahead."""
        moment = to_utc(instant)
        try:
            return self.anchor + max((moment - self.anchor) // self.every + 1, 0) * self.every
        except OverflowError:  # past the year 9999
            return None

    def latest_before(self, instant: datetime) -> datetime | None:
        """The newest occurrence at or before ``instant`` (aware), in UTC; None before the anchor."""
        passed = (to_utc(instant) - self.anchor) // self.every
        return self.anchor + passed * self.every if passed >= 0 else None

    def describe(self) -> str:
        """For instance ``every 1 hour 30 minutes``."""
        return words.of_interval(self.every)
