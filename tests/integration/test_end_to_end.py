"""Beats, workers and brokers as a user runs them, with the troubles that delayed tasks have today."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import psutil
import psycopg
import pytest
from celery import Celery

from celery_durable import apply_at, apply_many, schedules
from celery_durable.store import migrations
from celery_durable.store.database import Database
from tests.apps import recording
from tests.servers.brokers import ValkeyServer
from tests.servers.postgres import PostgresServer
from tests.servers.processes import CeleryTestBeat, CeleryTestSetup, CeleryTestWorker, Cluster
from tests.servers.waiting import eventually

MODULE = "tests.apps.recording"


class Bench:
    """One test's setup: servers, a database, and what ran."""

    def __init__(self, database_url: str, broker_url: str, valkey: ValkeyServer) -> None:
        self.env = {
            "CELERY_DURABLE_DATABASE_URL": database_url, "TEST_BROKER": broker_url, "TEST_BACKEND": valkey.backend_url,
        }  # fmt: skip
        self.valkey = valkey
        self.app: Celery = recording.app
        # This process is the application: the same app, told where the servers are.
        self.app.conf.update(
            durable_database_url=database_url, broker_url=broker_url, broker_write_url=broker_url,
            result_backend=valkey.backend_url,
        )  # fmt: skip
        self.database = Database(Database.of(self.app).settings.__class__.from_app(self.app))
        migrations.upgrade(self.database, app_name=self.app.main)
        self.outside = self.database.connect("test")
        self.outside.execute(recording.TABLE)
        self.setup = CeleryTestSetup(self.app, valkey, valkey, Cluster(), Cluster())

    def start(self, *, workers: int = 1, beats: int = 1, **env: str) -> None:
        """Start more workers and beats."""
        new = [CeleryTestWorker(MODULE, env={**self.env, **env}) for _ in range(workers)]
        self.setup.worker_cluster.nodes += new
        more = [CeleryTestBeat(MODULE, env={**self.env, **env}) for _ in range(beats)]
        self.setup.beat_cluster.nodes += more
        for node in (*new, *more):
            node.start(wait=False)
        for node in (*new, *more):
            node.wait_for_log(node.ready_line)

    def bodies(self) -> Counter[str]:
        """How many times each body ran."""
        return Counter(row[0] for row in self.outside.execute("select name from body").fetchall())

    def queued(self) -> int:
        """Messages in the queue or with a worker, on Valkey."""
        client: Any = self.valkey.client()
        return int(client.llen("recording")) + int(client.hlen("unacked"))

    def close(self) -> None:
        self.setup.teardown()
        self.outside.close()
        self.database.close()


@pytest.fixture
def bench(database_url: str, valkey: ValkeyServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    valkey.client().flushall()
    yield from _bench(database_url, valkey.url, valkey, monkeypatch)


@pytest.fixture
def any_bench(
    request: pytest.FixtureRequest, broker_url: str, valkey: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Bench]:
    """The same, on each broker, and on PostgreSQL 18 and 15 in turn."""
    server: PostgresServer = request.getfixturevalue("postgres15" if broker_url.startswith("amqp") else "postgres")
    name = server.create_database()
    yield from _bench(server.url(name), broker_url, valkey, monkeypatch)
    server.drop_database(name)


def _bench(
    database_url: str, broker_url: str, valkey: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Bench]:
    from celery_durable.store import database as module

    # Each test's database is another one; an app's is remembered for the life of the process.
    monkeypatch.setattr(module, "_databases", {})
    monkeypatch.setenv("CELERY_DURABLE_DATABASE_URL", database_url)
    bench = Bench(database_url, broker_url, valkey)
    yield bench
    Database.of(bench.app).close()
    bench.close()


def test_the_main_job(any_bench: Bench) -> None:
    """One-shot and recurring timers, durable and plain, on both brokers; every one runs once and is accounted for."""
    bench = any_bench
    bench.start(workers=1, beats=2)
    timers = apply_many(recording.note, [(1, (f"note {each}",)) for each in range(50)])
    timers += apply_many(recording.plain, [(1, (f"plain {each}",)) for each in range(50)])
    schedules.upsert("often", task="recording.note", when=1.0, args=("often",), app=bench.app)
    eventually(lambda: len(bench.bodies()) == 101 and bench.bodies()["often"] >= 2, message="all bodies ran")
    schedules.delete("often", app=bench.app)
    assert {name: count for name, count in bench.bodies().items() if count != 1 and name != "often"} == {}
    eventually(lambda: {timer.state for timer in timers} == {"succeeded", "sent"}, message="all have ended")
    assert timers[0].result.get(timeout=10) == "note 0"
    beats = [node.stop() for node in bench.setup.beat_cluster]
    assert beats == [0, 0]


def test_a_beat_in_a_worker_beside_others(bench: Bench) -> None:
    """``worker -B`` and a beat of its own share the work; nothing is published twice."""
    embedded = CeleryTestWorker(MODULE, "-P", "prefork", "-B", env=bench.env)
    bench.setup.worker_cluster.nodes.append(embedded)
    embedded.start()
    bench.start(workers=0, beats=1)
    apply_many(recording.plain, [(each / 100, (f"plain {each}",)) for each in range(300)])
    eventually(lambda: len(bench.bodies()) == 300, message="all ran")
    assert set(bench.bodies().values()) == {1}


def test_a_redis_visibility_timeout_does_not_multiply(bench: Bench) -> None:
    """C60: due later than the visibility timeout; queue and unacked set stay empty until then; one body."""
    bench.start(workers=2, beats=1, TEST_VISIBILITY="1")
    timer = apply_at(recording.note, 4, ("once",))
    seen: list[int] = []

    def done() -> bool:
        if timer.state == "waiting":
            seen.append(bench.queued())
        return timer.state == "succeeded"

    eventually(done, message="it has run")
    assert len(seen) > 50
    assert set(seen) == {0}
    assert bench.bodies() == {"once": 1}
    details = timer.details
    assert details is not None and details.started_at is not None and details.due_at is not None
    assert details.started_at - details.due_at < timedelta(seconds=1)


def test_waiting_timers_cost_no_memory(bench: Bench) -> None:
    """C62: many timers due tomorrow are in no queue and in no process, started before them or after."""
    bench.start(workers=1, beats=1)
    _run_one(bench, "warm")
    before = [_resident(node.pid) for node in (bench.setup.worker, bench.setup.beat)]
    apply_many(recording.note, [(timedelta(days=1), (f"tomorrow {each}",)) for each in range(20_000)])
    bench.start(workers=1, beats=1)
    _run_one(bench, "after")
    assert bench.queued() == 0
    after = [_resident(node.pid) for node in (bench.setup.worker, bench.setup.beat)]
    assert after[0] - before[0] < 10 * 2**20
    assert after[1] - before[1] < 50 * 2**20
    assert _resident(bench.setup.beat_cluster[1].pid) < 150 * 2**20


def _resident(pid: int) -> int:
    return int(psutil.Process(pid).memory_info().rss)


def _run_one(bench: Bench, name: str) -> None:
    """Run one timer through everything: beats have claimed since, workers have consumed."""
    apply_at(recording.note, 0, (name,))
    eventually(lambda: bench.bodies()[name] == 1, message=f"{name} ran")


def test_waiting_timers_do_not_hold_up_others(bench: Bench) -> None:
    """C63: with many timers due in an hour, plain tasks of the same queue run, one prefetched at a time."""
    apply_many(recording.note, [(timedelta(hours=1), (f"later {each}",)) for each in range(10_000)])
    bench.start(workers=1, beats=1)
    for each in range(100):
        recording.plain.delay(f"now {each}")
    eventually(lambda: len(bench.bodies()) == 100, message="the plain tasks ran")
    assert all(name.startswith("now") for name in bench.bodies())
    assert bench.queued() == 0


@pytest.mark.timeout(180)
def test_timers_survive_restarts_of_everything(any_bench: Bench) -> None:
    """C64: workers and beats are ended, politely and not, before the timers are due: all run, once each."""
    bench = any_bench
    timers = apply_many(recording.note, [(3600, (f"job {each}",)) for each in range(200)])
    bench.start(workers=1, beats=1, TEST_REDISPATCH="4")
    for number in (signal.SIGTERM, signal.SIGKILL):
        for node in (bench.setup.worker, bench.setup.beat):
            node.restart(number)
    assert {timer.state for timer in timers} == {"waiting"}
    bench.outside.execute("update celery_durable.timer set due_at = clock_timestamp(), wake_at = clock_timestamp()")
    # One more time while they fall due: what was with the worker is dispatched again.
    eventually(lambda: len(bench.bodies()) > 20, timeout=40, message="they have begun to run")
    bench.setup.worker.restart(signal.SIGKILL)
    bench.setup.beat.restart(signal.SIGKILL)
    eventually(lambda: all(timer.state == "succeeded" for timer in timers), timeout=60, message="all have run")
    repeated = {name for name, count in bench.bodies().items() if count != 1}
    # At least once: what was inside its body when the worker was killed runs again, and nothing else does.
    assert len(repeated) <= 2
    assert len(bench.bodies()) == 200


def test_a_cancel_outlives_the_workers(bench: Bench) -> None:
    """C65: cancelled by id and by key while no worker runs; with workers back nothing is published, nothing runs."""
    bench.start(workers=0, beats=1)
    by_id = apply_at(recording.note, 2, ("never",))
    by_key = apply_at(recording.note, 2, ("never",), key="order")
    published = apply_at(recording.note, 0, ("too late for the queue",))
    eventually(lambda: published.state == "dispatched", message="a message waits in the queue")
    from celery_durable import cancel

    assert by_id.cancel() == "cancelled"
    assert cancel(key="order", app=bench.app) == "cancelled"
    assert published.cancel() == "cancelled"
    assert bench.queued() == 1
    bench.start(workers=1, beats=0)
    last = apply_at(recording.note, 2.5, ("last",))
    eventually(lambda: last.state == "succeeded", message="a later timer has run")
    assert bench.bodies() == {"last": 1}
    assert {by_id.state, by_key.state, published.state} == {"cancelled"}


def test_a_row_from_another_age(bench: Bench) -> None:
    """C40: due in the year 300 by plain SQL: published late, once, and the others are on time."""
    timer = apply_at(recording.note, timedelta(hours=1), ("ancient",))
    bench.outside.execute(
        "update celery_durable.timer set due_at = '0300-01-01', wake_at = '0300-01-01' where id = %s", (timer.id,)
    )
    forever = apply_at(recording.note, timedelta(hours=1), ("endless",))
    bench.outside.execute(
        "update celery_durable.timer set due_at = '-infinity', wake_at = '-infinity' where id = %s", (forever.id,)
    )
    bench.start(workers=1, beats=1)
    on_time = apply_at(recording.note, 1, ("on time",))
    eventually(lambda: timer.state == "succeeded" and on_time.state == "succeeded", message="both ran")
    assert bench.bodies()["ancient"] == 1
    details = on_time.details
    assert details is not None and details.dispatched_at is not None and details.due_at is not None
    assert details.dispatched_at - details.due_at < timedelta(seconds=1)
    # It can be dispatched or not; what it may not do is stop the others, or be lost.
    row = bench.outside.execute(
        "select (select count(*) from celery_durable.outcome where id = %(id)s) "
        "+ (select count(*) from celery_durable.run where id = %(id)s) "
        "+ (select count(*) from celery_durable.timer where id = %(id)s)", {"id": forever.id},
    ).fetchone()  # fmt: skip
    assert row == (1,)
    assert bench.setup.beat.alive()


def test_intervals_added_while_a_beat_runs(bench: Bench) -> None:
    """C104: intervals in every unit, added at run time: the next run is creation + interval, and beat goes on."""
    bench.start(workers=1, beats=1)
    units = {
        "90 s": timedelta(seconds=90), "5 min": timedelta(minutes=5), "2 h": timedelta(hours=2),
        "1 day": timedelta(days=1), "1 week": timedelta(weeks=1),
    }  # fmt: skip
    for name, every in units.items():
        schedules.upsert(name, task="recording.note", when=every, args=(name,), app=bench.app)
    _run_one(bench, "still there")
    rows = bench.outside.execute("select name, next_at, created_at from celery_durable.schedule").fetchall()
    for name, next_at, created_at in rows:
        if name in units:
            assert abs((next_at - created_at - units[name]).total_seconds()) < 1
    assert {row[0] for row in rows} >= set(units)
    assert bench.bodies() == {"still there": 1}
    assert bench.setup.beat.alive()


Begin = Callable[[Bench], Any]


def test_nothing_runs_before_its_transaction_has_committed(bench: Bench) -> None:
    """C105: due at once, the transaction held open over two polls: published after the commit, and the body sees the data."""
    bench.outside.execute("create table orders (number int)")
    bench.start(workers=1, beats=1)
    with Database.of(bench.app).connect("caller") as caller:
        with caller.transaction():
            caller.execute("insert into orders values (1)")
            timer = apply_at(recording.order, 0, (1,), connection=caller)
            _run_one(bench, "meanwhile")
            with caller.transaction(force_rollback=True):
                undone = apply_at(recording.order, 0, (2,), connection=caller)
            assert timer.state is None
        eventually(lambda: timer.state == "succeeded", message="it ran after the commit")
        with pytest.raises(psycopg.errors.DivisionByZero), caller.transaction():
            apply_at(recording.order, 0, (3,), connection=caller)
            caller.execute("select 1 / 0")
    _run_one(bench, "afterwards")
    assert bench.bodies() == {"meanwhile": 1, "order 1": 1, "afterwards": 1}
    assert undone.state is None
