"""What a task class may put in the place of ours: on a real worker each is called as Celery calls it, under the lease."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import uuid4

import pytest

from celery_durable import apply_at
from tests.servers.brokers import ValkeyServer
from tests.servers.postgres import PostgresServer
from tests.servers.waiting import eventually
from tests.workers import Bench, bench_on


@pytest.fixture(scope="module")
def bench(postgres: PostgresServer, valkey: ValkeyServer) -> Iterator[Bench]:
    """A beat and a worker for all tests here."""
    valkey.client().flushall()
    with bench_on(postgres, valkey.url, valkey.backend_url) as bench:
        bench.beat()
        bench.worker()
        yield bench


@pytest.fixture
def name() -> str:
    return uuid4().hex


def test_a_call_that_runs_the_body_itself(bench: Bench, name: str) -> None:
    """Without super(): the lease is taken before it, and its failures are tried again."""
    timer = apply_at(bench.task("alone"), 0, (name, 1))
    assert bench.until(timer, "succeeded").attempt == 2
    bodies = bench.bodies(name)
    assert [(each.attempt, each.timer_id) for each in bodies] == [(1, timer.id), (2, timer.id)]
    assert bodies[0].more["fence"] < bodies[1].more["fence"]
    assert timer.result.get(timeout=10) == name


def test_a_mixin_that_fails_before_it_goes_on(bench: Bench, name: str) -> None:
    """What it does before super() belongs to the attempt, too."""
    timer = apply_at(bench.task("around"), 0, (name,))
    assert bench.until(timer, "succeeded").attempt == 2
    assert [each.error for each in bench.attempts(timer)] == ["before the body"]
    assert [each.attempt for each in bench.bodies(name)] == [2]


@pytest.mark.parametrize(
    ("times", "state", "hooks"),
    [
        (0, "succeeded", ["before_start", "on_success", "after_return SUCCESS"]),
        (1, "succeeded", ["before_start", "on_retry", "before_start", "on_success", "after_return SUCCESS"]),
        (2, "dead", ["before_start", "on_retry", "before_start", "on_failure", "after_return FAILURE"]),
    ],
)
def test_hooks_that_do_not_call_ours(bench: Bench, name: str, times: int, state: str, hooks: list[str]) -> None:
    """Each is called once for what it is named for."""
    timer = apply_at(bench.task("hooked"), 0, (name, times))

    def told() -> list[str]:
        rows = bench.rows("select name from body where name like %(name)s order by at", name=f"{name} %")
        return [row.name.partition(" ")[2] for row in rows if not row.name.endswith("RETRY")]

    def there() -> bool:
        assert told() == hooks
        return True

    eventually(there, message=f"{hooks}")
    assert timer.state == state
    assert len(bench.bodies(name)) == min(times + 1, 2)


def test_hooks_of_a_success_that_nobody_is_told_of(bench: Bench, name: str) -> None:
    """They wait for the end of the run: it is stored before them, not with the next lease."""
    timer = apply_at(bench.task("hooked"), 0, (name, 0), ignore_result=True)
    eventually(lambda: bench.bodies(f"{name} on_success"), message="on_success")
    assert timer.state == "succeeded"


def test_before_start_of_a_copy(bench: Bench, name: str) -> None:
    """Celery calls it before the lease is asked for: a copy of the message that is dropped has it called, too."""
    timer = apply_at(bench.task("hooked"), 0, (name, 0))
    bench.until(timer, "succeeded")
    bench.publish_again(timer, 1)
    eventually(lambda: len(bench.bodies(f"{name} before_start")) == 2, message="the copy")
    eventually(lambda: f"[{timer.id}] ignored" in bench.workers[0].logs(), message="it is dropped")
    assert len(bench.bodies(name)) == len(bench.bodies(f"{name} on_success")) == 1
