"""When a timer is due: what callers may say, and what is refused."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone, tzinfo

#: Further away than this is a mistake (milliseconds taken for seconds, an overflow), not a plan.
FARTHEST = timedelta(days=36525)

When = datetime | timedelta | int | float
"""An aware datetime, or a delay as a timedelta or in seconds."""


@dataclass(frozen=True, kw_only=True)
class Moment:
    """A due time: either an instant, or seconds from the database's now."""

    at: datetime | None = None
    after: float | None = None

    def approximate(self, now: datetime) -> datetime:
        """The instant meant, by the host's clock: good enough for a comparison with an expiry, not for a decision."""
        return self.at if self.at is not None else now + timedelta(seconds=self.after or 0.0)


def moment(when: When, *, naive: tzinfo | None = None, now: datetime | None = None) -> Moment:
    """Read a due time.

    Arguments:
        when: an aware datetime, a timedelta, or seconds from now; the past means at once.
        naive: the zone in which naive datetimes are meant; None refuses them.
        now: the host's time, for the sanity check alone.

    Raises:
        ValueError: for a naive datetime, NaN, or a time over a hundred years away.
        TypeError: for anything that is no time.
    """
    if isinstance(when, datetime):
        return Moment(at=_near(_aware(when, naive), now or datetime.now(timezone.utc)))
    if isinstance(when, timedelta):
        seconds = when.total_seconds()
    elif isinstance(when, (int, float)) and not isinstance(when, bool):
        if not math.isfinite(when):
            raise ValueError(f"{when!r} seconds is no delay. Pass a finite number of seconds, or a timedelta.")
        seconds = float(when) if abs(when) < 1e15 else math.copysign(1e15, when)
    else:
        raise TypeError(
            f"{when!r} is no due time. Pass an aware datetime, a timedelta, or a number of seconds from now."
        )
    if abs(seconds) > FARTHEST.total_seconds():
        raise ValueError(f"{when!r} is over a hundred years away. Is it in milliseconds? A delay is given in seconds.")
    return Moment(after=seconds)


def _aware(when: datetime, naive: tzinfo | None) -> datetime:
    if when.tzinfo is not None and when.utcoffset() is not None:
        return when.astimezone(timezone.utc)
    if naive is None:
        raise ValueError(
            f"{when!r} has no time zone, so it does not say when. Pass an aware datetime "
            '(for example datetime(…, tzinfo=ZoneInfo("Europe/Berlin"))), or set durable_naive_datetimes '
            "to the zone in which naive ones are meant (True: the app's)."
        )
    localize = getattr(naive, "localize", None)  # pytz zones attach their first offset in history otherwise
    aware: datetime = localize(when) if localize is not None else when.replace(tzinfo=naive)
    return aware.astimezone(timezone.utc)


def _near(at: datetime, now: datetime) -> datetime:
    if abs(at - now) > FARTHEST:
        raise ValueError(f"{at.isoformat()} is over a hundred years away. Check the year.")
    return at
