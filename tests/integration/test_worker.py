"""DurableTask in a real prefork worker: every way in which a body ends by itself."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from celery import Signature, chain, chord, group
from celery.exceptions import MaxRetriesExceededError, TaskRevokedError

from celery_durable import apply_at, dead_letters, get_timer
from celery_durable import canvas as canvas_
from tests.servers.brokers import ValkeyServer
from tests.servers.postgres import PostgresServer
from tests.servers.waiting import eventually
from tests.workers import Bench, bench_on


@pytest.fixture(scope="module")
def bench(postgres: PostgresServer, valkey: ValkeyServer) -> Iterator[Bench]:
    """One worker and one beat for the module; each test has names of its own."""
    valkey.client().flushall()
    with bench_on(postgres, valkey.url, valkey.backend_url) as bench:
        bench.beat()
        bench.worker("-E", concurrency=3)
        yield bench


@pytest.fixture
def name() -> str:
    return uuid4().hex


def test_success(bench: Bench, name: str) -> None:
    timer = apply_at(bench.task("note"), 0.2, (name, {"answer": 42}), key=f"key of {name}")
    found = bench.until(timer, "succeeded")
    assert timer.result.get(timeout=10) == {"answer": 42}
    [body] = bench.bodies(name)
    assert (body.task_id, body.timer_id) == (str(timer.id), timer.id)
    assert (body.attempt, body.retries, body.key) == (1, 0, f"key of {name}")
    assert 0 <= body.more["lateness"] < 2
    assert found.attempt == 1
    assert found.worker == f"celery@{found.worker.split('@')[1]}" if found.worker else False
    assert found.started_at is not None
    assert bench.attempts(timer) == []


def test_it_fails_twice_and_then_works(bench: Bench, name: str) -> None:
    """C89: header, key, queue, priority and root id are the same in all three attempts."""
    root = uuid4().hex
    timer = apply_at(
        bench.task("flaky"), 0, (name, 2), key=f"K1-{name}", headers={"x-tenant": 7}, priority=5, root_id=root
    )
    found = bench.until(timer, "succeeded")
    assert found.attempt == 3
    assert timer.result.get(timeout=10) == name
    bodies = bench.bodies(name)
    assert [(each.attempt, each.retries) for each in bodies] == [(1, 0), (2, 1), (3, 2)]
    assert {each.key for each in bodies} == {f"K1-{name}"}
    same = {(each.more["tenant"], each.more["priority"], each.more["queue"], each.more["root_id"]) for each in bodies}
    assert same == {(7, 5, "working", root)}
    first, second = bench.attempts(timer)
    assert (first.attempt, first.ending, first.error_type) == (1, "failed", "ConnectionError")
    assert first.error == "nobody there\\0 at attempt 1"
    # Base 0.2 s with jitter from its upper half, doubled after the second.
    assert 0.1 <= (first.next_due_at - first.ended_at).total_seconds() <= 0.25
    assert 0.2 <= (second.next_due_at - second.ended_at).total_seconds() <= 0.45
    assert len({each.more["fence"] for each in bodies}) == 3


def test_the_last_failure_makes_a_dead_letter_that_is_replayed_once(bench: Bench, name: str) -> None:
    """C90: payload, attempts, error chain and traceback are kept; a replay runs once, a second one is refused."""
    cure = bench.file(f"cure-{name}")
    when = datetime.now(timezone.utc)
    timer = apply_at(
        bench.task("doomed"), 0, (name, cure), {"at": when, "text": "näxt ✓"}, key=f"dead-{name}", headers={"x-tenant": 7},
        link_error=bench.task("errback").si(),
    )  # fmt: skip
    found = bench.until(timer, "dead")
    assert (found.attempt, found.reason) == (3, "exhausted")
    with pytest.raises(ValueError, match="cannot work"):
        timer.result.get(timeout=10)
    kept = dead_letters.get(timer.id, app=bench.app)
    assert kept is not None
    letter, attempts = kept
    assert (letter.task, letter.attempt, letter.reason, letter.queue) == ("working.doomed", 3, "exhausted", "working")
    assert letter.error_type == "ValueError"
    assert letter.error == f"{name} cannot work\ncaused by KeyError: 'missing'"
    assert [each.attempt for each in attempts] == [1, 2, 3]
    assert all(each.started_at < each.ended_at and each.worker for each in attempts)
    assert "KeyError: 'missing'" in attempts[-1].traceback
    assert "direct cause" in attempts[-1].traceback
    assert "in doomed" in attempts[-1].traceback
    eventually(lambda: len(bench.bodies("errback")) >= 1, message="the errback")
    assert len(bench.bodies(name)) == 3

    Path(cure).touch()
    again = dead_letters.replay(timer.id, app=bench.app)
    bench.until(again, "succeeded")
    last = bench.bodies(name)[-1]
    assert len(bench.bodies(name)) == 4
    assert (last.key, last.attempt, last.more["tenant"]) == (f"dead-{name}", 1, 7)
    assert last.more["kwargs"].keys() == {"at", "text"}
    with pytest.raises(Exception, match="replayed already"):
        dead_letters.replay(timer.id, app=bench.app)


def test_a_failure_that_no_attempt_can_mend(bench: Bench, name: str) -> None:
    timer = apply_at(bench.task("picky"), 0, (name,))
    found = bench.until(timer, "dead")
    assert (found.attempt, found.reason) == (1, "failed")
    assert len(bench.bodies(name)) == 1


def test_duplicates_run_one_body(bench: Bench, name: str) -> None:
    """Three copies during the body and one after it are dropped, and leave no trace in the result backend."""
    timer = apply_at(bench.task("waiting"), 0, (name, bench.file(name)))
    bench.until_begun(name)
    bench.publish_again(timer, 3)
    log = bench.workers[0]
    eventually(lambda: log.logs().count(f"[{timer.id}] ignored") == 3 or None, message="three copies ignored")
    assert timer.result.state == "STARTED"
    bench.let_go(name)
    bench.until(timer, "succeeded")
    assert timer.result.get(timeout=10) == name
    bench.publish_again(timer, 1)
    eventually(lambda: log.logs().count(f"[{timer.id}] ignored") == 4 or None, message="the late copy ignored")
    assert timer.result.state == "SUCCESS"
    assert len(bench.bodies(name)) == 1


def test_an_apply_async_that_fails_in_a_retry_loses_nothing(bench: Bench, name: str) -> None:
    """C87: the user's override raises while the body retries: that error is the attempt's, and another attempt follows."""
    timer = apply_at(bench.task("overriding"), 0, (name,))
    assert bench.until(timer, "succeeded").attempt == 2
    [failed] = bench.attempts(timer)
    assert (failed.ending, failed.error_type) == ("failed", "KeyError")
    assert len(bench.bodies(name)) == 2


def test_ignore_and_reject_end_the_timer(bench: Bench, name: str) -> None:
    ignored = apply_at(bench.task("ignoring"), 0, (name,))
    rejected = apply_at(bench.task("rejecting"), 0, (name,))
    assert bench.until(ignored, "skipped").reason == "Ignore: not today"
    reason = bench.until(rejected, "skipped").reason
    assert reason is not None and "no good" in reason
    assert len(bench.bodies(name)) == 2


@pytest.mark.parametrize("task", ["unserializable", "huge"])
def test_a_result_that_cannot_be_stored(bench: Bench, name: str, task: str) -> None:
    timer = apply_at(bench.task(task), 0, (name,))
    found = bench.until(timer, "dead")
    assert found.reason == "failed"
    eventually(lambda: timer.result.state == "FAILURE", message="the failure is stored")
    assert len(bench.bodies(name)) == 1


def test_a_body_may_call_its_own_task(bench: Bench, name: str) -> None:
    timer = apply_at(bench.task("calling_itself"), 0, (name,))
    bench.until(timer, "succeeded")
    assert timer.result.get(timeout=10) == 3


def test_a_soft_time_limit_is_a_failure_like_any_other(bench: Bench, name: str) -> None:
    timer = apply_at(bench.task("slow"), 0, (name,))
    bench.until(timer, "dead")
    assert [each.error_type for each in bench.attempts(timer)] == ["billiard.exceptions.SoftTimeLimitExceeded"] * 2


def test_callbacks_are_sent_once_and_then_the_timer_has_succeeded(bench: Bench, name: str) -> None:
    timer = apply_at(bench.task("note"), 0, (name, 7), link=bench.task("after").s(name=f"{name} link"))
    bench.until(timer, "succeeded")
    bench.until_begun(f"{name} link")
    assert bench.rows("select * from {schema}.held_result") == []


def test_callbacks_that_can_never_be_sent(bench: Bench, name: str) -> None:
    """An error that Celery does not expect there: one body, ten tries with growing pauses, one dead letter."""
    link = bench.task("after").s(name=f"{name} link").set(serializer="no such serializer")
    timer = apply_at(bench.task("note"), 0, (name, 7), link=link)
    found = bench.until(timer, "dead", timeout=60)
    assert found.reason == "callbacks failed"
    tries = bench.attempts(timer)
    assert [(each.ending, each.error_type) for each in tries] == [
        ("held", "kombu.exceptions.SerializerNotInstalled")
    ] * 10
    pauses = [(each.next_due_at - each.ended_at).total_seconds() for each in tries[:-1]]
    # Base 0.2 s, doubled up to 1 s, with jitter from the upper half.
    assert 0.05 < pauses[0] <= 0.25 and all(0.4 < each <= 1.05 for each in pauses[4:])
    assert len(bench.bodies(name)) == 1
    assert bench.bodies(f"{name} link") == []
    assert bench.rows("select id from {schema}.held_result where id = %(id)s::uuid", id=str(timer.id)) == []


def test_a_value_that_fits_into_no_message(bench: Bench, name: str) -> None:
    """The result backend's serializer takes it, the callbacks' does not, and never will."""
    link = bench.task("after").s(name=f"{name} link").set(serializer="msgpack")
    timer = apply_at(bench.task("note"), 0, (name, 2**70), link=link)
    assert bench.until(timer, "dead").reason == "callbacks failed"
    assert [each.ending for each in bench.attempts(timer)] == ["held"]
    assert len(bench.bodies(name)) == 1


def test_a_canvas_through_a_durable_task(bench: Bench, name: str) -> None:
    """Chain and chord go on after retries in the middle, once."""
    note, flaky, after = bench.task("note"), bench.task("flaky"), bench.task("after")
    done = chain(note.si(f"{name} a", 1), flaky.si(f"{name} b", 1), after.s(name=f"{name} c")).apply_async(
        countdown=0.2
    )
    assert done.get(timeout=20) == f"{name} b"
    body: Signature[Any] = after.s(name=f"{name} d")
    joined = chord(group(flaky.si(f"{name} {each}", 1) for each in range(3)), body).apply_async()
    assert sorted(joined.get(timeout=20)) == sorted(f"{name} {each}" for each in range(3))
    for each, number in (("a", 1), ("b", 2), ("c", 1), ("d", 1), ("0", 2), ("1", 2), ("2", 2)):
        assert len(bench.bodies(f"{name} {each}")) == number, each


class TestRetry:
    """``self.retry`` with and without a timer."""

    def test_changed_arguments(self, bench: Bench, name: str) -> None:
        timer = apply_at(
            bench.task("asking"), 0, (name,), key=f"asking {name}", headers={"x-tenant": 7, "x-other": 1}, priority=4
        )
        found = bench.until(timer, "succeeded")
        assert (found.attempt, found.key) == (3, f"asking {name}")
        assert timer.result.get(timeout=10) == 3
        bodies = bench.bodies(name)
        assert [each.more["args"] for each in bodies] == [[name], [name, 2], [name, 3]]
        assert [each.more["kwargs"] for each in bodies] == [{}, {"last": 3}, {"last": 3}]
        assert [each.more["tenant"] for each in bodies] == [7, 8, 8]
        assert {each.more["priority"] for each in bodies} == {4}
        assert {each.key for each in bodies} == {f"asking {name}"}
        assert {each.task_id for each in bodies} == {str(timer.id)}
        assert [each.ending for each in bench.attempts(timer)] == ["retried", "retried"]
        [calls] = bench.rows("select count(*) from {schema}.call where timer_id = %(id)s::uuid", id=str(timer.id))
        assert calls.count == 2  # the first, which holds the key, and the last

    def test_giving_up_is_not_started_over_by_the_automatic_policy(self, bench: Bench, name: str) -> None:
        timer = apply_at(bench.task("giving_up"), 0, (name,))
        found = bench.until(timer, "dead")
        assert (found.attempt, found.reason) == (2, "exhausted")
        with pytest.raises(OSError, match="no answer"):
            timer.result.get(timeout=10)
        assert len(bench.bodies(name)) == 2

    def test_without_throw_it_takes_place_all_the_same(self, bench: Bench, name: str) -> None:
        timer = apply_at(bench.task("swallowing"), 0, (name,))
        assert bench.until(timer, "succeeded").attempt == 2
        assert timer.result.get(timeout=10) == "swallowed"
        assert len(bench.bodies(name)) == 2

    @pytest.mark.parametrize(
        ("how", "last"),
        [("retry", "celery_durable.errors.InvalidTimer"), ("Retry", MaxRetriesExceededError.__qualname__)],
    )
    def test_a_time_that_is_none_is_a_failure_like_any_other(
        self, bench: Bench, name: str, how: str, last: str
    ) -> None:
        """By hand at the last attempt nothing is asked any more: it is one too many, whatever its time."""
        timer = apply_at(bench.task("untimely"), 0, (name, how))
        found = bench.until(timer, "dead")
        assert (found.attempt, found.reason) == (2, "exhausted")
        first, second = bench.attempts(timer)
        assert (first.ending, first.error_type) == ("failed", "celery_durable.errors.InvalidTimer")
        assert "300000000000.0 cannot be used" in first.error and "over a hundred years away" in first.error
        assert (second.ending, second.error_type.endswith(last)) == ("failed", True)

    def test_a_retry_by_hand_without_a_zone_is_in_utc(self, bench: Bench, name: str) -> None:
        timer = apply_at(bench.task("naive"), 0, (name,))
        assert bench.until(timer, "succeeded").attempt == 2
        [first] = bench.attempts(timer)
        assert first.ending == "retried"
        assert 0 < (first.next_due_at - first.started_at).total_seconds() < 1.5

    @pytest.mark.parametrize(
        ("task", "args", "attempts"), [("flaky", (2,), 3), ("asking", (), 3), ("swallowing", (), 2)]
    )
    def test_a_direct_call_is_durable_from_its_first_retry(
        self, bench: Bench, name: str, task: str, args: tuple[Any, ...], attempts: int
    ) -> None:
        result = bench.task(task).apply_async((name, *args), headers={"x-tenant": 7}, priority=3)
        assert result.get(timeout=20) is not None
        bodies = bench.bodies(name)
        assert len(bodies) == attempts
        assert [each.retries for each in bodies] == list(range(attempts))
        assert bodies[0].timer_id is None
        assert [each.attempt for each in bodies] == list(range(1, attempts + 1))
        assert {each.task_id for each in bodies} == {each.key for each in bodies} == {result.id}
        assert bodies[0].more["tenant"] == 7
        assert {each.more["priority"] for each in bodies} == {3}
        timer = get_timer(result.id, app=bench.app)
        assert timer is not None
        assert bench.until(timer, "succeeded").attempt == attempts

    def test_a_direct_call_dies_as_a_timer(self, bench: Bench, name: str) -> None:
        """Attempt 1 counts: three bodies with max_retries=2, not four."""
        result = bench.task("doomed").delay(name)
        with pytest.raises(ValueError, match="cannot work"):
            result.get(timeout=20)
        timer = get_timer(result.id, app=bench.app)
        assert timer is not None
        bench.until(timer, "dead")
        assert len(bench.bodies(name)) == 3


def test_a_cancelled_timer_whose_message_waits(bench: Bench, name: str) -> None:
    """The worker finds nothing to run; the result says REVOKED instead of PENDING for ever."""
    timer = apply_at(bench.task("note"), 3600, (name,))
    assert timer.cancel() == "cancelled"
    bench.publish_again(timer, 1)
    eventually(lambda: timer.result.state == "REVOKED", message="the result says so")
    with pytest.raises(TaskRevokedError):
        timer.result.get(timeout=5)
    assert bench.bodies(name) == []


@pytest.mark.parametrize("how", ["eta", "countdown", "set", "durable", "group"])
def test_no_call_form_becomes_a_broker_eta(bench: Bench, name: str, how: str) -> None:
    """C102: eta and countdown of a durable task make a row, and the queue stays empty until then."""
    note = bench.task("note")
    if how == "eta":
        result = note.apply_async((name, 5), eta=datetime.now(timezone.utc) + timedelta(hours=1), task_id=f"{name}-id")
    elif how == "countdown":
        result = note.apply_async((name, 5), countdown=3600)
    elif how == "set":
        result = note.s(name, 5).set(countdown=3600).apply_async()
    elif how == "group":
        result = group(note.s(name, 5) for _ in range(3)).apply_async(countdown=3600).children[0]
    else:
        result = note.apply_async((name, 5), durable=True, key=f"durable {name}")
    timer = get_timer(result.id, app=bench.app)
    assert timer is not None
    if how != "durable":
        assert timer.state == "waiting"
        assert timer.reschedule(0) == "rescheduled"
    bench.until(timer, "succeeded")
    assert result.get(timeout=10) == 5
    [body] = bench.bodies(name)
    assert (body.timer_id, body.task_id) == (timer.id, result.id)


def test_a_revoked_timer_does_not_run(bench: Bench, name: str) -> None:
    """Celery's own revoke, known to the worker before the message comes, ends the timer as cancelled."""
    timer = apply_at(bench.task("note"), 3600, (name,))
    answers: Any = bench.app.control.revoke(timer.task_id, reply=True, timeout=5)
    assert answers
    timer.reschedule(0)
    assert bench.until(timer, "cancelled").reason == "revoked"
    assert bench.bodies(name) == []


def test_a_terminated_body_ends_the_timer(bench: Bench, name: str) -> None:
    timer = apply_at(bench.task("waiting"), 0, (name, bench.file(name)))
    bench.until_begun(name)
    bench.app.control.revoke(timer.task_id, terminate=True)
    assert bench.until(timer, "cancelled").reason == "terminated"
    eventually(lambda: timer.result.state == "REVOKED", message="the result says so")
    assert len(bench.bodies(name)) == 1


def test_the_lease_is_kept_over_a_long_body(bench: Bench, name: str) -> None:
    """A body three times as long as its lease: heartbeats keep it, no copy begins."""
    timer = apply_at(bench.task("waiting"), 0, (name, bench.file(name)))
    bench.until_begun(name)

    def renewed_for(seconds: float) -> bool:
        rows = bench.rows(
            "select until - started_at > %(seconds)s * interval '1 second' as long from {schema}.renewal"
            " join {schema}.run using (id) where id = %(id)s::uuid", id=str(timer.id), seconds=seconds,
        )  # fmt: skip
        return bool(rows and rows[0].long)

    eventually(lambda: renewed_for(9), timeout=30, message="three leases long")
    bench.let_go(name)
    assert bench.until(timer, "succeeded").attempt == 1
    assert len(bench.bodies(name)) == 1


def test_a_message_that_only_looks_like_a_timers(bench: Bench, name: str) -> None:
    """Headers copied out of a running task's request, or made up, give no lease and lose no message."""
    header = {"durable_timer": str(uuid4()), "durable_call": str(uuid4()), "durable_leased": True, "mine": 1}
    assert bench.task("note").apply_async((name, 9), headers=header).get(timeout=10) == 9
    for garbage in ({"durable_timer": "x", "durable_leased": True}, {"durable_timer": 17}):
        assert bench.app.send_task("working.note", (name, 8), headers=garbage).get(timeout=10) == 8
    assert [each.timer_id for each in bench.bodies(name)] == [None] * 3


@pytest.fixture
def other_broker() -> Iterator[ValkeyServer]:
    """Not the one whose queue the module's worker empties: it would drop timers of another database."""
    server = ValkeyServer().start()
    yield server
    server.teardown()


def test_the_oldest_postgres(postgres15: PostgresServer, other_broker: ValkeyServer, name: str) -> None:
    """Success, retry, changed message, dead letter and callbacks with PostgreSQL 15."""
    with bench_on(postgres15, other_broker.url, other_broker.backend_url) as bench:
        bench.beat()
        bench.worker()
        flaky = apply_at(bench.task("flaky"), 0, (f"{name} 1", 2), link=bench.task("after").s(name=f"{name} 2"))
        asking = apply_at(bench.task("asking"), 0, (f"{name} 3",))
        doomed = apply_at(bench.task("doomed"), 0, (f"{name} 4",))
        assert bench.until(flaky, "succeeded").attempt == 3
        assert bench.until(asking, "succeeded").attempt == 3
        assert bench.until(doomed, "dead").attempt == 3
        bench.until_begun(f"{name} 2")


@pytest.mark.parametrize("shape", ["chain", "group", "chord"])
def test_a_canvas_at_a_later_time(bench: Bench, name: str, shape: str) -> None:
    """C103: nothing of it is applied before; its result is the one that the handle has from the start."""
    note, add = bench.task("note"), bench.task("sum")
    canvas: Any = {
        "chain": chain(note.s(name, 1), add.s([2]), add.s([3])),
        "group": group(note.s(name, each) for each in (1, 2, 3)),
        "chord": chord([note.s(name, each) for each in (1, 2, 3)], add.s([])),
    }[shape]
    timer = apply_at(canvas, 1.5, key=f"canvas {name}", expires=600)
    assert timer.task == "celery_durable.canvas" and bench.bodies(name) == []
    assert apply_at(canvas, 1.5, key=f"canvas {name}") == timer
    wanted: Any = {"chain": 6, "group": [1, 2, 3], "chord": 6}[shape]
    assert timer.result.get(timeout=20) == wanted
    bench.until(timer, "succeeded")
    assert len(bench.bodies(name)) == (1 if shape == "chain" else 3)


@pytest.mark.filterwarnings("ignore:Call to deprecated setex")  # Celery's own, in GroupResult.save
def test_a_canvas_that_is_applied_twice_has_the_same_ids(bench: Bench, name: str) -> None:
    """The worker dies after it has published the canvas: the second time brings copies, not other tasks."""
    timer = apply_at(group(bench.task("note").s(name, each) for each in (1, 2)), 3600)
    text = bench.rows(
        "select convert_from(body, 'utf-8')::json->0->>0 as text from {schema}.call where id = %(id)s", id=timer.id
    )[0].text
    ids = {canvas_.apply(bench.app, text) for _ in range(2)}
    assert ids == {timer.result.id}
    assert sorted(timer.result.get(timeout=20)) == [1, 2]
    eventually(
        lambda: len({each.task_id for each in bench.bodies(name)}) == 2, message="two tasks, however many bodies"
    )
    assert timer.cancel() == "cancelled"
