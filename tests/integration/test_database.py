"""The app's own connections to a Postgres that answers, and refuses: locks, limits, conflicts, a server that only reads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from celery import Celery
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from celery_durable import apply_at
from celery_durable.errors import DatabaseUnavailable, SchemaMismatch
from celery_durable.store.database import Database
from celery_durable.store.executor import Executor
from tests.beats import make_app, states
from tests.servers.postgres import PostgresServer
from tests.servers.waiting import eventually

ISOLATION = "select current_setting('transaction_isolation') as level"


@pytest.fixture
def local(database_url: str) -> Iterator[Celery]:
    """An app with its tables."""
    app = make_app(database_url, "memory://")
    yield app
    Database.of(app).close()


def dsn(app: Celery) -> str:
    return str(app.conf.durable_database_url).replace("+psycopg", "")


def alter(app: Celery, setting: str) -> None:
    """Change a default of the database, as its administrator might; only new sessions have it."""
    with psycopg.connect(dsn(app), autocommit=True) as connection:
        connection.execute(f"alter database {connection.info.dbname} set {setting}")
    Database.of(app).close()


@pytest.mark.parametrize("level", ["serializable", "repeatable read"])
def test_our_isolation_is_not_the_databases_default(local: Celery, level: str) -> None:
    alter(local, f"default_transaction_isolation = '{level}'")
    database = Database.of(local)
    with psycopg.connect(dsn(local)) as theirs:
        assert theirs.execute(ISOLATION).fetchone() == (level,)
    for run in (database.run, database.transact):
        assert [row.level for row in run(lambda executor: executor.fetch(ISOLATION))] == ["read committed"]
    with database.connect("test") as own:
        assert own.execute(ISOLATION).fetchone() == ("read committed",)


def test_a_connection_to_another_database_is_named(local: Celery, postgres: PostgresServer) -> None:
    other = postgres.create_database()
    url = postgres.url(other)
    engine = create_engine(url)
    task = local.tasks["beating.plain"]
    try:
        with (
            psycopg.connect(url.replace("+psycopg", "")) as plain,
            Session(engine) as session,
            engine.connect() as core,
        ):
            for connection in (plain, session, core):
                with pytest.raises(SchemaMismatch, match=f"schema 'celery_durable' of database '{other}' at 127.0.0.1"):
                    apply_at(task, 60, connection=connection)
    finally:
        engine.dispose()
        postgres.drop_database(other)
    assert states(local) == {}


def test_behind_a_pooler_nothing_is_set_for_the_session(local: Celery) -> None:
    """The setting would be met by other clients; our transactions carry the level themselves."""
    alter(local, "default_transaction_isolation = 'serializable'")
    local.conf.durable_prepared_statements = False
    settings = Database.of(local).settings.from_app(local)
    database = Database(settings)
    try:
        for run, level in ((database.run, "serializable"), (database.transact, "read committed")):
            assert [row.level for row in run(lambda executor: executor.fetch(ISOLATION))] == [level]
        with database.connect("test", limits=database.lease_limits) as own:
            assert own.execute("show lock_timeout").fetchone() == ("0",)
    finally:
        database.close()


def test_a_connection_that_only_reads_is_left_for_another(local: Celery) -> None:
    """A pooled connection has stayed with the server that was the primary: the call goes to the one that is now."""
    database = Database.of(local)
    pids: list[int] = []

    def stay(executor: Executor) -> None:
        executor.fetch("set default_transaction_read_only = on")
        pids.append(executor.fetch("select pg_backend_pid() as pid")[0].pid)

    database.run(stay)
    timer = apply_at("beating.plain", 3600, app=local)
    assert timer.state == "waiting"
    [now] = database.run(lambda executor: executor.fetch("select pg_backend_pid() as pid"))
    assert now.pid not in pids


def test_a_server_that_only_reads_is_unavailable(local: Celery) -> None:
    alter(local, "default_transaction_read_only = on")
    with pytest.raises(DatabaseUnavailable, match=r"takes no changes here: cannot execute .* in a read-only"):
        apply_at("beating.plain", 3600, app=local)
    assert states(local) == {}


def test_a_conflict_is_tried_once_more(local: Celery) -> None:
    """A statement that a deadlock or a serialisation failure has undone is run again, and once only."""
    database = Database.of(local)
    tries: list[str] = []

    def crossed(code: str, times: int) -> Any:
        def operation(executor: Executor) -> str:
            tries.append(code)
            if len(tries) <= times:
                executor.fetch(f"do $$ begin raise exception 'as told' using errcode = '{code}'; end $$")
            return "done"

        return operation

    for code in ("40001", "40P01"):
        tries.clear()
        assert database.run(crossed(code, 1)) == "done"
        assert len(tries) == 2
        tries.clear()
        with pytest.raises(DatabaseUnavailable, match="refuses for now: as told"):
            database.run(crossed(code, 9))
        assert len(tries) == 2


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("25006", "takes no changes here"), ("53100", "cannot be reached"), ("57P03", "cannot be reached"),
        ("58030", "cannot be reached"), ("55P03", "refuses for now"), ("57014", "refuses for now"),
    ],
)  # fmt: skip
def test_what_passes_is_not_a_wrong_statement(local: Celery, code: str, text: str) -> None:
    statement = f"do $$ begin raise exception 'as told' using errcode = '{code}'; end $$"
    with pytest.raises(DatabaseUnavailable, match=text):
        Database.of(local).run(lambda executor: executor.fetch(statement))


def test_a_wrong_statement_is_not_unavailability(local: Celery) -> None:
    for statement in ("select 1/0", "no statement"):
        with pytest.raises(psycopg.Error):
            Database.of(local).run(lambda executor, statement=statement: executor.fetch(statement))


def test_the_callers_transaction_keeps_its_own_errors(local: Celery) -> None:
    """Only the caller can run his transaction again, and he looks for the driver's error."""
    with psycopg.connect(dsn(local)) as theirs:
        statement = "do $$ begin raise exception 'as told' using errcode = '40001'; end $$"
        with pytest.raises(psycopg.errors.SerializationFailure):
            Database.of(local).perform(lambda executor: executor.fetch(statement), theirs)


def test_a_workers_statements_are_limited_by_its_lease(local: Celery) -> None:
    """A table that somebody has locked costs a sixth of the lease, then the caller is told."""
    local.conf.durable_lease, local.conf.durable_heartbeat = 3, 1
    database = Database(Database.of(local).settings.from_app(local))
    shown = "select current_setting('lock_timeout') as lock, current_setting('statement_timeout') as statement"
    answers: list[str] = []

    def wait() -> None:
        try:
            database.run(lambda executor: executor.fetch("select * from {schema}.run"), bounded=True)
        except DatabaseUnavailable as exc:
            answers.append(str(exc))

    try:
        [free] = database.run(lambda executor: executor.fetch(shown))
        assert (free.lock, free.statement) == ("0", "0")
        [bound] = database.run(lambda executor: executor.fetch(shown), bounded=True)
        assert (bound.lock, bound.statement) == ("500ms", "1s")
        with database.connect("test", limits=database.lease_limits) as own:
            assert own.execute("show lock_timeout").fetchone() == ("500ms",)
        with psycopg.connect(dsn(local)) as holder:
            holder.execute(f'lock table "{database.schema}".run in access exclusive mode')
            waiting = threading.Thread(target=wait)
            waiting.start()
            eventually(lambda: answers, timeout=10, message="the statement gives up")
            waiting.join()
        assert "lock timeout" in answers[0]
    finally:
        database.close()
