"""What an operator does to a schedule: run it now, pause it, resume it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from celery_durable import calls
from celery_durable.core.catchup import PAUSED, Pause, Policy, first, plan
from celery_durable.core.identity import new_id
from celery_durable.errors import InvalidSchedule
from celery_durable.occurrence import timer_of
from celery_durable.schedule import Schedule, database_of, locked, recurrence_of
from celery_durable.store import schedules as store
from celery_durable.store import timers
from celery_durable.store.database import Database
from celery_durable.store.executor import Executor
from celery_durable.store.schedules import CODE_KIND, Advance
from celery_durable.timer import Timer

if TYPE_CHECKING:
    from celery import Celery


def trigger(name: str, *, app: Celery | None = None) -> Timer:
    """Run a schedule's task once, now, whatever its own times; they are not changed by it.

    Raises:
        InvalidSchedule: there is none of that name, or only its program has its arguments.
    """
    app = app or calls.present_app()
    database = Database.of(app)
    timer_id = new_id()

    def store_timer(executor: Executor) -> Timer:
        stored = store.get(executor, name)
        if stored is None:
            raise InvalidSchedule(f"There is no schedule {name!r}.")
        if stored.kind == CODE_KIND:
            raise InvalidSchedule(f"Only the program of schedule {name!r} has what it calls. Use apply_at there.")
        now = store.now(executor)
        timer = timer_of(
            app, name, task=stored.task, args=stored.args, kwargs=stored.kwargs, options=stored.options,
            durable=Policy.of(stored.policy).durable, nominal=now, due_at=now, missed=0, reason="trigger",
            max_payload=database.settings.max_payload, timer_id=timer_id,
        )  # fmt: skip
        # Nothing is stored where the connection broke after a first try had committed.
        due_at = timers.insert(executor, timer) or timer.due_at
        task_id, key = timer.task_id or str(timer.id), timer.key or str(timer.id)
        return Timer(app, id=timer.id, task=timer.task, task_id=task_id, key=key, due_at=due_at, created=True)

    return database.run(store_timer)


def pause(
    name: str, *, until: datetime | timedelta | None = None, note: str | None = None, by: str | None = None,
    connection: Any = None, app: Celery | None = None,
) -> Schedule:  # fmt: skip
    """Let no occurrence run until :func:`resume`, or until an instant; those that pass are settled as paused.

    Runs that were made already go on.  On a paused schedule it changes the pause.

    Arguments:
        name: the schedule's; also that of an entry of ``beat_schedule``, which a restart does not resume.
        until: an aware datetime, or a timedelta from now: it goes on by itself with what comes after that.
        note: why, for others to read.
        by: who.
        connection: as for ``apply_at``: the caller's transaction.
        app: the app; the current one unless given.

    Raises:
        InvalidSchedule: there is none of that name, or `until` is naive or over.
    """
    if isinstance(until, datetime) and until.utcoffset() is None:
        raise InvalidSchedule(f"until = {until!r} must be an aware datetime, or a timedelta.")
    for argument, text in (("note", note), ("by", by)):
        calls.check_name(argument, text)

    def write(executor: Executor) -> Schedule:
        with executor.atomic():
            locked(executor, name)
            now = store.now(executor)
            end = now + until if isinstance(until, timedelta) else until
            if end is not None and end <= now:
                raise InvalidSchedule(f"until = {until!r} is over already.")
            store.pause(executor, name, until=end, by=by, note=note, next_at=end)
            return Schedule.of(locked(executor, name))

    return database_of(app).perform(write, connection)


def resume(name: str, *, connection: Any = None, app: Celery | None = None) -> Schedule:
    """End a pause: the next occurrence after now is the next to run, nothing of the pause is made up for.

    Arguments:
        name: the schedule's; one that is not paused stays as it is.
        connection: as for ``apply_at``: the caller's transaction.
        app: the app; the current one unless given.

    Raises:
        InvalidSchedule: there is none of that name.
    """

    def write(executor: Executor) -> Schedule:
        with executor.atomic():
            stored = locked(executor, name)
            now = store.now(executor)
            if stored.pause is None or stored.pause.over(now - Policy.of(stored.policy).delay(name)):
                return Schedule.of(stored)
            advance = Advance(
                name=name, cursor=now, next_at=now, queued=stored.queued, not_run=stored.not_run, pause_over=True
            )
            if stored.kind != CODE_KIND:
                recurrence, policy = recurrence_of(stored), Policy.of(stored.policy)
                delay = policy.delay(name)
                found = plan(
                    recurrence, policy, cursor=stored.cursor, now=now - delay, fired=stored.fired,
                    pause=Pause(stored.pause.since, None),
                )  # fmt: skip
                not_run = Counter(stored.not_run)
                if PAUSED in found.skipped:
                    not_run[PAUSED] += found.skipped[PAUSED].number
                    store.note(executor, [(name, nominal, PAUSED) for nominal in found.skipped[PAUSED].nominals])
                cursor = max(found.cursor, now - delay)
                nominal = first(recurrence, policy, cursor)
                next_at = None if nominal is None else nominal + delay
                advance = replace(advance, cursor=cursor, next_at=now if stored.queued else next_at, not_run=not_run)
            store.advance(executor, [advance])
            store.tell(executor)
            return Schedule.of(locked(executor, name))

    return database_of(app).perform(write, connection)
