"""Leases: who may run a timer, and until when.

Every later statement about a run names the fence that its lease took
(:mod:`celery_durable.store.runs`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any
from uuid import UUID

from celery_durable.store.executor import Executor, Row
from celery_durable.store.runs import FINISHED, Held, ended


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Which delivery wants a lease, and what the lease shall be like."""

    timer_id: UUID
    """From the header ``durable_timer``."""
    call_id: UUID
    """The message's version, from the header ``durable_call``."""
    token: str
    """Names this delivery in its node, for heartbeats."""
    worker: str
    """Shown to operators."""
    seconds: float
    """How long the lease is valid without a heartbeat."""
    max_attempts: int | None
    """After this many a lost run is dead; None: no limit."""
    base: float
    """Seconds of the first back-off, should the run be lost."""
    cap: float
    """The longest back-off in seconds."""

    def parameters(self) -> dict[str, Any]:
        """The parameters of a statement that takes it."""
        return {
            "id": str(self.timer_id), "call_id": str(self.call_id), "token": self.token, "worker": self.worker,
            "lease": self.seconds, "max_attempts": self.max_attempts, "base": self.base, "cap": self.cap,
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Lease:
    """What a worker gets with the lease of a timer."""

    timer_id: UUID
    fence: int
    attempt: int
    due_at: datetime
    dispatched_at: datetime
    started_at: datetime
    expires_at: datetime | None
    nominal: datetime | None
    schedule: str | None
    held: Held | None
    """The return value of an earlier attempt whose callbacks may not have been sent."""


_TAKEN = """
taken as (
    update {schema}.run
    set state = 'running', fence = nextval('{schema}.fence'), attempt = attempt + 1, token = %(token)s::text,
        worker = %(worker)s::text, started_at = {schema}.clock(),
        dispatched_at = coalesce(dispatched_at, {schema}.clock()),
        deadline = {schema}.clock() + %(lease)s::float8 * interval '1 second',
        max_attempts = %(max_attempts)s::integer,
        retry_in = least(%(cap)s::float8, %(base)s::float8 * 2 ^ least(attempt, 60))
    where id = %(id)s::uuid and call_id = %(call_id)s::uuid and leased and state in ('claimed', 'dispatched')
      and (expires_at is null or expires_at > {schema}.clock())
    returning *),
mine as (
    select * from taken
    union all
    select * from {schema}.run where id = %(id)s::uuid and token = %(token)s::text and state = 'running'
                                 and not exists (select from taken)),
lease as (
    select m.id, m.fence, m.attempt, {schema}.readable(m.due_at) as due_at, m.dispatched_at, m.started_at,
           {schema}.readable(m.expires_at) as expires_at, {schema}.readable(c.nominal) as nominal, c.schedule,
           h.body, h.content_type, h.content_encoding
    from mine m join {schema}.call c on c.id = m.id left join {schema}.held_result h on h.id = m.id)"""

# Purpose: one delivery takes the right to run.  Index: primary key.  Locks: the row.
# Fence: takes a fresh one, and names none: any delivery of a dispatched timer may take it, so a re-dispatch never
# invalidates an earlier message.  A repeated call of the same delivery (`token`) after a cut connection finds its own.
LEASE = f"with {_TAKEN} select * from lease"

# Purpose: both at once, for two timers: a process ends one run and takes its next lease.  Index, locks and
# fences: as LEASE and FINISH.
FINISH_AND_LEASE = f"""with {FINISHED}, {_TAKEN}
select e.id as ended, lease.* from (select (select id from gone) as id) e left join lease on true
"""

# Purpose: why a delivery found nothing to run.  Index: primary keys.  Locks: none.
WHY_NOT = """
select coalesce(
    (select case when state in ('claimed', 'dispatched') and expires_at <= {schema}.clock()
                 then 'expired' else 'duplicate' end
     from {schema}.run where id = %(id)s::uuid),
    (select case when state in ('cancelled', 'expired') then state else 'duplicate' end
     from {schema}.outcome where id = %(id)s::uuid),
    'duplicate') as reason
"""

# Purpose: keep all leases of a node alive in one statement.  Index: primary key of run and renewal.
# Locks: renewal rows only, never `run`: a user's REPEATABLE READ transaction that completes a timer must not fail.
# Fence: copied from the run that the delivery (`token`) holds.
RENEW = """
insert into {schema}.renewal as n (id, fence, until)
select r.id, r.fence, {schema}.clock() + %(lease)s::float8 * interval '1 second'
from {schema}.run r join unnest(%(ids)s::uuid[], %(tokens)s::text[]) as u(id, token) on r.id = u.id and r.token = u.token
where r.state in ('running', 'finishing')
order by r.id
on conflict (id) do update set fence = excluded.fence, until = excluded.until where n.fence <= excluded.fence
returning id
"""

# Purpose: is the lease still ours.  Index: primary keys of run and renewal.  Locks: none.  Fence: named.
# Not when it has expired: the sweep that ends it may come at any moment, and be followed by another attempt.
HOLDS = """
select r.id from {schema}.run r left join {schema}.renewal n on n.id = r.id and n.fence = r.fence
where r.id = %(id)s::uuid and r.fence = %(fence)s and r.state in ('running', 'finishing')
  and greatest(r.deadline, n.until) > {schema}.clock()
"""


def lease(executor: Executor, wanted: Wanted) -> Lease | str:
    """Take the lease of a dispatched timer for one delivery, in autocommit; counts the attempt.

    Returns:
        The lease; or, if this delivery may not run the timer, the reason:
        ``duplicate``, ``cancelled`` or ``expired``.
    """
    rows = executor.fetch(LEASE, wanted.parameters())
    return _lease(rows[0]) if rows else _why_not(executor, wanted)


def finish_and_lease(executor: Executor, timer_id: UUID, fence: int, wanted: Wanted) -> tuple[bool, Lease | str]:
    """End a run as :func:`celery_durable.store.runs.finish` and take a lease as :func:`lease`, of two timers, in one statement.

    Returns:
        What both return.
    """
    [row] = executor.fetch(FINISH_AND_LEASE, {**ended(timer_id, fence), **wanted.parameters()})
    return row.ended is not None, _why_not(executor, wanted) if row.id is None else _lease(row)


def _why_not(executor: Executor, wanted: Wanted) -> str:
    reason: str = executor.fetch(WHY_NOT, {"id": str(wanted.timer_id)})[0].reason
    return reason


def _lease(row: Row) -> Lease:
    held = None
    if row.body is not None:
        held = Held(body=bytes(row.body), content_type=row.content_type, content_encoding=row.content_encoding)
    return Lease(
        timer_id=UUID(str(row.id)), fence=row.fence, attempt=row.attempt, due_at=_utc(row.due_at),
        dispatched_at=_utc(row.dispatched_at), started_at=_utc(row.started_at),
        expires_at=None if row.expires_at is None else _utc(row.expires_at),
        nominal=None if row.nominal is None else _utc(row.nominal), schedule=row.schedule, held=held,
    )  # fmt: skip


def _utc(instant: datetime) -> datetime:
    return instant.astimezone(timezone.utc)


def renew(executor: Executor, leases: Sequence[tuple[UUID, str]], *, seconds: float) -> set[UUID]:
    """Extend the leases of these (timer id, delivery token) pairs; returns those that are still held."""
    if not leases:
        return set()
    parameters = {
        "ids": [str(each) for each, _ in leases], "tokens": [token for _, token in leases], "lease": seconds,
    }  # fmt: skip
    return {UUID(str(row.id)) for row in executor.fetch(RENEW, parameters)}


def holds(executor: Executor, timer_id: UUID, fence: int) -> bool:
    """Whether the lease with this fence is the valid one, and has not expired."""
    return bool(executor.fetch(HOLDS, {"id": str(timer_id), "fence": fence}))
