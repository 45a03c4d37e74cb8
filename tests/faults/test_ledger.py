"""Increments of accounts while children, workers and Postgres are killed at random: the sum is exact."""

from __future__ import annotations

import os
import random
import runpy
import signal
import time
from typing import Any
from unittest.mock import patch

import psycopg
import pytest

from celery_durable import apply_many
from celery_durable.store import migrations
from celery_durable.store.database import Database
from tests.apps import ledger
from tests.servers.brokers import ValkeyServer
from tests.servers.postgres import PostgresServer
from tests.servers.processes import CeleryTestBeat, CeleryTestWorker

NUMBER = int(os.environ.get("LEDGER_NUMBER", "600"))
ACCOUNTS = 20
KILLS = int(os.environ.get("LEDGER_KILLS", "14"))
KINDS = ("session", "connection", "psycopg")


@pytest.mark.timeout(600)
def test_the_sum_is_exact(valkey: ValkeyServer, request: pytest.FixtureRequest) -> None:
    """Each increment exactly once, whatever is killed; the seed is in the message of a failure."""
    seed = int(os.environ.get("LEDGER_SEED", random.randrange(10**6)))
    chance = random.Random(seed)
    valkey.client().flushall()
    server = PostgresServer().start()
    url = server.url(server.create_database())
    env = {"CELERY_DURABLE_DATABASE_URL": url, "TEST_BROKER": valkey.url, "TEST_BACKEND": valkey.backend_url}
    with patch.dict("os.environ", env):
        app = runpy.run_path(str(ledger.__file__), run_name="tests.apps.ledger")["app"]
    app.conf.durable_database_url = url
    migrations.upgrade(Database.of(app), app_name=app.main)
    dsn = url.replace("+psycopg", "")
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(ledger.TABLES)
        connection.execute("insert into account select n, 0 from generate_series(0, %s) n", (ACCOUNTS - 1,))
    for kind in KINDS:
        items = [(chance.random() * 8, (number % ACCOUNTS,)) for number in range(NUMBER // len(KINDS))]
        apply_many(app.tasks[f"ledger.{kind}"], items)
    workers = [CeleryTestWorker("tests.apps.ledger", env=env, concurrency=2) for _ in range(2)]
    beat = CeleryTestBeat("tests.apps.ledger", env=env)
    killed: dict[str, int] = {}
    try:
        for node in (*workers, beat):
            node.start()
        deadline = time.monotonic() + 400
        while not settled(dsn):
            assert time.monotonic() < deadline, f"seed {seed}: not done, {killed}"
            if sum(killed.values()) >= KILLS:
                time.sleep(0.2)  # nothing more to kill: the rest takes its time
                continue
            time.sleep(chance.uniform(0.3, 1.0))  # between two kills, not for a condition
            what = chance.choice(["child", "child", "parent", "postgres"])
            if kill(what, chance, workers, server):
                killed[what] = killed.get(what, 0) + 1
        with psycopg.connect(dsn) as connection:
            [(total,)] = connection.execute("select sum(balance) from account").fetchall()
            [(entries, timers)] = connection.execute("select count(*), count(distinct timer_id) from entry").fetchall()
            ended = dict(
                connection.execute("select state, count(*) from celery_durable.outcome group by state").fetchall()
            )
        assert (total, entries, timers, ended) == (NUMBER, NUMBER, NUMBER, {"succeeded": NUMBER}), (
            f"seed {seed}: {killed}"
        )
        assert set(killed) == {"child", "parent", "postgres"} or sum(killed.values()) < KILLS, killed
        assert sum(killed.values()) >= 5, f"seed {seed}: too few kills to mean anything, {killed}"
    finally:
        for node in (*workers, beat):
            node.teardown()
        Database.of(app).close()
        app.close()
        server.teardown()


def settled(dsn: str) -> bool:
    """Whether every timer has ended; a server that was just killed is asked again later."""
    try:
        with psycopg.connect(dsn, connect_timeout=2) as connection:
            row = connection.execute("select count(*) from celery_durable.outcome").fetchone()
    except psycopg.OperationalError:
        return False
    return row == (NUMBER,)


def kill(what: str, chance: random.Random, workers: list[CeleryTestWorker], server: PostgresServer) -> bool:
    """Kill one at once; True if it was there to be killed."""
    if what == "postgres":
        server.kill9()
        server.start()
        return True
    worker: Any = chance.choice(workers)
    if what == "child":
        children = worker.children()
        if not children:
            return False
        os.kill(chance.choice(children), signal.SIGKILL)
        return True
    worker.kill(signal.SIGKILL)
    worker.start(wait=False)
    return True
