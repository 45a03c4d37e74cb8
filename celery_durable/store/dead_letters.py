"""Dead letters in the tables: found page by page, counted in groups, replayed once, discarded.

A list costs what it shows: it walks an index from its cursor and stops after
:data:`MOST_LOOKED_AT` rows, however few of them the filters let through.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

import psycopg

from celery_durable.core.text import storable
from celery_durable.store.executor import Executor, Row
from celery_durable.store.timers import KEY

#: Dead letters that one call of :func:`page_of` or :func:`groups` looks at.
MOST_LOOKED_AT = 100_000

#: Rows that one statement looks at when filters may refuse most of them.
STRIDE = 2_000

# A dead letter whose call was deleted by plain SQL has no payload; it is shown all the same.
# Row by row, which the limits make sure of: joined freely, `call` was read in whole for two thousand of 200,000 rows.
_JOINED = """left join lateral (select * from {schema}.call where id = d.call_id limit 1) c on true
    left join lateral (select * from {schema}.call where id = d.id limit 1) o on true"""
_OUTCOME = "left join lateral (select * from {schema}.outcome where id = d.id limit 1) u on true"

_COLUMNS = """d.id, c.task, coalesce(c.task_id, d.id::text) as task_id, coalesce({key}, d.id::text) as key,
       c.queue, c.tenant, {schema}.readable(o.created_at) as created_at, {schema}.readable(u.due_at) as due_at,
       {schema}.readable(u.started_at) as started_at, u.worker, {schema}.readable(d.died_at) as died_at, d.attempt,
       d.reason, d.error_type, d.error, d.replayed_as, {schema}.readable(d.replayed_at) as replayed_at"""
_COLUMNS = _COLUMNS.replace("{key}", KEY)

_WANTED = """(%(replayed)s::boolean or d.replayed_as is null)
      and (%(task)s::text is null or c.task = %(task)s::text)
      and (%(reason)s::text is null or d.reason = %(reason)s::text)
      and (%(error_type)s::text is null or d.error_type = %(error_type)s::text)
      and (%(error)s::text is null or strpos(lower(d.error), lower(%(error)s::text)) > 0)
      and (%(key)s::text is null or starts_with({key}, %(key)s::text))
      and (%(queue)s::text is null or coalesce(c.queue, c.routing_key) = %(queue)s::text)""".replace("{key}", KEY)

# A range of the index for whatever is given: without an end, up to what died at `infinity`.
_SPAN = """died_at >= %(since)s::timestamptz
      and (died_at, id) < (%(until)s::timestamptz, %(until_id)s::uuid)"""

# Purpose: one stretch of the dead letters by the time of their death, and how far it went even if filters leave nothing.
# Index: dead_died, one range in either direction, then primary keys.  Locks: none.
# The position is text, because a row written by plain SQL may have died at `infinity`.
PAGE = f"""
with page as materialized (
    select * from {{schema}}.dead
    where (died_at, id) {{after}} (%(at)s::timestamptz, %(id)s::uuid)
      and {_SPAN} and (died_at, id) <= (%(last_at)s::timestamptz, %(last_id)s::uuid)
    order by died_at {{order}}, id {{order}} limit {{page}}),
seen as (select count(*) as looked_at, (array_agg(died_at order by died_at {{back}}, id {{back}}))[1] as at,
                (array_agg(id order by died_at {{back}}, id {{back}}))[1] as id from page)
select seen.looked_at, {{seen_at}} as last_at, seen.id as last_id, m.*
from seen left join lateral (
    select {_COLUMNS}, {{d_at}} as position,
           row_number() over (order by d.died_at {{order}}, d.id {{order}}) as number
    from page d {_JOINED} {_OUTCOME}
    where {_WANTED}
    order by number limit %(most)s::integer
) m on true
order by m.number
"""
_POSITION = "case when isfinite({at}) then ({at} at time zone 'UTC')::text || ' UTC' else {at}::text end"
for _name in ("seen", "d"):
    _at = {"seen": "seen.at", "d": "d.died_at"}[_name]
    PAGE = PAGE.replace("{" + _name + "_at}", _POSITION.replace("{at}", _at))

# Purpose: where a walk from the oldest ends: what dies later is not its business.  Index: dead_died, one entry.
# Locks: none.
NEWEST = """
select {position} as at, id from {schema}.dead d order by died_at desc, id desc limit 1
""".replace("{position}", _POSITION.replace("{at}", "died_at"))

# Purpose: the newest dead letters by task and error.  Index: dead_died, one range backwards, then primary keys.
# Locks: none.
GROUPS = f"""
with newest as materialized (
    select * from {{schema}}.dead
    where {_SPAN}
    order by died_at desc, id desc limit {{page}}),
sorted as (
    select c.task, d.error_type, d.reason, count(*) as number, {{schema}}.readable(min(d.died_at)) as oldest,
           {{schema}}.readable(max(d.died_at)) as newest, (array_agg(d.id order by d.died_at desc, d.id desc))[1] as example
    from newest d {_JOINED} where {_WANTED} group by 1, 2, 3 order by number desc, newest desc limit %(most)s::integer)
select seen.looked_at, s.* from (select count(*) as looked_at from newest) seen left join sorted s on true
order by s.number desc, s.newest desc
"""

# Purpose: dead letters with their payloads.  Index: primary keys.  Locks: none.
PAYLOADS = f"""
select {_COLUMNS}, c.body, c.content_type, c.content_encoding, c.headers::text as headers, c.properties::text as properties,
       c.exchange, c.routing_key, c.leased
from {{schema}}.dead d {_JOINED} {_OUTCOME}
where d.id = any(%(ids)s::uuid[]) order by d.died_at, d.id
"""

# Purpose: a dead letter is replayed once.  Index: primary key.
# Locks: the rows, in the order of their death; a second replay at the same moment waits, then finds them replayed.
LOCK = """
select id, replayed_as from {schema}.dead where id = any(%(ids)s::uuid[]) order by died_at, id for update
"""

# Purpose: link them to the timers that run them again.  Index: primary key.  Locks: held already.
REPLAYED = """
update {schema}.dead d set replayed_as = n.new_id, replayed_at = {schema}.clock()
from unnest(%(ids)s::uuid[], %(new_ids)s::uuid[]) as n(id, new_id) where d.id = n.id
"""

# Purpose: forget dead letters; their outcomes stay until retention.  Index: primary key.
# Locks: the rows, in the order of their death; one that was replayed meanwhile stays, unless those are wanted too.
DISCARD = """
with held as materialized (
    select id from {schema}.dead where id = any(%(ids)s::uuid[]) and (%(replayed)s::boolean or replayed_as is null)
    order by died_at, id for update)
delete from {schema}.dead where id = any(array(select id from held)) returning id
"""

_NO_CURSOR = "{!r} is no cursor. Take it from the page before, as it stands."
# Made of digits that were a timestamp once; one that is edited is refused here or, out of range, by Postgres.
_CURSOR = re.compile(
    r"(-?infinity|\d{4,6}-[01]\d-[0-3]\d_[0-2]\d:[0-5]\d:[0-5]\d(?:\.\d{1,6})?(?:_BC)?_UTC)"
    r",([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})"
)

Position = tuple[str, str]
"""When a dead letter died, as text, and its id."""

_START: Position = ("-infinity", str(UUID(int=0)))
_END: Position = ("infinity", str(UUID(int=(1 << 128) - 1)))


@dataclass(frozen=True, kw_only=True)
class Filter:
    """Which dead letters; None lets everything pass."""

    task: str | None = None
    reason: str | None = None
    error_type: str | None = None
    error: str | None = None
    """Somewhere in the error's text, in capitals or not."""
    key: str | None = None
    """Beginning of the idempotency key."""
    queue: str | None = None
    """The queue asked for; for a call without one, its routing key."""
    since: datetime | None = None
    """Earliest time of death, inclusive."""
    until: datetime | None = None
    """Latest time of death, exclusive."""
    replayed: bool = False
    """Also those that were replayed."""

    @property
    def lets_all_pass(self) -> bool:
        """Whether every row of its span is shown."""
        texts = (self.task, self.reason, self.error_type, self.error, self.key, self.queue)
        return self.replayed and all(each is None for each in texts)

    def parameters(self) -> dict[str, object]:
        """As named parameters of the statements above; texts as they are stored."""
        texts = {
            "task": self.task, "reason": self.reason, "error_type": self.error_type, "error": self.error,
            "key": self.key, "queue": self.queue,
        }  # fmt: skip
        return {
            **{name: None if text is None else storable(text) for name, text in texts.items()},
            "since": self.since or _START[0], "until": self.until or _END[0],
            "until_id": _END[1] if self.until is None else _START[1], "replayed": self.replayed,
        }  # fmt: skip


class Page(list[Row]):
    """Some dead letters, and where the list goes on: it may be empty and still have a cursor."""

    def __init__(self, rows: Collection[Row], cursor: str | None) -> None:
        super().__init__(rows)
        #: For the page after this one; None at the end.
        self.cursor = cursor


def page_of(
    executor: Executor, wanted: Filter, *, limit: int = 100, cursor: str | None = None, oldest_first: bool = False,
    last: Position = _END,
) -> Page:  # fmt: skip
    """List dead letters by the time of their death.

    Arguments:
        executor: the connection; no transaction is needed, and none is better.
        wanted: which ones.
        limit: most rows, at least 1.
        cursor: of the page before; None begins.
        oldest_first: the other direction.
        last: none that died after this one.

    Returns:
        The rows, without payloads.  A page may be short of `limit` and still have a cursor: the filters refused
        nearly everything it looked at.

    Raises:
        ValueError: `cursor` was not made by this function.
    """
    position = _position(cursor) or (_START if oldest_first else _END)
    order, back, after = ("asc", "desc", ">") if oldest_first else ("desc", "asc", "<")
    stride = limit + 1 if wanted.lets_all_pass else max(STRIDE, limit + 1)
    sql = (
        PAGE.replace("{order}", order).replace("{back}", back).replace("{after}", after).replace("{page}", str(stride))
    )
    found: list[Row] = []
    looked_at = 0
    while True:
        at, id_ = position
        parameters = {
            **wanted.parameters(), "at": at, "id": id_, "last_at": last[0], "last_id": last[1],
            "most": limit - len(found) + 1,
        }  # fmt: skip
        try:
            rows = executor.fetch(sql, parameters)
        except psycopg.errors.DatetimeFieldOverflow as exc:
            raise ValueError(_NO_CURSOR.format(cursor)) from exc
        for row in rows:
            if row.id is None:
                continue
            if len(found) == limit:
                return Page(found, _cursor(position))
            found.append(row)
            position = (row.position, str(row.id))
        looked_at += rows[0].looked_at
        if rows[0].looked_at < stride:
            return Page(found, None)
        position = (rows[0].last_at, str(rows[0].last_id))
        if len(found) == limit or looked_at >= MOST_LOOKED_AT:
            return Page(found, _cursor(position))


def newest(executor: Executor) -> Position | None:
    """The dead letter that died last, or None: where a walk from the oldest ends, whatever dies meanwhile."""
    rows = executor.fetch(NEWEST)
    return (rows[0].at, str(rows[0].id)) if rows else None


def groups(executor: Executor, wanted: Filter, *, limit: int) -> tuple[list[Row], int]:
    """Count the newest dead letters by task, type of error and reason.

    Returns:
        The largest groups, at most `limit`, and how many dead letters were looked at.
    """
    sql = GROUPS.replace("{page}", str(MOST_LOOKED_AT))
    rows = executor.fetch(sql, {**wanted.parameters(), "most": limit})
    return [row for row in rows if row.number is not None], rows[0].looked_at


def payloads(executor: Executor, ids: Collection[UUID]) -> Sequence[Row]:
    """Dead letters with their payloads, oldest first; those that are gone are left out."""
    return executor.fetch(PAYLOADS, {"ids": [str(each) for each in ids]})


def get(executor: Executor, timer_id: UUID) -> Row | None:
    """One dead letter with its payload, or None."""
    rows = payloads(executor, [timer_id])
    return rows[0] if rows else None


def lock(executor: Executor, ids: Collection[UUID]) -> dict[UUID, UUID | None]:
    """Hold dead letters until the transaction ends; the timer that each was replayed as, if any, of those that exist."""
    rows = executor.fetch(LOCK, {"ids": [str(each) for each in ids]})
    return {row.id: row.replayed_as for row in rows}


def mark_replayed(executor: Executor, timers: Mapping[UUID, UUID]) -> None:
    """Link dead letters that are locked to the timers that run them again.

    Call it in the transaction that stores the new timers.

    Arguments:
        executor: in that transaction.
        timers: the new timer's id by dead letter.
    """
    parameters = {"ids": [str(each) for each in timers], "new_ids": [str(each) for each in timers.values()]}
    executor.fetch(REPLAYED, parameters)


def discard(executor: Executor, ids: Collection[UUID], *, replayed: bool = True) -> int:
    """Delete dead letters, also those that were replayed unless told not to; returns how many there were."""
    return len(executor.fetch(DISCARD, {"ids": [str(each) for each in ids], "replayed": replayed}))


def _cursor(position: Position) -> str:
    return ",".join((position[0].replace(" ", "_"), position[1]))


def _position(cursor: str | None) -> Position | None:
    if cursor is None:
        return None
    parts = _CURSOR.fullmatch(cursor)
    if parts is None:
        raise ValueError(_NO_CURSOR.format(cursor))
    return parts[1].replace("_", " "), parts[2]
