"""Schedules: recurring definitions, their cursor, and the record of occurrences that did not run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from celery_durable.core.text import storable
from celery_durable.errors import InvalidSchedule
from celery_durable.store.executor import Executor, Row
from celery_durable.store.timers import utc

#: Definitions that only the program knows (third-party schedule classes, lazy arguments).
CODE_KIND = "code"

#: Longest name in bytes: with a nominal time it becomes an idempotency key.
MAX_NAME = 800


@dataclass(frozen=True, kw_only=True)
class StoredSchedule:
    """One row: what is to run, when, and how far it has come."""

    name: str
    task: str
    kind: str
    text: str
    tz: str | None
    anchor: datetime | None
    args: list[Any]
    kwargs: dict[str, Any]
    options: dict[str, Any]
    policy: dict[str, Any]
    owner: str
    fingerprint: str
    enabled: bool = True
    cursor: datetime
    next_at: datetime | None
    fired: int = field(default=0, compare=False)
    last_fired_at: datetime | None = field(default=None, compare=False)
    fault: str | None = None


_COLUMNS = """name, task, kind, text, tz, {schema}.readable(anchor) as anchor, args::text as args,
    kwargs::text as kwargs, options::text as options, policy::text as policy, owner, fingerprint, enabled,
    {schema}.readable(cursor) as cursor, {schema}.readable(next_at) as next_at, fired,
    {schema}.readable(last_fired_at) as last_fired_at, fault"""

# Purpose: the schedules with something due.  Index: schedule_next, one range.  Locks: the page's rows until the
# occurrence's timer and the cursor commit together, skipping others': two beats cannot make one occurrence twice.
# A definition that only the program knows is taken only by a program that has it.
DUE = """
select {columns} from {schema}.schedule
where enabled and next_at <= {schema}.clock() and (kind <> 'code' or name = any(%(known)s::text[]))
order by next_at limit {page} for update skip locked
"""

# Purpose: how long until an occurrence is due.  Index: schedule_next, its first entry.  Locks: none.
NEXT = """
select extract(epoch from min(next_at))::float8 - extract(epoch from {schema}.clock())::float8 as seconds
from {schema}.schedule
where enabled and (kind <> 'code' or name = any(%(known)s::text[]))
"""

# Purpose: settle occurrences up to `cursor`.  Index: primary key.  Locks: the row, held by DUE already.
# The cursor never moves back, whatever a clock does.
ADVANCE = """
update {schema}.schedule
set cursor = greatest(cursor, %(cursor)s::timestamptz), next_at = %(next_at)s::timestamptz,
    fired = fired + %(fired)s::integer, fault = %(fault)s::text,
    last_fired_at = case when %(fired)s::integer > 0 then {schema}.clock() else last_fired_at end
where name = %(name)s returning name
"""

# Purpose: lock one definition before it is changed, and read the clock.  Index: primary key.  Locks: the row.
LOCK = """select {columns} from {schema}.schedule where name = %(name)s for update"""

NOW = "select {schema}.clock() as now"

# Purpose: write a definition.  Index: primary key.  Locks: the row.  Tells the beats to look at the schedules again.
PUT = """
insert into {schema}.schedule as s (name, task, kind, text, tz, anchor, args, kwargs, options, policy, owner, fingerprint,
                                    enabled, cursor, next_at)
values (%(name)s, %(task)s, %(kind)s, %(text)s, %(tz)s, %(anchor)s::timestamptz, %(args)s::json, %(kwargs)s::json,
        %(options)s::json, %(policy)s::json, %(owner)s, %(fingerprint)s, %(enabled)s::boolean,
        %(cursor)s::timestamptz, %(next_at)s::timestamptz)
on conflict (name) do update set
    task = excluded.task, kind = excluded.kind, text = excluded.text, tz = excluded.tz, anchor = excluded.anchor,
    args = excluded.args, kwargs = excluded.kwargs, options = excluded.options, policy = excluded.policy,
    fingerprint = excluded.fingerprint, enabled = excluded.enabled, cursor = excluded.cursor,
    next_at = excluded.next_at, fault = null, updated_at = {schema}.clock()
where s.owner = excluded.owner
returning s.name, pg_notify(trim(both '"' from '{schema}'), 'schedule')::text
"""

# Purpose: definitions that left the code stop, and keep their history.  Index: none: run once at start.  Locks: the rows.
DISABLE_VANISHED = """
update {schema}.schedule set enabled = false, updated_at = {schema}.clock()
where owner = 'code' and enabled and not name = any(%(names)s::text[]) returning name
"""

# Purpose: a definition that cannot be used is set aside for a while, so that the others go on.  Index: primary key.
# Locks: the row, held by DUE already.
FAULT = """
with old as (select name, fault from {schema}.schedule where name = %(name)s for update)
update {schema}.schedule s
set fault = %(fault)s, next_at = {schema}.clock() + %(pause)s::float8 * interval '1 second'
from old where s.name = old.name returning old.fault is distinct from s.fault as news
"""

LIST = """select {columns} from {schema}.schedule where name > %(after)s order by name limit {page}"""

GET = """select {columns} from {schema}.schedule where name = %(name)s"""

DELETE = """delete from {schema}.schedule where name = %(name)s returning name"""

# Purpose: why an occurrence did not run.  Index: primary key.  Locks: none.
NOTE = """
insert into {schema}.occurrence (schedule, nominal, reason)
select %(schedule)s, nominal, %(reason)s from unnest(%(nominals)s::timestamptz[]) as u(nominal) on conflict do nothing
"""


def _sql(statement: str, page: int = 1) -> str:
    return statement.replace("{columns}", _COLUMNS).replace("{page}", str(int(page)))


def check_name(name: object) -> None:
    """Refuse what cannot be the name of a schedule.

    Raises:
        InvalidSchedule: it is empty, no text, too long, or not storable.
    """
    if not isinstance(name, str) or not name or "\x00" in name:
        raise InvalidSchedule(f"The name {name!r} must be text, not empty, without NUL.")
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise InvalidSchedule(f"The name {name!r} holds a lone surrogate, which is no character.") from None
    if size > MAX_NAME:
        raise InvalidSchedule(f"The name of {size:,} bytes is too long: at most {MAX_NAME:,}.")


def due(executor: Executor, *, known: Sequence[str], page: int) -> Sequence[Row]:
    """Lock and return the rows of schedules with a due occurrence; call it within a transaction.

    They are left to the caller to :func:`read`, who can set a bad one aside.
    """
    return executor.fetch(_sql(DUE, page), {"known": list(known)})


def next_due(executor: Executor, *, known: Sequence[str]) -> float | None:
    """Seconds until the next occurrence is due; None when no schedule is enabled."""
    seconds: float | None = executor.fetch(NEXT, {"known": list(known)})[0].seconds
    return seconds


def advance(
    executor: Executor,
    name: str,
    *,
    cursor: datetime,
    next_at: datetime | None,
    fired: int = 0,
    fault: str | None = None,
) -> None:
    """Move the cursor of a schedule, in the transaction that stores the occurrence's timer."""
    executor.fetch(ADVANCE, {"name": name, "cursor": cursor, "next_at": next_at, "fired": fired, "fault": fault})


def note_missed(executor: Executor, name: str, nominals: Sequence[datetime], reason: str) -> None:
    """Record why these occurrences did not run."""
    if nominals:
        executor.fetch(NOTE, {"schedule": name, "nominals": list(nominals), "reason": reason})


def now(executor: Executor) -> datetime:
    """The database's time."""
    instant: datetime = executor.fetch(NOW)[0].now
    return instant.astimezone(timezone.utc)


def lock(executor: Executor, name: str) -> StoredSchedule | None:
    """Lock one schedule until the transaction ends."""
    rows = executor.fetch(_sql(LOCK), {"name": name})
    return read(rows[0]) if rows else None


def put(executor: Executor, schedule: StoredSchedule) -> bool:
    """Write a definition; False when the name belongs to another owner."""
    parameters = {
        "name": schedule.name, "task": schedule.task, "kind": schedule.kind, "text": schedule.text,
        "tz": schedule.tz, "anchor": schedule.anchor, "args": json.dumps(schedule.args),
        "kwargs": json.dumps(schedule.kwargs), "options": json.dumps(schedule.options),
        "policy": json.dumps(schedule.policy), "owner": schedule.owner, "fingerprint": schedule.fingerprint,
        "enabled": schedule.enabled, "cursor": schedule.cursor, "next_at": schedule.next_at,
    }  # fmt: skip
    return bool(executor.fetch(PUT, parameters))


def disable_vanished(executor: Executor, names: Sequence[str]) -> list[str]:
    """Disable the code-owned schedules that are not among `names`; returns which."""
    return [row.name for row in executor.fetch(DISABLE_VANISHED, {"names": list(names)})]


def begin_sync(executor: Executor) -> datetime:
    """Let one process at a time write the definitions of its code, until the transaction ends.

    Returns:
        The database's time, read once the others are done.
    """
    executor.fetch("select pg_advisory_xact_lock(hashtext('celery-durable schedules {schema}'))")
    return now(executor)


def set_fault(executor: Executor, name: str, fault: str, *, pause: float) -> bool:
    """Write down why a schedule cannot come due, and try it again after `pause` seconds.

    Returns:
        False when the same was written down before.
    """
    return bool(executor.fetch(FAULT, {"name": name, "fault": storable(fault, 2000), "pause": pause})[0].news)


def page_of(executor: Executor, *, after: str = "", page: int = 500) -> list[StoredSchedule]:
    """Schedules in the order of their names, beginning after `after`."""
    return [read(row) for row in executor.fetch(_sql(LIST, page), {"after": after})]


def get(executor: Executor, name: str) -> StoredSchedule | None:
    """One schedule by name."""
    rows = executor.fetch(_sql(GET), {"name": name})
    return read(rows[0]) if rows else None


def delete(executor: Executor, name: str) -> bool:
    """Delete a schedule; timers of occurrences that are due already stay."""
    return bool(executor.fetch(DELETE, {"name": name}))


def read(row: Row) -> StoredSchedule:
    """Make a value of a row."""
    cursor = utc(row.cursor)
    assert cursor is not None
    return StoredSchedule(
        name=row.name, task=row.task, kind=row.kind, text=row.text, tz=row.tz, anchor=utc(row.anchor),
        args=json.loads(row.args), kwargs=json.loads(row.kwargs), options=json.loads(row.options),
        policy=json.loads(row.policy), owner=row.owner, fingerprint=row.fingerprint, enabled=row.enabled,
        cursor=cursor, next_at=utc(row.next_at), fired=row.fired, last_fired_at=utc(row.last_fired_at),
        fault=row.fault,
    )  # fmt: skip
