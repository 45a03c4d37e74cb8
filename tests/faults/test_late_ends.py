"""Ends of runs that nobody waits for are stored a moment after the body: what becomes of them when something fails then."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from celery_durable import apply_at, apply_many
from tests.refusing import only_reads, session, until_kept
from tests.servers.waiting import eventually
from tests.workers import Bench, bench

__all__ = ["bench", "only_reads"]


def test_ends_go_with_the_next_lease(bench: Bench) -> None:
    """One process, one run after the other: most transactions end a run and lease the next, and the last end is alone."""
    with session(bench) as own:
        own.execute("create table seen (xid xid8, what text)")
        own.execute(
            "create function note_it() returns trigger language plpgsql as"
            " $$ begin insert into seen values (pg_current_xact_id(), tg_argv[0]); return null; end $$"
        )
        schema = bench.database.schema
        own.execute(
            f"create trigger leased after update on {schema}.run for each row"
            " when (new.state = 'running') execute function note_it('leased')"
        )
        own.execute(
            f"create trigger ended after insert on {schema}.outcome for each row execute function note_it('ended')"
        )
    bench.beat()
    timers = apply_many(bench.task("note"), [(0, ("row", each)) for each in range(40)], ignore_result=True)
    for timer in timers:
        bench.until(timer, "dispatched")
    bench.worker("--prefetch-multiplier", "40", concurrency=1)
    for timer in timers:
        assert bench.until(timer, "succeeded").attempt == 1
    assert len(bench.bodies("row")) == 40
    kinds = [
        row.kinds for row in bench.rows("select string_agg(what, ' ' order by what) as kinds from seen group by xid")
    ]
    assert set(kinds) == {"ended", "leased", "ended leased"}
    assert kinds.count("ended leased") > 20


def test_a_warm_shutdown_stores_the_last_end(bench: Bench, only_reads: Callable[[bool], None]) -> None:
    """The process ends while its last end could not be stored yet: it stays for that, and the body has run once."""
    bench.beat(TEST_LEASE="60")
    worker = bench.worker(concurrency=1, TEST_LEASE="60")
    timer = apply_at(bench.task("gate"), 0, ("last", bench.file("go")), ignore_result=True)
    bench.until_begun("last")
    only_reads(True)
    bench.let_go("go")
    worker.wait_for_log("Postgres takes no changes here")
    worker.send_signal(signal.SIGTERM)
    only_reads(False)
    eventually(lambda: not worker.alive(), timeout=20, message="the worker has ended")
    assert (timer.state, bench.attempts(timer), len(bench.bodies("last"))) == ("succeeded", [], 1)


def test_a_child_killed_before_a_late_end(bench: Bench, only_reads: Callable[[bool], None]) -> None:
    """The body has returned, its end is lost with the process: the lease brings it back, and it succeeds."""
    bench.beat(TEST_LEASE="6")
    worker = bench.worker(concurrency=1, TEST_LEASE="6")
    timer = apply_at(bench.task("gate"), 0, ("killed", bench.file("go")), ignore_result=True)
    [body] = bench.until_begun("killed")
    only_reads(True)
    bench.let_go("go")
    worker.wait_for_log("Postgres takes no changes here")
    os.kill(body.pid, signal.SIGKILL)
    eventually(lambda: body.pid not in worker.children(), message="the child is gone")
    only_reads(False)
    assert bench.until(timer, "succeeded").attempt == 2
    assert [each.ending for each in bench.attempts(timer)] == ["lost"]
    assert len({each.pid for each in bench.bodies("killed")}) == 2


def test_a_late_end_keeps_its_lease_as_long_as_it_cannot_be_stored(bench: Bench) -> None:
    """Somebody holds the row for longer than the lease: a body that has returned is not run again."""
    bench.beat()
    worker = bench.worker(concurrency=1)
    timer = apply_at(bench.task("note"), 60, ("held up",), ignore_result=True)
    with session(bench) as holder:
        holder.execute(
            f"create function {bench.database.schema}.slow() returns trigger language plpgsql as"
            " $$ begin if current_setting('application_name') = 'celery-durable'"  # workers, not the beat's sweeps
            " and exists (select from pg_locks where locktype = 'advisory')"
            " then raise lock_not_available; end if; return old; end $$"
        )
        holder.execute(
            f"create trigger slow before delete on {bench.database.schema}.run"
            f" for each row execute function {bench.database.schema}.slow()"
        )
        holder.execute("select pg_advisory_lock(1)")
        [start] = bench.rows("select {schema}.clock() as now")
        timer.reschedule(0)
        worker.wait_for_log("Postgres refuses for now")
        until_kept(bench, start.now)
        assert timer.state == "running"
        holder.execute("select pg_advisory_unlock(1)")
    assert bench.until(timer, "succeeded").attempt == 1
    assert (bench.attempts(timer), len(bench.bodies("held up"))) == ([], 1)


def test_a_lease_that_was_lost_before_a_late_end(bench: Bench) -> None:
    """The end names its fence: it is refused, recorded, and told by the signal."""
    bench.beat(TEST_LEASE="60")
    worker = bench.worker(concurrency=1, TEST_LEASE="60", TEST_SIGNALS="1")
    timer = apply_at(bench.task("gate"), 0, ("fenced", bench.file("go")), ignore_result=True)
    bench.until_begun("fenced")
    bench.rows("update {schema}.run set fence = nextval('{schema}.fence') returning id")
    bench.let_go("go")
    worker.wait_for_log("lost, fence")
    eventually(
        lambda: [each.ending for each in bench.attempts(timer)] == ["refused"], message="the refusal is recorded"
    )
    [signal] = eventually(lambda: bench.bodies("signal lease_lost"), message="the signal")
    assert signal.timer_id == timer.id
    assert timer.state == "running"


def test_an_end_whose_companion_could_not_be_leased(bench: Bench, only_reads: Callable[[bool], None]) -> None:
    """The next lease is given up while Postgres refuses; the end that was to go with it is stored all the same, alone."""
    bench.beat(TEST_LEASE="60", TEST_REDISPATCH="60")
    worker = bench.worker("--prefetch-multiplier", "2", concurrency=1, TEST_LEASE="60")
    first = apply_at(bench.task("gate"), 0, ("first", bench.file("go")), ignore_result=True)
    bench.until_begun("first")
    second = apply_at(bench.task("note"), 0, ("second",), ignore_result=True)
    bench.until(second, "dispatched")
    only_reads(True)
    bench.let_go("go")
    worker.wait_for_log("it is dispatched again later: Postgres takes no changes here")
    only_reads(False)
    assert bench.until(first, "succeeded").attempt == 1
    assert (second.state, bench.bodies("second")) == ("dispatched", [])
