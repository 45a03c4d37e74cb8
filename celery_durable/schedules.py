"""Schedules made at run time: ``schedules.upsert("nightly", task="proj.report", when="0 2 * * *")``.

A schedule is a row; every beat sees it within ``durable_poll_interval``, as a
rule at once.  Entries of ``beat_schedule`` can be looked at here, but only the
program changes them.
"""

from __future__ import annotations

import builtins
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone, tzinfo
from typing import TYPE_CHECKING, Any
from uuid import UUID

from celery.app.task import Task

from celery_durable import calls
from celery_durable.backfill import Backfill, backfill
from celery_durable.core.catchup import Policy, first
from celery_durable.errors import InvalidSchedule, InvalidTimer
from celery_durable.occurrence import check_overlap, timer_of
from celery_durable.recurrence import Every, Spec, from_spec, to_spec
from celery_durable.schedule import Schedule, database_of, recurrence_of
from celery_durable.schedule_control import pause, resume, trigger
from celery_durable.store import schedules as store
from celery_durable.store import timers
from celery_durable.store.database import Database
from celery_durable.store.executor import Executor
from celery_durable.store.schedules import StoredSchedule

if TYPE_CHECKING:
    from celery import Celery

    from celery_durable.recurrence import When

__all__ = [
    "Backfill", "Occurrence", "Schedule", "backfill", "delete", "get", "history", "list", "next_times", "pause",
    "resume", "trigger", "upsert",
]  # fmt: skip

OWNER = "api"

#: Most times that :func:`next_times` tells.
MOST_TIMES = 1000


def upsert(
    name: str, *, task: str | Task[..., Any], when: When, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None,
    tz: str | tzinfo | None = None, options: Mapping[str, Any] | None = None, catchup: str = "latest",
    deadline: float | timedelta | None = None, overlap: str = "allow", start: datetime | None = None, end: datetime | None = None,
    max_runs: int | None = None, jitter: float | timedelta = 0.0, durable: bool | None = None, enabled: bool = True,
    connection: Any = None, app: Celery | None = None,
) -> Schedule:  # fmt: skip
    """Make a schedule, or change the one of that name.

    The first occurrence comes strictly after now.  A change of `when` or `tz`
    counts from now; a change of anything else moves no occurrence.

    Arguments:
        name: its identity.
        task: a task or a task's name; it need not be known here.
        when: cron text (five fields, or six with the seconds first), ``crontab``, ``solar``,
            a timedelta, or seconds.
        args: positional arguments, JSON values.
        kwargs: keyword arguments, JSON values.
        tz: zone of cron text and crontabs; the app's unless given.
        options: of ``apply_async``, JSON values: queue, priority, expires in seconds, …
        catchup: of the occurrences missed while no beat ran, run the ``latest``, ``all`` (at most
            1,000) or ``none``.
        deadline: an occurrence later than that many seconds is not run.
        overlap: while the run before goes on, retries among it: ``allow`` another beside it, ``skip``
            the occurrence, or ``queue`` it (one waits, later ones do not run).  Needs a DurableTask.
        start: no occurrence before it.
        end: no occurrence after it.
        max_runs: ends after that many runs.
        jitter: delays each run by the same time below that, which follows from the name.
        durable: for a task unknown to the beat: is it a DurableTask?
        enabled: False keeps it without running it.
        connection: as for ``apply_at``: the caller's transaction.
        app: the app; the current one unless given.

    Raises:
        InvalidSchedule: it cannot be stored or never comes due; nothing was stored.
        DatabaseUnavailable: Postgres cannot be reached.
    """
    app = app or calls.present_app()
    store.check_name(name)
    task_name = task if isinstance(task, str) else getattr(task, "name", None)
    if not isinstance(task_name, str) or not task_name:
        raise InvalidSchedule(f"task = {task!r} must be a task or the name of one.")
    spec = to_spec(when, app.timezone if tz is None and isinstance(when, str) else tz, name=name)
    if spec is None:
        raise InvalidSchedule(
            f"when = {when!r} cannot be stored as data: use cron text, crontab, solar, a timedelta or seconds, "
            "or put it into beat_schedule, where the object itself stays in the process."
        )
    policy = _policy(
        catchup=catchup,
        deadline=deadline,
        overlap=overlap,
        start=start,
        end=end,
        max_runs=max_runs,
        jitter=jitter,
        durable=durable,
    )
    check_overlap(app, task_name, policy)
    wanted = _Wanted(
        name=name, task=task_name, spec=spec, anchored=isinstance(when, Every), policy=policy, enabled=enabled,
        args=_json("args", builtins.list(args)), kwargs=_json("kwargs", dict(kwargs or {})),
        options=_json("options", dict(options or {})),
    )  # fmt: skip
    for word in ("eta", "task_id"):
        if wanted.options.get(word):
            raise InvalidSchedule(f"options[{word!r}] = {wanted.options[word]!r} makes no sense for many runs.")
    wanted.check_call(app)

    def write(executor: Executor) -> Schedule:
        with executor.atomic():
            return wanted.write(executor)

    return Database.of(app).perform(write, connection)


def get(name: str, *, app: Celery | None = None) -> Schedule | None:
    """The schedule of that name, or None."""
    found = database_of(app).run(lambda executor: store.get(executor, name))
    return None if found is None else Schedule.of(found)


def list(
    *, after: str = "", limit: int = 1000, prefix: str = "", task: str | None = None, owner: str | None = None,
    paused: bool | None = None, app: Celery | None = None,
) -> builtins.list[Schedule]:  # fmt: skip
    """Schedules in the order of their names.

    Arguments:
        after: begin with the first name after this one.
        limit: most to return.
        prefix: only names that begin so.
        task: only those of this task.
        owner: only those of ``api`` or ``code``.
        paused: only those that are paused, or that are not.
        app: the app; the current one unless given.
    """
    found = database_of(app).run(
        lambda executor: store.page_of(
            executor, after=after, page=limit, prefix=prefix, task=task, owner=owner, paused=paused
        )
    )
    return [Schedule.of(each) for each in found]


@dataclass(frozen=True, kw_only=True)
class Occurrence:
    """One occurrence of a schedule, as the history has it."""

    nominal: datetime
    """Its instant in the schedule; of a trigger, when it was triggered."""
    reason: str
    """Why it ran: ``schedule``, ``catchup``, ``trigger``, ``backfill``; or why it did not: ``missed``, ``deadline``,
    ``paused``, ``overlap``, ``max_runs``; ``queued`` or ``backfill`` without a timer: it waits for the run before."""
    timer_id: UUID | None
    """None: it did not run, or not yet."""
    state: str | None
    """Of its timer."""
    due_at: datetime | None
    started_at: datetime | None
    finished_at: datetime | None


def history(
    name: str, n: int = 50, *, before: datetime | None = None, app: Celery | None = None
) -> builtins.list[Occurrence]:
    """The newest `n` occurrences, those that did not run among them, newest first; kept for ``durable_retention``.

    Arguments:
        name: the schedule's.
        n: most to return.
        before: only those before this aware instant: where a page ended.
        app: the app; the current one unless given.
    """
    if before is not None and before.utcoffset() is None:
        raise InvalidSchedule(f"before = {before!r} must be an aware datetime.")
    rows = database_of(app).run(lambda executor: store.history(executor, name, before=before, page=n))
    return [
        Occurrence(
            nominal=row.nominal.astimezone(timezone.utc), reason=row.reason,
            timer_id=None if row.id is None else UUID(str(row.id)), state=row.state, due_at=timers.utc(row.due_at),
            started_at=timers.utc(row.started_at), finished_at=timers.utc(row.finished_at),
        )
        for row in rows
    ]  # fmt: skip


def delete(name: str, *, connection: Any = None, app: Celery | None = None) -> bool:
    """Delete a schedule; timers of occurrences that are due already stay.

    Returns:
        False when there is none of that name.

    Raises:
        InvalidSchedule: it belongs to ``beat_schedule``: the next start of a beat would make it again.
    """

    def remove(executor: Executor) -> bool:
        with executor.atomic():
            found = store.lock(executor, name)
            if found is not None and found.owner != OWNER and found.enabled:
                raise InvalidSchedule(f"Schedule {name!r} belongs to beat_schedule. Remove it there.")
            return store.delete(executor, name)

    return database_of(app).perform(remove, connection)


def next_times(name: str, n: int = 5, *, app: Celery | None = None) -> builtins.list[datetime]:
    """The next `n` times at which the schedule runs, at most 1,000; fewer if it ends, those after a pause while
    it is paused.

    Raises:
        InvalidSchedule: there is none of that name, or only its program can tell.
    """
    database = database_of(app)

    def read(executor: Executor) -> tuple[StoredSchedule | None, datetime]:
        return store.get(executor, name), store.now(executor)

    stored, now = database.run(read)
    if stored is None:
        raise InvalidSchedule(f"There is no schedule {name!r}.")
    recurrence, policy = recurrence_of(stored), Policy.of(stored.policy)
    delay = policy.delay(name)
    left = MOST_TIMES if policy.max_runs is None else max(policy.max_runs - stored.fired, 0)
    times: builtins.list[datetime] = []
    at: datetime | None = max(stored.cursor, now - delay)
    while at is not None and stored.enabled and len(times) < min(n, left, MOST_TIMES):
        at = first(recurrence, policy, at, stored.pause)
        if at is not None:
            times.append(at + delay)
    return times


@dataclass(frozen=True, kw_only=True)
class _Wanted:
    """A definition as the caller said it, checked."""

    name: str
    task: str
    spec: Spec
    anchored: bool
    """Whether the caller said from when an interval counts; from its creation otherwise."""
    policy: Policy
    args: builtins.list[Any]
    kwargs: dict[str, Any]
    options: dict[str, Any]
    enabled: bool

    @property
    def fingerprint(self) -> str:
        said = [*_timing(self.spec), self.task, self.args, self.kwargs, self.options]
        return hashlib.sha256(json.dumps([said, self.policy.written()], sort_keys=True).encode()).hexdigest()

    def check_call(self, app: Celery) -> None:
        """Refuse a call that no occurrence could be rendered from.

        Raises:
            InvalidSchedule: arguments or options are wrong.
        """
        now = datetime.now(timezone.utc)
        try:
            timer_of(
                app, self.name, task=self.task, args=self.args, kwargs=self.kwargs, options=self.options,
                durable=self.policy.durable, nominal=now, due_at=now, missed=0, reason="schedule",
                max_payload=Database.of(app).settings.max_payload,
            )  # fmt: skip
        except (InvalidTimer, TypeError) as exc:
            raise InvalidSchedule(f"The call of schedule {self.name!r} cannot be made: {exc}") from exc

    def write(self, executor: Executor) -> Schedule:
        before = store.lock(executor, self.name)
        now = store.now(executor)
        anchor, cursor = now, now
        # Switched on again, or its end put off, it begins now: what it slept through is no backlog.
        if before is not None and not before.enabled:
            store.forget_waiting(executor, self.name)
            before = replace(before, queued=0)
        ended = before is not None and before.next_at is None and before.pause is None
        if before is not None and before.enabled and not ended and _timing(before) == _timing(self.spec):
            anchor, cursor = before.anchor or now, before.cursor
        spec = self.spec
        if spec.kind == "interval" and not self.anchored:
            spec = Spec(spec.kind, spec.text, spec.tz, anchor)
        recurrence = from_spec(spec)
        nominal = first(recurrence, self.policy, cursor)
        if nominal is None:
            raise InvalidSchedule(f"Schedule {self.name!r} never comes due after {cursor}: check when, start and end.")
        try:
            self.policy.check_jitter(recurrence, cursor)
        except ValueError as exc:
            raise InvalidSchedule(str(exc)) from exc
        next_at: datetime | None = nominal + self.policy.delay(self.name)
        if before is not None and before.pause is not None:
            next_at = before.pause.until
        elif before is not None and before.queued:
            next_at = now  # somebody waits for the run before to end
        if before is not None and self.policy.max_runs is not None and before.fired >= self.policy.max_runs:
            raise InvalidSchedule(
                f"Schedule {self.name!r} has run {before.fired} times already, max_runs = {self.policy.max_runs}: "
                "it would never run. Raise max_runs, or delete it first."
            )
        stored = StoredSchedule(
            name=self.name, task=self.task, kind=spec.kind, text=spec.text, tz=spec.tz, anchor=spec.anchor,
            args=self.args, kwargs=self.kwargs, options=self.options, policy=self.policy.written(), owner=OWNER,
            fingerprint=self.fingerprint, enabled=self.enabled, cursor=cursor,
            next_at=next_at,
        )  # fmt: skip
        if not store.put(executor, stored):
            raise InvalidSchedule(f"The name {self.name!r} belongs to an entry of beat_schedule. Use another one.")
        found = store.get(executor, self.name)
        assert found is not None
        return Schedule.of(found)


def _timing(of: StoredSchedule | Spec) -> tuple[str, str, str | None]:
    return of.kind, of.text, of.tz


def _policy(**words: Any) -> Policy:
    try:
        return Policy.of(words)
    except ValueError as exc:
        raise InvalidSchedule(str(exc)) from exc


def _json(argument: str, value: Any) -> Any:
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as exc:
        raise InvalidSchedule(f"{argument} = {value!r} is no JSON: {exc}") from exc
    return json.loads(text)
