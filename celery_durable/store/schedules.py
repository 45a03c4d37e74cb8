"""Schedules: recurring definitions, their cursor, and the record of occurrences that did not run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from types import SimpleNamespace
from typing import Any
from uuid import UUID

from celery_durable.core.catchup import Pause
from celery_durable.core.text import storable
from celery_durable.errors import InvalidSchedule
from celery_durable.store.executor import Executor, Row
from celery_durable.store.timers import utc

#: Definitions that only the program knows (third-party schedule classes, lazy arguments).
CODE_KIND = "code"

#: The reasons of occurrences that wait for the one before to end: the clock's, and those of a backfill.
QUEUED, BACKFILL = WAITING = "queued", "backfill"

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
    paused_at: datetime | None = None
    paused_until: datetime | None = None
    paused_by: str | None = None
    paused_note: str | None = None
    last_id: UUID | None = field(default=None, compare=False)
    queued: int = field(default=0, compare=False)
    fired: int = field(default=0, compare=False)
    not_run: Mapping[str, int] = field(default_factory=dict, compare=False)
    last_fired_at: datetime | None = field(default=None, compare=False)
    fault: str | None = None

    @property
    def pause(self) -> Pause | None:
        """The present pause, or one that has ended by itself and was not looked at since."""
        return None if self.paused_at is None else Pause(self.paused_at, self.paused_until)


@dataclass(frozen=True, kw_only=True)
class Advance:
    """What a look at a schedule has settled."""

    name: str
    cursor: datetime
    next_at: datetime | None
    fired: int = 0
    last_id: UUID | None = None
    """The timer of the newest occurrence; None: the one before still is."""
    queued: int = 0
    not_run: Mapping[str, int]
    """All counts by reason, the earlier ones among them."""
    pause_over: bool = False


_COLUMNS = """name, task, kind, text, tz, {schema}.readable(anchor) as anchor, args::text as args,
    kwargs::text as kwargs, options::text as options, policy::text as policy, owner, fingerprint, enabled,
    {schema}.readable(cursor) as cursor, {schema}.readable(next_at) as next_at,
    {schema}.readable(paused_at) as paused_at, {schema}.readable(paused_until) as paused_until, paused_by, paused_note,
    last_id, queued, fired, not_run::text as not_run, {schema}.readable(last_fired_at) as last_fired_at, fault"""

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

# Purpose: settle what a page of schedules has come to.  Index: primary key.  Locks: the rows, held by DUE already.
# The cursor never moves back, whatever a clock does.
ADVANCE = """
update {schema}.schedule s
set cursor = greatest(s.cursor, u.cursor), next_at = u.next_at, fired = s.fired + u.fired, fault = null,
    last_id = coalesce(u.last_id, s.last_id), queued = u.queued, not_run = u.not_run,
    last_fired_at = case when u.fired > 0 then {schema}.clock() else s.last_fired_at end
from unnest(%(names)s::text[], %(cursors)s::timestamptz[], %(next_ats)s::timestamptz[], %(fireds)s::integer[],
            %(last_ids)s::uuid[], %(queueds)s::integer[], %(not_runs)s::json[])
     as u(name, cursor, next_at, fired, last_id, queued, not_run)
where s.name = u.name
"""

# Purpose: end pauses.  Index: primary key.  Locks: the rows, held already.
END_PAUSE = """
update {schema}.schedule
set paused_at = null, paused_until = null, paused_by = null, paused_note = null, edition = edition + 1
where name = any(%(names)s::text[])
"""

# Purpose: pause a schedule, or change its pause.  Index: primary key.  Locks: the row.
PAUSE = """
update {schema}.schedule
set paused_at = coalesce(paused_at, {schema}.clock()), paused_until = %(until)s::timestamptz, paused_by = %(by)s::text,
    paused_note = %(note)s::text, next_at = %(next_at)s::timestamptz, edition = edition + 1,
    updated_at = {schema}.clock()
where name = %(name)s returning pg_notify(trim(both '"' from '{schema}'), 'schedule')::text
"""

# Purpose: which of these timers wait or run.  Index: primary keys.  Locks: none.
LIVE = """
select id from unnest(%(ids)s::uuid[]) as u(id)
where exists (select from {schema}.timer t where t.id = u.id) or exists (select from {schema}.run r where r.id = u.id)
"""

# Purpose: the occurrences that wait for the one before: the oldest, and how many.  Index: primary key.  Locks: none: the
# caller has locked the schedule's row.
WAITING_LINE = """
select {schema}.readable((array_agg(nominal order by nominal))[1]) as first,
       (array_agg(reason order by nominal))[1] as reason, count(*) as number,
       count(*) filter (where reason = 'queued') as clock
from {schema}.occurrence where schedule = %(schedule)s and reason in ('queued', 'backfill')
"""

# Purpose: a schedule that is switched on again begins anew.  Index: primary keys.  Locks: the rows.
FORGET_WAITING = """
with gone as (delete from {schema}.occurrence where schedule = %(name)s and reason in ('queued', 'backfill'))
update {schema}.schedule set queued = 0 where name = %(name)s
"""

# Purpose: have the beats look at the schedules at once.  Index: none.  Locks: none.
TELL = """select pg_notify(trim(both '"' from '{schema}'), 'schedule')::text"""

# Purpose: occurrences that run after all are no longer noted as not run.  Index: primary key.  Locks: the rows.
UNNOTE = """
delete from {schema}.occurrence o using unnest(%(schedules)s::text[], %(nominals)s::timestamptz[]) as u(schedule, nominal)
where o.schedule = u.schedule and o.nominal = u.nominal
"""

# Purpose: which keys are held.  Index: call_key.  Locks: none.
HELD_KEYS = "select key from {schema}.call where key = any(%(keys)s::text[])"

# Purpose: what has become of the newest occurrences.  Index: call_schedule and the primary key of occurrence, both
# backwards; then primary keys.  Locks: none.
HISTORY = """
with ran as (
    select c.id, c.nominal, c.reason from {schema}.call c
    where c.schedule = %(schedule)s and c.nominal < %(before)s::timestamptz order by c.nominal desc limit {page}),
stood as (
    select r.nominal, r.reason, f.* from ran r left join lateral (
        select id, 'waiting' as state, due_at, null::timestamptz as started_at, null::timestamptz as finished_at
        from {schema}.timer where id = r.id
        union all select id, state, due_at, started_at, null from {schema}.run where id = r.id
        union all select id, state, due_at, started_at, finished_at from {schema}.outcome where id = r.id) f on true)
select {schema}.readable(nominal) as nominal, reason, id, state, {schema}.readable(due_at) as due_at, started_at,
       finished_at from stood where id is not null
union all
select * from (
    select {schema}.readable(nominal), reason, null::uuid, null::text, null::timestamptz, null::timestamptz,
           null::timestamptz from {schema}.occurrence o
    where schedule = %(schedule)s and o.nominal < %(before)s::timestamptz order by o.nominal desc limit {page}) n
order by nominal desc limit {page}
"""

# Purpose: the zones in use.  Index: none: a look at every schedule, once at start and daily.  Locks: none.
ZONES = """
select distinct coalesce(tz, 'UTC') as tz from {schema}.schedule where enabled and kind in ('cron', 'crontab')
"""

# Purpose: a page of the schedules of some zones, to be computed anew.  Index: primary key.  Locks: the rows, skipping
# others': who holds one computes it anyway.
OF_ZONES = """
select {columns} from {schema}.schedule
where name > %(after)s and enabled and kind in ('cron', 'crontab') and tz = any(%(zones)s::text[])
order by name limit {page} for update skip locked
"""

# Purpose: a cache that was computed anew.  Index: primary key.  Locks: the rows, held already.
MOVE = """
update {schema}.schedule s set next_at = u.next_at
from unnest(%(names)s::text[], %(next_ats)s::timestamptz[]) as u(name, next_at) where s.name = u.name
"""

# Purpose: lock one definition before it is changed, and read the clock.  Index: primary key.  Locks: the row.
LOCK = """select {columns} from {schema}.schedule where name = %(name)s for update"""

# Purpose: the database's time.  Index: none.  Locks: none.
NOW = "select {schema}.clock() as now"

# Purpose: write a definition.  Index: primary key.  Locks: the row.  Tells the beats to look at the schedules again.
PUT = """
insert into {schema}.schedule as s (name, task, kind, text, tz, anchor, args, kwargs, options, policy, owner, fingerprint,
                                    enabled, cursor, next_at, edition)
values (%(name)s, %(task)s, %(kind)s, %(text)s, %(tz)s, %(anchor)s::timestamptz, %(args)s::json, %(kwargs)s::json,
        %(options)s::json, %(policy)s::json, %(owner)s, %(fingerprint)s, %(enabled)s::boolean,
        %(cursor)s::timestamptz, %(next_at)s::timestamptz, 1)
on conflict (name) do update set
    task = excluded.task, kind = excluded.kind, text = excluded.text, tz = excluded.tz, anchor = excluded.anchor,
    args = excluded.args, kwargs = excluded.kwargs, options = excluded.options, policy = excluded.policy,
    fingerprint = excluded.fingerprint, enabled = excluded.enabled, cursor = excluded.cursor,
    next_at = excluded.next_at, fault = null, edition = s.edition + 1, updated_at = {schema}.clock()
where s.owner = excluded.owner
returning s.name, pg_notify(trim(both '"' from '{schema}'), 'schedule')::text
"""

# Purpose: definitions that left the code stop, and keep their history.  Index: none: run once at start.  Locks: the rows.
DISABLE_VANISHED = """
update {schema}.schedule set enabled = false, edition = edition + 1, updated_at = {schema}.clock()
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

# Purpose: a page of schedules by name; the filters are tried on what lies behind the name.  Index: primary key.
# Locks: none.
LIST = """
select {columns} from {schema}.schedule
where name > %(after)s and starts_with(name, %(prefix)s) and (%(task)s::text is null or task = %(task)s)
  and (%(owner)s::text is null or owner = %(owner)s)
  and (%(paused)s::boolean is null or (paused_at is not null) = %(paused)s)
order by name limit {page}
"""

# Purpose: one schedule.  Index: primary key.  Locks: none.
GET = """select {columns} from {schema}.schedule where name = %(name)s"""

# Purpose: delete a schedule; a trigger forgets who waits for its runs.  Index: primary key.  Locks: the row.
DELETE = """delete from {schema}.schedule where name = %(name)s returning name"""

# Purpose: why occurrences did not run.  Index: primary key.  Locks: none.
NOTE = """
insert into {schema}.occurrence as o (schedule, nominal, reason)
select schedule, nominal, reason
from unnest(%(schedules)s::text[], %(nominals)s::timestamptz[], %(reasons)s::text[]) as u(schedule, nominal, reason)
on conflict (schedule, nominal) do update set reason = excluded.reason, noted_at = excluded.noted_at
where excluded.reason in ('queued', 'backfill')
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


def advance(executor: Executor, settled: Sequence[Advance]) -> None:
    """Move the cursors of schedules, in the transaction that stores the occurrences' timers."""
    executor.fetch(
        ADVANCE,
        {
            "names": [each.name for each in settled], "cursors": [each.cursor for each in settled],
            "next_ats": [each.next_at for each in settled], "fireds": [each.fired for each in settled],
            "last_ids": [None if each.last_id is None else str(each.last_id) for each in settled],
            "queueds": [each.queued for each in settled],
            "not_runs": [json.dumps(dict(each.not_run)) for each in settled],
        },
    )  # fmt: skip
    over = [each.name for each in settled if each.pause_over]
    if over:
        executor.fetch(END_PAUSE, {"names": over})


def note(executor: Executor, notes: Sequence[tuple[str, datetime, str]]) -> None:
    """Record why occurrences did not run, or that they are queued: (schedule, nominal, reason) each."""
    if notes:
        names, nominals, reasons = zip(*notes, strict=True)
        executor.fetch(NOTE, {"schedules": list(names), "nominals": list(nominals), "reasons": list(reasons)})


def forget_waiting(executor: Executor, name: str) -> None:
    """Let nobody wait for the run before any more, in a transaction that has locked the schedule."""
    executor.fetch(FORGET_WAITING, {"name": name})


def tell(executor: Executor) -> None:
    """Have the beats look at the schedules when the transaction commits."""
    executor.fetch(TELL)


def unnote(executor: Executor, occurrences: Sequence[tuple[str, datetime]]) -> None:
    """Forget the notes about occurrences that run after all: (schedule, nominal) each."""
    if occurrences:
        names, nominals = zip(*occurrences, strict=True)
        executor.fetch(UNNOTE, {"schedules": list(names), "nominals": list(nominals)})


def pause(
    executor: Executor, name: str, *, until: datetime | None, by: str | None, note: str | None, next_at: datetime | None
) -> None:
    """Pause a schedule, in a transaction that has locked it."""
    executor.fetch(PAUSE, {"name": name, "until": until, "by": by, "note": note, "next_at": next_at})


def live(executor: Executor, timer_ids: Sequence[UUID]) -> set[UUID]:
    """Those of the timers that wait or run."""
    if not timer_ids:
        return set()
    rows = executor.fetch(LIVE, {"ids": [str(each) for each in timer_ids]})
    return {UUID(str(row.id)) for row in rows}


@dataclass(frozen=True, kw_only=True)
class Line:
    """The occurrences of a schedule that wait for the one before."""

    first: datetime | None
    """The oldest."""
    reason: str
    """Why it waits: :data:`QUEUED` or :data:`BACKFILL`."""
    number: int
    clock: int
    """How many of them are the clock's."""


NOBODY = Line(first=None, reason="", number=0, clock=0)


def waiting(executor: Executor, name: str) -> Line:
    """Who waits, in a transaction that has locked the schedule."""
    row = executor.fetch(WAITING_LINE, {"schedule": name})[0]
    return Line(first=utc(row.first), reason=row.reason or "", number=row.number, clock=row.clock)


def held_keys(executor: Executor, keys: Sequence[str]) -> set[str]:
    """Those of the idempotency keys that a timer holds."""
    return {row.key for row in executor.fetch(HELD_KEYS, {"keys": list(keys)})}


def history(executor: Executor, name: str, *, before: datetime | None, page: int) -> Sequence[Row]:
    """The newest occurrences before an instant: run ones with their timer, others with the reason why not."""
    return executor.fetch(_sql(HISTORY, page), {"schedule": name, "before": before or "infinity"})


def zones(executor: Executor) -> list[str]:
    """The IANA names of the zones that enabled schedules are read in."""
    return [row.tz for row in executor.fetch(ZONES)]


def of_zones(executor: Executor, zones: Sequence[str], *, after: str, page: int) -> Sequence[Row]:
    """Lock and return a page of the rows of schedules in these zones; call it within a transaction."""
    return executor.fetch(_sql(OF_ZONES, page), {"zones": list(zones), "after": after})


def move(executor: Executor, moved: Mapping[str, datetime | None]) -> None:
    """Store next times that were computed anew."""
    if moved:
        executor.fetch(MOVE, {"names": list(moved), "next_ats": list(moved.values())})


def now(executor: Executor) -> datetime:
    """The database's time."""
    instant: datetime = executor.fetch(NOW)[0].now
    return instant.astimezone(timezone.utc)


def lock(executor: Executor, name: str) -> StoredSchedule | None:
    """Lock one schedule until the transaction ends."""
    rows = executor.fetch(_sql(LOCK), {"name": name})
    return shown(rows[0]) if rows else None


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


def page_of(
    executor: Executor, *, after: str = "", page: int = 500, prefix: str = "", task: str | None = None,
    owner: str | None = None, paused: bool | None = None,
) -> list[StoredSchedule]:  # fmt: skip
    """Schedules in the order of their names, beginning after `after`; None lets every one pass."""
    parameters = {"after": after, "prefix": prefix, "task": task, "owner": owner, "paused": paused}
    return [shown(row) for row in executor.fetch(_sql(LIST, page), parameters)]


def get(executor: Executor, name: str) -> StoredSchedule | None:
    """One schedule by name."""
    rows = executor.fetch(_sql(GET), {"name": name})
    return shown(rows[0]) if rows else None


def delete(executor: Executor, name: str) -> bool:
    """Delete a schedule; timers of occurrences that are due already stay."""
    return bool(executor.fetch(DELETE, {"name": name}))


def shown(row: Row) -> StoredSchedule:
    """As :func:`read`, for a list: a row that cannot be read is shown with the reason as its fault."""
    try:
        return read(row)
    except InvalidSchedule as exc:
        empty = {"args": "[]", "kwargs": "{}", "options": "{}", "policy": "{}", "not_run": "{}"}
        return replace(read(SimpleNamespace(**{**row._asdict(), **empty})), fault=str(exc))


def read(row: Row) -> StoredSchedule:
    """Make a value of a row.

    Raises:
        InvalidSchedule: its JSON is beyond what Python reads, or of the wrong kind.
    """
    cursor = utc(row.cursor)
    assert cursor is not None
    values: dict[str, Any] = {}
    for name, kind in (("args", list), ("kwargs", dict), ("options", dict), ("policy", dict), ("not_run", dict)):
        try:
            values[name] = json.loads(getattr(row, name))
        except (ValueError, RecursionError) as exc:
            raise InvalidSchedule(f"{name} of schedule {row.name!r} cannot be read: {exc}") from exc
        if not isinstance(values[name], kind):
            raise InvalidSchedule(
                f"{name} of schedule {row.name!r} must be a JSON {'array' if kind is list else 'object'}."
            )
    return StoredSchedule(
        name=row.name, task=row.task, kind=row.kind, text=row.text, tz=row.tz, anchor=utc(row.anchor),
        owner=row.owner, fingerprint=row.fingerprint, enabled=row.enabled,
        cursor=cursor, next_at=utc(row.next_at), paused_at=utc(row.paused_at), paused_until=utc(row.paused_until),
        paused_by=row.paused_by, paused_note=row.paused_note,
        last_id=None if row.last_id is None else UUID(str(row.last_id)), queued=row.queued, fired=row.fired,
        last_fired_at=utc(row.last_fired_at), fault=row.fault, **values,
    )  # fmt: skip
