"""Dead letters in the tables: found, replayed once, discarded."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from celery_durable.store.executor import Executor, Row
from celery_durable.store.timers import KEY

# Purpose: the newest dead letters.  Index: primary key of dead, backwards (ids rise with time), then call.  Locks: none.
LIST = """
select d.id, c.task, {key} as key, c.queue, d.died_at, d.attempt, d.reason,
       d.error_type, d.error, d.replayed_as, d.replayed_at
from {schema}.dead d join {schema}.call c on c.id = d.call_id join {schema}.call o on o.id = d.id
where (%(task)s::text is null or c.task = %(task)s::text)
  and (%(replayed)s::boolean or d.replayed_as is null)
  and d.id < coalesce(%(before)s::uuid, 'ffffffff-ffff-ffff-ffff-ffffffffffff'::uuid)
order by d.id desc limit {limit}
""".replace("{key}", KEY)

# Purpose: one dead letter with its payload.  Index: primary keys.  Locks: none.
GET = """
select d.id, c.task, coalesce(c.task_id, d.id::text) as task_id, {key} as key,
       c.queue, d.died_at, d.attempt, d.reason, d.error_type, d.error, d.replayed_as, d.replayed_at,
       c.body, c.content_type, c.content_encoding, c.headers::text as headers, c.properties::text as properties,
       c.exchange, c.routing_key, c.leased, c.tenant, c.created_at, {schema}.readable(u.due_at) as due_at, u.started_at, u.worker
from {schema}.dead d join {schema}.call c on c.id = d.call_id join {schema}.call o on o.id = d.id
left join {schema}.outcome u on u.id = d.id
where d.id = %(id)s::uuid
""".replace("{key}", KEY)

# Purpose: a dead letter is replayed once.  Index: primary key.
# Locks: the row; a second replay at the same moment waits, then finds it replayed.
REPLAYED = """
update {schema}.dead set replayed_as = %(new_id)s::uuid, replayed_at = {schema}.clock()
where id = %(id)s::uuid and replayed_as is null returning id
"""

# Purpose: forget a dead letter; its outcome stays until retention.  Index: primary key.  Locks: the row.
DISCARD = "delete from {schema}.dead where id = %(id)s::uuid returning id"


def find_all(
    executor: Executor, *, task: str | None = None, replayed: bool = False, before: UUID | None = None, limit: int = 100
) -> Sequence[Row]:
    """The newest dead letters, optionally of one task, optionally with those already replayed."""
    parameters = {"task": task, "replayed": replayed, "before": None if before is None else str(before)}
    return executor.fetch(LIST.replace("{limit}", str(int(limit))), parameters)


def get(executor: Executor, timer_id: UUID) -> Row | None:
    """One dead letter with its payload, or None."""
    rows = executor.fetch(GET, {"id": str(timer_id)})
    return rows[0] if rows else None


def mark_replayed(executor: Executor, timer_id: UUID, new_id: UUID) -> bool:
    """Link a dead letter to the timer that runs it again; False when there is none, or it was replayed before.

    Call it in the transaction that stores the new timer.
    """
    return bool(executor.fetch(REPLAYED, {"id": str(timer_id), "new_id": str(new_id)}))


def discard(executor: Executor, timer_id: UUID) -> bool:
    """Delete a dead letter; False when there is none."""
    return bool(executor.fetch(DISCARD, {"id": str(timer_id)}))
