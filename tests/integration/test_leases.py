"""Leases in the database: when one is still valid, and renewals that cross with others."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch
from uuid import UUID

import psycopg
import pytest
from celery import Celery

from celery_durable import apply_at
from celery_durable.store import leases
from celery_durable.store.database import Database
from celery_durable.store.executor import PsycopgExecutor
from celery_durable.worker import heartbeat
from celery_durable.worker.delivery import Delivery
from celery_durable.worker.heartbeat import Heartbeat
from tests.beats import Scripted, inline_beat, make_app, rows
from tests.servers.waiting import eventually


@pytest.fixture
def local(database_url: str) -> Iterator[Celery]:
    """An app with its tables."""
    app = make_app(database_url, "memory://")
    yield app
    Database.of(app).close()


def leased(app: Celery, number: int = 1) -> list[leases.Lease]:
    """Timers whose leases were taken as workers take them, ordered by id."""
    timers = [apply_at("elsewhere.task", 0, durable=True, app=app) for _ in range(number)]
    with inline_beat(app, publisher=Scripted()) as beat:
        beat.until(lambda: all(each.state == "dispatched" for each in timers))

    def lease(id: UUID) -> leases.Lease:
        taken = Database.of(app).run(
            lambda executor: leases.lease(
                executor,
                leases.Wanted(
                    timer_id=id, call_id=id, token=f"1-{id}", worker="w", seconds=30, max_attempts=3, base=1, cap=60
                ),
            )
        )
        assert isinstance(taken, leases.Lease)
        return taken

    return [lease(id) for id in sorted(each.id for each in timers)]


def holds(app: Celery, lease: leases.Lease, fence: int | None = None) -> bool:
    return Database.of(app).run(lambda executor: leases.holds(executor, lease.timer_id, fence or lease.fence))


def test_a_lease_past_its_deadline_counts_as_lost_before_any_sweep(local: Celery) -> None:
    [lease] = leased(local)
    assert holds(local, lease)
    assert not holds(local, lease, fence=lease.fence - 1)
    rows(local, "update {schema}.run set deadline = {schema}.clock() - interval '1 ms' returning id")
    assert not holds(local, lease)


def test_a_renewal_extends_a_lease_of_its_own_fence_only(local: Celery) -> None:
    [lease] = leased(local)
    rows(local, "update {schema}.run set deadline = {schema}.clock() - interval '1 ms' returning id")
    pairs = [(lease.timer_id, f"1-{lease.timer_id}")]
    renewed = Database.of(local).run(lambda executor: leases.renew(executor, pairs, seconds=30))
    assert renewed == {lease.timer_id}
    assert holds(local, lease)
    rows(local, "update {schema}.renewal set until = {schema}.clock() - interval '1 ms' returning id")
    assert not holds(local, lease)
    rows(local, "update {schema}.renewal set until = 'infinity', fence = fence - 1 returning id")
    assert not holds(local, lease)


def test_a_thousand_leases_are_renewed_by_one_statement(local: Celery) -> None:
    ids = sorted(each.timer_id for each in leased(local, 1000))
    before = rows(local, "select min(deadline) as at from {schema}.run")[0].at
    heart = Heartbeat(Database.of(local))
    wanted = [Delivery(timer_id=id, call_id=id, token=f"1-{id}") for id in ids]
    said: list[str] = []
    fetch = PsycopgExecutor.fetch

    def counted(self: PsycopgExecutor, sql: str, params: Any = None) -> Any:
        said.append(sql)
        return fetch(self, sql, params)

    with patch.object(heartbeat, "running", lambda: wanted), patch.object(PsycopgExecutor, "fetch", counted):
        heart.beat()
    assert said == [leases.RENEW]
    assert len(heart.kept) == 1000
    [renewed] = rows(local, "select count(*) as n, min(until) as until from {schema}.renewal")
    assert renewed.n == 1000 and renewed.until > before
    heart._disconnect()


def test_a_heartbeat_outlives_a_deadlock(local: Celery, caplog: pytest.LogCaptureFixture) -> None:
    """Somebody locks two renewals the other way round: the beat that Postgres undoes for it is done again at once."""
    database = Database.of(local)
    first, second = (each.timer_id for each in leased(local, 2))
    pairs = [(each, f"1-{each}") for each in (first, second)]
    database.run(lambda executor: leases.renew(executor, pairs, seconds=1))
    wanted = [Delivery(timer_id=id, call_id=id, token=token) for id, token in pairs]
    heart = Heartbeat(database)
    caplog.set_level(logging.DEBUG, "celery_durable.worker.heartbeat")
    dsn = str(local.conf.durable_database_url).replace("+psycopg", "")
    take = f"select from {database.schema}.renewal where id = %s for update"
    with patch.object(heartbeat, "running", lambda: wanted), psycopg.connect(dsn) as other:
        other.execute("set local deadlock_timeout = '1 h'")  # the heartbeat finds the deadlock, not this session
        other.execute(take, (second,))
        beat = threading.Thread(target=heart.beat)
        beat.start()
        waiting = (
            "select 1 as one from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
        )
        eventually(lambda: rows(local, waiting), message="the heartbeat waits for the second", every=0.005)
        other.execute(take, (first,))  # returns when the heartbeat was undone
        other.commit()
        beat.join(20)
    assert not beat.is_alive()
    assert "deadlock detected" in caplog.text
    assert set(heart.kept) == {token for _, token in pairs}
    assert rows(local, "select count(*) as n from {schema}.renewal where until > {schema}.clock()")[0].n == 2
    heart._disconnect()


def test_one_run_ends_and_another_is_leased_in_one_statement(local: Celery) -> None:
    """Each as alone: the fence decides about the end, the row's state about the lease."""
    first, second = leased(local, 2)
    rows(local, f"update {{schema}}.run set state = 'dispatched' where id = '{second.timer_id}' returning id")
    database = Database.of(local)
    wanted = leases.Wanted(
        timer_id=second.timer_id, call_id=second.timer_id, token="2-b", worker="w", seconds=30, max_attempts=3, base=1, cap=60
    )  # fmt: skip

    def both(fence: int) -> tuple[bool, leases.Lease | str]:
        return database.run(lambda executor: leases.finish_and_lease(executor, first.timer_id, fence, wanted))

    ended, taken = both(first.fence - 1)
    assert isinstance(taken, leases.Lease) and (ended, taken.timer_id, taken.attempt) == (False, second.timer_id, 2)
    assert taken.fence > second.fence
    ended, again = both(first.fence)
    assert (ended, again) == (True, taken), "the same delivery finds its own lease"
    assert both(first.fence) == (False, taken)
    rows(local, f"update {{schema}}.run set token = '3-c' where id = '{second.timer_id}' returning id")
    assert both(first.fence) == (False, "duplicate")
    assert rows(local, "select state from {schema}.outcome")[0].state == "succeeded"
