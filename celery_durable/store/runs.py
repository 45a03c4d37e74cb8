"""Runs: how they end, each statement fenced.

Each names the fence that the lease took (:mod:`celery_durable.store.leases`).  No row
back means the lease is no longer ours: nothing was changed, nothing is retried.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any
from uuid import UUID

from celery_durable.core.states import State
from celery_durable.core.text import storable
from celery_durable.store.executor import Executor, Row
from celery_durable.store.timers import ANNOUNCED, NewTimer

#: A task without a limit of attempts ends after this many lost workers all the same.
MAX_LOST = 10
#: Shortest pause before a timer whose task a worker did not know is dispatched again, in seconds.
UNKNOWN_PAUSE = 5


@dataclass(frozen=True, kw_only=True)
class Held:
    """A stored return value."""

    body: bytes
    content_type: str
    content_encoding: str


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why an attempt ended, as it is kept."""

    error_type: str
    error: str
    traceback: str | None = None


#: The part that ends a run, for statements that do more than that.
FINISHED = """
gone as (delete from {schema}.run where id = %(ended_id)s::uuid and fence = %(ended_fence)s
         and state in ('running', 'finishing') returning *),
unheld as (delete from {schema}.held_result h using gone where h.id = gone.id),
ended as (
    insert into {schema}.outcome (id, call_id, due_at, dispatched_at, started_at, fence, attempt, state, worker)
    select id, call_id, due_at, dispatched_at, started_at, fence, attempt, 'succeeded', worker from gone
    on conflict do nothing)"""

# Purpose: the run succeeded.  Index: primary key; no payload page is touched.  Locks: the row.  Fence: named.
# An outcome of that id can only have been made by plain SQL: it stands, here and below.
FINISH = f"with {FINISHED} select id from gone"

# Purpose: the delivery that had this timer's message died before it took the lease: dispatch it again now.
# Index: primary key.  Locks: the row.  Fence: a fresh one: a beat that has not marked its dispatch yet must not put
# this off.
NUDGE = """
update {schema}.run set state = 'claimed', fence = nextval('{schema}.fence'), deadline = {schema}.clock()
where id = %(id)s::uuid and state in ('claimed', 'dispatched') returning id
"""

# Purpose: a worker does not know this timer's task: dispatch it again, after a pause that grows with the time since
# this was first met.  Index: primary key.  Locks: the row.  Fence: a fresh one: a mark must not put this off.
UNKNOWN = """
with met as (
    update {schema}.run
    set state = 'claimed', fence = nextval('{schema}.fence'), unknown_at = coalesce(unknown_at, {schema}.clock()),
        deadline = {schema}.clock() + interval '1 second' * least(600, {least} + coalesce(
            extract(epoch from {schema}.clock())::float8 - extract(epoch from unknown_at)::float8, 0) / 2)
    where id = %(id)s::uuid and call_id = %(call_id)s::uuid and leased and state in ('claimed', 'dispatched')
    returning *)
insert into {schema}.attempt (timer_id, fence, attempt, ending, worker, next_due_at, error_type, error)
select m.id, m.fence, m.attempt, 'unknown', %(worker)s::text, m.deadline, 'NotRegistered',
       'this worker does not know the task ' || c.task
from met m join {schema}.call c on c.id = m.call_id
"""

# Purpose: nobody has known its task for the whole grace: dead.  Index: primary key.  Locks: the row.
# Fence: none named; the state is.
UNKNOWN_TOO_LONG = """
with gone as (
    delete from {schema}.run
    where id = %(id)s::uuid and call_id = %(call_id)s::uuid and leased and state in ('claimed', 'dispatched')
      and unknown_at <= {schema}.clock() - %(grace)s::float8 * interval '1 second' returning *),
ended as (
    insert into {schema}.outcome (id, call_id, due_at, dispatched_at, fence, attempt, state, reason)
    select id, call_id, due_at, dispatched_at, fence, attempt, 'dead', 'unknown task' from gone
    on conflict do nothing),
buried as (
    insert into {schema}.dead (id, call_id, attempt, reason, error_type, error)
    select g.id, g.call_id, g.attempt, 'unknown task', 'NotRegistered', 'no worker knew the task ' || c.task
    from gone g join {schema}.call c on c.id = g.call_id
    on conflict do nothing)
select id from gone
"""

# Purpose: what a parent that lost its child needs to settle the run.  Index: primary key.  Fence: found by token.
BY_TOKEN = """
select id, fence, attempt, max_attempts, coalesce(retry_in, 0) as retry_in, lost, state from {schema}.run
where id = %(id)s::uuid and token = %(token)s::text and state in ('running', 'finishing')
"""

# Purpose: the body has returned, its callbacks are not out yet: keep the value.  Index: primary key.  Fence: named.
# It cannot expire any more, or be cancelled.
HOLD = """
with held as (update {schema}.run set state = 'finishing', held = true, expires_at = null
              where id = %(id)s::uuid and fence = %(fence)s
              and state in ('running', 'finishing') returning id, fence)
insert into {schema}.held_result (id, fence, content_type, content_encoding, body)
select id, fence, %(content_type)s::text, %(content_encoding)s::text, %(body)s::bytea from held
on conflict (id) do update set fence = excluded.fence, content_type = excluded.content_type,
    content_encoding = excluded.content_encoding, body = excluded.body
returning id
"""

_ATTEMPT = """insert into {schema}.attempt (timer_id, fence, started_at, attempt, ending, worker, next_due_at,
                                            error_type, error, traceback)"""

# Purpose: back to waiting until the back-off is over.  Index: primary key.  Locks: the row.  Fence: named.
# A call id of its own carries a changed message; the one before, unless it is the first, is referred to no more.
# A body that has returned is never undone: for one the state is `finishing`, and only its callbacks are due again.
RETRY = """
with gone as (delete from {schema}.run where id = %(id)s::uuid and fence = %(fence)s and state = %(state)s::text
              returning *),
back as (
    insert into {schema}.timer (id, call_id, due_at, wake_at, expires_at, attempt, lost, shard, held)
    select id, coalesce(%(call_id)s::uuid, call_id), d.at, greatest(d.at, {schema}.clock()), expires_at, attempt,
           lost + %(lost)s::integer, shard, held
    from gone, lateral (select coalesce(%(due_at)s::timestamptz,
                                        {schema}.clock() + %(delay)s::float8 * interval '1 second') as at) d
    returning id, due_at, wake_at),
superseded as (
    delete from {schema}.call c using gone
    where c.id = gone.call_id and c.id <> gone.id and %(call_id)s::uuid is not null),
told as (
    {attempt}
    select g.id, g.fence, g.started_at, g.attempt, %(ending)s::text, g.worker, back.due_at, %(error_type)s::text,
           %(error)s::text, %(traceback)s::text from gone g join back on back.id = g.id)
select id, due_at, case when wake_at <= {schema}.clock() + %(announced)s::float8 * interval '1 second'
    then pg_notify(trim(both '"' from '{schema}'), extract(epoch from wake_at)::text)::text end from back
""".replace("{attempt}", _ATTEMPT)

# Purpose: the run has failed for the last time.  Index: primary key.  Locks: the row.  Fence: named.
BURY = """
with gone as (delete from {schema}.run where id = %(id)s::uuid and fence = %(fence)s and state in ('running', 'finishing')
              returning *),
ended as (
    insert into {schema}.outcome (id, call_id, due_at, dispatched_at, started_at, fence, attempt, state, reason, worker)
    select id, call_id, due_at, dispatched_at, started_at, fence, attempt, 'dead', %(reason)s::text, worker from gone
    on conflict do nothing),
unheld as (delete from {schema}.held_result h using gone where h.id = gone.id),
told as (
    {attempt}
    select id, fence, started_at, attempt, %(ending)s::text, worker, null, %(error_type)s::text, %(error)s::text,
           %(traceback)s::text from gone),
buried as (
    insert into {schema}.dead (id, call_id, attempt, reason, error_type, error)
    select id, call_id, attempt, %(reason)s::text, %(error_type)s::text, %(error)s::text from gone
    on conflict do nothing)
select id from gone
""".replace("{attempt}", _ATTEMPT)

# Purpose: a user's revoke or Ignore ends the run.  Index: primary key.  Locks: the row.  Fence: named.
DROP = """
with gone as (delete from {schema}.run where id = %(id)s::uuid and fence = %(fence)s and state in ('running', 'finishing')
              returning *),
unheld as (delete from {schema}.held_result h using gone where h.id = gone.id),
ended as (
    insert into {schema}.outcome (id, call_id, due_at, dispatched_at, started_at, fence, attempt, state, reason, worker)
    select id, call_id, due_at, dispatched_at, started_at, fence, attempt, %(state)s::text, %(reason)s::text, worker
    from gone on conflict do nothing)
select id from gone
"""

# Purpose: the record that a holder whose lease was replaced tried to change something.  Index: none.  Locks: none.
REFUSED = (
    _ATTEMPT
    + """
values (%(id)s::uuid, %(fence)s, null, %(attempt)s, 'refused', %(worker)s::text, null, %(error_type)s::text,
        %(error)s::text, %(traceback)s::text)
"""
)

# Purpose: a changed message of a timer in motion.  Index: none.  Locks: none.
NEW_MESSAGE = """
insert into {schema}.call (id, timer_id, task, leased, body, content_type, content_encoding, headers, properties,
                           exchange, routing_key, queue, task_id, tenant)
select %(new_id)s::uuid, c.timer_id, %(task)s::text, true, %(body)s::bytea, %(content_type)s::text,
       %(content_encoding)s::text, %(headers)s::json, %(properties)s::json, %(exchange)s::text, %(routing_key)s::text,
       %(queue)s::text, c.task_id, c.tenant
from {schema}.call c where c.id = %(id)s::uuid
on conflict do nothing
"""

# Purpose: how a run ended under a fence: was it this holder's own statement, whose answer the network swallowed?
# Index: primary key of outcome, attempt_timer.  Locks: none.  Fence: named.
ENDINGS = """
select state as ending from {schema}.outcome where id = %(id)s::uuid and fence = %(fence)s
union all
select ending from {schema}.attempt where timer_id = %(id)s::uuid and fence = %(fence)s
"""

# Purpose: where a run stands under a fence, once no transaction is about to end it.  Index: primary keys.
# Locks: waits for the row's holder.  Fence: named.
STANDING_RUN = """
select state from {schema}.run where id = %(id)s::uuid and fence = %(fence)s for update
"""
STANDING_OUTCOME = "select state from {schema}.outcome where id = %(id)s::uuid and fence = %(fence)s"

NO_FAILURE = Failure(error_type="", error="")


def by_token(executor: Executor, timer_id: UUID, token: str) -> Row | None:
    """The run that a delivery of this node holds, if it holds one."""
    rows = executor.fetch(BY_TOKEN, {"id": str(timer_id), "token": token})
    return rows[0] if rows else None


def nudge(executor: Executor, timer_id: UUID) -> bool:
    """Have a dispatched timer whose message is known to be lost dispatched again at once."""
    return bool(executor.fetch(NUDGE, {"id": str(timer_id)}))


def unknown(executor: Executor, *, timer_id: UUID, call_id: UUID, worker: str, grace: float) -> bool:
    """A worker does not know the task: put the next dispatch off, or end the timer after `grace` seconds of that.

    Returns:
        Whether the timer is dead now.
    """
    parameters = {"id": str(timer_id), "call_id": str(call_id), "worker": worker, "grace": grace}
    if executor.fetch(UNKNOWN_TOO_LONG, parameters):
        return True
    executor.fetch(UNKNOWN.replace("{least}", str(UNKNOWN_PAUSE)), parameters)
    return False


def ended(timer_id: UUID, fence: int) -> dict[str, Any]:
    """The parameters of :data:`FINISHED`."""
    return {"ended_id": str(timer_id), "ended_fence": fence}


def finish(executor: Executor, timer_id: UUID, fence: int) -> bool:
    """End a run as succeeded; False when the lease is no longer ours."""
    return bool(executor.fetch(FINISH, ended(timer_id, fence)))


def hold(executor: Executor, timer_id: UUID, fence: int, held: Held) -> bool:
    """Keep the return value until callbacks are out; False when the lease is no longer ours."""
    parameters = {
        "id": str(timer_id), "fence": fence, "body": held.body, "content_type": held.content_type,
        "content_encoding": held.content_encoding,
    }  # fmt: skip
    return bool(executor.fetch(HOLD, parameters))


def retry(
    executor: Executor, timer_id: UUID, fence: int, *, delay: float | None = None, due_at: datetime | None = None,
    failure: Failure = NO_FAILURE, ending: str = "failed", lost: bool = False, call_id: UUID | None = None,
    finishing: bool = False,
) -> datetime | None:  # fmt: skip
    """Put a run back to waiting.

    Arguments:
        executor: anything.
        timer_id: the timer.
        fence: of the lease.
        delay: seconds from now; or
        due_at: an aware instant.
        failure: what ended this attempt.
        ending: ``failed``, ``retried`` (the task asked for it), ``lost`` or ``held``.
        lost: count a lost worker, or callbacks that were not sent.
        call_id: the version of the message to send next, if it changed.
        finishing: the body has returned and its value is held; such a run only, otherwise only one that is not.

    Returns:
        The new due instant; None when the lease is no longer ours.
    """
    rows = executor.fetch(
        RETRY,
        {
            "id": str(timer_id), "fence": fence, "delay": delay, "due_at": due_at, "ending": ending, "lost": int(lost),
            "call_id": None if call_id is None else str(call_id), "announced": ANNOUNCED,
            "state": "finishing" if finishing else "running", **_kept(failure),
        },
    )  # fmt: skip
    return rows[0].due_at.astimezone(timezone.utc) if rows else None


def bury(
    executor: Executor, timer_id: UUID, fence: int, *, reason: str, failure: Failure, ending: str = "failed"
) -> bool:
    """Make a dead letter of a run; False when the lease is no longer ours."""
    parameters = {"id": str(timer_id), "fence": fence, "reason": reason, "ending": ending, **_kept(failure)}
    return bool(executor.fetch(BURY, parameters))


def drop(executor: Executor, timer_id: UUID, fence: int, *, state: str, reason: str) -> bool:
    """End a run as ``cancelled`` or ``skipped``; False when the lease is no longer ours."""
    return bool(executor.fetch(DROP, {"id": str(timer_id), "fence": fence, "state": state, "reason": reason}))


def refused(
    executor: Executor, timer_id: UUID, fence: int, attempt: int, worker: str, failure: Failure = NO_FAILURE
) -> None:
    """Record that a holder without a valid lease was refused."""
    parameters = {"id": str(timer_id), "fence": fence, "attempt": attempt, "worker": worker, **_kept(failure)}
    executor.fetch(REFUSED, parameters)


def endings(executor: Executor, timer_id: UUID, fence: int) -> set[str]:
    """The state and the attempt's ending recorded under this fence; empty while the run lives, or when it was pruned."""
    return {row.ending for row in executor.fetch(ENDINGS, {"id": str(timer_id), "fence": fence})}


def standing(executor: Executor, timer_id: UUID, fence: int) -> State | None:
    """The state of a run under this fence, after any transaction that is about to end it; None: replaced or pruned."""
    parameters = {"id": str(timer_id), "fence": fence}
    for statement in (STANDING_RUN, STANDING_OUTCOME):
        rows = executor.fetch(statement, parameters)
        if rows:
            return State(rows[0].state)
    return None


def new_message(executor: Executor, timer: NewTimer, call_id: UUID) -> None:
    """Store a changed message of a timer in motion under the version `call_id`."""
    executor.fetch(NEW_MESSAGE, {**timer.parameters(), "new_id": str(call_id)})


def _kept(failure: Failure) -> dict[str, Any]:
    return {
        "error_type": storable(failure.error_type, 500) or None, "error": storable(failure.error, 20_000) or None,
        "traceback": None if failure.traceback is None else storable(failure.traceback, 100_000),
    }  # fmt: skip
