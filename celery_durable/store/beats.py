"""Beats: one row per scheduler process, so that operators see who is alive."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from celery_durable.store.executor import Executor, Row

# Purpose: a beat says that it is alive.  Index: primary key.  Locks: its own row.
SEEN = """
insert into {schema}.beat as b (id, node, pid, version, code)
values (%(id)s::uuid, %(node)s, %(pid)s, %(version)s, %(code)s::text)
on conflict (id) do update set seen_at = {schema}.clock(), code = excluded.code,
    dispatched = b.dispatched + %(dispatched)s::bigint
"""

# Purpose: is a beat with this version of the program's entries alive.  Index: none: a handful of rows.  Locks: none.
ALIVE_WITH = """
select id from {schema}.beat
where code = %(code)s and seen_at > {schema}.clock() - interval '20 seconds' limit 1
"""

# Purpose: beats that have ended without a word.  Index: none: a handful of rows.  Locks: the rows.
FORGET = """delete from {schema}.beat where seen_at < {schema}.clock() - interval '1 day'"""

# Purpose: a beat that ends says so.  Index: primary key.  Locks: its own row.
GONE = """delete from {schema}.beat where id = %(id)s::uuid"""

# Purpose: the beats that are alive or were so lately.  Index: none: a handful of rows.  Locks: none.
LIST = """
select id, node, pid, version, started_at, seen_at, dispatched,
       extract(epoch from {schema}.clock() - seen_at)::float8 as silent_for
from {schema}.beat order by started_at
"""

# Purpose: how many timers stand where.  Index: none: counts are capped, `waiting` by the statistics of the planner
# when there are more.  Locks: none.
COUNTS = """
with shard as (
    select generate_series(0, (select value::text::int from {schema}.meta where name = 'shards') - 1)::smallint as shard)
select (select count(*) from (select 1 from {schema}.timer limit 100001) t) as waiting,
       (select reltuples::bigint from pg_class where oid = '{schema}.timer'::regclass) as waiting_estimate,
       (select count(*) from (select 1 from shard join {schema}.timer t using (shard) where t.wake_at <= {schema}.clock()
                              limit 100001) t) as due,
       (select extract(epoch from {schema}.clock())::float8 - min(first.wake_at)
        from shard, lateral (select extract(epoch from {schema}.readable(wake_at))::float8 as wake_at from {schema}.timer t
                             where t.shard = shard.shard and t.wake_at <= {schema}.clock()
                             order by t.wake_at limit 1) first) as oldest_overdue,
       (select count(*) from {schema}.dead where replayed_as is null) as dead,
       (select count(*) from {schema}.schedule where enabled) as schedules,
       (select count(*) from {schema}.schedule where enabled and fault is not null) as faulty
"""

# Purpose: how many runs stand in which state.  Index: none: `run` is small.  Locks: none.
IN_MOTION = """select state, count(*) as number from {schema}.run group by state"""

# Purpose: how many timers ended in which state within a day.  Index: outcome_finished; at most 100,000 rows.  Locks: none.
ENDED = """
select state, count(*) as number
from (select state from {schema}.outcome
      where finished_at > {schema}.clock() - interval '1 day' order by finished_at desc limit 100000) o
group by state
"""


def seen(
    executor: Executor, beat_id: UUID, *, node: str, pid: int, version: str, dispatched: int, code: str | None
) -> None:
    """Note that a beat is alive, how many timers it dispatched since it last said so, and which entries it has."""
    parameters = {"node": node, "pid": pid, "version": version, "dispatched": dispatched, "code": code}
    executor.fetch(SEEN, {"id": str(beat_id), **parameters})


def alive_with(executor: Executor, code: str) -> bool:
    """Whether a beat whose program has this version of the recurring entries is alive."""
    return bool(executor.fetch(ALIVE_WITH, {"code": code}))


def gone(executor: Executor, beat_id: UUID) -> None:
    """Delete the row of a beat that has ended."""
    executor.fetch(GONE, {"id": str(beat_id)})


def forget_silent(executor: Executor) -> None:
    """Delete the rows of beats that have been silent for a day."""
    executor.fetch(FORGET)


def every(executor: Executor) -> Sequence[Row]:
    """All beats that are alive or were so lately."""
    return executor.fetch(LIST)


def counts(executor: Executor) -> dict[str, object]:
    """The numbers of ``durable status``: what waits, moves, ended within a day, and how late."""
    row = executor.fetch(COUNTS)[0]
    waiting = row.waiting if row.waiting <= 100_000 else max(row.waiting, row.waiting_estimate)
    return {
        "waiting": waiting, "waiting_is_estimate": row.waiting > 100_000, "due": row.due,
        "oldest_overdue": row.oldest_overdue, "dead": row.dead, "schedules": row.schedules, "faulty": row.faulty,
        "in_motion": {each.state: each.number for each in executor.fetch(IN_MOTION)},
        "ended_last_day": {each.state: each.number for each in executor.fetch(ENDED)},
    }  # fmt: skip
