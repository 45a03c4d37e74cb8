"""Due schedules become timers: the occurrence's timer, its key and the cursor in one transaction."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING

import psycopg
from celery.utils.log import get_logger

from celery_durable.beat.entries import Entry
from celery_durable.beat.link import Link
from celery_durable.core.catchup import Plan, Policy, plan
from celery_durable.core.pacing import HeldUp
from celery_durable.errors import DatabaseUnavailable
from celery_durable.occurrence import timer_of
from celery_durable.recurrence import Recurrence, Spec, from_spec
from celery_durable.settings import Settings
from celery_durable.store import schedules, timers
from celery_durable.store.executor import Executor
from celery_durable.store.schedules import CODE_KIND, StoredSchedule

if TYPE_CHECKING:
    from celery import Celery

logger = get_logger(__name__)

#: Schedules settled in one transaction.
PAGE = 50
#: Seconds until a schedule that cannot come due is tried again.
PAUSE = 60.0


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
        self._read: dict[str, tuple[Spec, Recurrence]] = {}
        self._look_at = float("-inf")
        self._held_up = HeldUp()

    def remaining(self, now: float) -> float:
        """Seconds until the next look, at the monotonic instant `now`."""
        return self._look_at - now

    def soon(self) -> None:
        """Look at the next turn: a schedule has changed."""
        self._look_at = float("-inf")

    def turn(self) -> None:
        """Settle one page of due schedules if it is time.

        Raises:
            DatabaseUnavailable: Postgres is away; nothing was settled, or all of it.
        """
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + self._settings.poll_interval
        if self._link.transact(self._settle_page) >= PAGE:
            self._look_at = now
            return
        seconds = self._link.run(lambda executor: schedules.next_due(executor, known=sorted(self._known)))
        pause = self._held_up.pause(seconds)
        if pause is not None:
            self._look_at = min(self._look_at, time.monotonic() + pause)

    def _settle_page(self, executor: Executor) -> int:
        page = schedules.due(executor, known=sorted(self._known), page=PAGE)
        if not page:
            return 0
        now = schedules.now(executor)
        for row in page:
            try:
                with executor.atomic():
                    self._settle(executor, schedules.read(row), now)
            except (DatabaseUnavailable, psycopg.OperationalError):
                raise
            except (
                Exception
            ) as exc:  # specifications, tasks, signal handlers are the user's: they stop their schedule alone
                if schedules.set_fault(executor, row.name, f"{type(exc).__name__}: {exc}", pause=PAUSE):
                    logger.error("Schedule %r cannot run, it is tried every %g s: %s", row.name, PAUSE, exc)
        return len(page)

    def _settle(self, executor: Executor, stored: StoredSchedule, now: datetime) -> None:
        entry = self._entries.get(stored.name) if stored.kind == CODE_KIND else None
        if entry is not None and entry.fingerprint != stored.fingerprint:
            # A newer program has changed it; it is theirs now.
            self._known.discard(stored.name)
            return
        policy = Policy.of(stored.policy)
        delay = policy.delay(stored.name)
        recurrence = self._recurrence(stored) if entry is None else entry.recurrence_from(stored.anchor)
        found = plan(recurrence, policy, cursor=stored.cursor, now=now - delay, fired=stored.fired)
        missed = found.missed_count
        for nominal in found.run:
            timer = timer_of(
                self._app, stored.name, task=stored.task,
                args=entry.current_args() if entry is not None else stored.args,
                kwargs=entry.current_kwargs() if entry is not None else stored.kwargs,
                options=entry.options if entry is not None else stored.options,
                durable=policy.durable, nominal=nominal, due_at=nominal + delay, missed=missed,
                reason=self._reason(found, nominal), max_payload=self._settings.max_payload,
            )  # fmt: skip
            timers.insert(executor, timer)
        schedules.note_missed(executor, stored.name, found.missed, "missed")
        if missed:
            logger.warning("Schedule %r missed %d occurrences until %s.", stored.name, missed, found.cursor)
        next_at = None if found.next_nominal is None else found.next_nominal + delay
        schedules.advance(executor, stored.name, cursor=found.cursor, next_at=next_at, fired=len(found.run))

    @staticmethod
    def _reason(found: Plan, nominal: datetime) -> str:
        punctual = nominal == found.cursor and not found.missed_count
        return "schedule" if punctual else "catchup"

    def _recurrence(self, stored: StoredSchedule) -> Recurrence:
        """The recurrence of a row; parsed once for as long as it says the same."""
        spec = Spec(stored.kind, stored.text, stored.tz, stored.anchor)
        known = self._read.get(stored.name)
        if known is None or known[0] != spec:
            known = self._read[stored.name] = (spec, from_spec(spec))
        return known[1]
