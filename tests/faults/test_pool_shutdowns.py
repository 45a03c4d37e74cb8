"""Every pool of Celery's while its worker is told to end: no body is lost, and no attempt is the task's fault."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from uuid import uuid4

import pytest

from celery_durable import apply_at
from tests.servers.brokers import ValkeyServer
from tests.servers.postgres import PostgresServer
from tests.servers.waiting import eventually
from tests.workers import Bench, bench_on

POOLS = ("prefork", "threads", "gevent", "solo")
pytestmark = pytest.mark.parametrize("pool", POOLS)


@pytest.fixture(scope="module")
def bench(postgres: PostgresServer, valkey: ValkeyServer) -> Iterator[Bench]:
    """One beat, and a worker that takes what others leave."""
    valkey.client().flushall()
    with bench_on(postgres, valkey.url, valkey.backend_url) as bench:
        bench.beat()
        bench.worker("-P", "threads")
        yield bench


@pytest.fixture
def name() -> str:
    return uuid4().hex


def test_a_warm_shutdown(bench: Bench, pool: str, name: str) -> None:
    """The body in hand ends; a timer whose message the worker has only fetched begins in another one."""
    worker = bench.worker("-P", pool, "-Q", name, concurrency=1)
    gate = apply_at(bench.task("gate"), 0, (name, bench.file(name)), queue=name)
    bench.until_begun(name)
    fetched = apply_at(bench.task("note"), 0, (f"{name} fetched",), queue=name)
    bench.until(fetched, "dispatched")
    worker.send_signal(signal.SIGTERM)
    worker.wait_for_log("Warm shutdown")
    bench.let_go(name)
    eventually(lambda: not worker.alive(), message="it has ended")
    assert worker.process is not None and worker.process.returncode == 0
    assert bench.until(gate, "succeeded").attempt == 1
    assert gate.result.get(timeout=10) == name
    bench.app.control.add_consumer(name)
    assert bench.until(fetched, "succeeded").attempt == 1
    assert (len(bench.bodies(name)), len(bench.bodies(f"{name} fetched"))) == (1, 1)


def test_a_cold_shutdown(bench: Bench, pool: str, name: str) -> None:
    """SIGQUIT: the body begins again in another worker, long before the lease ends; a thread goes on to its end."""
    worker = bench.worker("-P", pool, "-Q", name, concurrency=1, TEST_LEASE="60")
    timer = apply_at(bench.task("gate"), 0, (name, bench.file(name)), queue=name)
    bench.until_begun(name)
    worker.send_signal(signal.SIGQUIT)
    attempts = 1 if pool == "threads" else 2
    if pool == "threads":
        worker.wait_for_log("keeps its lease to the end of its body")
    else:
        eventually(lambda: bench.attempts(timer), message="it is given back")
        eventually(lambda: timer.result.state == "RETRY", message="the result says so") if pool != "solo" else None
        bench.app.control.add_consumer(name)
        bench.until_begun(name, 2)
    bench.let_go(name)
    assert bench.until(timer, "succeeded").attempt == attempts
    assert [each.ending for each in bench.attempts(timer)] == ["lost"] * (attempts - 1)
    eventually(lambda: not worker.alive(), message="it has ended")
    assert timer.result.get(timeout=10) == name
