"""What operators read: timers page by page, stored messages, lateness, what fires next.

Nothing here locks or changes a row.  A list costs what it shows: it walks an
index from its cursor and stops after :data:`MOST_LOOKED_AT` rows, however few
of them the filters let through.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

import psycopg

from celery_durable.core.states import ENDED, IN_MOTION, LIVE, State
from celery_durable.store import timers
from celery_durable.store.executor import Executor, Row
from celery_durable.store.schedules import StoredSchedule
from celery_durable.store.schedules import get as get_schedule
from celery_durable.store.timers import KEY, Found

#: Rows that one call of :func:`page_of_timers` looks at before it returns what it has, with a cursor to go on from.
MOST_LOOKED_AT = 100_000

#: Rows that one statement looks at when filters may refuse most of them.
STRIDE = 2_000

_NO_CURSOR = "{!r} is no cursor. Take it from the page before, as it stands."
# Made of digits that were a timestamp once; one that is edited is refused here or, out of range, by Postgres.
_CURSOR = re.compile(
    r"(motion|waiting|ended),(-?infinity|\d{4,6}-[01]\d-[0-3]\d_[0-2]\d:[0-5]\d:[0-5]\d(?:\.\d{1,6})?(?:_BC)?_UTC)"
    r",([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})"
)

_COMMON = "id, call_id, due_at, attempt"

# Purpose: a page of what is in motion.  Index: none: `run` is tiny and has no other.  Locks: none.
MOTION = f"""
select {_COMMON}, due_at as at, state, expires_at, dispatched_at, started_at, null::timestamptz as finished_at, worker,
       null as reason
from {{schema}}.run
where (due_at, id) > (%(at)s::timestamptz, %(id)s::uuid)
  and due_at >= %(due_after)s::timestamptz and (%(due_before)s::timestamptz is null or due_at < %(due_before)s::timestamptz)
order by due_at, id limit {{page}}
"""

# Purpose: a page of what waits, in the order in which beats take it.  Index: timer_wake, one range of each shard.
# Locks: none.  `wake_at` is never before `due_at`, and after it only for a timer that was overdue when stored.
WAITING = f"""
select t.* from generate_series(0, (select value::text::int from {{schema}}.meta where name = 'shards') - 1) as s(shard)
cross join lateral (
    select {_COMMON}, wake_at as at, 'waiting' as state, expires_at, null::timestamptz as dispatched_at,
           null::timestamptz as started_at, null::timestamptz as finished_at, null as worker, null as reason
    from {{schema}}.timer
    where shard = s.shard and wake_at >= greatest(%(at)s::timestamptz, %(due_after)s::timestamptz)
      and wake_at <= greatest(coalesce(%(due_before)s::timestamptz, 'infinity'), {{schema}}.clock())
      and (wake_at, id) > (%(at)s::timestamptz, %(id)s::uuid)
    order by wake_at, id limit {{page}}) t
order by t.at, t.id limit {{page}}
"""

# Purpose: a page of what has ended, newest first.  Index: outcome_finished, backwards.  Locks: none.
ENDED_NEWEST = f"""
select {_COMMON}, finished_at as at, state, null::timestamptz as expires_at, dispatched_at, started_at, finished_at,
       worker, reason
from {{schema}}.outcome
where finished_at <= %(at)s::timestamptz and (finished_at, id) < (%(at)s::timestamptz, %(id)s::uuid)
order by finished_at desc, id desc limit {{page}}
"""

# Purpose: what the filters leave of a page, and how far the page went even if that is nothing.
# Index: primary key of call for the page's rows.  Locks: none.
_FILTERED = """
with page as materialized ({source}),
seen as (select count(*) as looked_at, (array_agg(at order by at {order}, id {order}))[1] as last_at,
                (array_agg(id order by at {order}, id {order}))[1] as last_id from page)
select seen.looked_at, {last_at} as last_at, seen.last_id, m.id, m.call_id, m.due_at, m.attempt, m.state, m.expires_at,
       m.dispatched_at, m.started_at, m.finished_at, m.worker, m.reason, m.task, m.task_id, m.key, m.leased, m.queue,
       m.schedule, {m_at} as position
from seen left join lateral (
    select p.id, p.call_id, {schema}.readable(p.due_at) as due_at, p.attempt, p.at, p.state,
           {schema}.readable(p.expires_at) as expires_at, p.dispatched_at, p.started_at, p.finished_at, p.worker,
           p.reason, c.task, coalesce(c.task_id, p.id::text) as task_id, {key} as key, c.leased, c.queue, o.schedule
    from page p join {schema}.call c on c.id = p.call_id join {schema}.call o on o.id = p.id
    where p.state = any(%(states)s::text[])
      and p.due_at >= %(due_after)s::timestamptz
      and (%(due_before)s::timestamptz is null or p.due_at < %(due_before)s::timestamptz)
      and (%(task)s::text is null or c.task = %(task)s::text)
      and (%(queue)s::text is null or coalesce(c.queue, c.routing_key) = %(queue)s::text)
      and (%(schedule)s::text is null or o.schedule = %(schedule)s::text)
      and (%(key)s::text is null or starts_with({key}, %(key)s::text))
) m on true
order by m.at {forward}, m.id {forward}
"""
# A position as text, because a row written by plain SQL may be due at `infinity`.
_POSITION = "case when isfinite({at}) then ({at} at time zone 'UTC')::text || ' UTC' else {at}::text end"
for _name, _at in (("last_at", "seen.last_at"), ("m_at", "m.at")):
    _FILTERED = _FILTERED.replace("{" + _name + "}", _POSITION.replace("{at}", _at))
_FILTERED = _FILTERED.replace("{key}", KEY)

# Purpose: the message of a timer as it is stored.  Index: primary keys.  Locks: none.
MESSAGE = """
select c.body, c.content_type, c.content_encoding, c.headers::text as headers, c.properties::text as properties,
       c.exchange, c.routing_key, c.tenant, c.nominal, c.replay_of, o.created_at
from {schema}.call c join {schema}.call o on o.id = c.timer_id where c.id = %(id)s::uuid
"""

# Purpose: the schedules that come due next.  Index: schedule_next.  Locks: none.
NEXT_SCHEDULES = """
select name from {schema}.schedule where enabled and next_at is not null order by next_at, name limit {limit}
"""


@dataclass(frozen=True, kw_only=True)
class Filter:
    """Which timers to list; None lets everything pass."""

    states: Collection[State] = LIVE
    task: str | None = None
    queue: str | None = None
    """The queue asked for; for a call without one, its routing key."""
    schedule: str | None = None
    key: str | None = None
    """Beginning of the idempotency key."""
    due_after: datetime | None = None
    """Earliest due time, inclusive."""
    due_before: datetime | None = None
    """Latest due time, exclusive."""

    def parameters(self) -> dict[str, object]:
        """As named parameters of the statements above."""
        return {
            "states": [str(state) for state in self.states], "task": self.task, "queue": self.queue,
            "schedule": self.schedule, "key": self.key, "due_after": self.due_after or "-infinity",
            "due_before": self.due_before,
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Page:
    """Some timers of a list."""

    timers: list[Found]
    cursor: str | None
    """Where the list goes on; None at its end."""
    looked_at: int
    """How many timers the filters were tried on."""


@dataclass(frozen=True)
class _Walk:
    """One source of the list, in the order in which it is walked."""

    name: str
    sql: str
    states: frozenset[State]
    start: tuple[str, str]
    forward: str = "asc"
    backward: str = "desc"

    def statement(self, rows: int) -> str:
        source = self.sql.replace("{page}", str(int(rows)))
        filtered = _FILTERED.replace("{forward}", self.forward).replace("{order}", self.backward)
        return filtered.replace("{source}", source)


_LOWEST, _HIGHEST = str(UUID(int=0)), str(UUID(int=(1 << 128) - 1))
_WALKS = (
    _Walk("motion", MOTION, IN_MOTION, ("-infinity", _LOWEST)),
    _Walk("waiting", WAITING, frozenset({State.WAITING}), ("-infinity", _LOWEST)),
    _Walk("ended", ENDED_NEWEST, ENDED, ("infinity", _HIGHEST), "desc", "asc"),
)


def page_of_timers(executor: Executor, wanted: Filter, *, limit: int = 50, cursor: str | None = None) -> Page:
    """List timers: those in motion by due time, then those waiting by due time, then the ended, newest first.

    Arguments:
        executor: the connection; no transaction is needed, and none is better.
        wanted: which timers.
        limit: most timers returned, at least 1.
        cursor: of the page before; None begins.

    Returns:
        The timers, and where to go on.  A page may be short of `limit` and still have a
        cursor: the filters refused nearly everything it looked at.

    Raises:
        ValueError: `cursor` was not made by this function.
    """
    walks, position = _resume(cursor)
    parameters = wanted.parameters()
    stride = limit + 1 if _unfiltered(wanted) else max(STRIDE, limit + 1)
    found: list[Found] = []
    looked_at = 0
    for walk in walks:
        states = walk.states & set(wanted.states)
        while states:
            at, last_id = position or walk.start
            try:
                rows = executor.fetch(walk.statement(stride), {**parameters, "at": at, "id": last_id})
            except psycopg.errors.DatetimeFieldOverflow as exc:
                raise ValueError(_NO_CURSOR.format(cursor)) from exc
            looked_at += rows[0].looked_at
            for row in rows:
                if row.id is None:
                    continue
                if len(found) == limit:
                    assert position is not None
                    return Page(timers=found, cursor=_cursor(walk, position), looked_at=looked_at)
                found.append(timers.read(row))
                position = (row.position, str(row.id))
            if rows[0].looked_at < stride:
                break
            position = (rows[0].last_at, str(rows[0].last_id))
            if len(found) == limit or looked_at >= MOST_LOOKED_AT:
                return Page(timers=found, cursor=_cursor(walk, position), looked_at=looked_at)
        # Only now is a full page known to have nothing behind it in this walk.
        position = None
    return Page(timers=found, cursor=None, looked_at=looked_at)


def _unfiltered(wanted: Filter) -> bool:
    """True when every row that a walk meets is shown."""
    ended = set(wanted.states) & ENDED
    return (wanted.task or wanted.queue or wanted.schedule or wanted.key) is None and (
        not ended or (ended == ENDED and wanted.due_after is None and wanted.due_before is None)
    )


def _cursor(walk: _Walk, position: tuple[str, str]) -> str:
    return ",".join((walk.name, position[0].replace(" ", "_"), position[1]))


def _resume(cursor: str | None) -> tuple[Sequence[_Walk], tuple[str, str] | None]:
    if cursor is None:
        return _WALKS, None
    parts = _CURSOR.fullmatch(cursor)
    if parts is None:
        raise ValueError(_NO_CURSOR.format(cursor))
    name, at, last_id = parts.groups()
    number = [walk.name for walk in _WALKS].index(name)
    return _WALKS[number:], (at.replace("_", " "), last_id)


def message_of(executor: Executor, call_id: UUID) -> Row | None:
    """The stored message of a timer, and when the timer was first stored; None when it has been pruned."""
    rows = executor.fetch(MESSAGE, {"id": str(call_id)})
    return rows[0] if rows else None


def next_schedules(executor: Executor, *, limit: int) -> list[StoredSchedule]:
    """The enabled schedules that come due next, soonest first."""
    names = [row.name for row in executor.fetch(NEXT_SCHEDULES.replace("{limit}", str(int(limit))))]
    found = (get_schedule(executor, name) for name in names)
    return [schedule for schedule in found if schedule is not None]
