"""The first schema: payload apart from state, one table per phase of a timer's life.

``call`` is written once and never updated, so no state change touches a payload
page; ``timer`` and ``run`` are tiny, so dead rows of the hot path cost little even
while an old snapshot is open; ``outcome`` only grows until it is pruned.
"""

from __future__ import annotations

from alembic import op

revision = "0001"
down_revision = None

CLOCK = """
-- The one clock. STABLE so that it can be an index condition; a test replaces it to move time.
create function clock() returns timestamptz language sql stable parallel safe
    as 'select pg_catalog.clock_timestamp()'
"""

READABLE = """
-- Held to what a Python datetime can say: a row written by plain SQL may say infinity, or the year 200000.
create function readable(timestamptz) returns timestamptz language sql immutable parallel safe
    as 'select case when $1 is not null then least(greatest($1, ''0002-01-01+00''), ''9998-01-01+00'') end'
"""

# Fences never repeat and only rise: no CACHE, and never reset.
FENCE = "create sequence fence"

META = "create table meta (name text primary key, value json not null)"

CALL = """
create table call (
    id uuid primary key,
    timer_id uuid not null,            -- equal to id, but for a message that replaced the first one
    created_at timestamptz not null default clock(),
    nominal timestamptz,
    leased boolean not null,
    task text not null,
    task_id text,                      -- null: the timer's id, so that only a chosen one costs an index entry
    key text,                          -- the one that this timer holds
    carried_key text,                  -- one that it only carries, of a timer before it: replays, retries of direct calls
    queue text,
    exchange text not null,
    routing_key text not null,
    content_type text not null,
    content_encoding text not null,
    headers json not null,             -- json, not jsonb: nobody queries it, and it is stored twice as fast
    properties json not null,
    tenant text,
    schedule text,
    reason text,                       -- why the schedule made it: schedule, catchup, trigger, backfill
    replay_of uuid,
    body bytea not null                -- bytes: NUL, NaN, surrogates, pickle and msgpack must pass
)
"""

TIMER = """
create table timer (
    id uuid primary key,
    call_id uuid not null,
    due_at timestamptz not null,
    wake_at timestamptz not null,      -- greatest(due_at, clock at insert): what the claim walks
    expires_at timestamptz,
    attempt integer not null default 0,
    lost integer not null default 0,
    shard smallint not null default 0,
    held boolean not null default false -- the body has returned: its value is in held_result, only callbacks are due
) with (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_insert_scale_factor = 0.2)
"""

RUN = """
create table run (
    id uuid primary key,               -- the only index: heartbeats, marks and leases stay HOT
    call_id uuid not null,
    fence bigint not null,
    due_at timestamptz not null,
    expires_at timestamptz,
    deadline timestamptz not null,     -- when somebody else may act on it
    claimed_at timestamptz not null,
    dispatched_at timestamptz,
    started_at timestamptz,
    attempt integer not null,
    lost integer not null,
    dispatches integer not null default 0,
    max_attempts integer,              -- from the lease on: null is no limit
    retry_in double precision,         -- seconds to wait should this run be lost
    shard smallint not null,
    leased boolean not null,
    held boolean not null default false,
    state text not null,               -- in a WHERE, never in an index
    token text,
    worker text,
    unknown_at timestamptz             -- when a worker first did not know its task
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 500)
"""

RENEWAL = """
create table renewal (
    id uuid primary key,
    fence bigint not null,
    until timestamptz not null
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 500)
"""

HELD_RESULT = """
create table held_result (
    id uuid primary key,
    fence bigint not null,
    content_type text not null,
    content_encoding text not null,
    body bytea not null
)
"""

OUTCOME = """
create table outcome (
    id uuid primary key,
    call_id uuid not null,
    finished_at timestamptz not null default clock(),
    due_at timestamptz,
    dispatched_at timestamptz,
    started_at timestamptz,
    fence bigint,
    attempt integer not null,
    state text not null,
    reason text,
    worker text
)
"""

DEAD = """
create table dead (
    id uuid primary key,
    call_id uuid not null,
    died_at timestamptz not null default clock(),
    attempt integer not null,
    reason text not null,
    error_type text,
    error text,
    replayed_as uuid,
    replayed_at timestamptz
)
"""

ATTEMPT = """
create table attempt (
    id bigint generated always as identity primary key,
    timer_id uuid not null,
    fence bigint not null,
    started_at timestamptz,
    ended_at timestamptz not null default clock(),
    next_due_at timestamptz,
    attempt integer not null,
    ending text not null,              -- failed, retried, lost, refused, held, unknown
    worker text,
    error_type text,
    error text,
    traceback text
)
"""

# What plain SQL need not say has a default; `next_at` is a cache that the beats fill in.
SCHEDULE = """
create table schedule (
    name text primary key,
    task text not null,
    kind text not null,                -- cron, crontab, interval, solar; code: only the program knows it
    text text not null,
    tz text,
    anchor timestamptz,
    args json not null default '[]',
    kwargs json not null default '{}',
    options json not null default '{}',
    policy json not null default '{}', -- catchup, deadline, overlap, jitter, start, end, max_runs
    owner text not null default 'api', -- code, api
    fingerprint text not null default '',
    edition integer not null default 0, -- raised by the product's own writes: anything else is an edit by plain SQL
    enabled boolean not null default true,
    paused_at timestamptz,
    paused_until timestamptz,
    paused_by text,
    paused_note text,
    cursor timestamptz not null default clock(), -- the nominal time of the newest settled occurrence
    next_at timestamptz,               -- a cache of f(specification, zone, cursor); null: never again
    last_id uuid,                      -- the newest occurrence's timer: is it still running?
    queued integer not null default 0, -- occurrences that wait for the one before to end
    fired bigint not null default 0,
    not_run json not null default '{}', -- how many did not, by reason
    last_fired_at timestamptz,
    fault text,                        -- why it cannot be loaded
    created_at timestamptz not null default clock(),
    updated_at timestamptz not null default clock()
)
"""

# An edit by plain SQL takes effect at once: the row is due, and a beat computes anew when it comes due.
# A new rhythm, a switch on, the end of a pause and an end put off begin now: what lies before is no backlog.
EDITED = """
create function schedule_edited() returns trigger language plpgsql as $$
declare
    present timestamptz;
begin
    if tg_op = 'INSERT' then
        if new.edition > 0 then
            return new;
        end if;
    elsif new.edition <> old.edition or (
        (new.kind, new.text, new.tz, new.anchor, new.enabled, new.paused_at, new.paused_until, new.policy::text,
         new.task, new.args::text, new.kwargs::text, new.options::text)
        is not distinct from
        (old.kind, old.text, old.tz, old.anchor, old.enabled, old.paused_at, old.paused_until, old.policy::text,
         old.task, old.args::text, old.kwargs::text, old.options::text)
    ) then
        return new;
    end if;
    execute format('select %I.clock()', tg_table_schema) into present;
    if tg_op = 'UPDATE' and (
        (new.kind, new.text, new.tz, new.anchor, new.enabled) is distinct from
        (old.kind, old.text, old.tz, old.anchor, old.enabled) or (old.paused_at is not null and new.paused_at is null)
        or (old.next_at is null and old.paused_at is null)
    ) then
        new.cursor := greatest(new.cursor, present);
    end if;
    new.fault := null;
    if tg_op = 'UPDATE' and new.enabled and not old.enabled then
        execute format('delete from %I.occurrence where schedule = $1 and reason in (''queued'', ''backfill'')',
                       tg_table_schema) using new.name;
        new.queued := 0;
    end if;
    new.next_at := present;
    new.updated_at := present;
    perform pg_notify(tg_table_schema, 'schedule');
    return new;
end $$
"""

# Who waits for a run of a schedule that is gone waits for nothing; a later one of that name is another.
DELETED = """
create function schedule_deleted() returns trigger language plpgsql as $$
begin
    execute format('delete from %I.occurrence where schedule = $1 and reason in (''queued'', ''backfill'')',
                   tg_table_schema) using old.name;
    return null;
end $$
"""

EDITED_TRIGGERS = (
    "create trigger deleted after delete on schedule for each row execute function schedule_deleted()",
    "create trigger inserted before insert on schedule for each row execute function schedule_edited()",
    "create trigger edited before update of kind, text, tz, anchor, policy, enabled, paused_at, paused_until, task, "
    "args, kwargs, options on schedule for each row execute function schedule_edited()",
)

OCCURRENCE = """
create table occurrence (
    schedule text not null,
    nominal timestamptz not null,
    noted_at timestamptz not null default clock(),
    reason text not null,              -- why it did not run; queued, backfill: it waits for the one before to end
    primary key (schedule, nominal)
)
"""

BEAT = """
create table beat (
    id uuid primary key,
    node text not null,
    pid integer not null,
    version text not null,
    started_at timestamptz not null default clock(),
    seen_at timestamptz not null default clock(),
    dispatched bigint not null default 0,
    code text                          -- digest of the recurring entries in its program
)
"""

INDEXES = (
    "create unique index call_key on call (key) where key is not null",
    "create index call_task_id on call (task_id) where task_id is not null",
    "create index call_schedule on call (schedule, nominal) where schedule is not null",
    "create index call_replaced on call (timer_id) where timer_id <> id",
    "create index timer_wake on timer (shard, wake_at)",
    "create index outcome_finished on outcome (finished_at)",
    "create index dead_died on dead (died_at, id)",
    "create index attempt_timer on attempt (timer_id)",
    "create index occurrence_noted on occurrence (noted_at) where reason not in ('queued', 'backfill')",
    "create index schedule_next on schedule (next_at) where enabled",
)

TABLES = (
    META, CALL, TIMER, RUN, RENEWAL, HELD_RESULT, OUTCOME, DEAD, ATTEMPT, SCHEDULE, OCCURRENCE, BEAT,
)  # fmt: skip

SEED = """insert into meta (name, value) values ('schema_major', '1'), ('shards', '1')"""


def upgrade() -> None:
    """Create everything."""
    for statement in (CLOCK, READABLE, FENCE, *TABLES, *INDEXES, EDITED, DELETED, *EDITED_TRIGGERS, SEED):
        op.execute(statement)


def downgrade() -> None:
    """Remove everything: the timers are gone with it."""
    for statement in reversed(TABLES):
        op.execute("drop table " + statement.split()[2])
    op.execute("drop function schedule_edited()")
    op.execute("drop function schedule_deleted()")
    op.execute("drop sequence fence")
    op.execute("drop function clock()")
    op.execute("drop function readable(timestamptz)")
