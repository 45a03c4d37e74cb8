"""Occurrences of a schedule that lie in the past, run now."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from celery_durable import calls
from celery_durable.core.catchup import Policy, first
from celery_durable.core.identity import occurrence_key
from celery_durable.errors import InvalidSchedule
from celery_durable.occurrence import check_overlap, timer_of
from celery_durable.schedule import locked, recurrence_of
from celery_durable.store import schedules as store
from celery_durable.store import timers
from celery_durable.store.database import Database
from celery_durable.store.executor import Executor
from celery_durable.store.schedules import Advance, StoredSchedule

if TYPE_CHECKING:
    from celery import Celery

#: Most occurrences of one backfill.
MOST = 10_000
#: Timers stored in one transaction.
PAGE = 500

_INSTANT = timedelta(microseconds=1)


@dataclass(frozen=True, kw_only=True)
class Backfill:
    """What a backfill does, or would do."""

    name: str
    nominals: Sequence[datetime]
    """The occurrences that run, oldest first."""
    held: Sequence[datetime]
    """Those that have run already, or were settled by a timer that is kept still; they do not run again."""
    overlap: str
    """``allow``: all at once; ``queue``: one after the other."""


def backfill(
    name: str, start: datetime, end: datetime, *, overlap: str | None = None, dry_run: bool = False,
    progress: Callable[[int], None] | None = None, app: Celery | None = None,
) -> Backfill:  # fmt: skip
    """Run the occurrences of a span of the past that did not run.

    Their keys are those of the occurrences, so one that has run within ``durable_retention`` does not run again.
    The cursor, ``fired`` and a pause are left alone.

    Arguments:
        name: the schedule's.
        start: first nominal time, an aware datetime, inclusive.
        end: last nominal time, inclusive; not in the future: what comes runs by itself.
        overlap: ``allow`` runs all of them at once, ``queue`` each when the one before has ended, which needs
            a DurableTask; as the schedule says unless given.
        dry_run: only say what would run.
        progress: is told after each page how many were stored.
        app: the app; the current one unless given.

    Raises:
        InvalidSchedule: there is none of that name, only its program can tell, or the span is naive, in the
            future or holds more than 10,000 occurrences.
    """
    app = app or calls.present_app()
    database = Database.of(app)
    for argument, instant in (("start", start), ("end", end)):
        if not isinstance(instant, datetime) or instant.utcoffset() is None:
            raise InvalidSchedule(f"{argument} = {instant!r} must be an aware datetime.")
    if overlap not in (None, "allow", "queue"):
        raise InvalidSchedule(f"overlap = {overlap!r} is none of allow, queue.")

    def look(executor: Executor) -> tuple[StoredSchedule, datetime]:
        with executor.atomic():
            return locked(executor, name), store.now(executor)

    stored, now = database.run(look)
    if not start <= end <= now:
        raise InvalidSchedule(f"start = {start.isoformat()}, end = {end.isoformat()}: a span must end by now.")
    policy = Policy.of(stored.policy)
    chosen = overlap or ("allow" if policy.overlap == "allow" else "queue")
    check_overlap(app, stored.task, replace(policy, overlap=chosen))
    nominals = _between(stored, policy, start, end)
    keys = {occurrence_key(name, each): each for each in nominals}
    held = database.run(lambda executor: store.held_keys(executor, list(keys)))
    missing = [each for key, each in keys.items() if key not in held]
    found = Backfill(name=name, nominals=missing, held=[keys[key] for key in keys if key in held], overlap=chosen)
    if dry_run or not missing:
        return found
    if chosen == "queue":
        database.transact(lambda executor: _queue(executor, name, missing))
        if progress is not None:
            progress(len(missing))
        return found
    for begin in range(0, len(missing), PAGE):
        page = missing[begin : begin + PAGE]
        made = [
            timer_of(
                app, name, task=stored.task, args=stored.args, kwargs=stored.kwargs, options=stored.options,
                durable=policy.durable, nominal=nominal, due_at=now + (begin + number) * _INSTANT, missed=0,
                reason=store.BACKFILL, max_payload=database.settings.max_payload,
            )
            for number, nominal in enumerate(page)
        ]  # fmt: skip

        def write(executor: Executor, made: Sequence[timers.NewTimer] = made) -> None:
            timers.insert_each(executor, made)
            store.unnote(executor, [(name, each.nominal) for each in made if each.nominal is not None])

        database.transact(write)
        if progress is not None:
            progress(begin + len(page))
    return found


def _between(stored: StoredSchedule, policy: Policy, start: datetime, end: datetime) -> list[datetime]:
    recurrence = recurrence_of(stored)
    nominals: list[datetime] = []
    at = first(recurrence, policy, start - _INSTANT)
    while at is not None and at <= end:
        if len(nominals) == MOST:
            raise InvalidSchedule(
                f"The span holds more than {MOST:,} occurrences of {stored.name!r}. Take a part of it."
            )
        nominals.append(at)
        at = first(recurrence, policy, at)
    return nominals


def _queue(executor: Executor, name: str, nominals: Sequence[datetime]) -> None:
    stored = locked(executor, name)
    store.note(executor, [(name, each, store.BACKFILL) for each in nominals])
    next_at = stored.next_at if stored.pause is not None else store.now(executor)
    advance = Advance(
        name=name,
        cursor=stored.cursor,
        next_at=next_at,
        queued=store.waiting(executor, name).number,
        not_run=stored.not_run,
    )
    store.advance(executor, [advance])
    store.tell(executor)
