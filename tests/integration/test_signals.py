"""What receivers of our signals are told, in beats and workers, and what becomes of tasks that nobody knows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest

from celery_durable import apply_at, dead_letters
from celery_durable.timer import Timer
from tests.servers.brokers import ValkeyServer
from tests.servers.postgres import PostgresServer
from tests.servers.waiting import eventually
from tests.workers import Bench, bench_on


@pytest.fixture(scope="module")
def bench(postgres: PostgresServer, valkey: ValkeyServer) -> Iterator[Bench]:
    valkey.client().flushall()
    with bench_on(postgres, valkey.url, valkey.backend_url) as bench:
        bench.beat(TEST_SIGNALS="1")
        bench.worker(concurrency=3, TEST_SIGNALS="1")
        yield bench


@pytest.fixture
def name() -> str:
    return uuid4().hex


def told(bench: Bench, timer: Timer) -> list[tuple[str, dict[str, Any]]]:
    """The signals about a timer, in order."""
    sql = "select name, more from body where timer_id = %(id)s and name like 'signal %%' order by at"
    return [(row.name.removeprefix("signal "), row.more) for row in bench.rows(sql, id=timer.id)]


def names(bench: Bench, timer: Timer) -> list[str]:
    return [signal for signal, _ in told(bench, timer)]


def test_a_life_with_a_retry(bench: Bench, name: str) -> None:
    timer = apply_at(bench.task("flaky"), 0, (name, 1))
    bench.until(timer, "succeeded")
    eventually(lambda: len(told(bench, timer)) == 5, message="all are told")
    found = told(bench, timer)
    assert sorted(each for each, _ in found) == [
        "timer_dispatched", "timer_dispatched", "timer_retried", "timer_started", "timer_started",
    ]  # fmt: skip
    assert {more["task"] for _, more in found} == {"working.flaky"}
    assert [more["attempt"] for each, more in found if each == "timer_started"] == [1, 2]
    [retried] = [more for each, more in found if each == "timer_retried"]
    assert retried["attempt"] == 1 and "nobody there" in retried["error"]
    assert all(more["lateness"] < 5 and more["leased"] for each, more in found if each == "timer_dispatched")


def test_a_death(bench: Bench, name: str) -> None:
    timer = apply_at(bench.task("doomed"), 0, (name,))
    bench.until(timer, "dead")
    eventually(lambda: "timer_dead" in names(bench, timer), message="it is told")
    [dead] = [more for each, more in told(bench, timer) if each == "timer_dead"]
    assert dead["reason"] == "exhausted" and dead["error"]


def test_a_death_that_the_parent_sees(bench: Bench, name: str) -> None:
    timer = apply_at(bench.task("killer"), 0, (name,))
    bench.until(timer, "dead")
    eventually(lambda: names(bench, timer).count("timer_dead") == 1, message="it is told once")
    found = dict(told(bench, timer))
    assert found["timer_dead"]["reason"] == "worker lost"
    assert names(bench, timer).count("timer_retried") == 2


def test_a_message_that_no_broker_can_carry(bench: Bench, name: str) -> None:
    timer = apply_at(bench.task("note"), 3600, (name,))
    bench.rows("update {schema}.call set headers = '[]' where id = %(id)s returning id", id=timer.id)
    assert timer.reschedule(0) == "rescheduled"
    bench.until(timer, "dead")
    eventually(lambda: names(bench, timer) == ["timer_dead"], message="it is told")
    assert told(bench, timer)[0][1]["reason"] == "undispatchable"


def test_a_task_that_this_release_does_not_know(bench: Bench, name: str) -> None:
    """C87: it waits with its reason in the history until a worker knows it."""
    timer = apply_at("working.newer", 0, (name,), durable=True, app=bench.app)
    eventually(lambda: bool(bench.attempts(timer)), message="a worker has said so")
    first = bench.attempts(timer)[0]
    assert (first.ending, first.error_type) == ("unknown", "NotRegistered") and "working.newer" in first.error
    assert timer.state in ("claimed", "dispatched")
    bench.workers.pop().teardown()
    bench.worker(TEST_NEWER="1", TEST_SIGNALS="1")
    bench.rows("update {schema}.run set deadline = {schema}.clock() where id = %(id)s returning id", id=timer.id)
    found = bench.until(timer, "succeeded")
    assert found.attempt == 1, "it was no attempt of the task"
    assert timer.result.get(timeout=10) == name


def test_a_task_that_nobody_ever_knows(bench: Bench, name: str) -> None:
    timer = apply_at("working.nobody", 0, (name,), durable=True, app=bench.app)
    eventually(lambda: bool(bench.attempts(timer)), message="a worker has said so")
    bench.rows(
        "update {schema}.run set unknown_at = unknown_at - interval '2 days', deadline = {schema}.clock() "
        "where id = %(id)s returning id", id=timer.id,
    )  # fmt: skip
    bench.until(timer, "dead")
    [letter] = [each for each in dead_letters.find_all(app=bench.app) if each.id == timer.id]
    assert (letter.reason, letter.error_type) == ("unknown task", "NotRegistered")
    eventually(lambda: "timer_dead" in names(bench, timer), message="it is told")
