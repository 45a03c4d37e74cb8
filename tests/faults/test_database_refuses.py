"""What becomes of runs under a Postgres that answers and refuses: it only reads, or somebody holds what a worker needs."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from celery_durable import apply_at
from tests.refusing import alter, only_reads, session, until_kept
from tests.servers.waiting import eventually
from tests.workers import Bench, bench

__all__ = ["bench", "only_reads"]


def test_a_lease_that_cannot_be_taken(bench: Bench, only_reads: Callable[[bool], None]) -> None:
    """Nothing has run and nothing has failed: the timer is dispatched again, and its first attempt is the first."""
    bench.beat(TEST_REDISPATCH="4")
    timer = apply_at(bench.task("note"), 0, ("taking", 5), link_error=bench.task("errback").si())
    bench.until(timer, "dispatched")
    only_reads(True)
    worker = bench.worker()
    worker.wait_for_log("it is dispatched again later: Postgres takes no changes here")
    assert timer.result.state == "PENDING"
    only_reads(False)
    assert bench.until(timer, "succeeded").attempt == 1
    assert timer.result.get(timeout=10) == 5
    assert (bench.attempts(timer), len(bench.bodies("taking")), bench.bodies("errback")) == ([], 1, [])


@pytest.mark.parametrize(("task", "attempts"), [("gate", 1), ("gated_failure", 2), ("gated_retry", 2)])
def test_an_end_that_cannot_be_stored_yet(
    bench: Bench, only_reads: Callable[[bool], None], task: str, attempts: int
) -> None:
    """The body has returned, failed or asked for a retry: that is stored when the primary is back, and once."""
    bench.beat(TEST_LEASE="60")
    worker = bench.worker(TEST_LEASE="60")
    timer = apply_at(bench.task(task), 0, ("ending", bench.file("go")), link_error=bench.task("errback").si())
    bench.until_begun("ending")
    only_reads(True)
    bench.let_go("go")
    worker.wait_for_log("Postgres takes no changes here: cannot execute")
    only_reads(False)
    assert bench.until(timer, "succeeded").attempt == attempts
    assert timer.result.get(timeout=10) is not None
    assert len(bench.bodies("ending")) == attempts
    endings = [each.error_type for each in bench.attempts(timer)]
    assert (
        endings == {"gate": [], "gated_failure": ["ConnectionError"], "gated_retry": ["celery.exceptions.Retry"]}[task]
    )
    assert bench.bodies("errback") == []


def test_a_row_that_somebody_holds_for_longer_than_the_lease(bench: Bench) -> None:
    """Heartbeats keep the lease meanwhile, so the worker keeps trying: a body that has returned is not run again."""
    alter(bench, "set lock_timeout = '200ms'")
    bench.beat()
    worker = bench.worker()
    timer = apply_at(bench.task("gate"), 0, ("held up", bench.file("go")))
    bench.until_begun("held up")
    with session(bench) as holder, holder.transaction():
        holder.execute(f"select from {bench.database.schema}.run for update")
        [start] = bench.rows("select {schema}.clock() as now")
        bench.let_go("go")
        worker.wait_for_log("lock timeout")
        until_kept(bench, start.now)
        assert timer.state == "running"
    assert bench.until(timer, "succeeded").attempt == 1
    assert timer.result.get(timeout=10) == "held up"
    assert (bench.attempts(timer), len(bench.bodies("held up"))) == ([], 1)


def test_a_change_under_a_serializable_default(bench: Bench) -> None:
    """Somebody changes the run's row while its end waits for it: under that default a serialisation failure."""
    alter(bench, "set default_transaction_isolation = 'serializable'")
    bench.beat()
    bench.worker()
    timer = apply_at(bench.task("gate"), 0, ("crossing", bench.file("go")))
    bench.until_begun("crossing")
    with session(bench) as holder, holder.transaction():
        holder.execute(f"update {bench.database.schema}.run set worker = worker")
        bench.let_go("go")
        waiting = (
            "select 1 as one from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
        )
        eventually(lambda: bench.rows(waiting), message="the end waits for the row")
    assert bench.until(timer, "succeeded").attempt == 1
    assert timer.result.get(timeout=10) == "crossing"
    assert (bench.attempts(timer), len(bench.bodies("crossing"))) == ([], 1)


def test_a_child_killed_while_the_database_refuses(bench: Bench, only_reads: Callable[[bool], None]) -> None:
    """The parent cannot store it, and does not keep the lease of nobody alive: the next attempt follows its end."""
    bench.beat()
    worker = bench.worker()
    timer = apply_at(bench.task("gate"), 0, ("orphan", bench.file("go")))
    [body] = bench.until_begun("orphan")
    only_reads(True)
    os.kill(body.pid, signal.SIGKILL)
    worker.wait_for_log("is left to its lease: Postgres takes no changes here")
    only_reads(False)
    bench.until_begun("orphan", 2)
    bench.let_go("go")
    assert bench.until(timer, "succeeded").attempt == 2
    assert [each.ending for each in bench.attempts(timer)] == ["lost"]
    assert worker.alive()


def test_a_renewal_that_somebody_holds(bench: Bench) -> None:
    """The heartbeat gives up, says so, and beats again: it does not wait for ever."""
    bench.beat(TEST_LEASE="60")
    worker = bench.worker(TEST_LEASE="6")
    timer = apply_at(bench.task("gate"), 0, ("renewing", bench.file("go")))
    bench.until_begun("renewing")
    eventually(lambda: bench.rows("select 1 as one from {schema}.renewal"), message="it is renewed")
    with session(bench) as holder, holder.transaction():
        holder.execute(f"select from {bench.database.schema}.renewal for update")
        worker.wait_for_log("Leases cannot be renewed: canceling statement due to lock timeout")
    worker.wait_for_log("Leases are renewed again")
    bench.let_go("go")
    bench.until(timer, "succeeded")
