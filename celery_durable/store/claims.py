"""Claims: a beat takes due timers out of waiting for a bounded time, and marks what the broker confirmed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import NamedTuple
from uuid import UUID

from celery_durable.core.text import storable
from celery_durable.store.executor import Executor, Row

#: The lower bound of a scan that must see everything.
UNBOUNDED = "-infinity"


class Claim(NamedTuple):
    """One claimed run with its message as stored: JSON is read by whoever can quarantine a bad row.

    A tuple in the order of the statements' columns: a dataclass costs ten times as much to make.
    """

    id: UUID
    call_id: UUID
    fence: int
    due_at: float
    """Epoch seconds; a row written by plain SQL may say ``infinity``."""
    expires_in: float | None
    """Seconds until the timer expires, by the database's clock."""
    task: str
    leased: bool
    body: bytes
    content_type: str
    content_encoding: str
    headers: str
    properties: str
    exchange: str
    routing_key: str
    queue: str | None


class Claimed(NamedTuple):
    """One page taken out of waiting."""

    claims: list[Claim]
    held: int
    """Rows of the page, those that expired among them."""
    last: float | None
    """The latest wake time among them, in epoch seconds; None: there was none."""


_WIDTH = len(Claim._fields)

_MESSAGE = """c.task, c.leased, c.body, c.content_type, c.content_encoding, c.headers::text as headers,
    c.properties::text as properties, c.exchange, c.routing_key, c.queue"""

# The claims that are still this beat's: locked in one order, or two beats could deadlock, and skipping others' locks.
_MINE = """mine as materialized (
    select r.id from {schema}.run r join unnest(%(ids)s::uuid[], %(fences)s::bigint[]) as u(id, fence)
           on r.id = u.id and r.fence = u.fence
    where r.state = 'claimed' order by r.id for update of r skip locked)"""

# Purpose: take a page of due timers out of waiting; those past `expires` end here, decided once for each row: two
# looks at the clock could leave it in neither table.  A row made by plain SQL whose id has a run or an outcome already
# is dropped, which its attempts tell: it would run a finished timer again, and as an error stop its whole page for ever.
# Index: timer_wake, one range between watermark and now, then primary keys.
# Locks: the page's rows, skipping others' locks.  A row whose payload this snapshot does not see stays: a replacement
# may have been committed after the snapshot and before the lock.  It comes back without a fence; the last row tells how
# many rows the page held, and the latest wake time among them.
# Fence: a fresh one for each row.  MATERIALIZED keeps the LIMIT from being planned away; the number stands in
# the text because a generic plan for a parameter would scan the whole table.  Instants become numbers before they are
# subtracted: a row written by plain SQL may say `infinity`, which Postgres 16 and older refuse to subtract.
CLAIM = """
with due as materialized (
    select id, call_id, wake_at, (expires_at <= {schema}.clock()) is true as lapsed from {schema}.timer
    where shard = %(shard)s and wake_at >= %(watermark)s::timestamptz and wake_at <= {schema}.clock()
    order by wake_at limit {page} for update skip locked),
gone as (
    delete from {schema}.timer t using due
    where t.id = due.id and (lapsed or exists (select from {schema}.call c where c.id = due.call_id))
    returning t.*, lapsed),
ended as (
    insert into {schema}.outcome (id, call_id, due_at, attempt, state, reason)
    select id, call_id, due_at, attempt, 'expired', 'expired before dispatch' from gone where lapsed
    on conflict do nothing),
moved as (
    insert into {schema}.run (id, call_id, fence, due_at, expires_at, deadline, claimed_at, attempt, lost, shard,
                              leased, held, state)
    select g.id, g.call_id, nextval('{schema}.fence'), g.due_at, g.expires_at,
           {schema}.clock() + %(timeout)s::float8 * interval '1 second', {schema}.clock(), g.attempt, g.lost, g.shard,
           c.leased, g.held, 'claimed'
    from gone g join {schema}.call c on c.id = g.call_id
    where not g.lapsed and not exists (select from {schema}.outcome o where o.id = g.id)
    on conflict do nothing returning id, call_id, fence, due_at, expires_at),
told as (
    insert into {schema}.attempt (timer_id, fence, attempt, ending, error)
    select id, 0, attempt, 'refused', 'a run or an outcome of this id exists already'
    from gone where not lapsed and id not in (select id from moved))
select m.id, m.call_id, m.fence, extract(epoch from m.due_at)::float8 as due_at,
       extract(epoch from m.expires_at)::float8 - extract(epoch from {schema}.clock())::float8 as expires_in, {message},
       null::bigint as held, null::float8 as last
from moved m join {schema}.call c on c.id = m.call_id
union all
select id, {nothing}, null, null from due where id not in (select id from gone)
union all
select null, {nothing}, count(*), extract(epoch from max(wake_at))::float8 from due
order by due_at
""".replace("{message}", _MESSAGE).replace(
    "{nothing}", "null, null, null, null, null, null, null, null, null, null, null, null, null, null"
)

# Purpose: end the timers that have no payload, which only plain SQL can bring about: first their locks, then a look
# that sees whatever was committed before them.  Index: primary keys.  Locks: the rows, skipping others'.
LOCK_WAITING = "select id from {schema}.timer where id = any(%(ids)s::uuid[]) order by id for update skip locked"
END_WITHOUT_PAYLOAD = """
with gone as (
    delete from {schema}.timer t where id = any(%(ids)s::uuid[])
    and not exists (select from {schema}.call c where c.id = t.call_id) returning *)
insert into {schema}.outcome (id, call_id, due_at, attempt, state, reason)
select id, call_id, due_at, attempt, 'dead', 'payload missing' from gone
on conflict do nothing
"""

# Purpose: claim again, in place, what was claimed or dispatched and then forgotten.  Index: primary key.
# Locks: the page's rows, skipping others'.  Fence: a fresh one; deadline and state are checked again.
RECLAIM = """
with late as materialized (
    select id from {schema}.run
    where id = any(%(ids)s::uuid[]) and state in ('claimed', 'dispatched') and deadline <= {schema}.clock()
      and (expires_at is null or expires_at > {schema}.clock())
    order by id for update skip locked),
again as (
    update {schema}.run r
    set fence = nextval('{schema}.fence'), state = 'claimed', claimed_at = {schema}.clock(),
        deadline = {schema}.clock() + %(timeout)s::float8 * interval '1 second'
    from late where r.id = late.id
    returning r.id, r.call_id, r.fence, r.due_at, r.expires_at)
select a.id, a.call_id, a.fence, extract(epoch from a.due_at)::float8 as due_at,
       extract(epoch from a.expires_at)::float8 - extract(epoch from {schema}.clock())::float8 as expires_in, {message}
from again a join {schema}.call c on c.id = a.call_id order by a.due_at
""".replace("{message}", _MESSAGE)

# Purpose: when the next timer is due, and what the time is.  Index: timer_wake, its first entry at or after the
# watermark.  Locks: none.
NEXT = """
select extract(epoch from {schema}.clock())::float8 as now,
       (select extract(epoch from wake_at)::float8 from {schema}.timer
        where shard = %(shard)s and wake_at >= %(watermark)s::timestamptz order by wake_at limit 1) as wake_at
"""

# Purpose: the shards there are and the database's time.  Index: none (one row).  Locks: none.
SHARDS = """
select value::text::int as shards, extract(epoch from {schema}.clock())::float8 as now
from {schema}.meta where name = 'shards'
"""

# Purpose: leased timers are dispatched once the broker has confirmed them.  Index: primary key.
# Locks: the rows in one order, skipping others': a cancel in an open transaction must not hold a beat up; if it comes
# to nothing the message is published again, and the lease keeps it single.
# Fence: named; a run that a quick worker has leased, or another beat claimed again, is left alone.
MARK_DISPATCHED = """
with {mine}
update {schema}.run r
set state = 'dispatched', dispatched_at = coalesce(r.dispatched_at, {schema}.clock()),
    deadline = {schema}.clock() + interval '1 second' *
               least(%(redispatch_max)s::float8, %(redispatch_after)s::float8 * 2 ^ least(r.dispatches, 20)),
    dispatches = r.dispatches + 1
from mine where r.id = mine.id
returning r.id, extract(epoch from r.dispatched_at)::float8 - extract(epoch from r.due_at)::float8 as lateness
""".replace("{mine}", _MINE)

# Purpose: plain tasks end as sent.  Index: primary key.  Locks, fence: as above.
MARK_SENT = """
with {mine},
gone as (delete from {schema}.run r using mine where r.id = mine.id returning r.*),
ended as (
    insert into {schema}.outcome (id, call_id, due_at, dispatched_at, fence, attempt, state)
    select id, call_id, due_at, {schema}.clock(), fence, attempt, 'sent' from gone
    on conflict do nothing)
select id, extract(epoch from {schema}.clock())::float8 - extract(epoch from due_at)::float8 as lateness from gone
""".replace("{mine}", _MINE)

# Purpose: let go of claims that were not published, to be tried again after a pause.  Index: primary key.
# Locks: the rows, as above.  Fence: named.
RELEASE = """
with {mine}
update {schema}.run r set deadline = {schema}.clock() + %(pause)s::float8 * interval '1 second'
from mine where r.id = mine.id returning r.id
""".replace("{mine}", _MINE)

# Purpose: a row that no broker can ever carry is kept as a dead letter.  Index: primary key.  Locks: the row.
# Fence: named.
QUARANTINE = """
with gone as (delete from {schema}.run where id = %(id)s::uuid and fence = %(fence)s and state = 'claimed' returning *),
ended as (
    insert into {schema}.outcome (id, call_id, due_at, fence, attempt, state, reason)
    select id, call_id, due_at, fence, attempt, 'dead', 'undispatchable' from gone
    on conflict do nothing),
buried as (
    insert into {schema}.dead (id, call_id, attempt, reason, error_type, error)
    select id, call_id, attempt, 'undispatchable', %(error_type)s::text, %(error)s::text from gone
    on conflict do nothing)
select id from gone
"""


def claim(executor: Executor, *, shard: int, watermark: float | str, page: int, timeout: float) -> Claimed:
    """Claim due timers of one shard in the order of their wake time.

    Arguments:
        executor: in autocommit: no transaction may be open while the page is published.
        shard: which shard.
        watermark: epoch seconds, lower bound of the scan, or :data:`UNBOUNDED`.
        page: most rows.
        timeout: seconds after which any beat may claim them again.

    Returns:
        The claims to publish, how many rows the page held, and how far it went.
    """
    rows = executor.fetch(
        CLAIM.replace("{page}", str(int(page))),
        {"shard": shard, "watermark": _instant(watermark), "timeout": timeout},
    )
    hidden = [str(row.id) for row in rows if row.fence is None and row.id is not None]
    if hidden:
        with executor.atomic():
            locked = [str(row.id) for row in executor.fetch(LOCK_WAITING, {"ids": hidden})]
            executor.fetch(END_WITHOUT_PAYLOAD, {"ids": locked})
    [page_row] = [row for row in rows if row.held is not None]
    found = [Claim._make(row[:_WIDTH]) for row in rows if row.fence is not None]
    return Claimed(claims=found, held=page_row.held, last=page_row.last)


def reclaim(executor: Executor, ids: Sequence[UUID], *, timeout: float) -> list[Claim]:
    """Claim runs whose claim or dispatch nobody followed up; each keeps its place in ``run``."""
    return [
        Claim._make(row) for row in executor.fetch(RECLAIM, {"ids": [str(each) for each in ids], "timeout": timeout})
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outlook:
    """When a shard has work next, in epoch seconds of the database's clock."""

    now: float
    wake_at: float | None


def next_due(executor: Executor, *, shard: int, watermark: float | str) -> Outlook:
    """When the next timer of the shard is due (in the past: overdue); `wake_at` None when none waits."""
    row = executor.fetch(NEXT, {"shard": shard, "watermark": _instant(watermark)})[0]
    return Outlook(now=row.now, wake_at=row.wake_at)


def _instant(watermark: float | str) -> datetime | str:
    return watermark if isinstance(watermark, str) else datetime.fromtimestamp(watermark, timezone.utc)


def shards(executor: Executor) -> tuple[int, float]:
    """How many shards there are, and the database's time in epoch seconds."""
    row = executor.fetch(SHARDS)[0]
    return row.shards, row.now


def _fenced(claims: Sequence[Claim]) -> dict[str, object]:
    return {"ids": [str(each.id) for each in claims], "fences": [each.fence for each in claims]}


def mark(
    executor: Executor, confirmed: Sequence[Claim], *, redispatch_after: float, redispatch_max: float
) -> dict[UUID, float]:
    """Record what the broker has confirmed: leased timers as dispatched, plain ones as sent.

    Returns:
        The lateness in seconds of each timer marked; those that a worker overtook are not among them.
    """
    rows: list[Row] = []
    leased = [each for each in confirmed if each.leased]
    plain = [each for each in confirmed if not each.leased]
    if leased:
        times = {"redispatch_after": redispatch_after, "redispatch_max": redispatch_max}
        rows += executor.fetch(MARK_DISPATCHED, {**_fenced(leased), **times})
    if plain:
        rows += executor.fetch(MARK_SENT, _fenced(plain))
    return {row.id: row.lateness for row in rows}


def release(executor: Executor, claims: Sequence[Claim], *, pause: float) -> None:
    """Make claims available again after `pause` seconds, because nothing of them reached the broker."""
    if claims:
        executor.fetch(RELEASE, {**_fenced(claims), "pause": pause})


def quarantine(executor: Executor, claim: Claim, error: BaseException) -> bool:
    """Turn a claim that can never be published into a dead letter; False when it is no longer ours."""
    parameters = {
        "id": str(claim.id), "fence": claim.fence, "error_type": type(error).__name__,
        "error": storable(str(error), 8000),
    }  # fmt: skip
    return bool(executor.fetch(QUARANTINE, parameters))
