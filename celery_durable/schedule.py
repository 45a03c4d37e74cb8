"""The handle of one schedule, and what can be computed from its row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from celery_durable import calls
from celery_durable.errors import InvalidSchedule
from celery_durable.recurrence import Recurrence, Spec, from_spec
from celery_durable.store import schedules as store
from celery_durable.store.database import Database
from celery_durable.store.executor import Executor
from celery_durable.store.schedules import CODE_KIND, StoredSchedule

if TYPE_CHECKING:
    from celery import Celery


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
    """What differs from the defaults: catchup, deadline, overlap, start, end, max_runs, jitter, durable."""
    owner: str
    """``api``, or ``code`` for an entry of ``beat_schedule``."""
    enabled: bool
    next_at: datetime | None
    """When a beat looks at it next, as a rule because an occurrence is due; None: never again, or not while paused."""
    paused_at: datetime | None
    paused_until: datetime | None
    """None while it is paused: until somebody resumes it."""
    paused_by: str | None
    paused_note: str | None
    queued: int
    """Occurrences that wait for the run before to end."""
    fired: int
    """Occurrences that ran; triggers and backfills are not among them."""
    not_run: Mapping[str, int]
    """How many did not, by reason: missed, deadline, paused, overlap, max_runs."""
    last_fired_at: datetime | None
    fault: str | None
    """Why it cannot come due."""

    @classmethod
    def of(cls, stored: StoredSchedule) -> Schedule:
        """The handle of a row."""
        return cls(
            name=stored.name, task=stored.task, when=stored.text, kind=stored.kind, tz=stored.tz,
            args=tuple(stored.args), kwargs=stored.kwargs, options=stored.options, policy=stored.policy,
            owner=stored.owner, enabled=stored.enabled, next_at=stored.next_at if stored.enabled else None,
            paused_at=stored.paused_at, paused_until=stored.paused_until, paused_by=stored.paused_by,
            paused_note=stored.paused_note, queued=stored.queued, fired=stored.fired, not_run=stored.not_run,
            last_fired_at=stored.last_fired_at, fault=stored.fault,
        )  # fmt: skip

    @property
    def paused(self) -> bool:
        """Whether somebody has paused it."""
        return self.paused_at is not None


def database_of(app: Celery | None) -> Database:
    """The database of `app`, or of the current one."""
    return Database.of(app or calls.present_app())


def locked(executor: Executor, name: str) -> StoredSchedule:
    """The row, locked until the transaction ends.

    Raises:
        InvalidSchedule: there is none of that name.
    """
    stored = store.lock(executor, name)
    if stored is None:
        raise InvalidSchedule(f"There is no schedule {name!r}.")
    return stored


def recurrence_of(stored: StoredSchedule) -> Recurrence:
    """When the schedule comes due.

    Raises:
        InvalidSchedule: only its program can tell, or the row cannot be understood.
    """
    if stored.kind == CODE_KIND:
        raise InvalidSchedule(
            f"Only the program of schedule {stored.name!r} can tell when it comes due: {stored.text}."
        )
    return from_spec(Spec(stored.kind, stored.text, stored.tz, stored.anchor))
