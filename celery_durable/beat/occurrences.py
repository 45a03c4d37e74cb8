"""Due schedules become timers: the occurrence's timer, its key and the cursor in one transaction."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING
from uuid import UUID

import psycopg
from celery.utils.log import get_logger

from celery_durable.beat.entries import Entry
from celery_durable.beat.link import Link
from celery_durable.core.catchup import LATE, Pause, Plan, Policy, plan
from celery_durable.core.pacing import HeldUp
from celery_durable.errors import DatabaseUnavailable
from celery_durable.occurrence import timer_of
from celery_durable.recurrence import Recurrence, Spec, from_spec
from celery_durable.settings import Settings
from celery_durable.store import schedules, timers
from celery_durable.store.executor import Executor
from celery_durable.store.schedules import CODE_KIND, QUEUED, Advance, Line, StoredSchedule
from celery_durable.store.timers import NewTimer

if TYPE_CHECKING:
    from celery import Celery

logger = get_logger(__name__)

#: Most schedules settled in one transaction: what is paid for each transaction is shared, and the first of the page
#: wait for the last.
PAGE = 200
#: No further schedule of a page is settled once it has made so many timers: one that catches up alone may make a thousand.
ENOUGH = 1000
#: Seconds until a schedule that cannot come due is tried again.
PAUSE = 60.0
#: Time until it is looked again whether a run that others wait for has ended.
QUEUE_LOOK = timedelta(seconds=1)
#: Recurrences kept parsed.
MOST_READ = 10_000

SCHEDULE, CATCHUP = "schedule", "catchup"


class Occurrences:
    """Settles the occurrences of all schedules as they come due.

    Two beats never settle the same one: the row is locked until timer and
    cursor commit together, and the key is unique besides.

    Arguments:
        app: renders the calls.
        link: the beat's connection.
        settings: the payload limit and the poll interval.
        entries: those of the program, by name: they alone can evaluate rows of kind ``code``.
    """

    def __init__(self, app: Celery, link: Link, settings: Settings, entries: Mapping[str, Entry]) -> None:
        self._app = app
        self._link = link
        self._settings = settings
        self._entries = entries
        self._known = {name for name, entry in entries.items() if entry.kind == CODE_KIND}
        self._read: dict[Spec, Recurrence] = {}
        self._look_at = float("-inf")
        self._held_up = HeldUp()

    def remaining(self, now: float) -> float:
        """Seconds until the next look, at the monotonic instant `now`."""
        return self._look_at - now

    def soon(self) -> None:
        """Look at the next turn: a schedule has changed."""
        self._look_at = float("-inf")

    def forget(self) -> None:
        """Read all recurrences anew: the time zone data has changed."""
        self._read.clear()

    def turn(self) -> None:
        """Settle one page of due schedules if it is time.

        Raises:
            DatabaseUnavailable: Postgres is away; nothing was settled, or all of it.
        """
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + self._settings.poll_interval
        if self._link.transact(self._settle_page):
            self._look_at = now
            return
        seconds = self._link.run(lambda executor: schedules.next_due(executor, known=sorted(self._known)))
        pause = self._held_up.pause(seconds)
        if pause is not None:
            self._look_at = min(self._look_at, time.monotonic() + pause)

    def _settle_page(self, executor: Executor) -> bool:
        """Settle a page; returns whether more may be due."""
        page = schedules.due(executor, known=sorted(self._known), page=PAGE)
        if not page:
            return False
        now = schedules.now(executor)
        ids = [UUID(str(row.last_id)) for row in page if row.last_id is not None]
        live = schedules.live(executor, ids)
        good: list[_Settled] = []
        made, more = 0, len(page) >= PAGE
        for row in page:
            if made >= ENOUGH:
                more = True  # those left over are due as before
                break
            try:
                settled = self._settled(executor, schedules.read(row), now, live)
                if settled is not None:
                    good.append(settled)
                    made += len(settled.timers)
            except (DatabaseUnavailable, psycopg.OperationalError):
                raise
            except (
                Exception
            ) as exc:  # specifications, tasks, signal handlers are the user's: they stop their schedule alone
                self._set_fault(executor, row.name, exc)
        self._store(executor, good)
        return more

    def _store(self, executor: Executor, page: Sequence[_Settled]) -> None:
        """Store what a page has come to; if that fails one by one, so that one bad schedule does not keep the others."""
        try:
            with executor.atomic():
                store(executor, page)
        except (DatabaseUnavailable, psycopg.OperationalError) as exc:
            if not isinstance(exc, psycopg.errors.LockNotAvailable):
                raise
            # Somebody holds a row of one of them, or its key: the others do not wait for that.
            self._one_by_one(executor, page, exc)
        except psycopg.Error as exc:
            self._one_by_one(executor, page, exc)

    def _one_by_one(self, executor: Executor, page: Sequence[_Settled], exc: psycopg.Error) -> None:
        if len(page) == 1:
            self._set_fault(executor, page[0].advance.name, exc)
            return
        for each in page:
            self._store(executor, [each])

    def _set_fault(self, executor: Executor, name: str, exc: Exception) -> None:
        if schedules.set_fault(executor, name, f"{type(exc).__name__}: {exc}", pause=PAUSE):
            logger.error("Schedule %r cannot run, it is tried every %g s: %s", name, PAUSE, exc)

    def _settled(
        self, executor: Executor, stored: StoredSchedule, now: datetime, live: set[UUID]
    ) -> _Settled | None:  # fmt: skip
        entry = self._entries.get(stored.name) if stored.kind == CODE_KIND else None
        if entry is not None and entry.fingerprint != stored.fingerprint:
            # A newer program has changed it; it is theirs now.
            self._known.discard(stored.name)
            return None
        policy = Policy.of(stored.policy)
        delay = policy.delay(stored.name)
        recurrence = self._recurrence(stored) if entry is None else entry.recurrence_from(stored.anchor)
        pause = stored.pause
        # A pause covers the nominal times in it, whenever the jitter would have had them run.
        awake = pause is None or pause.over(now - delay)
        goes_on, waited, late = stored.last_id in live, None, None
        line = schedules.waiting(executor, stored.name) if stored.queued else schedules.NOBODY
        if line.first is not None and awake and self._too_late(policy, line, now):
            late = line.first
            line = replace(line, first=None, clock=line.clock - 1, number=line.number - 1)
        if line.first is not None and not goes_on and awake:
            waited, goes_on = line.first, True
            line = replace(line, clock=line.clock - (line.reason == QUEUED), number=line.number - 1)
        found = plan(
            recurrence, policy, cursor=stored.cursor, now=now - delay, pause=pause, live=goes_on, queued=line.clock > 0,
            fired=stored.fired + line.clock + (waited is not None and line.reason == QUEUED),
        )  # fmt: skip
        timers = [
            self._timer(stored, policy, entry, nominal, nominal + delay, found.missed, self._reason(found, nominal))
            for nominal in found.run
        ]
        fired = len(timers)
        if waited is not None:
            reason = SCHEDULE if line.reason == QUEUED else line.reason
            timers.append(self._timer(stored, policy, entry, waited, now, 0, reason))
            fired += line.reason == QUEUED
        notes = [(nominal, reason) for reason, skipped in found.skipped.items() for nominal in skipped.nominals]
        notes += [(nominal, QUEUED) for nominal in found.queue]
        not_run = Counter(stored.not_run)
        not_run.update({reason: skipped.number for reason, skipped in found.skipped.items()})
        if late is not None:
            notes.append((late, LATE))
            not_run[LATE] += 1
        if found.missed:
            logger.warning("Schedule %r missed %d occurrences until %s.", stored.name, found.missed, found.cursor)
        next_at = None if found.next_nominal is None else found.next_nominal + delay
        queued = line.number + len(found.queue)
        if queued and awake:
            again = now + QUEUE_LOOK
            next_at = again if next_at is None else min(next_at, again)
        return _Settled(
            timers=timers, notes=notes, waited=waited or late, advance=Advance(
                name=stored.name, cursor=found.cursor, next_at=next_at if awake else self._after_pause(pause, delay), fired=fired,
                last_id=timers[-1].id if timers else None, queued=queued, not_run=not_run,
                pause_over=pause is not None and awake,
            ),
        )  # fmt: skip

    @staticmethod
    def _too_late(policy: Policy, line: Line, now: datetime) -> bool:
        """Whether the occurrence that waits longest is past its deadline; a backfill was asked for, however late."""
        if line.first is None or line.reason != QUEUED or policy.deadline is None:
            return False
        return (now - line.first).total_seconds() > policy.deadline

    @staticmethod
    def _after_pause(pause: Pause | None, delay: timedelta) -> datetime | None:
        """When a pause that ends by itself is to be looked at."""
        return None if pause is None or pause.until is None else pause.until + delay

    def _timer(
        self, stored: StoredSchedule, policy: Policy, entry: Entry | None, nominal: datetime, due_at: datetime,
        missed: int, reason: str,
    ) -> NewTimer:  # fmt: skip
        return timer_of(
            self._app, stored.name, task=stored.task, args=entry.current_args() if entry is not None else stored.args,
            kwargs=entry.current_kwargs() if entry is not None else stored.kwargs,
            options=entry.options if entry is not None else stored.options, durable=policy.durable, nominal=nominal,
            due_at=due_at, missed=missed, reason=reason, max_payload=self._settings.max_payload,
        )  # fmt: skip

    @staticmethod
    def _reason(found: Plan, nominal: datetime) -> str:
        punctual = nominal == found.cursor and not found.missed
        return SCHEDULE if punctual else CATCHUP

    def _recurrence(self, stored: StoredSchedule) -> Recurrence:
        """The recurrence of a row; schedules that say the same share one, parsed once."""
        spec = Spec(stored.kind, stored.text, stored.tz, stored.anchor)
        known = self._read.get(spec)
        if known is None:
            if len(self._read) >= MOST_READ:
                self._read.clear()
            known = self._read[spec] = from_spec(spec)
        return known


@dataclass(frozen=True, kw_only=True)
class _Settled:
    """What a look at one schedule has come to, not stored yet."""

    timers: Sequence[NewTimer]
    notes: Sequence[tuple[datetime, str]]
    waited: datetime | None
    """The occurrence that waited for the one before, and does so no more."""
    advance: Advance

    def advanced(self, new: Collection[UUID]) -> Advance:
        """How far the schedule has come: an occurrence that a backfill has run before is none that ran now."""
        made = [timer.id for timer in self.timers if timer.id in new]
        if len(made) == len(self.timers):
            return self.advance
        fired = max(self.advance.fired - (len(self.timers) - len(made)), 0)
        return replace(self.advance, fired=fired, last_id=made[-1] if made else None)


def store(executor: Executor, page: Sequence[_Settled]) -> None:
    """Store timers, notes and cursors; call it within a transaction."""
    new = timers.insert_each(executor, [timer for each in page for timer in each.timers])
    schedules.unnote(executor, [(each.advance.name, each.waited) for each in page if each.waited is not None])
    schedules.note(executor, [(each.advance.name, nominal, reason) for each in page for nominal, reason in each.notes])
    schedules.advance(executor, [each.advanced(new) for each in page])
