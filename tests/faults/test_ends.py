"""Ends of a run that need more than a body: shutdowns, frozen children, and messages that come again or too late."""

from __future__ import annotations

import json
import os
import signal

from celery_durable import apply_at
from tests.servers.brokers import RabbitServer, ValkeyServer
from tests.servers.postgres import PostgresServer
from tests.servers.waiting import eventually
from tests.workers import Bench, bench, bench_on

__all__ = ["bench"]


def test_a_cold_shutdown_with_late_acknowledgement(bench: Bench) -> None:
    """Celery lets bodies end whose messages were acknowledged before; a leased one is given back all the same."""
    bench.beat()
    late = json.dumps({"task_acks_late": True})
    worker = bench.worker(TEST_LEASE="60", TEST_CONF=late)
    timer = apply_at(bench.task("gate"), 0, ("late", bench.file("go")))
    bench.until_begun("late")
    worker.send_signal(signal.SIGQUIT)
    eventually(lambda: bench.attempts(timer), message="it is given back")
    bench.worker(TEST_CONF=late)
    bench.until_begun("late", 2)
    bench.let_go("go")
    assert bench.until(timer, "succeeded").attempt == 2
    assert [each.ending for each in bench.attempts(timer)] == ["lost"]
    assert timer.result.get(timeout=10) == "late"
    eventually(lambda: not worker.alive(), message="it has ended")


def test_a_soft_shutdown(bench: Bench) -> None:
    """Bodies that end in its time have ended for good, well or not; the others are given back at its end."""
    bench.beat()
    soft = json.dumps({"worker_soft_shutdown_timeout": 4})
    worker = bench.worker(concurrency=3, TEST_LEASE="60", TEST_CONF=soft)
    quick = apply_at(bench.task("gate"), 0, ("quick", bench.file("soon")))
    failing = apply_at(bench.task("picky"), 0, ("failing", bench.file("soon")))
    long = apply_at(bench.task("gate"), 0, ("long", bench.file("late")))
    for name in ("quick", "failing", "long"):
        bench.until_begun(name)
    worker.send_signal(signal.SIGQUIT)
    worker.wait_for_log("Initiating Soft Shutdown")
    bench.let_go("soon")
    assert bench.until(quick, "succeeded").attempt == 1
    bench.until(failing, "dead")
    assert long.state == "running"
    eventually(lambda: bench.attempts(long), message="it is given back")
    eventually(lambda: not worker.alive(), message="it has ended")
    assert (quick.result.state, failing.result.state) == ("SUCCESS", "FAILURE")
    bench.worker()
    bench.until_begun("long", 2)
    bench.let_go("late")
    assert bench.until(long, "succeeded").attempt == 2
    assert [each.ending for each in bench.attempts(long)] == ["lost"]
    assert [len(bench.bodies(name)) for name in ("quick", "failing")] == [1, 1]


def test_a_frozen_child_keeps_its_lease(bench: Bench) -> None:
    """Its parent renews it: nobody else begins, and the body ends well when it goes on."""
    bench.beat()
    bench.worker()
    timer = apply_at(bench.task("gate"), 0, ("frozen", bench.file("go")))
    [body] = bench.until_begun("frozen")
    os.kill(body.pid, signal.SIGSTOP)
    try:
        until = "select until > started_at + interval '9 s' as long from {schema}.renewal join {schema}.run using (id)"
        eventually(lambda: [each.long for each in bench.rows(until)] == [True], message="three leases long")
        bench.let_go("go")
        assert timer.state == "running"
    finally:
        os.kill(body.pid, signal.SIGCONT)
    assert bench.until(timer, "succeeded").attempt == 1
    assert len(bench.bodies("frozen")) == 1


def test_a_frozen_child_beyond_its_hard_limit(bench: Bench) -> None:
    """Its parent kills it, and the next attempt begins in a new one."""
    bench.beat()
    bench.worker()
    timer = apply_at(bench.task("gate"), 0, ("limited", bench.file("go")), time_limit=2)
    [body] = bench.until_begun("limited")
    os.kill(body.pid, signal.SIGSTOP)
    second = bench.until_begun("limited", 2)[1]
    assert second.pid != body.pid
    bench.let_go("go")
    assert bench.until(timer, "succeeded").attempt == 2
    [first] = bench.attempts(timer)
    assert (first.ending, first.error_type) == ("failed", "billiard.exceptions.TimeLimitExceeded")


def test_a_message_that_the_broker_delivers_again(
    postgres: PostgresServer, valkey: ValkeyServer, rabbitmq: RabbitServer
) -> None:
    """RabbitMQ gives the fetched message of a killed worker to the next one: its body runs there, and once."""
    with bench_on(postgres, rabbitmq.create_vhost(), valkey.backend_url) as bench:
        bench.beat()
        worker = bench.worker(concurrency=1)
        running = apply_at(bench.task("gate"), 0, ("running", bench.file("go")))
        bench.until_begun("running")
        fetched = apply_at(bench.task("note"), 0, ("fetched",))
        worker.wait_for_log(f"[{fetched.id}] received")
        worker.kill(signal.SIGKILL)
        assert bench.bodies("fetched") == []
        bench.worker()
        bench.until_begun("running", 2)
        bench.let_go("go")
        assert bench.until(running, "succeeded").attempt == 2
        assert bench.until(fetched, "succeeded").attempt == 1
        assert (len(bench.bodies("running")), len(bench.bodies("fetched"))) == (2, 1)


def test_a_message_that_waits_beyond_its_expiry(bench: Bench) -> None:
    """The worker is busy: the timer expires in Postgres, its late message runs nothing, the result says REVOKED."""
    bench.beat()
    bench.worker("-P", "solo", concurrency=1)
    busy = apply_at(bench.task("gate"), 0, ("busy", bench.file("go")))
    bench.until_begun("busy")
    timer = apply_at(bench.task("note"), 0, ("late",), expires=2)
    bench.until(timer, "dispatched")
    assert bench.until(timer, "expired").attempt == 0
    bench.let_go("go")
    bench.until(busy, "succeeded")
    eventually(lambda: timer.result.state == "REVOKED", message="the result says so")
    assert bench.bodies("late") == []


def test_callbacks_that_are_tried_again_are_no_failure_yet(bench: Bench) -> None:
    """Ten tries, and at the end of the last one errback and one signal."""
    bench.beat()
    bench.worker(TEST_SIGNALS="1")
    link = bench.task("after").s(name="link").set(serializer="no such serializer")
    timer = apply_at(bench.task("note"), 0, ("held",), link=link, link_error=bench.task("errback").si())
    eventually(lambda: bench.attempts(timer), message="a try has failed")
    assert bench.bodies("signal timer_dead") == []
    bench.until(timer, "dead", timeout=60)
    eventually(lambda: len(bench.bodies("errback")) == 1, message="the errback")
    eventually(lambda: len(bench.bodies("signal timer_dead")) == 1, message="the signal")
    eventually(lambda: bench.messages() == 0, message="the queue is empty")
    bench.task("note").delay("last").get(timeout=10)
    assert len(bench.attempts(timer)) == 10 and len(bench.bodies("held")) == 1
    assert len(bench.bodies("errback")) == 1
    assert timer.result.state == "FAILURE"
