"""Timers as their owner sees them: stored, replaced, found, cancelled, moved."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any
from uuid import UUID

from celery_durable.core.states import Answer, State
from celery_durable.core.text import storable
from celery_durable.store.executor import Executor, Row

#: A timer due within this many seconds is announced by NOTIFY: a beat may be asleep that long.
ANNOUNCED = 7.0


@dataclass(frozen=True, kw_only=True)
class NewTimer:
    """What is stored for one timer: its call, and when it is due.

    Exactly one of `due_at` (an aware instant) and `delay` (seconds from the
    database's now) is set.
    """

    id: UUID
    task: str
    leased: bool
    body: bytes = field(repr=False)
    content_type: str
    content_encoding: str
    headers: dict[str, Any]
    properties: dict[str, Any]
    exchange: str
    routing_key: str
    queue: str | None
    due_at: datetime | None = None
    delay: float | None = None
    expires_at: datetime | None = None
    task_id: str | None = None
    key: str | None = None
    tenant: str | None = None
    schedule: str | None = None
    nominal: datetime | None = None
    reason: str | None = None
    """Why the schedule made it."""
    replay_of: UUID | None = None
    attempt: int = 0
    """Attempts that were made before there was a timer: of a call that was published directly."""

    @property
    def carried_key(self) -> str | None:
        """The key in the message, where it is neither the one that the timer holds nor the timer's id."""
        carried = self.headers.get("durable_key")
        return None if carried in (None, self.key, str(self.id)) else storable(str(carried))

    def parameters(self) -> dict[str, object]:
        """As named parameters of the statements below."""
        return {
            "id": str(self.id), "task": self.task, "leased": self.leased, "body": self.body,
            "content_type": self.content_type, "content_encoding": self.content_encoding,
            "headers": json.dumps(self.headers), "properties": json.dumps(self.properties),
            "exchange": self.exchange, "routing_key": self.routing_key, "queue": self.queue,
            "due_at": self.due_at, "delay": self.delay, "expires_at": self.expires_at,
            "task_id": None if self.task_id == str(self.id) else self.task_id,
            "key": self.key, "tenant": self.tenant, "schedule": self.schedule, "nominal": self.nominal, "reason": self.reason,
            "replay_of": None if self.replay_of is None else str(self.replay_of), "announced": ANNOUNCED,
            "attempt": self.attempt, "carried_key": self.carried_key,
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Found:
    """One timer, wherever it stands."""

    id: UUID
    task: str
    task_id: str
    key: str | None
    state: State
    due_at: datetime | None
    attempt: int
    leased: bool
    call_id: UUID
    queue: str | None
    expires_at: datetime | None = None
    dispatched_at: datetime | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    worker: str | None = None
    reason: str | None = None
    schedule: str | None = None


_CALL_COLUMNS = """id, timer_id, task, leased, body, content_type, content_encoding, headers, properties,
    exchange, routing_key, queue, task_id, key, carried_key, tenant, schedule, nominal, reason,
    replay_of"""

_CALL_VALUES = """%(task)s::text, %(leased)s::boolean, %(body)s::bytea, %(content_type)s::text,
    %(content_encoding)s::text, %(headers)s::json, %(properties)s::json, %(exchange)s::text, %(routing_key)s::text,
    %(queue)s::text"""

_DUE = "coalesce(%(due_at)s::timestamptz, {schema}.clock() + %(delay)s::float8 * interval '1 second')"

# RETURNING and a final SELECT list are the places where pg_notify is sure to run, once a row.
_ANNOUNCE = """case when wake_at <= {schema}.clock() + %(announced)s::float8 * interval '1 second'
    then pg_notify('{channel}', extract(epoch from wake_at)::text)::text end"""
_ANNOUNCE = _ANNOUNCE.replace("'{channel}'", "trim(both '\"' from '{schema}')")

# Purpose: store one timer; no row back: the id or the key is taken.  Index: call_key for the conflict.
# Locks: waits for an uncommitted holder of the key.  Announces a timer due before the next poll.
INSERT = f"""
with new_call as (
    insert into {{schema}}.call ({_CALL_COLUMNS})
    values (%(id)s::uuid, %(id)s::uuid, {_CALL_VALUES}, %(task_id)s::text, %(key)s::text, %(carried_key)s::text,
            %(tenant)s::text, %(schedule)s::text, %(nominal)s::timestamptz, %(reason)s::text, %(replay_of)s::uuid)
    on conflict do nothing returning id),
new_timer as (
    insert into {{schema}}.timer (id, call_id, due_at, wake_at, expires_at, attempt)
    select id, id, {_DUE}, greatest({_DUE}, {{schema}}.clock()), %(expires_at)s::timestamptz, %(attempt)s::integer
    from new_call
    returning id, due_at, wake_at)
select id, due_at, {_ANNOUNCE} from new_timer
"""

# Purpose: store many timers of one task; the ids back are the new ones.  Index, locks: as INSERT, in the order of the
# keys: two calls with the same keys in different orders would wait for each other.  Code points, as Python sorts: a call
# of many pages keeps the order over all of them.
# One NOTIFY for all, with the earliest.  The arrays are parallel.
INSERT_MANY = f"""
with item as (
    select * from unnest(%(ids)s::uuid[], %(keys)s::text[], %(bodies)s::bytea[], %(headers)s::json[],
                         %(properties)s::json[], %(due_ats)s::timestamptz[], %(delays)s::float8[])
             with ordinality as u(id, key, body, headers, properties, due_at, delay, number)),
new_call as (
    insert into {{schema}}.call (id, timer_id, task, leased, body, content_type, content_encoding, headers,
                                 properties, exchange, routing_key, queue, key, tenant)
    select id, id, %(task)s::text, %(leased)s::boolean, body, %(content_type)s::text, %(content_encoding)s::text,
           headers, properties,
           %(exchange)s::text, %(routing_key)s::text, %(queue)s::text, key, %(tenant)s::text
    from item order by key collate "C", number on conflict do nothing returning id),
new_timer as (
    insert into {{schema}}.timer (id, call_id, due_at, wake_at, expires_at)
    select id, id, d.at, greatest(d.at, {{schema}}.clock()), %(expires_at)s::timestamptz
    from new_call join item using (id),
         lateral (select coalesce(due_at, {{schema}}.clock() + delay * interval '1 second') as at) d
    returning id, due_at, wake_at),
first as (select min(wake_at) as wake_at from new_timer)
select id, due_at, null from new_timer
union all
select null, null, {_ANNOUNCE} from first
"""

# Purpose: store many timers of any tasks; the ids back are the new ones.  Index, locks: as INSERT_MANY.
# One NOTIFY for all, with the earliest.  The arrays are parallel.  Those of JSON are JSON: in an array of texts the
# client escapes each quotation mark, which takes it longer than all the rest.
INSERT_EACH = f"""
with item as (
    select * from rows from (
            unnest(%(ids)s::uuid[], %(keys)s::text[], %(tasks)s::text[], %(leaseds)s::boolean[],
                   %(bodies)s::bytea[], %(content_types)s::text[], %(content_encodings)s::text[],
                   %(exchanges)s::text[], %(routing_keys)s::text[], %(queues)s::text[], %(schedules)s::text[],
                   %(nominals)s::timestamptz[], %(reasons)s::text[], %(due_ats)s::timestamptz[], %(delays)s::float8[],
                   %(expires_ats)s::timestamptz[], %(tenants)s::text[]),
            json_array_elements(%(headers)s::json), json_array_elements(%(properties)s::json))
         with ordinality as u(id, key, task, leased, body, content_type, content_encoding, exchange, routing_key,
              queue, schedule, nominal, reason, due_at, delay, expires_at, tenant, headers, properties, number)),
new_call as (
    insert into {{schema}}.call (id, timer_id, task, leased, body, content_type, content_encoding, headers,
                                 properties, exchange, routing_key, queue, key, tenant, schedule, nominal, reason)
    select id, id, task, leased, body, content_type, content_encoding, headers, properties, exchange, routing_key,
           queue, key, tenant, schedule, nominal, reason
    from item order by key collate "C", number on conflict do nothing returning id),
new_timer as (
    insert into {{schema}}.timer (id, call_id, due_at, wake_at, expires_at)
    select id, id, d.at, greatest(d.at, {{schema}}.clock()), expires_at
    from new_call join item using (id),
         lateral (select coalesce(due_at, {{schema}}.clock() + delay * interval '1 second') as at) d
    returning id, due_at, wake_at),
first as (select min(wake_at) as wake_at from new_timer)
select id, due_at, null from new_timer
union all
select null, null, {_ANNOUNCE} from first
"""

# Purpose: give the waiting timer that holds the key a new message and due time.  Index: call_key, then primary keys.
# Locks: the timer's row.  No row back: the holder is not waiting, or this very replacement was made before.
# The key stays with the first call row; the message between them is referred to by nothing any more.
REPLACE = f"""
with held as (
    select t.id, t.call_id, c.task_id, c.tenant from {{schema}}.call c join {{schema}}.timer t on t.id = c.timer_id
    where c.key = %(key)s::text and not t.held for update of t),
new_call as (
    insert into {{schema}}.call ({_CALL_COLUMNS})
    select %(id)s::uuid, held.id, {_CALL_VALUES}, %(task_id)s::text, null, null, held.tenant,
           null, null, null, null from held on conflict do nothing returning id),
superseded as (
    delete from {{schema}}.call c using held, new_call where c.id = held.call_id and c.id <> held.id)
update {{schema}}.timer t
set call_id = new_call.id, due_at = {_DUE}, wake_at = greatest({_DUE}, {{schema}}.clock()),
    expires_at = %(expires_at)s::timestamptz
from new_call, held where t.id = held.id
returning t.id, t.due_at, {_ANNOUNCE}
"""

#: The idempotency key, from the timer's first call `o`.
KEY = "coalesce(o.key, o.carried_key, o.id::text)"

_FOUND = """
select c.timer_id as id, f.call_id, c.task, coalesce(c.task_id, c.timer_id::text) as task_id,
       {key} as key, c.leased, c.queue, o.schedule, f.state,
       {schema}.readable(f.due_at) as due_at, f.attempt, {schema}.readable(f.expires_at) as expires_at,
       f.dispatched_at, f.started_at, f.finished_at, f.worker, f.reason
from {wanted} w
join lateral (
    select call_id, 'waiting' as state, due_at, attempt, expires_at, null::timestamptz as dispatched_at,
           null::timestamptz as started_at, null::timestamptz as finished_at, null as worker, null as reason
    from {schema}.timer where id = w.id
    union all
    select call_id, state, due_at, attempt, expires_at, dispatched_at, started_at, null, worker, null
    from {schema}.run where id = w.id
    union all
    select call_id, state, due_at, attempt, null, dispatched_at, started_at, finished_at, worker, reason
    from {schema}.outcome where id = w.id
) f on true
join {schema}.call c on c.id = f.call_id
join {schema}.call o on o.id = w.id
""".replace("{key}", KEY)

# Purpose: one timer wherever it stands.  Index: primary keys.  Locks: none.
FIND = _FOUND.replace("{wanted}", "(select %(id)s::uuid as id)")

# Purpose: the timers of a Celery task id that somebody chose.  Index: call_task_id.  Locks: none.
FIND_TASK_ID = _FOUND.replace("{wanted}", "(select distinct timer_id as id from {schema}.call where task_id = %(id)s)")

# Purpose: the timer that holds a key.  Index: call_key.  Locks: none.
FIND_KEY = _FOUND.replace("{wanted}", "(select timer_id as id from {schema}.call where key = %(id)s)")

# Purpose: cancel what waits.  Index: primary key.  Locks: waits for a claim in progress, then finds no row.
# A body that has returned is past cancelling, here and below.
CANCEL_WAITING = """
with gone as (delete from {schema}.timer where id = %(id)s::uuid and not held returning *)
insert into {schema}.outcome (id, call_id, due_at, attempt, state, reason)
select id, call_id, due_at, attempt, 'cancelled', %(reason)s::text from gone returning id
"""

# Purpose: cancel a leased timer that no worker has leased.  Index: primary key.  Locks: the row.
# Fence: none named; the state is: a worker that took the lease first is not disturbed.
CANCEL_IN_MOTION = """
with gone as (delete from {schema}.run where id = %(id)s::uuid and leased and not held
              and state in ('claimed', 'dispatched') returning *)
insert into {schema}.outcome (id, call_id, due_at, dispatched_at, fence, attempt, state, reason)
select id, call_id, due_at, dispatched_at, fence, attempt, 'cancelled', %(reason)s::text from gone returning id
"""

# A move into the past makes it due now: nobody was late before.
_MOVED = f"greatest({_DUE}, {{schema}}.clock())"

# Purpose: move what waits.  Index: primary key.  Locks: as CANCEL_WAITING.
MOVE_WAITING = f"""
update {{schema}}.timer set due_at = {_MOVED}, wake_at = {_MOVED}
where id = %(id)s::uuid and not held returning id, due_at, {_ANNOUNCE}
"""

# Purpose: put a leased timer that no worker has leased back to waiting.  Index, locks, fence: as CANCEL_IN_MOTION.
MOVE_IN_MOTION = f"""
with gone as (delete from {{schema}}.run where id = %(id)s::uuid and leased and not held
              and state in ('claimed', 'dispatched') returning *),
back as (
    insert into {{schema}}.timer (id, call_id, due_at, wake_at, expires_at, attempt, lost, shard)
    select id, call_id, {_MOVED}, {_MOVED}, expires_at, attempt, lost, shard from gone
    returning id, due_at, wake_at)
select id, due_at, {_ANNOUNCE} from back
"""


def utc(instant: datetime | None) -> datetime | None:
    """The same instant in UTC: the session's zone is no part of our answers."""
    return None if instant is None else instant.astimezone(timezone.utc)


def insert(executor: Executor, timer: NewTimer) -> datetime | None:
    """Store a timer.

    Returns:
        Its due instant; None when its id or its key is taken already.
    """
    rows = executor.fetch(INSERT, timer.parameters())
    return utc(rows[0].due_at) if rows else None


def replace(executor: Executor, timer: NewTimer) -> tuple[UUID, datetime] | None:
    """Put the message and due time of `timer` into the waiting timer that holds its key.

    Returns:
        The id and due instant of the holder; None when it is no longer waiting.
    """
    rows = executor.fetch(REPLACE, timer.parameters())
    return (UUID(str(rows[0].id)), rows[0].due_at.astimezone(timezone.utc)) if rows else None


def insert_many(
    executor: Executor,
    template: NewTimer,
    items: Sequence[tuple[UUID, str | None, bytes, str, str, datetime | None, float | None]],
) -> dict[UUID, datetime]:
    """Store one page of timers that differ in id, key, body, headers, properties and due time only.

    Arguments:
        executor: best within a transaction, so that all pages commit together.
        template: everything the items share.
        items: id, key, body, headers and properties as JSON text, due instant or None, delay in seconds or None.

    Returns:
        Due instant by id, of those that are new.
    """
    ids, keys, bodies, headers, properties, due_ats, delays = (list(column) for column in zip(*items, strict=True))
    rows = executor.fetch(
        INSERT_MANY,
        {
            **template.parameters(), "properties": properties, "ids": [str(each) for each in ids],
            "keys": keys, "bodies": bodies, "headers": headers, "due_ats": due_ats, "delays": delays,
        },
    )  # fmt: skip
    return {UUID(str(row.id)): row.due_at.astimezone(timezone.utc) for row in rows if row.id is not None}


def insert_each(executor: Executor, many: Sequence[NewTimer]) -> dict[UUID, datetime]:
    """Store a page of timers of any tasks, none with a chosen task id; returns the due instants of the new ones by id."""
    if not many:
        return {}
    columns = [each.parameters() for each in many]
    names = (
        "id", "key", "task", "leased", "body", "content_type", "content_encoding", "exchange", "routing_key", "queue",
        "schedule", "nominal", "reason", "due_at", "delay", "expires_at", "tenant",
    )  # fmt: skip
    arrays: dict[str, object] = {
        "bodies" if name == "body" else f"{name}s": [each[name] for each in columns] for name in names
    }
    for name in ("headers", "properties"):
        arrays[name] = f"[{','.join(str(each[name]) for each in columns)}]"
    rows = executor.fetch(INSERT_EACH, {**arrays, "announced": ANNOUNCED})
    return {UUID(str(row.id)): row.due_at.astimezone(timezone.utc) for row in rows if row.id is not None}


def find(executor: Executor, identity: UUID | str) -> Found | None:
    """Find a timer by its id or its Celery task id; of several the live one, else the newest."""
    text = str(identity)
    if storable(text) != text:
        return None  # no column can hold it
    rows: Sequence[Row] = ()
    try:
        rows = executor.fetch(FIND, {"id": str(UUID(text))})
    except ValueError:
        pass
    return _best(rows or executor.fetch(FIND_TASK_ID, {"id": text}))


def find_key(executor: Executor, key: str) -> Found | None:
    """Find the timer that holds an idempotency key."""
    return _best(executor.fetch(FIND_KEY, {"id": key})) if storable(key) == key else None


def _best(rows: Sequence[Row]) -> Found | None:
    found = [read(row) for row in rows]
    # While a claim commits, one snapshot shows one place only; several rows are several timers of one task id.
    return max(found, key=lambda each: (not each.state.ended, each.id.int), default=None)


def read(row: Row) -> Found:
    """Make a value of a row of the statements above."""
    return Found(
        id=UUID(str(row.id)), task=row.task, task_id=row.task_id, key=row.key, state=State(row.state),
        due_at=utc(row.due_at), attempt=row.attempt, leased=row.leased, call_id=UUID(str(row.call_id)),
        queue=row.queue, expires_at=utc(row.expires_at), dispatched_at=utc(row.dispatched_at),
        started_at=utc(row.started_at), finished_at=utc(row.finished_at), worker=row.worker, reason=row.reason,
        schedule=row.schedule,
    )  # fmt: skip


def cancel(executor: Executor, timer_id: UUID, reason: str | None = None) -> Answer:
    """Cancel a timer if nobody can have started it; a definite answer, whatever the workers do."""
    parameters = {"id": str(timer_id), "reason": reason}
    # Between two looks a timer may go from waiting into motion and back: look at both, then at the first again.
    for statement in (CANCEL_WAITING, CANCEL_IN_MOTION, CANCEL_WAITING, CANCEL_IN_MOTION):
        if executor.fetch(statement, parameters):
            return Answer.CANCELLED
    return _settled(executor, timer_id)


def reschedule(
    executor: Executor, timer_id: UUID, due_at: datetime | None, delay: float | None
) -> tuple[Answer, datetime | None]:
    """Move a timer if nobody can have started it.

    Returns:
        The answer, and the new due instant if it was moved.
    """
    parameters = {"id": str(timer_id), "due_at": due_at, "delay": delay, "announced": ANNOUNCED}
    for statement in (MOVE_WAITING, MOVE_IN_MOTION, MOVE_WAITING, MOVE_IN_MOTION):
        rows = executor.fetch(statement, parameters)
        if rows:
            return Answer.RESCHEDULED, utc(rows[0].due_at)
    answer = _settled(executor, timer_id)
    return (Answer.TOO_LATE if answer is Answer.CANCELLED else answer), None


def _settled(executor: Executor, timer_id: UUID) -> Answer:
    found = find(executor, timer_id)
    if found is None:
        return Answer.UNKNOWN
    return Answer.CANCELLED if found.state is State.CANCELLED else Answer.TOO_LATE
