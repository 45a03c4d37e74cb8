"""Which occurrences of a schedule run now, which wait, and which are settled without a run."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timedelta, timezone
from itertools import pairwise
from typing import Any, NamedTuple

from celery_durable.core.recurrence import Every, Recurrence

#: Most occurrences that ``catchup="all"`` runs at once, and most that are noted one by one as not run.
MOST = 1000
#: Most occurrences that are counted one by one; from this many on, a count that is not an interval's means "at least".
COUNTED = 10_000
#: With ``catchup="none"`` an occurrence this late, in seconds, still runs: a beat needs time to come round.
PUNCTUAL = 60.0

CATCHUPS = ("latest", "all", "none")
OVERLAPS = ("allow", "skip", "queue")

#: Why an occurrence did not run.
MISSED, LATE, PAUSED, OVERLAP, ENDED = "missed", "deadline", "paused", "overlap", "max_runs"


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What a schedule does beside coming due; written as JSON, what is at its default left out."""

    catchup: str = "latest"
    """Of missed occurrences run the newest (``latest``), ``all`` or ``none``."""
    deadline: float | None = None
    """An occurrence later than this many seconds is settled without a run."""
    overlap: str = "allow"
    """While the run before still goes on: run beside it (``allow``), not at all (``skip``), or after it (``queue``;
    one waits, later ones do not run)."""
    start: datetime | None = None
    end: datetime | None = None
    """Nominal times lie within [start, end]."""
    max_runs: int | None = None
    jitter: float = 0.0
    """Each run is delayed by the same share of this many seconds, which follows from the name."""
    durable: bool | None = None
    """For a task unknown to the beat: is it a DurableTask?"""

    def __post_init__(self) -> None:
        for name, words in (("catchup", CATCHUPS), ("overlap", OVERLAPS)):
            if getattr(self, name) not in words:
                raise ValueError(f"{name} = {getattr(self, name)!r} is none of {', '.join(words)}.")
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
    def of(cls, values: Mapping[str, Any]) -> Policy:
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

    def check_jitter(self, recurrence: Recurrence, after: datetime) -> None:
        """Refuse a jitter that could carry an occurrence past the next one.

        Raises:
            ValueError: naming the shortest of the next ten gaps.
        """
        if not self.jitter:
            return
        upcoming = recurrence.upcoming(_since(self, after), 11)
        gaps = [(later - earlier).total_seconds() for earlier, later in pairwise(upcoming)]
        if gaps and self.jitter >= min(gaps):
            raise ValueError(
                f"jitter = {self.jitter:g} s is not below the shortest gap of the next runs, {min(gaps):g} s."
            )


class Pause(NamedTuple):
    """Nothing of a schedule runs from `since` on."""

    since: datetime
    until: datetime | None
    """Inclusive; None: until somebody ends it."""

    def over(self, now: datetime) -> bool:
        """Whether it has ended by itself."""
        return self.until is not None and now >= self.until


class Skipped(NamedTuple):
    """Occurrences that do not run, for one reason."""

    nominals: Sequence[datetime]
    """The newest of them."""
    number: int
    """How many; see :data:`COUNTED`."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is to be done about a schedule now."""

    run: Sequence[datetime] = ()
    """Nominal times to run, oldest first."""
    queue: Sequence[datetime] = ()
    """Nominal times to run once the run before has ended."""
    skipped: Mapping[str, Skipped]
    """What does not run, by reason."""
    cursor: datetime
    """Everything up to here is settled."""
    next_nominal: datetime | None
    """The first occurrence beyond; None: never again, or not until a pause ends."""

    @property
    def missed(self) -> int:
        """How many occurrences did not run because nobody was there in time."""
        return sum(self.skipped[reason].number for reason in (MISSED, LATE) if reason in self.skipped)


def first(recurrence: Recurrence, policy: Policy, after: datetime, pause: Pause | None = None) -> datetime | None:
    """The first occurrence strictly after `after` that the policy allows, and strictly after a pause."""
    if pause is not None:
        if pause.until is None:
            return None
        after = max(after, pause.until)
    found = recurrence.next_after(_since(policy, after))
    return None if found is None or (policy.end is not None and found > policy.end) else found


def plan(
    recurrence: Recurrence, policy: Policy, *, cursor: datetime, now: datetime, fired: int, pause: Pause | None = None,
    live: bool = False, queued: bool = False,
) -> Plan:  # fmt: skip
    """Decide about the occurrences after `cursor` and up to `now`.

    Arguments:
        recurrence: when it comes due.
        policy: see :class:`Policy`; the caller has taken the jitter off `now`.
        cursor: everything up to here is settled.
        now: the database's time.
        fired: how many occurrences have run before.
        pause: the present pause, or one that has just ended.
        live: the run before still goes on.
        queued: an occurrence waits for it already.
    """
    since = _since(policy, cursor)
    newest = recurrence.latest_before(now if policy.end is None else min(now, policy.end))
    if newest is None or newest <= since:
        used_up = policy.max_runs is not None and fired >= policy.max_runs
        return Plan(
            skipped={}, cursor=cursor, next_nominal=None if used_up else first(recurrence, policy, cursor, pause)
        )
    occurrences, count = _between(recurrence, since, newest)
    skipped: dict[str, Skipped] = {}

    def skip(reason: str, nominals: Sequence[datetime], number: int | None = None) -> None:
        number = len(nominals) if number is None else number
        if number:
            skipped[reason] = Skipped(nominals, number)

    if pause is not None:
        until = now if pause.until is None else min(now, pause.until)
        awake = [each for each in occurrences if each > until]
        skip(PAUSED, [each for each in occurrences if each <= until], count - len(awake))
        occurrences, count = awake, len(awake)
    run = occurrences if policy.catchup == "all" else occurrences[-1:]
    if policy.catchup == "none":
        run = [each for each in run if (now - each).total_seconds() <= PUNCTUAL]
    chosen = set(run)
    skip(MISSED, [each for each in occurrences if each not in chosen], count - len(run))
    if policy.deadline is not None:
        late = [each for each in run if (now - each).total_seconds() > policy.deadline]
        skip(LATE, late)
        run = run[len(late) :]
    queue: list[datetime] = []
    if policy.overlap != "allow":
        free = 0 if live or queued else 1
        run, waiting = run[:free], run[free:]
        if policy.overlap == "queue" and not queued:
            queue, waiting = waiting[:1], waiting[1:]
        skip(OVERLAP, waiting)
    over = False
    if policy.max_runs is not None:
        left = max(policy.max_runs - fired, 0)
        over = len(run) + len(queue) >= left
        skip(ENDED, [*run, *queue][left:])
        run, queue = run[:left], queue[: max(left - len(run), 0)]
    return Plan(
        run=run, queue=queue, skipped=skipped, cursor=newest,
        next_nominal=None if over else first(recurrence, policy, newest, pause),
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
    found: deque[datetime] = deque()
    back: datetime | None = newest
    while back is not None and back > since and len(found) < MOST:
        found.appendleft(back)
        back = recurrence.latest_before(back - timedelta(microseconds=1))
    count = len(found)
    if back is not None and back > since:
        count, at = 0, recurrence.next_after(since)
        while at is not None and at <= newest and count < COUNTED:
            count, at = count + 1, recurrence.next_after(at)
        count = max(count, len(found))
    return list(found), count
