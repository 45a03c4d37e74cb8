"""When a beat looks again, and from where: pure, with clocks and randomness passed in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from celery_durable.core import backoff

#: How far the watermark trails behind the last complete scan: a transaction that inserts a timer due at once may
#: take that long to commit without being missed by the bounded scan.
TRAIL = 5.0
#: Seconds between two scans without a lower bound, which find whatever the bounded ones missed.
FULL_SCAN = 10.0


class Watermark:
    """The lower bound of the scan for due timers of one shard, in epoch seconds of the database's clock.

    It keeps the scan from walking the dead index entries of timers long gone,
    which vacuum cannot remove while anybody holds an old snapshot.  A bound is
    never a promise: it is lowered by an announcement of an earlier timer, and
    left out every :data:`FULL_SCAN` seconds.
    """

    def __init__(self) -> None:
        self._bound: float | None = None
        self._full_scan_at = float("-inf")

    def begin(self, now: float) -> float | None:
        """The bound for a scan that begins at `now` (monotonic seconds); None: scan everything."""
        if self._bound is None or now >= self._full_scan_at:
            self._full_scan_at = now + FULL_SCAN
            return None
        return self._bound

    @property
    def bound(self) -> float | None:
        """The present bound."""
        return self._bound

    def filled(self, last: float) -> None:
        """A page was full and ended with a timer due at `last`: whatever comes before has been taken."""
        self._bound = last

    def emptied(self, scanned_at: float) -> None:
        """A page was not full: at `scanned_at` (database's clock) nothing more was due."""
        self._bound = scanned_at - TRAIL

    def lower(self, wake_at: float) -> None:
        """A timer due at `wake_at` has been announced."""
        if self._bound is not None:
            self._bound = min(self._bound, wake_at)

    def forget(self) -> None:
        """Scan everything next time."""
        self._bound = None


@dataclass
class Clock:
    """The database's clock, told by the monotonic one since it was last read."""

    offset: float = 0.0

    def read(self, database: float, monotonic: float) -> None:
        """The database said `database` (epoch seconds) at `monotonic`."""
        self.offset = database - monotonic

    def at(self, monotonic: float) -> float:
        """The database's time at `monotonic`."""
        return monotonic + self.offset

    def until(self, instant: float, monotonic: float) -> float:
        """Seconds from `monotonic` to the database's `instant`; negative when it has passed."""
        return instant - self.at(monotonic)


class HeldUp:
    """How long to wait for what is overdue and was not there a moment ago.

    It has just fallen due, or somebody holds its row: a beat for a moment, or a
    transaction for a minute.  Pauses double from `least` to `most` seconds.
    """

    def __init__(self, least: float = 0.001, most: float = 0.25) -> None:
        self._least, self._most = least, most
        self._next = least

    def pause(self, seconds: float | None) -> float | None:
        """The pause before the next look, when the next one is due in `seconds` (negative: overdue; None: never)."""
        if seconds is None or seconds > 0:
            self._next = self._least
            return seconds
        pause, self._next = self._next, min(self._next * 2, self._most)
        return pause


class Outage:
    """Something that is away: when to try again, and what is worth saying.

    Pauses double from 0.2 s to `cap`, each drawn from its upper half, so that
    many beats do not come back in step.
    """

    BASE = 0.2

    def __init__(self, *, cap: float = 5.0, random: Callable[[], float]) -> None:
        self._cap = cap
        self._random = random
        self._failures = 0
        self._since = 0.0
        self._retry_at = 0.0

    @property
    def active(self) -> bool:
        """Whether it is away."""
        return self._failures > 0

    def failed(self, now: float) -> bool:
        """It failed at `now` (monotonic seconds); True when that is news."""
        self._failures += 1
        if self._failures == 1:
            self._since = now
        self._retry_at = now + backoff.delay(
            self._failures, base=self.BASE, cap=self._cap, jitter=True, random=self._random
        )
        return self._failures == 1

    def worked(self, now: float) -> float | None:
        """It worked at `now`; returns how long it was away, if it was."""
        if not self._failures:
            return None
        self._failures = 0
        return now - self._since

    def remaining(self, now: float) -> float:
        """Seconds until it should be tried again; 0 when it may be now."""
        return max(self._retry_at - now, 0.0) if self._failures else 0.0


def jittered(interval: float, random: Callable[[], float]) -> float:
    """An interval drawn from its upper fifth, so that beats do not poll in step."""
    return interval * (0.8 + 0.2 * random())


def pause_of_returned(lateness: float, *, least: float = 1.0, most: float = 300.0) -> float:
    """How long to wait before a message that the broker gave back is tried again, in seconds.

    Half of its lateness, so that the pauses of one timer grow by half each
    time, whichever beat tries it, and nobody has to count.

    Arguments:
        lateness: seconds since it was due.
        least: the shortest pause.
        most: the longest one.
    """
    return min(max(lateness / 2, least), most)
