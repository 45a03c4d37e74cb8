"""History: the attempts and outcomes of timers, and its pruning in bounded batches."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from celery_durable.store.executor import Executor, Row

# Purpose: the attempts of one timer.  Index: attempt_timer.  Locks: none.
ATTEMPTS = """
select attempt, fence, ending, started_at, ended_at, next_due_at, worker, error_type, error, traceback
from {schema}.attempt where timer_id = %(id)s::uuid order by id
"""

# Purpose: forget finished timers, and with them their keys and payloads.  Index: outcome_finished, then primary keys.
# Locks: the page's rows, skipping others'.  A dead letter is kept until it is replayed or discarded.
PRUNE = """
with old as materialized (
    select id from {schema}.outcome o
    where finished_at < {schema}.clock() - %(retention)s::float8 * interval '1 second'
      and not exists (select from {schema}.dead d where d.id = o.id and d.replayed_as is null)
    order by finished_at limit {page} for update skip locked),
gone as (delete from {schema}.outcome o using old where o.id = old.id returning o.id),
undead as (delete from {schema}.dead d using gone where d.id = gone.id),
attempts as (delete from {schema}.attempt a using gone where a.timer_id = gone.id),
replaced as (delete from {schema}.call c using gone where c.timer_id = gone.id and c.timer_id <> c.id)
delete from {schema}.call c using gone where c.id = gone.id returning c.id
"""


def attempts(executor: Executor, timer_id: UUID) -> Sequence[Row]:
    """The ended and refused attempts of a timer, oldest first; a success stands in its outcome."""
    return executor.fetch(ATTEMPTS, {"id": str(timer_id)})


def prune(executor: Executor, *, retention: float, page: int) -> int:
    """Delete one page of timers finished longer ago than `retention` seconds; returns how many."""
    return len(executor.fetch(PRUNE.replace("{page}", str(int(page))), {"retention": retention}))
