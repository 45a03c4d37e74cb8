"""Recurrences made of Celery's own schedule objects: the crontab, the sun, and any other object.

:mod:`celery_durable.recurrence` decides which of these an object becomes.
"""

from __future__ import annotations

import copy
import logging
import os
import re
from collections.abc import Iterable
from datetime import datetime, timedelta, tzinfo
from typing import Any
from zoneinfo import ZoneInfo

from celery.schedules import BaseSchedule, crontab, solar
from celery.utils.time import LocalTimezone

from celery_durable.core.recurrence import Crontab, Stepping, to_utc
from celery_durable.core.zones import UTC
from celery_durable.errors import InvalidSchedule

logger = logging.getLogger(__name__)

#: How far :meth:`Walked.latest_before` looks back. The sun's rarest event comes once a year.
LOOK_BACK = timedelta(days=5 * 366)

#: What Celery's crontab parser reads in full; it silently drops the rest of anything else.
_CRONTAB_ITEM = re.compile(r"(\*|[a-z]+|\d+)(-([a-z]+|\d+))?(/\d+)?", re.ASCII | re.IGNORECASE)
_NAMES = {
    "january", "february", "march", "april", "may", "june",
    "july", "august", "september", "october", "november", "december",
    "sunday", "monday", "tuesday", "wednesday", "thursday", "friday", "saturday",
}  # fmt: skip
_NAMES |= {name[:3] for name in _NAMES}


_FIELDS = ("minute", "hour", "day_of_month", "month_of_year", "day_of_week")


def from_crontab(obj: crontab, tz: str | tzinfo) -> Crontab:
    """Celery's crontab by our time rule: its five sets, all of which must match."""
    minute, hour, day_of_month, month_of_year, day_of_week = (frozenset(getattr(obj, name)) for name in _FIELDS)
    text = " ".join(_texts(obj))
    return Crontab(minute, hour, day_of_month, month_of_year, day_of_week, text, tz)


def warn_of_misread(obj: crontab) -> None:
    """Log the items of a crontab of which Celery's parser silently drops a part, as in ``FRI#2``."""
    for name, text in zip(_FIELDS, _texts(obj), strict=True):
        for item in text.split(","):
            if not _is_plain(item):
                read = sorted(getattr(obj, name))
                logger.warning("crontab %s %r: Celery reads the field as %s", name, text, read)


def _texts(obj: crontab) -> list[str]:
    return [_field_text(getattr(obj, f"_orig_{name}")) for name in _FIELDS]


def _field_text(value: object) -> str:
    """A crontab argument as blank-free text: ``*/5``, ``7``, ``0,15,30``."""
    if isinstance(value, str):
        return "".join(value.split())
    if isinstance(value, Iterable):
        return ",".join(str(int(number)) for number in sorted(value))
    return str(value)


def _is_plain(item: str) -> bool:
    match = _CRONTAB_ITEM.fullmatch(item)
    words = (match[1], match[3]) if match else ()
    return bool(match) and all(not word or not word.isalpha() or word.lower() in _NAMES for word in words)


def host_zone(tz: tzinfo) -> tzinfo:
    """The zone itself, or the host's IANA zone for Celery's LocalTimezone, which knows no gaps.

    Celery uses LocalTimezone where ``enable_utc`` is off and ``timezone`` is unset.
    """
    if not isinstance(tz, LocalTimezone):
        return tz
    candidates = (
        os.environ.get("TZ", "").lstrip(":"),
        os.path.realpath("/etc/localtime").partition("zoneinfo/")[2],
    )
    for name in filter(None, candidates):
        try:
            return ZoneInfo(name)
        except (KeyError, ValueError, OSError):  # a POSIX rule, or no such name
            continue
    try:
        with open("/etc/localtime", "rb") as file:
            return ZoneInfo.from_file(file)
    except (OSError, ValueError):
        return UTC  # what the C library does with a host that names no zone


class Walked(Stepping):
    """``latest_before`` for something that can only look forward."""

    def latest_before(self, instant: datetime) -> datetime | None:
        """The newest occurrence at or before ``instant`` (aware), in UTC; looks back five years at most.

        Starts ever earlier until an occurrence lies at or before ``instant``, then steps
        forward. The first start that finds one is at most twice as early as needed, so
        few steps remain.
        """
        moment = to_utc(instant)
        back = timedelta(seconds=1)
        while back <= LOOK_BACK:
            found = self.next_after(moment - back)
            if found is not None and found <= moment:
                while (later := self.next_after(found)) is not None and later <= moment:
                    found = later
                return found
            back *= 2
        return None


class ObjectRecurrence(Walked):
    """A schedule object that decides for itself, such as a subclass overriding ``is_due``.

    Arguments:
        obj: The object; it is never changed.
        tz: The zone in which it is shown the time; it matters to objects that round to local days.
    """

    def __init__(self, obj: BaseSchedule, tz: tzinfo) -> None:
        self.obj = obj
        self.tz = tz

    def __repr__(self) -> str:
        return f"ObjectRecurrence({self.obj!r})"

    def next_after(self, instant: datetime) -> datetime | None:
        """The first occurrence strictly after ``instant`` (aware), in UTC.

        Asks a copy of the object that believes ``instant`` to be both now and its last run.
        None if it names no later time (a one-off that is over).

        Raises:
            InvalidSchedule: The object raised.
        """
        moment = to_utc(instant)
        here = moment.astimezone(self.tz)
        try:
            remaining = _remaining(self.obj, here)
        except Exception as exc:  # code we do not know; its schedule alone may suffer
            raise InvalidSchedule(f"{self.obj!r} cannot say when it is due after {moment}: {exc!r}") from exc
        try:
            found = moment + remaining
        except OverflowError:
            return None
        return found if found > moment else None

    def describe(self) -> str:
        """The object's own representation."""
        return f"as {self.obj!r} decides"


def _remaining(obj: BaseSchedule, here: datetime) -> timedelta:
    asked: Any = _clone(obj)
    asked.nowfun = lambda: here
    try:
        remaining: timedelta = asked.remaining_estimate(here)
    except NotImplementedError:  # only is_due was overridden
        return timedelta(seconds=asked.is_due(here)[1])
    return remaining


def _clone(obj: BaseSchedule) -> BaseSchedule:
    # Celery's __reduce__ calls the class with the base's arguments, which loses what a subclass
    # added or fails outright; copy.copy would go that way.
    if not hasattr(obj, "__dict__"):
        return copy.copy(obj)
    clone: BaseSchedule = object.__new__(type(obj))
    clone.__dict__.update(obj.__dict__)
    return clone


_celery_solar: Any = solar  # its annotation takes literals; here the event is data


class Solar(Walked):
    """Celery's solar events, to the second.

    Arguments:
        event: One of Celery's event names, such as ``sunset``.
        lat, lon: Degrees.

    Raises:
        InvalidSchedule: Celery refuses the arguments, or the event never happens there.
    """

    def __init__(self, event: str, lat: float, lon: float) -> None:
        self.event, self.lat, self.lon = event, lat, lon
        try:
            _celery_solar(event, lat, lon)
        except ValueError as exc:
            raise InvalidSchedule(str(exc)) from exc
        if self.next_after(datetime(2000, 1, 1, tzinfo=UTC)) is None:
            raise InvalidSchedule(f"solar event {event!r} never happens at latitude {lat}, longitude {lon}")

    def __repr__(self) -> str:
        return f"Solar({self.event!r}, {self.lat!r}, {self.lon!r})"

    def next_after(self, instant: datetime) -> datetime | None:
        """The first event strictly after ``instant`` (aware), in UTC; None if none comes within a year."""
        moment = start = to_utc(instant)
        while start - moment < timedelta(days=367):
            found = self._search(start)
            event = self._event_at(found)
            if event is not None and event > moment:
                return event
            # Not an event but where Celery gave up for the day or the year, or the event we come from.
            start = max(found, start + timedelta(minutes=5))
        return None

    def describe(self) -> str:
        """For instance ``at sunset at 52.5, 13.4``."""
        return f"at {self.event.replace('_', ' ')} at {self.lat}, {self.lon}"

    def _event_at(self, found: datetime) -> datetime | None:
        # The search's answer moves by microseconds with its start, and the nominal time is an
        # identity: so search again from a start that depends on the event alone.
        start = found.replace(second=0, microsecond=0) - timedelta(minutes=30)
        again = self._search(start)
        if abs(again - found) > timedelta(minutes=1):
            return None
        return (again + timedelta(milliseconds=500)).replace(microsecond=0)

    def _search(self, start: datetime) -> datetime:
        sun = _celery_solar(self.event, self.lat, self.lon, nowfun=lambda: start)
        sun.tz = UTC  # else it would ask the current app
        try:
            remaining: timedelta = sun.remaining_estimate(start)
        except TypeError:
            # Celery 5.5 fails so on a day without sunrise or sunset; 5.6 and newer answer "the next day".
            return start + timedelta(days=1)
        return start + remaining
