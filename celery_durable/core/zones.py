"""Time zones as this package needs them: wall clocks to instants, and where the clock changes.

Everything here works on *naive UTC* instants and *naive* wall clocks, so that no
arithmetic is ever done on an aware local datetime, where Python ignores the offset.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from datetime import datetime, timedelta, timezone, tzinfo
from functools import lru_cache
from zoneinfo import ZoneInfo

from celery_durable.core.errors import RecurrenceError

UTC = timezone.utc
SECOND = timedelta(seconds=1)
DAY = timedelta(days=1)

#: Two changes of one zone are never closer than this, so a scan in such steps misses none.
_SCAN = timedelta(hours=12)
#: No zone has ever moved its clock by more than a day, so a repeated hour began at most this long ago.
_LONGEST_REPEAT = timedelta(hours=25)


class Zone:
    """A zone's wall clock.

    Arguments:
        tz: A :class:`zoneinfo.ZoneInfo` or a fixed :class:`datetime.timezone`;
            :func:`as_zone` makes one from anything else.
    """

    def __init__(self, tz: tzinfo) -> None:
        self.tz = tz
        #: The IANA name, or None for a zone that has none (a fixed offset, a zone read from a file).
        self.name: str | None = "UTC" if tz is UTC else _checked(getattr(tz, "key", None))
        self._fixed = isinstance(tz, timezone)
        self._changes: dict[int, tuple[datetime, ...]] = {}

    def __repr__(self) -> str:
        return f"<Zone {self}>"

    def __str__(self) -> str:
        return self.name or str(self.tz)

    def wall(self, instant: datetime) -> datetime:
        """The wall clock at a naive UTC instant: naive, ``fold=1`` if it is showing this time again."""
        return self.tz.fromutc(instant.replace(tzinfo=self.tz)).replace(tzinfo=None)

    def offset(self, instant: datetime) -> timedelta:
        """Wall clock minus UTC at a naive UTC instant."""
        return self.wall(instant) - instant

    def instant(self, wall: datetime) -> datetime | None:
        """The one instant at which a slot of a fixed-time job runs (the rule of :mod:`.recurrence`).

        Arguments:
            wall: A naive wall-clock time.

        Returns:
            The naive UTC instant: of the first pass if the clock shows ``wall`` twice,
            the end of the gap if it skips ``wall``, None if it skips the whole date.
        """
        local = wall.replace(tzinfo=self.tz, fold=0)
        before, after = _utcoffset(local), _utcoffset(local.replace(fold=1))
        if before >= after:
            return wall - before
        change = self._bisect(wall - after, wall - before)
        midnight = wall.replace(hour=0, minute=0, second=0, microsecond=0)
        if change + before <= midnight and change + after >= midnight + DAY:
            return None
        return change

    def settled(self, instant: datetime) -> datetime:
        """The newest wall-clock second whose slot, by :meth:`instant`, is at or before ``instant``.

        That is the wall clock itself, except while it repeats an hour: all slots
        of the repeated hour belong to the first pass and are over.
        """
        wall = self.wall(instant)
        if not wall.fold:
            return wall.replace(microsecond=0)
        change = self.last_change(instant - _LONGEST_REPEAT, instant)
        if change is None:  # a zone that sets fold without a change we can see
            return wall.replace(microsecond=0, fold=0)
        return change + self.offset(change - SECOND) - SECOND

    def first_change(self, after: datetime, until: datetime) -> datetime | None:
        """The first instant in (after, until] from which another offset holds (naive UTC)."""
        if self._fixed:
            return None
        for year in range(after.year, until.year + 1):
            changes = self._in_year(year)
            at = bisect_right(changes, after)
            if at < len(changes):
                return changes[at] if changes[at] <= until else None
        return None

    def last_change(self, after: datetime, until: datetime) -> datetime | None:
        """The newest instant in (after, until] from which another offset holds (naive UTC)."""
        if self._fixed:
            return None
        for year in range(until.year, after.year - 1, -1):
            changes = self._in_year(year)
            at = bisect_right(changes, until)
            if at:
                return changes[at - 1] if changes[at - 1] > after else None
        return None

    def _in_year(self, year: int) -> tuple[datetime, ...]:
        found = self._changes.get(year)
        if found is None:
            found = self._changes[year] = tuple(self._scan(year))
        return found

    def _scan(self, year: int) -> list[datetime]:
        found: list[datetime] = []
        if not 2 <= year <= 9997:  # the edges of datetime: no zone is defined there
            return found
        low = _new_year(year) - SECOND
        end = _new_year(year + 1) - SECOND
        offset = self.offset(low)
        while low < end:
            high = min(low + _SCAN, end)
            here = self.offset(high)
            if here != offset:
                found.append(self._bisect(low, high))
            low, offset = high, here
        return found

    def _bisect(self, low: datetime, high: datetime) -> datetime:
        """The first second in (low, high] whose offset is not the one at ``low``."""
        offset = self.offset(low)
        while high - low > SECOND:
            middle = low + timedelta(seconds=(high - low) // SECOND // 2)
            if self.offset(middle) == offset:
                low = middle
            else:
                high = middle
        return high


def _new_year(year: int) -> datetime:
    return datetime(year, 1, 1, tzinfo=UTC).replace(tzinfo=None)


def _checked(name: str | None) -> str | None:
    """The name if it can be looked up: a zone read from a file may carry a made-up one (tzlocal's ``local``)."""
    try:
        return ZoneInfo(name).key if name else None
    except (KeyError, ValueError, OSError):
        return None


def _utcoffset(local: datetime) -> timedelta:
    offset = local.utcoffset()
    if offset is None:  # a tzinfo that refuses to say; as_zone lets none through
        raise RecurrenceError(f"time zone {local.tzinfo!r} gives no offset for {local}")
    return offset


@lru_cache(maxsize=2048)
def _of_tzinfo(tz: tzinfo) -> Zone:
    return Zone(tz)


def forget() -> None:
    """Make zones anew from now on; see :func:`celery_durable.core.zone_data.forget`."""
    _of_tzinfo.cache_clear()


def as_zone(tz: str | tzinfo | Zone) -> Zone:
    """The zone meant by an IANA name or a tzinfo object of any of the usual libraries.

    Arguments:
        tz: An IANA name, a ``ZoneInfo``, a ``datetime.timezone``, or a pytz or
            dateutil zone (taken by their IANA name).

    Returns:
        The same :class:`Zone` for the same zone, so that what it knows is kept.

    Raises:
        RecurrenceError: No zone of that name, or a tzinfo that stands for none.
    """
    if isinstance(tz, Zone):
        return tz
    if isinstance(tz, str):
        return _of_tzinfo(_by_name(tz))
    if isinstance(tz, (ZoneInfo, timezone)):
        return _of_tzinfo(UTC if getattr(tz, "key", None) == "UTC" else tz)
    if not isinstance(tz, tzinfo):
        raise RecurrenceError(
            f"tz={tz!r} is a {type(tz).__name__}: give an IANA name such as 'Europe/Berlin', or a tzinfo"
        )
    name = _iana_name(tz)
    if name:
        return _of_tzinfo(_by_name(name))
    offset = tz.utcoffset(None)
    if offset is not None:  # a fixed offset: it needs no date to know itself
        return _of_tzinfo(timezone(offset) if offset else UTC)
    raise RecurrenceError(
        f"tz={tz!r} stands for no IANA zone: give its name, such as 'Europe/Berlin', or a zoneinfo.ZoneInfo"
    )


def _by_name(name: str) -> tzinfo:
    try:
        return UTC if name == "UTC" else ZoneInfo(name)
    except (KeyError, ValueError, OSError) as exc:  # unknown; malformed; a folder of the zone database
        raise RecurrenceError(
            f"tz={name!r} is not a time zone known here: use an IANA name such as 'Europe/Berlin' "
            f"(if the name is right, install or update the tzdata package)"
        ) from exc


def _iana_name(tz: tzinfo) -> str | None:
    """The IANA name carried by a pytz zone (``zone``) or a dateutil one (the file it was read from)."""
    zone = getattr(tz, "zone", None)
    if isinstance(zone, str):
        return zone
    path = getattr(tz, "_filename", None)
    if not isinstance(path, str):
        return None
    parts = path.replace(os.sep, "/").split("/")
    for start in range(max(len(parts) - 3, 0), len(parts)):
        name = "/".join(parts[start:])
        try:
            ZoneInfo(name)
        except (KeyError, ValueError, OSError):
            continue
        return name
    return None
