"""Every pool of Celery's: the same body ends the same way, and what a pool cannot do is shown, too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest

from celery_durable import apply_at
from tests.servers.brokers import ValkeyServer
from tests.servers.postgres import PostgresServer
from tests.servers.waiting import eventually
from tests.workers import Bench, bench_on

POOLS = ("prefork", "threads", "gevent", "solo")
#: Where a soft limit reaches the body, and where a hard one does.
SOFT, HARD = ("prefork",), ("prefork", "gevent")


@pytest.fixture(scope="module", params=POOLS)
def pool(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def bench(postgres: PostgresServer, valkey: ValkeyServer, pool: str) -> Iterator[Bench]:
    """One worker of the pool and one beat; each test has names of its own."""
    valkey.client().flushall()
    with bench_on(postgres, valkey.url, valkey.backend_url) as bench:
        bench.beat()
        bench.worker("-P", pool)
        yield bench


@pytest.fixture
def name() -> str:
    return uuid4().hex


def follow_ups(bench: Bench, name: str) -> dict[str, Any]:
    """A callback and an errback that leave a row each."""
    return {"link": bench.task("after").s(name=f"{name} link"), "link_error": bench.task("errback").si()}


def sent(bench: Bench, name: str, errbacks_before: int) -> tuple[int, int]:
    """How many callbacks and errbacks have run, when nothing is left in the queue and a later message has run."""
    eventually(lambda: bench.messages() == 0, message="the queue is empty")
    bench.task("note").delay(f"{name} last").get(timeout=10)
    return len(bench.bodies(f"{name} link")), len(bench.bodies("errback")) - errbacks_before


ENDS = {
    # task: (state, attempts, reason, result, callbacks, errbacks)
    "note": ("succeeded", 1, None, "SUCCESS", 1, 0),
    "flaky": ("succeeded", 3, None, "SUCCESS", 1, 0),
    "asking": ("succeeded", 3, None, "SUCCESS", 1, 0),
    "naive": ("succeeded", 2, None, "SUCCESS", 1, 0),
    "doomed": ("dead", 3, "exhausted", "FAILURE", 0, 1),
    "unserializable": ("dead", 1, "failed", "FAILURE", 0, 1),
    "ignoring": ("skipped", 1, "Ignore: not today", "STARTED", 0, 0),
    "rejecting": ("skipped", 1, "Reject: ", "FAILURE", 0, 1),
    "rejecting with requeue": ("succeeded", 2, None, "SUCCESS", 1, 0),
    "leaving": ("succeeded", 2, None, "SUCCESS", 1, 0),
}


@pytest.mark.parametrize("task", ENDS)
def test_the_end_of_a_body(bench: Bench, name: str, task: str) -> None:
    state, attempts, reason, result, callbacks, errbacks = ENDS[task]
    before = len(bench.bodies("errback"))
    more = {"flaky": (2,), "rejecting with requeue": (True,)}.get(task, ())
    timer = apply_at(bench.task(task.split()[0]), 0, (name, *more), **follow_ups(bench, name))
    found = bench.until(timer, state)
    assert found.attempt == attempts
    assert (found.reason or "").startswith(reason or ""), found.reason
    assert (found.reason is None) == (reason is None)
    eventually(lambda: timer.result.state == result, message=f"its result is {result}")
    eventually(lambda: len(bench.bodies(f"{name} link")) == callbacks, message="its callbacks")
    eventually(lambda: len(bench.bodies("errback")) - before == errbacks, message="its errbacks")
    assert sent(bench, name, before) == (callbacks, errbacks)
    assert len(bench.bodies(name)) == attempts


def test_a_soft_limit(bench: Bench, pool: str, name: str) -> None:
    """Where the pool does not enforce it, the body goes on and the lease with it."""
    limited(bench, name, pool in SOFT, "billiard.exceptions.SoftTimeLimitExceeded", "exhausted", soft_time_limit=1)


def test_a_hard_limit(bench: Bench, pool: str, name: str) -> None:
    """The same; beyond its hard limit a lease is kept for a minute only."""
    limited(bench, name, pool in HARD, "billiard.exceptions.TimeLimitExceeded", "time limit", time_limit=1)


def limited(bench: Bench, name: str, enforced: bool, error: str, reason: str, **limit: float) -> None:
    """A body of a task with three retries, held until its limit is over."""
    before = len(bench.bodies("errback"))
    timer = apply_at(bench.task("gate"), 0, (name, bench.file(name)), **limit, **follow_ups(bench, name))
    if not enforced:
        bench.until_begun(name)
        over = "select clock_timestamp() - at > interval '3.5 s' as so from body where name = %(name)s"
        eventually(lambda: bench.rows(over, name=name)[0].so, message="longer than limit and lease")
        bench.let_go(name)
        assert bench.until(timer, "succeeded").attempt == 1
        assert len(bench.bodies(name)) == 1
        return
    found = bench.until(timer, "dead")
    assert (found.attempt, found.reason) == (4, reason)
    assert [each.error_type for each in bench.attempts(timer)] == [error] * 4
    eventually(lambda: timer.result.state == "FAILURE", message="its result")
    eventually(lambda: len(bench.bodies("errback")) > before, message="its errback")
    assert sent(bench, name, before) == (0, 1)


def test_a_terminated_body(bench: Bench, pool: str, name: str) -> None:
    """Pools that can end a body end its timer as cancelled; in the others the body runs to its end."""
    before = len(bench.bodies("errback"))
    timer = apply_at(bench.task("gate"), 0, (name, bench.file(name)), **follow_ups(bench, name))
    bench.until_begun(name)
    bench.app.control.revoke(timer.task_id, terminate=True)
    if pool in ("threads", "solo"):
        if pool == "threads":
            bench.workers[0].wait_for_log("does not implement kill_job")
        bench.let_go(name)
        assert bench.until(timer, "succeeded").attempt == 1
        assert timer.result.get(timeout=10) == name
    else:
        assert bench.until(timer, "cancelled").reason == "terminated"
        eventually(lambda: timer.result.state == "REVOKED", message="the result says so")
        assert sent(bench, name, before)[0] == 0
        assert (timer.state, timer.result.state) == ("cancelled", "REVOKED")
    assert len(bench.bodies(name)) == 1
