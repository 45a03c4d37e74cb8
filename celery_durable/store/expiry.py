"""Sweeps: what nobody followed up, found in ``run`` by pages and put right, each page one statement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from celery_durable.store.executor import Executor, Row
from celery_durable.store.runs import MAX_LOST
from celery_durable.store.timers import ANNOUNCED

#: Rows of ``run`` that one look examines: it has no index on the deadline, which keeps heartbeats and marks HOT.
LOOK = 20_000
FIRST = UUID(int=0)

# Purpose: a stretch of `run`, with what in it needs attention.  Index: primary key, one range.  Locks: none.
# Long runs with a live renewal are left out here already, or a page of them would hide the lost ones.
LOOK_AT = """
with stretch as materialized (
    select id, fence, state, deadline, expires_at, dispatched_at from {schema}.run where id > %(after)s::uuid
    order by id limit {look})
select (select count(*) from stretch) as seen, (select id from stretch order by id desc limit 1) as last,
       array(select id from stretch where state = 'claimed' and deadline <= {schema}.clock()
             and (expires_at is null or expires_at > {schema}.clock()) order by deadline limit {page}) as unmarked,
       array(select id from stretch where state = 'dispatched' and deadline <= {schema}.clock()
             and (expires_at is null or expires_at > {schema}.clock())
             and dispatched_at > {schema}.clock() - %(grace)s::float8 * interval '1 second'
             order by deadline limit {page}) as untaken,
       array(select id from stretch where state in ('running', 'finishing') and deadline <= {schema}.clock()
             and not exists (select from {schema}.renewal n where n.id = stretch.id and n.fence = stretch.fence
                             and n.until > {schema}.clock())
             order by deadline limit {page}) as silent,
       array(select id from stretch where state in ('claimed', 'dispatched') and expires_at <= {schema}.clock()
             limit {page}) as expired,
       array(select id from stretch where state = 'dispatched' and deadline <= {schema}.clock()
             and dispatched_at <= {schema}.clock() - %(grace)s::float8 * interval '1 second' limit {page}) as unwanted
"""

# Purpose: runs whose lease ended without an end of the run: back to waiting, or dead when attempts are used up.
# Index: primary keys of run and renewal.  Locks: the page's rows, skipping others'.
# Fence: a renewal counts only with the fence of the run; a missing one means expired.
# Where the body has returned only its callbacks are due again: at once the first time, then after the task's pause.
LOST = """
with late as materialized (
    select r.id from {schema}.run r
    where r.id = any(%(ids)s::uuid[]) and r.state in ('running', 'finishing') and r.deadline <= {schema}.clock()
      and not exists (select from {schema}.renewal n
                      where n.id = r.id and n.fence = r.fence and n.until > {schema}.clock())
    order by r.id for update of r skip locked),
gone as (delete from {schema}.run r using late where r.id = late.id returning r.*),
judged as (
    select *, (state = 'running' and attempt >= max_attempts or lost + 1 >= {max_lost}) is true as over,
           case when state = 'running' then 'worker lost' else 'callbacks failed' end as why,
           case when state = 'running' or lost > 0 then coalesce(retry_in, 0) * (0.5 + random() / 2) else 0 end as pause
    from gone),
unrenewed as (
    delete from {schema}.renewal where id = any(array(
        select n.id from {schema}.renewal n join gone g on n.id = g.id and n.fence <= g.fence
        order by n.id for update of n skip locked))),
unheld as (delete from {schema}.held_result h using judged j where h.id = j.id and j.over),
back as (
    insert into {schema}.timer (id, call_id, due_at, wake_at, expires_at, attempt, lost, shard, held)
    select id, call_id, d.at, d.at, expires_at, attempt, lost + 1, shard, held
    from judged, lateral (select {schema}.clock() + pause * interval '1 second' as at) d
    where not over on conflict do nothing returning id, due_at, wake_at),
ended as (
    insert into {schema}.outcome (id, call_id, due_at, dispatched_at, started_at, fence, attempt, state, reason, worker)
    select id, call_id, due_at, dispatched_at, started_at, fence, attempt, 'dead', why, worker
    from judged where over on conflict do nothing),
buried as (
    insert into {schema}.dead (id, call_id, attempt, reason, error_type, error)
    select id, call_id, attempt, why, 'WorkerLostError', 'no heartbeat of ' || worker from judged where over
    on conflict do nothing),
told as (
    insert into {schema}.attempt (timer_id, fence, started_at, attempt, ending, worker, next_due_at, error_type, error)
    select j.id, j.fence, j.started_at, j.attempt, case when j.state = 'running' then 'lost' else 'held' end, j.worker,
           back.due_at, 'WorkerLostError', 'no heartbeat of ' || j.worker
    from judged j left join back on back.id = j.id)
select j.id, j.over, j.attempt, j.why as reason, c.task, 'no heartbeat of ' || j.worker as error,
    case when back.wake_at <= {schema}.clock() + %(announced)s::float8 * interval '1 second'
    then pg_notify(trim(both '"' from '{schema}'), extract(epoch from back.wake_at)::text)::text end
from judged j join {schema}.call c on c.id = j.call_id left join back on back.id = j.id
""".replace("{max_lost}", str(MAX_LOST))

# Purpose: leased timers past `expires` that no worker has leased.  Index: primary key.  Locks: skipping others'.
EXPIRED = """
with late as materialized (
    select id from {schema}.run where id = any(%(ids)s::uuid[]) and state in ('claimed', 'dispatched')
      and expires_at <= {schema}.clock() and (leased or deadline <= {schema}.clock()) order by id for update skip locked),
gone as (delete from {schema}.run r using late where r.id = late.id returning r.*)
insert into {schema}.outcome (id, call_id, due_at, dispatched_at, fence, attempt, state, reason)
select id, call_id, due_at, dispatched_at, fence, attempt, 'expired', 'expired before a worker took it' from gone
on conflict do nothing returning id
"""

# Purpose: dispatched again and again for the whole grace, never leased: dead.  Index: primary key.
# Locks: skipping others'.
UNWANTED = """
with late as materialized (
    select id from {schema}.run where id = any(%(ids)s::uuid[]) and state = 'dispatched'
      and deadline <= {schema}.clock()
      and dispatched_at <= {schema}.clock() - %(grace)s::float8 * interval '1 second' order by id for update skip locked),
gone as (delete from {schema}.run r using late where r.id = late.id returning r.*),
ended as (
    insert into {schema}.outcome (id, call_id, due_at, dispatched_at, fence, attempt, state, reason)
    select id, call_id, due_at, dispatched_at, fence, attempt, 'dead', 'never leased' from gone
    on conflict do nothing),
buried as (
    insert into {schema}.dead (id, call_id, attempt, reason, error)
    select id, call_id, attempt, 'never leased', 'no worker took it after ' || dispatches || ' dispatches' from gone
    on conflict do nothing)
select g.id, c.task, 'never leased' as reason, 'no worker took it after ' || g.dispatches || ' dispatches' as error
from gone g join {schema}.call c on c.id = g.call_id
"""

# Purpose: renewals that outlived their run.  Index: primary keys.  Locks: the page's rows, skipping others'.
STALE_RENEWALS = """
delete from {schema}.renewal where id = any(array(
    select n.id from {schema}.renewal n
    where n.until <= {schema}.clock() and not exists (select from {schema}.run r where r.id = n.id)
    limit {page} for update skip locked))
returning id
"""


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """What one look at a part of ``run`` found."""

    last: UUID | None
    """Where the next look begins; None: the end was reached."""
    unmarked: Sequence[UUID]
    """Claims whose beat has died or could not publish."""
    untaken: Sequence[UUID]
    """Dispatched, and no worker has leased them for so long that the message may be lost."""
    silent: Sequence[UUID]
    expired: Sequence[UUID]
    unwanted: Sequence[UUID]


def look(executor: Executor, *, after: UUID, page: int, grace: float) -> Stretch:
    """Examine the next stretch of ``run``, and name at most one page of each kind of trouble in it."""
    sql = LOOK_AT.replace("{look}", str(LOOK)).replace("{page}", str(int(page)))
    row = executor.fetch(sql, {"after": str(after), "grace": grace})[0]
    return Stretch(
        last=row.last if row.seen == LOOK else None, unmarked=row.unmarked, untaken=row.untaken, silent=row.silent,
        expired=row.expired, unwanted=row.unwanted,
    )  # fmt: skip


def settle_lost(executor: Executor, ids: Sequence[UUID]) -> Sequence[Row]:
    """End the runs whose lease has expired.

    Returns:
        Rows with id, task, attempt, reason and error; ``over``: it is dead, the others go back to waiting.
    """
    return executor.fetch(LOST, {"ids": [str(each) for each in ids], "announced": ANNOUNCED})


def settle_expired(executor: Executor, ids: Sequence[UUID]) -> int:
    """End the dispatched timers whose `expires` has passed; returns how many."""
    return len(executor.fetch(EXPIRED, {"ids": [str(each) for each in ids]}))


def settle_unwanted(executor: Executor, ids: Sequence[UUID], *, grace: float) -> Sequence[Row]:
    """Make dead letters of timers that no worker ever leased; returns rows with id, task, reason and error."""
    return executor.fetch(UNWANTED, {"ids": [str(each) for each in ids], "grace": grace})


def clear_renewals(executor: Executor, *, page: int) -> int:
    """Delete one page of renewals without a run; returns how many."""
    return len(executor.fetch(STALE_RENEWALS.replace("{page}", str(int(page)))))
