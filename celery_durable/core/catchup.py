"""Which occurrences of a schedule run now, and which are settled as missed."""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass, fields
from datetime import datetime, timedelta, timezone
from typing import Any

from celery_durable.core.recurrence import Every, Recurrence

#: Most occurrences that ``catchup="all"`` runs at once, and most that are noted one by one as missed.
MOST = 1000
#: Most occurrences that are counted one by one; a count that reaches it means "at least".
COUNTED = 10_000
#: With ``catchup="none"`` an occurrence this late, in seconds, still runs: a beat needs time to come round.
PUNCTUAL = 60.0

CATCHUPS = ("latest", "all", "none")


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What a schedule does beside coming due; written as JSON, what is at its default left out."""

    catchup: str = "latest"
    """Of missed occurrences run the newest (``latest``), ``all`` or ``none``."""
    deadline: float | None = None
    """An occurrence later than this many seconds is settled as missed."""
    start: datetime | None = None
    end: datetime | None = None
    """Nominal times lie within [start, end]."""
    max_runs: int | None = None
    jitter: float = 0.0
    """Each run is delayed by the same share of this many seconds, which follows from the name."""
    durable: bool | None = None
    """For a task unknown to the beat: is it a DurableTask?"""

    def __post_init__(self) -> None:
        if self.catchup not in CATCHUPS:
            raise ValueError(f"catchup = {self.catchup!r} is none of {', '.join(CATCHUPS)}.")
        for name in ("deadline", "jitter"):
            value = getattr(self, name)
            if value is None:
                continue
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < 1e10:
                raise ValueError(f"{name} = {value!r} is no number of seconds.")
        for name in ("start", "end"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, datetime) or value.utcoffset() is None):
                raise ValueError(f"{name} = {value!r} must be an aware datetime.")
        if self.start is not None and self.end is not None and self.start > self.end:
            raise ValueError(f"start = {self.start.isoformat()} is after end = {self.end.isoformat()}.")
        runs = self.max_runs
        if runs is not None and (not isinstance(runs, int) or isinstance(runs, bool) or runs < 1):
            raise ValueError(f"max_runs = {runs!r} must be a whole number of at least 1.")
        if self.durable not in (None, True, False):
            raise ValueError(f"durable = {self.durable!r} must be True or False.")

    @classmethod
    def of(cls, values: dict[str, Any]) -> Policy:
        """Read a policy: JSON values, or what a program says (timedeltas, datetimes).

        Raises:
            ValueError: naming the word and the value.
        """
        known = {each.name for each in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(f"{unknown[0]} is no word of a schedule's policy: use {', '.join(sorted(known))}.")
        read = {name: value for name, value in values.items() if value is not None}
        for name in ("deadline", "jitter"):
            if isinstance(read.get(name), timedelta):
                read[name] = read[name].total_seconds()
        for name in ("start", "end"):
            if isinstance(read.get(name), str):
                read[name] = datetime.fromisoformat(read[name])
        return cls(**read)

    def written(self) -> dict[str, Any]:
        """As JSON values."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        return {
            name: value.astimezone(timezone.utc).isoformat() if isinstance(value, datetime) else value
            for name, value in found.items()
            if value != getattr(type(self), name)
        }

    def delay(self, name: str) -> timedelta:
        """By how much the runs of the schedule `name` are delayed: the same for every run."""
        share = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64
        return timedelta(seconds=self.jitter * share)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is to be done about a schedule now."""

    run: list[datetime]
    """Nominal times to run, oldest first."""
    missed: list[datetime]
    """The newest of those that do not run."""
    missed_count: int
    """How many do not run; from :data:`COUNTED` on "at least"."""
    cursor: datetime
    """Everything up to here is settled."""
    next_nominal: datetime | None
    """The first occurrence beyond; None: never again."""


def first(recurrence: Recurrence, policy: Policy, after: datetime) -> datetime | None:
    """The first occurrence strictly after `after` that the policy allows."""
    found = recurrence.next_after(_since(policy, after))
    return None if found is None or (policy.end is not None and found > policy.end) else found


def plan(recurrence: Recurrence, policy: Policy, *, cursor: datetime, now: datetime, fired: int) -> Plan:
    """Decide about the occurrences after `cursor` and up to `now`.

    Arguments:
        recurrence: when it comes due.
        policy: see :class:`Policy`; the caller has taken the jitter off `now`.
        cursor: everything up to here is settled.
        now: the database's time.
        fired: how many occurrences have run before.
    """
    since = _since(policy, cursor)
    newest = recurrence.latest_before(now if policy.end is None else min(now, policy.end))
    if newest is None or newest <= since:
        return Plan(run=[], missed=[], missed_count=0, cursor=cursor, next_nominal=first(recurrence, policy, cursor))
    occurrences, count = _between(recurrence, since, newest)
    run = [newest] if policy.catchup == "latest" else occurrences
    if policy.catchup == "none":
        run = [newest] if (now - newest).total_seconds() <= PUNCTUAL else []
    if policy.deadline is not None:
        run = [each for each in run if (now - each).total_seconds() <= policy.deadline]
    left = None if policy.max_runs is None else max(policy.max_runs - fired, 0)
    if left is not None:
        run = run[:left]
    chosen = set(run)
    over = left is not None and len(run) >= left
    return Plan(
        run=run, missed=[each for each in occurrences if each not in chosen], missed_count=count - len(run),
        cursor=newest, next_nominal=None if over else first(recurrence, policy, newest),
    )  # fmt: skip


def _since(policy: Policy, instant: datetime) -> datetime:
    return instant if policy.start is None else max(instant, policy.start - timedelta(microseconds=1))


def _between(recurrence: Recurrence, since: datetime, newest: datetime) -> tuple[list[datetime], int]:
    """The occurrences in (since, newest]: the newest :data:`MOST` of them, and how many there are."""
    if isinstance(recurrence, Every):
        oldest = recurrence.next_after(since)
        assert oldest is not None
        count = (newest - oldest) // recurrence.every + 1
        return [newest - back * recurrence.every for back in range(min(count, MOST) - 1, -1, -1)], count
    found: deque[datetime] = deque(maxlen=MOST)
    count = 0
    at = recurrence.next_after(since)
    while at is not None and at < newest and count < COUNTED:
        found.append(at)
        count += 1
        at = recurrence.next_after(at)
    found.append(newest)
    return list(found), count + 1
