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

# Purpose: timers finished long ago.  Index: outcome_finished, one range.  Locks: none.
# A dead letter is kept until it is replayed or discarded.
OLD = """
select id from {schema}.outcome o
where finished_at < {schema}.clock() - %(retention)s::float8 * interval '1 second'
  and not exists (select from {schema}.dead d where d.id = o.id and d.replayed_as is null)
order by finished_at limit {page}
"""

# Purpose: forget them, and with them their keys and payloads.  Index: primary keys, attempt_timer, call_replaced, each
# reached by the array: joined with the deleted rows, `call` was read in whole wherever its statistics were missing.
# Locks: the rows; what another beat has forgotten meanwhile is no longer there.
FORGET = """
with gone as (delete from {schema}.outcome where id = any(%(ids)s::uuid[])),
undead as (delete from {schema}.dead where id = any(%(ids)s::uuid[])),
attempts as (delete from {schema}.attempt where timer_id = any(%(ids)s::uuid[])),
replaced as (delete from {schema}.call where timer_id = any(%(ids)s::uuid[]) and timer_id <> id)
delete from {schema}.call where id = any(%(ids)s::uuid[]) returning id
"""

# Purpose: how everything ended.  Index: none: for a report over a small store.  Locks: none.
TALLY = "select state, count(*) as number from {schema}.outcome group by state order by state"

# Purpose: lateness of everything that was dispatched.  Index: none: as TALLY.  Locks: none.
LATENESS = """
select count(*) as number, coalesce(percentile_cont(0.5) within group (order by late), 0) as p50,
       coalesce(percentile_cont(0.99) within group (order by late), 0) as p99
from (select extract(epoch from dispatched_at - due_at)::float8 as late from {schema}.outcome
      where dispatched_at is not null) o
"""

# Purpose: how many of these timers have ended.  Index: primary key.  Locks: none.
NUMBER_ENDED = "select count(*) as number from {schema}.outcome where id = any(%(ids)s::uuid[])"

# Purpose: ids that ended nowhere and wait nowhere: there must be none.  Index: primary keys.  Locks: none.
UNACCOUNTED = """
select c.timer_id as id from {schema}.call c
where c.id = c.timer_id
  and not exists (select from {schema}.outcome o where o.id = c.id)
  and not exists (select from {schema}.timer t where t.id = c.id)
  and not exists (select from {schema}.run r where r.id = c.id)
"""


def attempts(executor: Executor, timer_id: UUID) -> Sequence[Row]:
    """The ended and refused attempts of a timer, oldest first; a success stands in its outcome."""
    return executor.fetch(ATTEMPTS, {"id": str(timer_id)})


def prune(executor: Executor, *, retention: float, page: int) -> int:
    """Delete one page of timers finished longer ago than `retention` seconds; returns how many."""
    rows = executor.fetch(OLD.replace("{page}", str(int(page))), {"retention": retention})
    if rows:
        executor.fetch(FORGET, {"ids": [str(row.id) for row in rows]})
    return len(rows)


def tally(executor: Executor) -> dict[str, int]:
    """How many timers ended in which state."""
    return {row.state: row.number for row in executor.fetch(TALLY)}


def lateness(executor: Executor) -> Row:
    """``number``, ``p50`` and ``p99`` (seconds) of all dispatches in the history."""
    return executor.fetch(LATENESS)[0]


def number_ended(executor: Executor, ids: Sequence[UUID]) -> int:
    """How many of these timers have ended."""
    number: int = executor.fetch(NUMBER_ENDED, {"ids": [str(each) for each in ids]})[0].number
    return number


def unaccounted(executor: Executor) -> list[UUID]:
    """Timers that are nowhere: always none, which a test or the demo may check."""
    return [row.id for row in executor.fetch(UNACCOUNTED)]
