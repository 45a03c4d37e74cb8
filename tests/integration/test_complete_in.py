"""The end of a run in the task's own transaction, on every kind of connection and at every isolation level."""

from __future__ import annotations

import os
import runpy
import signal
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import psycopg
import pytest
from celery import Celery, chain
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from celery_durable import apply_at, dead_letters
from celery_durable.store import migrations
from celery_durable.store.database import Database
from celery_durable.timer import Timer
from tests.apps import ledger
from tests.servers.brokers import ValkeyServer
from tests.servers.postgres import PostgresServer
from tests.servers.processes import CeleryTestBeat, CeleryTestWorker
from tests.servers.waiting import eventually


class Ledger:
    """One beat and one worker on a database with accounts."""

    def __init__(self, url: str, valkey: ValkeyServer, folder: Path) -> None:
        env = {"CELERY_DURABLE_DATABASE_URL": url, "TEST_BROKER": valkey.url, "TEST_BACKEND": valkey.backend_url}
        with patch.dict("os.environ", env):
            self.app: Celery = runpy.run_path(str(ledger.__file__), run_name="tests.apps.ledger")["app"]
        self.app.conf.durable_database_url = url
        self.app.finalize()
        self.database = Database.of(self.app)
        migrations.upgrade(self.database, app_name=self.app.main)
        self.outside = psycopg.connect(url.replace("+psycopg", ""), autocommit=True)
        self.outside.execute(ledger.TABLES)
        self.folder = folder
        self.worker = CeleryTestWorker("tests.apps.ledger", env=env, concurrency=3)
        self.beat = CeleryTestBeat("tests.apps.ledger", env=env)
        for node in (self.worker, self.beat):
            node.start()
        self._accounts = 0

    def account(self) -> int:
        """A new account."""
        self._accounts += 1
        self.outside.execute("insert into account values (%s, 0)", (self._accounts,))
        return self._accounts

    def task(self, name: str) -> Any:
        return self.app.tasks[f"ledger.{name}"]

    def balance(self, account: int) -> int:
        row = self.outside.execute("select balance from account where id = %s", (account,)).fetchone()
        assert row is not None
        return int(row[0])

    def until(self, timer: Timer, state: str) -> Any:
        eventually(lambda: timer.state == state, message=f"{timer} is {state}, not {timer.details}")
        return timer.details

    def close(self) -> None:
        for node in (self.worker, self.beat):
            node.teardown()
        self.outside.close()
        self.database.close()
        self.app.close()


@pytest.fixture(scope="module")
def books(postgres: PostgresServer, valkey: ValkeyServer) -> Iterator[Ledger]:
    valkey.client().flushall()
    name = postgres.create_database()
    with TemporaryDirectory() as folder:
        books = Ledger(postgres.url(name), valkey, Path(folder))
        yield books
        books.close()
    postgres.drop_database(name)


@pytest.mark.parametrize("isolation", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
@pytest.mark.parametrize("kind", ["session", "connection", "psycopg"])
def test_data_and_completion_commit_together(books: Ledger, kind: str, isolation: str) -> None:
    account = books.account()
    timer = apply_at(books.task(kind), 0, (account, isolation))
    assert books.until(timer, "succeeded").attempt == 1
    assert books.balance(account) == 1
    assert timer.result.get(timeout=10) == account


def test_on_a_psycopg_connection_in_autocommit(books: Ledger) -> None:
    account = books.account()
    books.until(apply_at(books.task("psycopg"), 0, (account, "READ COMMITTED", True)), "succeeded")
    assert books.balance(account) == 1


def test_on_djangos_connection(books: Ledger) -> None:
    account = books.account()
    books.until(apply_at(books.task("django"), 0, (account,)), "succeeded")
    assert books.balance(account) == 1


def test_a_body_that_raises_leaves_nothing(books: Ledger) -> None:
    account = books.account()
    assert books.until(apply_at(books.task("failing"), 0, (account,)), "dead").reason == "exhausted"
    assert books.balance(account) == 0


def test_an_answer_that_was_lost_is_read(books: Ledger) -> None:
    """COMMIT was done and the connection cut: no second attempt."""
    account = books.account()
    timer = apply_at(books.task("swallowed"), 0, (account,))
    assert books.until(timer, "succeeded").attempt == 1
    assert timer.result.get(timeout=10) == account
    assert books.balance(account) == 1


@pytest.mark.parametrize("how", ["refused", "unsent"])
def test_a_commit_that_was_not_sent_is_an_attempt_that_failed(books: Ledger, how: str) -> None:
    """Because the connection broke, or with the transaction still open: the row's lock is let go of first."""
    account = books.account()
    assert books.until(apply_at(books.task(how), 0, (account,)), "succeeded").attempt == 2
    assert books.balance(account) == 1


def test_heartbeats_do_not_disturb_a_serializable_transaction(books: Ledger) -> None:
    """It stays open over several heartbeats and another timer's whole life, and sees no conflict."""
    account, other = books.account(), books.account()
    go = books.folder / "go"
    timer = apply_at(books.task("late"), 0, (account, str(go)))
    eventually(lambda: Path(f"{go}.in").exists(), message="it is in its transaction")
    renewed = "select until from celery_durable.renewal where id = %s"
    first: list[Any] = []

    def beaten() -> bool:
        row = books.outside.execute(renewed, (timer.id,)).fetchone()
        if row is not None and row not in first:
            first.append(row)
        return len(first) >= 3

    eventually(beaten, message="three heartbeats", timeout=20)
    books.until(apply_at(books.task("psycopg"), 0, (other, "SERIALIZABLE")), "succeeded")
    go.touch()
    assert books.until(timer, "succeeded").attempt == 1
    assert books.balance(account) == 1


def test_a_lease_that_was_lost_commits_nothing(books: Ledger) -> None:
    """The process stands still for longer than the lease; another attempt runs; what it did itself is taken back."""
    account = books.account()
    go = books.folder / "thawed"
    timer = apply_at(books.task("late"), 0, (account, str(go)))
    eventually(lambda: Path(f"{go}.in").exists(), message="it is in its transaction")
    row = books.outside.execute("select worker from celery_durable.run where id = %s", (timer.id,)).fetchone()
    assert row is not None
    pids = [books.worker.pid, *books.worker.children()]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    lost = "select from celery_durable.attempt where timer_id = %s and ending = 'lost'"
    eventually(lambda: books.outside.execute(lost, (timer.id,)).fetchone() is not None, message="the lease is lost")
    go.touch()
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    assert books.until(timer, "succeeded").attempt == 2
    assert books.balance(account) == 1


def test_what_follows_gets_the_result(books: Ledger) -> None:
    first, second = books.account(), books.account()
    books.outside.execute("insert into account values (%s, 0)", (first + 1000,))
    timer = apply_at(
        chain(books.task("chained").s(first), books.task("psycopg").s()).tasks[0], 0, link=books.task("psycopg").s()
    )
    books.until(timer, "succeeded")
    eventually(lambda: books.balance(first + 1000) == 1, message="what follows has run with the result")
    assert books.balance(first) == 1 and books.balance(second) == 0


@pytest.mark.parametrize("how", ["session", "autocommit"])
def test_a_commit_of_ones_own_in_the_block_is_refused(books: Ledger, how: str) -> None:
    """What it committed stands, and the attempt has failed with the reason: the two are not one."""
    account = books.account()
    timer = apply_at(books.task("hasty"), 0, (account, how))
    books.until(timer, "dead")
    [letter] = [each for each in dead_letters.find_all(app=books.app) if each.id == timer.id]
    assert "Leave that to complete_in" in letter.error
    assert books.balance(account) == 1


def test_a_result_that_cannot_be_sent_takes_all_back(books: Ledger) -> None:
    account = books.account()
    timer = apply_at(books.task("shapeless"), 0, (account,), link=books.task("psycopg").s())
    books.until(timer, "dead")
    assert books.balance(account) == 0


def test_a_retry_that_was_asked_for_does_not_undo_what_has_committed(books: Ledger) -> None:
    account = books.account()
    timer = apply_at(books.task("wavering"), 0, (account,))
    assert books.until(timer, "succeeded").attempt == 1
    assert timer.result.get(timeout=10) == account
    assert books.balance(account) == 1


@pytest.mark.parametrize("how", ["twice", "raising"])
def test_what_comes_after_the_end_changes_nothing(books: Ledger, how: str) -> None:
    """A second block, an exception: the call has succeeded, with its result, and its callback runs."""
    account, following = books.account(), books.account()
    timer = apply_at(books.task(how), 0, (account, following), link=books.task("psycopg").s())
    assert books.until(timer, "succeeded").attempt == 1
    assert timer.result.get(timeout=10) == following
    eventually(lambda: books.balance(following) == 1, message="what follows has run")
    assert books.balance(account) == 1


def test_on_a_scoped_session(books: Ledger) -> None:
    account = books.account()
    books.until(apply_at(books.task("scoped"), 0, (account,)), "succeeded")
    assert books.balance(account) == 1


def test_a_call_without_a_timer_just_commits(books: Ledger) -> None:
    account = books.account()
    assert books.task("psycopg").delay(account).get(timeout=20) == account
    assert books.balance(account) == 1


def test_a_transaction_of_somebody_else_is_refused(books: Ledger) -> None:
    task = books.task("psycopg")
    with psycopg.connect(
        books.database.url.set(drivername="postgresql").render_as_string(False), autocommit=True
    ) as connection:
        with connection.transaction(), pytest.raises(RuntimeError, match="commits the transaction itself"):
            task.complete_in(connection).__enter__()
        connection.autocommit = False
        with connection.transaction(), pytest.raises(RuntimeError, match="commits the transaction itself"):
            task.complete_in(connection).__enter__()
    engine = create_engine(books.database.url)
    with (
        engine.connect() as outer,
        outer.begin(),
        Session(bind=outer) as joined,
        pytest.raises(RuntimeError, match="joined"),
    ):
        task.complete_in(joined).__enter__()
    with (
        engine.connect().execution_options(isolation_level="AUTOCOMMIT") as loose,
        pytest.raises(RuntimeError, match="AUTO"),
    ):
        task.complete_in(loose).__enter__()
    engine.dispose()
    with pytest.raises(TypeError, match="not str"):
        task.complete_in("x").__enter__()
