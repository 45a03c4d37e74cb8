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
from dataclasses import dataclass
from datetime import datetime, timedelta, tzinfo
from typing import TYPE_CHECKING, Any

from celery.app.task import Task

from celery_durable import calls
from celery_durable.core.catchup import Policy, first
from celery_durable.core.identity import new_id
from celery_durable.errors import InvalidSchedule
from celery_durable.occurrence import timer_of
from celery_durable.recurrence import Every, Recurrence, Spec, from_spec, to_spec
from celery_durable.store import schedules as store
from celery_durable.store import timers
from celery_durable.store.database import Database
from celery_durable.store.executor import Executor
from celery_durable.store.schedules import CODE_KIND, StoredSchedule
from celery_durable.timer import Timer

if TYPE_CHECKING:
    from celery import Celery

    from celery_durable.recurrence import When

OWNER = "api"

#: Most times that :func:`next_times` tells.
MOST_TIMES = 1000


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """One schedule as it stood when it was read."""

    name: str
    task: str
    when: str
    """Cron text, interval in seconds, or what its kind says."""
    kind: str
    """``cron``, ``crontab``, ``interval``, ``solar``; ``code``: only the program knows."""
    tz: str | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    options: dict[str, Any]
    policy: dict[str, Any]
    """What differs from the defaults: catchup, deadline, start, end, max_runs, jitter, durable."""
    owner: str
    """``api``, or ``code`` for an entry of ``beat_schedule``."""
    enabled: bool
    next_at: datetime | None
    """When the next occurrence runs; None: never again."""
    fired: int
    last_fired_at: datetime | None
    fault: str | None
    """Why it cannot come due."""


def upsert(
    name: str, *, task: str | Task[..., Any], when: When, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None,
    tz: str | tzinfo | None = None, options: Mapping[str, Any] | None = None, catchup: str = "latest",
    deadline: float | timedelta | None = None, start: datetime | None = None, end: datetime | None = None,
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
        catchup=catchup, deadline=deadline, start=start, end=end, max_runs=max_runs, jitter=jitter, durable=durable
    )
    wanted = _Wanted(
        name=name, task=task_name, spec=spec, anchored=isinstance(when, Every), policy=policy, enabled=enabled,
        args=_json("args", builtins.list(args)), kwargs=_json("kwargs", dict(kwargs or {})),
        options=_json("options", dict(options or {})),
    )  # fmt: skip
    for word in ("eta", "task_id"):
        if wanted.options.get(word):
            raise InvalidSchedule(f"options[{word!r}] = {wanted.options[word]!r} makes no sense for many runs.")

    def write(executor: Executor) -> Schedule:
        with executor.atomic():
            return wanted.write(executor)

    return Database.of(app).perform(write, connection)


def get(name: str, *, app: Celery | None = None) -> Schedule | None:
    """The schedule of that name, or None."""
    found = _database(app).run(lambda executor: store.get(executor, name))
    return None if found is None else _handle(found)


def list(*, after: str = "", limit: int = 1000, app: Celery | None = None) -> builtins.list[Schedule]:
    """Schedules in the order of their names.

    Arguments:
        after: begin with the first name after this one.
        limit: most to return.
        app: the app; the current one unless given.
    """
    return [
        _handle(each) for each in _database(app).run(lambda executor: store.page_of(executor, after=after, page=limit))
    ]


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

    return _database(app).perform(remove, connection)


def next_times(name: str, n: int = 5, *, app: Celery | None = None) -> builtins.list[datetime]:
    """The next `n` times at which the schedule runs, at most 1,000; fewer if it ends.

    Raises:
        InvalidSchedule: there is none of that name, or only its program can tell.
    """
    database = _database(app)

    def read(executor: Executor) -> tuple[StoredSchedule | None, datetime]:
        return store.get(executor, name), store.now(executor)

    stored, now = database.run(read)
    if stored is None:
        raise InvalidSchedule(f"There is no schedule {name!r}.")
    if stored.kind == CODE_KIND:
        raise InvalidSchedule(f"Only the program of schedule {name!r} can tell when it comes due: {stored.text}.")
    policy = Policy.of(stored.policy)
    recurrence, delay = _recurrence(stored), policy.delay(name)
    left = MOST_TIMES if policy.max_runs is None else max(policy.max_runs - stored.fired, 0)
    times: builtins.list[datetime] = []
    at: datetime | None = max(stored.cursor, now - delay)
    while at is not None and stored.enabled and len(times) < min(n, left, MOST_TIMES):
        at = first(recurrence, policy, at)
        if at is not None:
            times.append(at + delay)
    return times


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

    def write(self, executor: Executor) -> Schedule:
        before = store.lock(executor, self.name)
        now = store.now(executor)
        anchor, cursor = now, now
        # Switched on again it begins now: what it slept through is no backlog.
        if before is not None and before.enabled and _timing(before) == _timing(self.spec):
            anchor, cursor = before.anchor or now, before.cursor
        spec = self.spec
        if spec.kind == "interval" and not self.anchored:
            spec = Spec(spec.kind, spec.text, spec.tz, anchor)
        nominal = first(from_spec(spec), self.policy, cursor)
        if nominal is None:
            raise InvalidSchedule(f"Schedule {self.name!r} never comes due after {cursor}: check when, start and end.")
        stored = StoredSchedule(
            name=self.name, task=self.task, kind=spec.kind, text=spec.text, tz=spec.tz, anchor=spec.anchor,
            args=self.args, kwargs=self.kwargs, options=self.options, policy=self.policy.written(), owner=OWNER,
            fingerprint=self.fingerprint, enabled=self.enabled, cursor=cursor,
            next_at=nominal + self.policy.delay(self.name),
        )  # fmt: skip
        if not store.put(executor, stored):
            raise InvalidSchedule(f"The name {self.name!r} belongs to an entry of beat_schedule. Use another one.")
        found = store.get(executor, self.name)
        assert found is not None
        return _handle(found)


def _timing(of: StoredSchedule | Spec) -> tuple[str, str, str | None]:
    return of.kind, of.text, of.tz


def _database(app: Celery | None) -> Database:
    return Database.of(app or calls.present_app())


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


def _recurrence(stored: StoredSchedule) -> Recurrence:
    return from_spec(Spec(stored.kind, stored.text, stored.tz, stored.anchor))


def _handle(stored: StoredSchedule) -> Schedule:
    return Schedule(
        name=stored.name, task=stored.task, when=stored.text, kind=stored.kind, tz=stored.tz, args=tuple(stored.args),
        kwargs=stored.kwargs, options=stored.options, policy=stored.policy, owner=stored.owner, enabled=stored.enabled,
        next_at=stored.next_at if stored.enabled else None, fired=stored.fired, last_fired_at=stored.last_fired_at,
        fault=stored.fault,
    )  # fmt: skip
