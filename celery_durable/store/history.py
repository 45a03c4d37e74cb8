"""History: the attempts and outcomes of timers, and its pruning in bounded batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from uuid import UUID

from celery_durable.store.executor import Executor, Row

# Purpose: the attempts of one timer.  Index: attempt_timer.  Locks: none.
ATTEMPTS = """
select attempt, fence, ending, started_at, ended_at, next_due_at, worker, error_type, error, traceback
from {schema}.attempt where timer_id = %(id)s::uuid order by id
"""

# Purpose: a stretch of the timers finished long ago.  Index: outcome_finished, one range from where the last look ended:
# a dead letter is kept until it is replayed or discarded, and a store may keep many.  Locks: none.
OLD = """
select id, finished_at::text as at, exists (select from {schema}.dead d where d.id = o.id and d.replayed_as is null) as kept
from {schema}.outcome o
where finished_at < {schema}.clock() - %(retention)s::float8 * interval '1 second'
  and finished_at >= %(at)s::timestamptz and (finished_at, id) > (%(at)s::timestamptz, %(id)s::uuid)
order by finished_at, id limit {page}
"""

# Purpose: forget them, and with them their keys and payloads.  Index: primary keys, attempt_timer, call_replaced, each
# reached by the array: joined with the deleted rows, `call` was read in whole wherever its statistics were missing.
# Locks: the rows; what another beat has forgotten meanwhile is no longer there.
FORGET = """
with gone as (delete from {schema}.outcome where id = any(%(ids)s::uuid[])),
undead as (delete from {schema}.dead where id = any(%(ids)s::uuid[])),
attempts as (delete from {schema}.attempt where timer_id = any(%(ids)s::uuid[])),
held as (delete from {schema}.held_result where id = any(%(ids)s::uuid[])),
replaced as (delete from {schema}.call where timer_id = any(%(ids)s::uuid[]) and timer_id <> id)
delete from {schema}.call where id = any(%(ids)s::uuid[]) returning id
"""

# Purpose: attempts noted after their timer was forgotten: a holder that was refused days later.  Index: primary key,
# one range from where the last look ended, then primary keys.  Locks: the rows.
LEFT_OVER = """
with stretch as materialized (
    select id, timer_id, ended_at < {schema}.clock() - %(retention)s::float8 * interval '1 second' as old
    from {schema}.attempt where id > %(after)s::bigint order by id limit {page}),
gone as (
    delete from {schema}.attempt where id = any(array(
        select s.id from stretch s
        where old and not exists (select from {schema}.outcome o where o.id = s.timer_id)
          and not exists (select from {schema}.run r where r.id = s.timer_id)
          and not exists (select from {schema}.timer t where t.id = s.timer_id)
        order by s.id)))
select max(id) as last, count(*) as seen, coalesce(bool_and(old), false) as old from stretch
"""

# Purpose: notes of occurrences that did not run long ago.  Index: occurrence_noted, one range.  Locks: the rows.
OLD_NOTES = """
delete from {schema}.occurrence where ctid = any(array(
    select ctid from {schema}.occurrence
    where reason not in ('queued', 'backfill')
      and noted_at < {schema}.clock() - %(retention)s::float8 * interval '1 second' order by noted_at limit {page}))
returning schedule
"""

# Purpose: how everything ended.  Index: none: for a report over a small store.  Locks: none.
TALLY = "select state, count(*) as number from {schema}.outcome group by state order by state"

# Purpose: how late timers were dispatched within a day.  Index: outcome_finished; at most 100,000 rows.  Locks: none.
LATENESS = """
select count(*) as number, percentile_cont(array[0.5, 0.95, 0.99]) within group
       (order by extract(epoch from dispatched_at - {schema}.readable(due_at))::float8) as seconds
from (select dispatched_at, due_at from {schema}.outcome where finished_at > {schema}.clock() - interval '1 day'
      order by finished_at desc limit 100000) o
where dispatched_at is not null and due_at is not null
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


@dataclass(frozen=True, kw_only=True)
class Position:
    """How far the pruning has come: it need not look again at what is kept."""

    at: str = "-infinity"
    id: str = str(UUID(int=0))
    attempt: int = 0


def prune(executor: Executor, position: Position, *, retention: float, page: int) -> tuple[Position, bool]:
    """Delete, of one page of timers finished longer ago than `retention` seconds, those that nobody may want.

    Arguments:
        executor: in autocommit.
        position: of the call before; the first one sees everything.
        retention: in seconds.
        page: most rows.

    Returns:
        The position for the next call, and whether there is more to look at now.
    """
    rows = executor.fetch(
        OLD.replace("{page}", str(int(page))), {"retention": retention, "at": position.at, "id": position.id}
    )
    forgotten = [str(row.id) for row in rows if not row.kept]
    if forgotten:
        executor.fetch(FORGET, {"ids": forgotten})
    if rows:
        position = replace(position, at=rows[-1].at, id=str(rows[-1].id))
    return position, len(rows) == page


def prune_left_over(executor: Executor, position: Position, *, retention: float, page: int) -> tuple[Position, bool]:
    """As :func:`prune`, of one page of attempts: those whose timer has been forgotten."""
    sql = LEFT_OVER.replace("{page}", str(int(page)))
    row = executor.fetch(sql, {"retention": retention, "after": position.attempt})[0]
    if not row.old:
        return position, False  # younger ones come next: they are looked at again
    return replace(position, attempt=row.last), row.seen == page


def prune_notes(executor: Executor, *, retention: float, page: int) -> bool:
    """Delete one page of old notes about occurrences that did not run; whether there may be more."""
    return len(executor.fetch(OLD_NOTES.replace("{page}", str(int(page))), {"retention": retention})) == page


def tally(executor: Executor) -> dict[str, int]:
    """How many timers ended in which state."""
    return {row.state: row.number for row in executor.fetch(TALLY)}


@dataclass(frozen=True, kw_only=True)
class Lateness:
    """Dispatched minus due, in seconds; None where nothing was dispatched."""

    number: int
    p50: float | None
    p95: float | None
    p99: float | None


def lateness(executor: Executor) -> Lateness:
    """How late timers were that ended within a day."""
    row = executor.fetch(LATENESS)[0]
    p50, p95, p99 = row.seconds or (None, None, None)
    return Lateness(number=row.number, p50=p50, p95=p95, p99=p99)


def number_ended(executor: Executor, ids: Sequence[UUID]) -> int:
    """How many of these timers have ended."""
    number: int = executor.fetch(NUMBER_ENDED, {"ids": [str(each) for each in ids]})[0].number
    return number


def unaccounted(executor: Executor) -> list[UUID]:
    """Timers that are nowhere: always none, which a test or the demo may check."""
    return [row.id for row in executor.fetch(UNACCOUNTED)]
