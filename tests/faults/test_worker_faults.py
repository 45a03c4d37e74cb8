"""What becomes of a run when its child, its worker, the broker or Postgres goes away under it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from billiard.exceptions import WorkerLostError
from celery.exceptions import TimeLimitExceeded

from celery_durable import apply_at
from tests.servers.brokers import ValkeyServer
from tests.servers.postgres import PostgresServer
from tests.servers.processes import CeleryTestWorker
from tests.servers.waiting import eventually
from tests.workers import MODULE, Bench, bench, bench_on

__all__ = ["bench"]


def errbacks(bench: Bench) -> int:
    return len(bench.bodies("errback"))


def test_a_killed_child_is_noticed_at_once(bench: Bench) -> None:
    """kill -9 of the child in the middle of its body: the parent gives the run back, long before the lease ends."""
    bench.beat()
    worker = bench.worker(TEST_LEASE="60")
    timer = apply_at(bench.task("gate"), 0, ("child", bench.file("go")))
    [body] = bench.until_begun("child")
    assert body.pid in worker.children()
    os.kill(body.pid, signal.SIGKILL)
    bench.until_begun("child", 2, timeout=10)
    assert timer.result.state in ("RETRY", "STARTED")
    bench.let_go("go")
    assert bench.until(timer, "succeeded").attempt == 2
    [lost] = bench.attempts(timer)
    assert (lost.attempt, lost.ending, lost.error_type) == (1, "lost", "billiard.exceptions.WorkerLostError")
    assert timer.result.get(timeout=10) == "child"


def test_a_child_killed_before_its_lease(bench: Bench) -> None:
    """The message is gone and no attempt was made: the timer is dispatched again at once, not after five minutes."""
    bench.beat()
    bench.worker()
    timer = apply_at(bench.task("dying_early"), 0, ("early", bench.file("mark")))
    assert bench.until(timer, "succeeded").attempt == 1
    assert Path(bench.file("mark")).exists()
    assert len(bench.bodies("early")) == 1
    assert bench.attempts(timer) == []


def test_a_task_that_kills_its_process_each_time(bench: Bench) -> None:
    """C84: exactly as many starts as allowed, then one dead letter; other tasks of the worker are not disturbed."""
    bench.beat()
    worker = bench.worker(concurrency=2)
    others = [apply_at(bench.task("note"), each / 10, (f"other {each}",)) for each in range(30)]
    timer = apply_at(bench.task("killer"), 0, ("killer",), link_error=bench.task("errback").si())
    found = bench.until(timer, "dead")
    assert (found.attempt, found.reason) == (3, "worker lost")
    for other in others:
        bench.until(other, "succeeded")
    assert len(bench.bodies("killer")) == 3
    with pytest.raises(WorkerLostError):
        timer.result.get(timeout=10)
    eventually(lambda: errbacks(bench) == 1, message="one errback")
    assert [each.ending for each in bench.attempts(timer)] == ["lost", "lost", "lost"]
    assert worker.alive()
    eventually(lambda: bench.messages() == 0, message="the queue is empty")
    assert {len(bench.bodies(f"other {each}")) for each in range(30)} == {1}


def test_a_task_whose_whole_worker_is_killed_each_time(bench: Bench) -> None:
    """C84: the same when nobody is left to notice: the sweep counts, and stops at the limit."""
    bench.beat()
    timer = apply_at(bench.task("doomed"), 3600, ("whole", bench.file("never")))
    timer = apply_at(bench.task("killer"), 0, ("whole",), link_error=bench.task("errback").si())
    for attempt in range(1, 4):
        worker = bench.worker("-P", "solo", concurrency=1)
        bench.until_begun("whole", attempt)
        eventually(lambda worker=worker: not worker.alive(), message="the worker has killed itself")
    found = bench.until(timer, "dead")
    assert (found.attempt, found.reason) == (3, "worker lost")
    assert len(bench.bodies("whole")) == 3
    assert timer.result.state == "STARTED" and errbacks(bench) == 0  # no worker is left to tell


def test_a_killed_worker_is_recovered_when_its_lease_ends(bench: Bench) -> None:
    """kill -9 of the parent, whose children die with it: the next attempt begins when the lease has expired."""
    bench.beat()
    worker = bench.worker()
    timer = apply_at(bench.task("gate"), 0, ("parent", bench.file("go")))
    [first] = bench.until_begun("parent")
    worker.kill(signal.SIGKILL)
    eventually(lambda: not psutil.pid_exists(first.pid), message="the child is gone too")
    bench.worker()
    second = bench.until_begun("parent", 2)[1]
    # Lease 3 s, counted from its last renewal; sweep every 0.3 s; back-off 0.2 s.
    assert 2 < (second.at - first.at).total_seconds() < 8
    bench.let_go("go")
    assert bench.until(timer, "succeeded").attempt == 2
    assert [each.ending for each in bench.attempts(timer)] == ["lost"]


def test_a_body_that_leaves_its_process(bench: Bench) -> None:
    """sys.exit() ends the child; the run is tried again."""
    bench.beat()
    bench.worker()
    timer = apply_at(bench.task("leaving"), 0, ("leaving",))
    assert bench.until(timer, "succeeded").attempt == 2
    assert [each.ending for each in bench.attempts(timer)] == ["lost"]


@pytest.mark.parametrize("pool", ["solo", "threads"])
def test_a_body_that_exits_in_a_pool_without_processes(bench: Bench, pool: str) -> None:
    """sys.exit() ends the attempt, not the worker, and no request stays active for ever."""
    bench.beat()
    worker = bench.worker("-P", pool)
    timer = apply_at(bench.task("leaving"), 0, ("leaving",))
    assert bench.until(timer, "succeeded").attempt == 2
    flaky = apply_at(bench.task("flaky"), 0, ("flaky", 2))
    doomed = apply_at(bench.task("doomed"), 0, ("doomed",))
    assert bench.until(flaky, "succeeded").attempt == 3
    assert bench.until(doomed, "dead").attempt == 3
    waiting = apply_at(bench.task("waiting"), 0, ("long", bench.file("go")))
    if pool == "threads":
        bench.until_begun("long")
        eventually(lambda: bench.rows("select * from {schema}.renewal"), message="it is renewed")
    bench.let_go("go")
    assert bench.until(waiting, "succeeded").attempt == 1
    assert worker.stop() == 0


def test_a_hard_time_limit_is_one_failure(bench: Bench) -> None:
    """The next attempt begins after the child is gone; at the end there is one failure and one errback."""
    bench.beat()
    bench.worker()
    timer = apply_at(bench.task("endless"), 0, ("endless",), link_error=bench.task("errback").si())
    found = bench.until(timer, "dead")
    assert (found.attempt, found.reason) == (2, "time limit")
    first, second = bench.bodies("endless")
    assert not psutil.pid_exists(first.pid) or first.pid != second.pid
    [one, two] = bench.attempts(timer)
    assert (one.next_due_at - one.ended_at).total_seconds() > 0.9
    assert two.error_type == "billiard.exceptions.TimeLimitExceeded"
    with pytest.raises(TimeLimitExceeded):
        timer.result.get(timeout=10)
    eventually(lambda: errbacks(bench) == 1, message="one errback")
    later = apply_at(bench.task("note"), 0, ("later",))
    bench.until(later, "succeeded")
    assert errbacks(bench) == 1


LATE = {"task_acks_late": True, "task_reject_on_worker_lost": True}


class TestLateAcknowledgement:
    """An app whose messages are acknowledged late: the user's wish for a direct call, never for a timer."""

    def test_a_direct_call_comes_back_from_the_broker(self, bench: Bench) -> None:
        bench.worker(TEST_CONF=json.dumps(LATE))
        result = bench.task("killer").delay("direct", 1)
        assert result.get(timeout=20) == "direct"
        assert len(bench.bodies("direct")) == 2
        result = bench.task("gate").delay("late", bench.file("go"))
        bench.until_begun("late")
        assert bench.messages() == 1
        bench.let_go("go")
        assert result.get(timeout=10) == "late"
        eventually(lambda: bench.messages() == 0, message="it is acknowledged at its end")

    @pytest.mark.parametrize(
        "settings",
        [
            LATE,
            {"task_acks_late": True, "task_acks_on_failure_or_timeout": False},
            {"task_retry_on_worker_lost": True},
        ],
    )
    def test_a_timer_comes_back_by_its_lease(self, bench: Bench, settings: dict[str, bool]) -> None:
        """As many bodies as ever, one failure, and no copy of the message."""
        bench.beat()
        bench.worker(TEST_CONF=json.dumps(settings))
        going = apply_at(bench.task("gate"), 0, ("early", bench.file("go")))
        bench.until_begun("early")
        eventually(lambda: bench.messages() == 0, message="it is acknowledged while it runs")
        bench.let_go("go")
        bench.until(going, "succeeded")
        for task, reason, error in (
            ("killer", "worker lost", WorkerLostError), ("endless", "time limit", TimeLimitExceeded),
        ):  # fmt: skip
            before = errbacks(bench)
            timer = apply_at(bench.task(task), 0, (task,), link_error=bench.task("errback").si())
            found = bench.until(timer, "dead")
            assert (found.attempt, found.reason) == (bench.task(task).max_retries + 1, reason)
            with pytest.raises(error):
                timer.result.get(timeout=10)
            eventually(lambda before=before: errbacks(bench) == before + 1, message="one errback")
            assert len(bench.bodies(task)) == found.attempt
        eventually(lambda: bench.messages() == 0, message="the errbacks are acknowledged too")
        assert bench.rows("select 1 as one from {schema}.timer union all select 1 from {schema}.run") == []


def test_a_lost_lease_sends_nothing(bench: Bench) -> None:
    """A parent that was frozen beyond the lease: its body goes on beside the next one, and can change nothing."""
    bench.beat()
    frozen = bench.worker()
    timer = apply_at(bench.task("gate"), 0, ("fenced", bench.file("go")), link=bench.task("after").s(name="callback"))
    [first] = bench.until_begun("fenced")
    frozen.send_signal(signal.SIGSTOP)
    try:
        other = bench.worker()
        second = bench.until_begun("fenced", 2)[1]
        assert second.parent == other.pid
        bench.let_go("go")
        assert bench.until(timer, "succeeded").attempt == 2
        eventually(
            lambda: "refused" in [each.ending for each in bench.attempts(timer)], message="the refusal is recorded"
        )
    finally:
        frozen.send_signal(signal.SIGCONT)
    assert first.more["fence"] < second.more["fence"]
    later = apply_at(bench.task("note"), 0, ("later",))
    bench.until(later, "succeeded")
    bench.until_begun("callback")
    assert len(bench.bodies("callback")) == 1
    assert timer.result.get(timeout=10) == "fenced"


def test_a_lease_that_was_lost_can_be_noticed(bench: Bench) -> None:
    """check_lease() raises in the body; the attempt is refused, not retried."""
    bench.beat()
    frozen = bench.worker(concurrency=1)
    timer = apply_at(bench.task("waiting"), 0, ("noticed", bench.file("go")))
    bench.until_begun("noticed")
    frozen.send_signal(signal.SIGSTOP)
    try:
        bench.worker(concurrency=1)
        bench.until_begun("noticed", 2)
        bench.let_go("go")
        bench.until(timer, "succeeded")
        eventually(
            lambda: "celery_durable.errors.LeaseLost" in [each.error_type for each in bench.attempts(timer)],
            message="the lost lease is recorded",
        )
    finally:
        frozen.send_signal(signal.SIGCONT)


class TestBrokerAway:
    """The broker is stopped while a body runs."""

    @pytest.fixture
    def broker(self) -> Iterator[ValkeyServer]:
        """A broker of its own, to be stopped."""
        server = ValkeyServer().start()
        yield server
        server.teardown()

    def test_a_retry_needs_no_broker(
        self, postgres: PostgresServer, valkey: ValkeyServer, broker: ValkeyServer
    ) -> None:
        """C87: the body raises while the broker is down; the retry is in Postgres, and runs once it is back."""
        with bench_on(postgres, broker.url, valkey.backend_url) as bench:
            bench.beat()
            bench.worker()
            timer = apply_at(bench.task("gated_failure"), 0, ("broker", bench.file("go")))
            asked = apply_at(bench.task("gated_retry"), 0, ("asked", bench.file("go")))
            bench.until_begun("broker")
            bench.until_begun("asked")
            broker.stop()
            bench.let_go("go")
            for each in (timer, asked):
                eventually(lambda each=each: bench.attempts(each), message="the retry is stored while it is down")
                assert each.state in ("waiting", "claimed")
            assert not broker.alive()
            broker.start()
            assert bench.until(timer, "succeeded", timeout=60).attempt == 2
            assert bench.until(asked, "succeeded", timeout=60).attempt == 2
            assert (len(bench.bodies("broker")), len(bench.bodies("asked"))) == (2, 2)


class TestPostgresAway:
    """Postgres is stopped while a body runs."""

    @pytest.fixture
    def server(self) -> Iterator[PostgresServer]:
        """A server of its own, to be stopped."""
        server = PostgresServer("18").start()
        yield server
        server.teardown()

    def test_the_end_of_a_run_waits_for_it(self, server: PostgresServer, valkey: ValkeyServer) -> None:
        """C85: down before the body fails, and back later: attempts are counted once, nothing stays running."""
        valkey.client().flushall()
        with bench_on(server, valkey.url, valkey.backend_url) as bench:
            bench.beat(TEST_LEASE="30")
            worker = bench.worker(TEST_LEASE="30")
            failing = apply_at(bench.task("gated_failure"), 0, ("failing", bench.file("go")))
            working = apply_at(bench.task("gate"), 0, ("working", bench.file("go")))
            for name in ("failing", "working"):
                bench.until_begun(name)
            server.stop()
            worker.wait_for_log("Leases cannot be renewed")
            bench.let_go("go")
            server.start()
            assert bench.until(working, "succeeded").attempt == 1
            assert bench.until(failing, "succeeded").attempt == 2
            worker.wait_for_log("Leases are renewed again")
            assert (len(bench.bodies("failing")), len(bench.bodies("working"))) == (2, 1)

    def test_a_worker_waits_for_it_at_its_start(self, server: PostgresServer, valkey: ValkeyServer) -> None:
        valkey.client().flushall()
        with bench_on(server, valkey.url, valkey.backend_url) as bench:
            server.stop()
            worker = CeleryTestWorker(MODULE, env=bench.env)
            bench.workers.append(worker)
            worker.start(wait=False)
            worker.wait_for_log("Waiting for it.")
            server.start()
            worker.wait_for_log(worker.ready_line)
            assert worker.stop() == 0


def test_a_worker_that_meets_another_schema_stops(bench: Bench) -> None:
    """It says which command mends it, and ends by itself."""
    bench.rows("update {schema}.meta set value = '99' where name = 'schema_major'")
    worker = CeleryTestWorker(MODULE, env=bench.env)
    bench.workers.append(worker)
    worker.start(wait=False)
    eventually(lambda: not worker.alive(), message="it has stopped")
    assert "Upgrade celery-durable here." in worker.logs()
    assert worker.process is not None
    assert worker.process.returncode == os.EX_CONFIG


def test_a_task_that_is_durable_no_more_is_told_of_once(bench: Bench) -> None:
    """Its timers run as plain bodies, and nobody ends them: the worker says which task, and what to do."""
    bench.beat()
    worker = bench.worker(TEST_FORMER="1")
    timers = [apply_at(bench.task("former"), 0, ("former",)) for _ in range(3)]
    bench.until_begun("former", 3)
    worker.wait_for_log("Task working.former is no DurableTask here")
    assert worker.logs().count("is no DurableTask here") == 1
    assert [each.cancel() for each in timers] == ["cancelled"] * 3


def test_a_warm_shutdown_lets_bodies_end(bench: Bench) -> None:
    """Heartbeats go on until the last body has ended, longer than the lease."""
    bench.beat()
    worker = bench.worker()
    timer = apply_at(bench.task("gate"), 0, ("warm", bench.file("go")))
    bench.until_begun("warm")
    worker.send_signal(signal.SIGTERM)
    worker.wait_for_log("Warm shutdown")
    other = bench.worker()
    until = (
        "select until > started_at + interval '6 seconds' as long from {schema}.renewal join {schema}.run using (id)"
    )
    eventually(lambda: [each.long for each in bench.rows(until)] == [True], message="two leases long")
    bench.let_go("go")
    assert bench.until(timer, "succeeded").attempt == 1
    eventually(lambda: not worker.alive(), message="it has ended")
    assert len(bench.bodies("warm")) == 1
    assert other.alive()


def test_a_cold_shutdown_gives_its_runs_back_at_once(bench: Bench) -> None:
    """SIGQUIT: the body goes on in another worker long before the lease would have ended."""
    bench.beat()
    worker = bench.worker(TEST_LEASE="60")
    timer = apply_at(bench.task("gate"), 0, ("cold", bench.file("go")))
    bench.until_begun("cold")
    worker.send_signal(signal.SIGQUIT)
    bench.worker()
    bench.until_begun("cold", 2)
    bench.let_go("go")
    assert bench.until(timer, "succeeded").attempt == 2
    assert [each.ending for each in bench.attempts(timer)] == ["lost"]
    eventually(lambda: not worker.alive(), message="it has ended")
    assert timer.result.get(timeout=10) == "cold"


def test_an_expiry_is_not_forgotten_on_retry(bench: Bench) -> None:
    """C88: fails at once, next attempt after the expiry: it expires, and never starts again."""
    bench.beat()
    bench.worker()
    timer = apply_at(bench.task("patient"), 0, ("expiring",), expires=1.5)
    bench.until_begun("expiring")
    found = bench.until(timer, "expired")
    assert found.attempt == 1
    assert len(bench.bodies("expiring")) == 1


def test_callbacks_that_the_broker_did_not_take_are_sent_later(bench: Bench) -> None:
    """The process dies between the body and its callbacks: the kept value goes to them, without another body."""
    bench.beat()
    bench.worker()
    crash = bench.file("crash")
    Path(crash).touch()
    timer = apply_at(bench.task("dying_result"), 0, ("held", crash), link=bench.task("after").s(name="held callback"))
    bench.until(timer, "succeeded")
    bench.until_begun("held callback")
    assert not Path(crash).exists()
    assert len(bench.bodies("held")) == 1
    assert len(bench.bodies("held callback")) == 1
    assert timer.result.get(timeout=10) == "kept"
    assert bench.rows("select * from {schema}.held_result") == []


def test_a_result_backend_that_goes_away_ends_no_worker(postgres: PostgresServer, valkey: ValkeyServer) -> None:
    """Its end stands in Postgres all the same, and the worker goes on."""
    valkey.client().flushall()
    backend = ValkeyServer().start()
    try:
        with bench_on(postgres, valkey.url, backend.backend_url) as bench:
            bench.beat()
            worker = bench.worker()
            timer = apply_at(bench.task("gate"), 0, ("unreported", bench.file("go")))
            bench.until_begun("unreported")
            backend.stop()
            bench.let_go("go")
            bench.until(timer, "succeeded")
            worker.wait_for_log("could not be reported")
            backend.start()
            following = apply_at(bench.task("note"), 0, ("following",))
            bench.until(following, "succeeded")
            assert worker.alive()
            assert len(bench.bodies("unreported")) == 1
    finally:
        backend.teardown()
