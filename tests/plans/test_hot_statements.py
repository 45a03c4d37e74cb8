"""The statements of the hot path read what they return, whatever waits beside it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any
from uuid import UUID

import pytest
from celery import Celery

from celery_durable.settings import Settings
from celery_durable.store import claims, dead_letters, expiry, history, leases, migrations, runs, schedules, timers
from celery_durable.store.database import Database
from celery_durable.store.executor import Executor, qualified
from tests.servers.postgres import PostgresServer

WAITING = 200_000

# A fifth is due, the rest lies in the future; every tenth has a key.
FILL = """
insert into {schema}.call (id, timer_id, leased, task, exchange, routing_key, content_type, content_encoding, headers,
                           properties, body, key)
select md5(n::text)::uuid, md5(n::text)::uuid, true, 't', '', 'q', 'application/json', 'utf-8', '{}', '{}', 'x',
       case when n % 10 = 0 then 'key-' || n end
from generate_series(1, {number}) n;
insert into {schema}.timer (id, call_id, due_at, wake_at)
select md5(n::text)::uuid, md5(n::text)::uuid, d.at, d.at
from generate_series(1, {number}) n, lateral (select {schema}.clock() + (n - {number} / 5) * interval '1 second' as at) d;
"""


ENDED: dict[str, object] = {"ended_id": "c4ca4238-a0b9-2382-0dcc-509a6f75849b", "ended_fence": 1}
WANTED: dict[str, object] = leases.Wanted(
    timer_id=UUID("c81e728d-9d4c-2f63-6f06-7f89cc14862c"), call_id=UUID("c81e728d-9d4c-2f63-6f06-7f89cc14862c"),
    token="1-a", worker="w", seconds=30, max_attempts=3, base=1, cap=60,
).parameters()  # fmt: skip


@pytest.fixture(scope="module")
def database(postgres: PostgresServer) -> Iterator[Database]:
    name = postgres.create_database()
    database = Database(Settings(database_url=postgres.url(name)))
    migrations.upgrade(database, app_name=Celery("plans", set_as_current=False).main)
    with database.connect("fill") as connection:
        connection.execute(qualified(FILL.replace("{number}", str(WAITING)), database.schema))
        connection.execute("vacuum analyze")
    yield database
    database.close()
    postgres.drop_database(name)


def explained(database: Database, sql: str, parameters: Mapping[str, object]) -> tuple[set[str], set[str], float]:
    """Run a statement and take it back; returns indexes used, tables read in whole, rows read from tables."""
    with database.connect("explain") as connection, connection.transaction(force_rollback=True):
        text = "explain (analyze, buffers, format json) " + qualified(sql, database.schema)
        row = connection.execute(text, parameters).fetchone()
    assert row is not None
    plan = row[0] if isinstance(row[0], list) else json.loads(row[0])
    indexes: set[str] = set()
    whole: set[str] = set()
    read = 0.0
    waiting = [plan[0]["Plan"]]
    while waiting:
        node: dict[str, Any] = waiting.pop()
        waiting += node.get("Plans", [])
        if "Index Name" in node:
            indexes.add(node["Index Name"])
        if node["Node Type"] == "Seq Scan":
            whole.add(node["Relation Name"])
        if "Relation Name" in node:
            # EXPLAIN reports averages of a loop.
            removed = node.get("Rows Removed by Filter", 0) + node.get("Rows Removed by Index Recheck", 0)
            read += (node["Actual Rows"] + removed) * node["Actual Loops"]
    return indexes, whole, read


def test_a_claim_reads_the_page_that_it_takes(database: Database) -> None:
    page = 500
    parameters = {"shard": 0, "watermark": "-infinity", "timeout": 8.0}
    indexes, whole, read = explained(database, claims.CLAIM.replace("{page}", str(page)), parameters)
    assert "timer_wake" in indexes
    assert not whole & {"timer", "call"}
    # Scan, delete, move, and the join with the payload: each touches a row of the page once.
    assert read <= page * 12


def test_a_claim_with_nothing_due_reads_nothing(database: Database) -> None:
    parameters = {"shard": 0, "watermark": "3000-01-01", "timeout": 8.0}
    indexes, whole, read = explained(database, claims.CLAIM.replace("{page}", "500"), parameters)
    assert "timer_wake" in indexes
    assert not whole & {"timer", "call"}
    assert read <= 2


@pytest.mark.parametrize(
    ("sql", "parameters", "index"),
    [
        (timers.FIND, {"id": "c4ca4238-a0b9-2382-0dcc-509a6f75849b"}, "timer_pkey"),
        (timers.FIND_KEY, {"id": "key-100"}, "call_key"),
        (timers.CANCEL_WAITING, {"id": "c4ca4238-a0b9-2382-0dcc-509a6f75849b", "reason": None}, "timer_pkey"),
        (leases.HOLDS, {"id": "c4ca4238-a0b9-2382-0dcc-509a6f75849b", "fence": 1}, None),
        (leases.LEASE, WANTED, None),
        (runs.FINISH, ENDED, None),
        (leases.FINISH_AND_LEASE, {**ENDED, **WANTED}, None),
    ],
    ids=["find", "find key", "cancel", "holds", "lease", "finish", "finish and lease"],
)
def test_one_timer_is_reached_by_its_index(
    database: Database, sql: str, parameters: dict[str, object], index: str | None
) -> None:
    indexes, whole, read = explained(database, sql, parameters)
    assert index is None or index in indexes
    assert not whole & {"timer", "call"}
    assert read <= 10


def test_the_next_due_time_is_one_index_entry(database: Database) -> None:
    def run(executor: Executor) -> Any:
        return claims.next_due(executor, shard=0, watermark=claims.UNBOUNDED)

    assert database.run(run) is not None
    indexes, whole, read = explained(database, claims.NEXT, {"shard": 0, "watermark": "-infinity"})
    assert "timer_wake" in indexes
    assert "timer" not in whole
    assert read <= 1


@pytest.mark.parametrize("analyzed", [True, False])
def test_sweeps_leave_waiting_timers_alone(database: Database, analyzed: bool) -> None:
    """Whatever the statistics say: a sweep that read all payloads stalled a beat with 1,000,000 waiting for 150 ms."""
    if not analyzed:
        sql = "delete from pg_statistic where starelid = any(array['{schema}.call'::regclass, '{schema}.outcome'::regclass])"
        with database.connect("forget") as connection:
            connection.execute(qualified(sql, database.schema))
    ids = [f"c4ca4238-a0b9-2382-0dcc-509a6f7584{each:02x}" for each in range(50)]
    retention, times = {"retention": 3600.0}, {"timeout": 8.0}
    statements: list[tuple[str, dict[str, object]]] = [
        (history.OLD.replace("{page}", "500"), {**retention, "at": "-infinity", "id": ids[0]}),
        (history.LEFT_OVER.replace("{page}", "500"), {**retention, "after": 0}),
        (history.OLD_NOTES.replace("{page}", "500"), {**retention}),
        (history.FORGET, {"ids": ids}),
        (expiry.STALE_RENEWALS.replace("{page}", "500"), {}),
        (expiry.LOST, {"ids": ids, "announced": 7.0}),
        (expiry.EXPIRED, {"ids": ids}),
        (expiry.UNWANTED, {"ids": ids, "grace": 3600.0}),
        (claims.RECLAIM, {"ids": ids, **times}),
    ]
    for sql, parameters in statements:
        _, whole, read = explained(database, sql, parameters)
        assert not whole & {"timer", "call"}, sql
        assert read <= 500, sql


SCHEDULES = """
insert into {schema}.schedule (name, task, kind, text, tz, edition, cursor, next_at)
select 'schedule ' || n, 't', 'cron', '0 0 1 1 *', 'UTC', 1, {schema}.clock(),
       {schema}.clock() + (n - 100) * interval '1 minute'
from generate_series(1, 100000) n
"""


@pytest.mark.parametrize("analyzed", [True, False])
def test_due_schedules_are_found_by_their_index(database: Database, analyzed: bool) -> None:
    """A hundred of 100,000 are due: as many rows are read, and of the next one a single entry."""
    with database.connect("schedules") as connection:
        connection.execute(qualified("delete from {schema}.schedule", database.schema))
        connection.execute(qualified(SCHEDULES, database.schema))
        if analyzed:
            connection.execute(qualified("vacuum analyze {schema}.schedule", database.schema))
    known: dict[str, object] = {"known": ["some", "entries"]}
    indexes, whole, read = explained(database, schedules._sql(schedules.DUE, 50), known)
    assert "schedule_next" in indexes and "schedule" not in whole and read <= 200
    indexes, whole, read = explained(database, schedules.NEXT, known)
    assert "schedule_next" in indexes and "schedule" not in whole and read <= 5
    history_of: dict[str, object] = {"schedule": "schedule 7", "before": "infinity"}
    indexes, whole, read = explained(database, schedules._sql(schedules.HISTORY, 50), history_of)
    assert "call_schedule" in indexes and not whole & {"call", "timer"} and read <= 10


DEAD = 100_000

# As many dead as wait: the filters look into `call` for those that they meet, and for no others.
DIE = """
insert into {schema}.dead (id, call_id, died_at, attempt, reason, error_type, error)
select id, id, {schema}.clock() - row_number() over (order by id) * interval '1 second', 1, 'exhausted', 'E', 'no'
from {schema}.call limit {number};
insert into {schema}.outcome (id, call_id, attempt, state) select id, call_id, 1, 'dead' from {schema}.dead;
"""


@pytest.fixture(scope="module")
def dying(database: Database) -> Database:
    with database.connect("die") as connection:
        connection.execute(qualified(DIE.replace("{number}", str(DEAD)), database.schema))
        connection.execute("vacuum analyze")
    return database


@pytest.mark.parametrize("oldest_first", [False, True])
@pytest.mark.parametrize("until", [None, "an hour ago"])
def test_a_page_of_dead_letters_reads_its_stretch(dying: Database, oldest_first: bool, until: str | None) -> None:
    """Even one that lies behind a day of others, and of which the filters leave nothing."""
    read_sql: list[tuple[str, Mapping[str, object]]] = []

    class Watched:
        def __init__(self, executor: Executor) -> None:
            self.fetch_ = executor.fetch

        def fetch(self, sql: str, params: Mapping[str, object] | None = None) -> Any:
            read_sql.append((sql, params or {}))
            return self.fetch_(sql, params)

    def run(executor: Executor) -> Any:
        [now] = executor.fetch("select {schema}.clock() - interval '20 h' as ago")
        wanted = dead_letters.Filter(task="none", until=None if until is None else now.ago)
        return dead_letters.page_of(Watched(executor), wanted, oldest_first=oldest_first)  # type: ignore[arg-type]

    assert dying.run(run) == []
    for sql, parameters in read_sql[:2]:
        indexes, whole, read = explained(dying, sql, parameters)
        assert "dead_died" in indexes
        assert not whole & {"dead", "call", "outcome"}
        # The stretch, the call and the first call of each.
        assert read <= dead_letters.STRIDE * 3 + 10


def test_where_the_dead_letters_end_is_one_index_entry(dying: Database) -> None:
    indexes, whole, read = explained(dying, dead_letters.NEWEST, {})
    assert indexes == {"dead_died"}
    assert not whole
    assert read <= 1


def test_groups_of_dead_letters_read_the_newest(dying: Database) -> None:
    sql = dead_letters.GROUPS.replace("{page}", "1000")
    indexes, whole, read = explained(dying, sql, {**dead_letters.Filter(task="t").parameters(), "most": 100})
    assert "dead_died" in indexes
    assert not whole & {"dead", "call"}
    assert read <= 1000 * 3 + 10


@pytest.mark.parametrize(
    ("sql", "more"),
    [
        (dead_letters.PAYLOADS, {}), (dead_letters.LOCK, {}), (dead_letters.DISCARD, {"replayed": False}),
        (dead_letters.REPLAYED, {}),
    ],
    ids=["payloads", "lock", "discard", "replayed"],
)  # fmt: skip
def test_a_chunk_of_dead_letters_is_reached_by_the_primary_keys(
    dying: Database, sql: str, more: dict[str, object]
) -> None:
    rows = dying.run(lambda executor: executor.fetch("select id from {schema}.dead limit 100"))
    ids = [str(row.id) for row in rows]
    _, whole, read = explained(dying, sql, {"ids": ids, "new_ids": ids, **more})
    assert not whole & {"dead", "call"}
    assert read <= 100 * 5
