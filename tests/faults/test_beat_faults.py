"""Beats whose broker, database, neighbours and own process fail in mid-work."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from celery import Celery

from celery_durable import apply_at, apply_many, cancel
from celery_durable.store.database import Database
from tests.beats import Published, make_app, rows, states
from tests.servers.brokers import ValkeyServer
from tests.servers.postgres import PostgresServer
from tests.servers.processes import CeleryTestBeat
from tests.servers.proxy import Proxy
from tests.servers.waiting import eventually

NOW = timedelta(0)
CRASHING = ("-S", "tests.apps.beating:CrashingScheduler")
Start = Callable[..., CeleryTestBeat]


@pytest.fixture
def app(database_url: str, valkey: ValkeyServer) -> Iterator[Celery]:
    valkey.client().flushall()
    app = make_app(database_url, valkey.url)
    yield app
    app.close()
    Database.of(app).close()


@pytest.fixture
def published(valkey: ValkeyServer) -> Published:
    return Published(valkey.url)


@pytest.fixture
def start(app: Celery, database_url: str, valkey: ValkeyServer, tmp_path: Path) -> Iterator[Start]:
    """Start a beat as a program."""
    beats: list[CeleryTestBeat] = []

    def begin(*arguments: str, wait_for: str = "Dispatching timers", **env: str) -> CeleryTestBeat:
        given = {
            "CELERY_DURABLE_DATABASE_URL": database_url, "TEST_BROKER": valkey.url, "TEST_CRASH": str(tmp_path / "crash"),
            **env,
        }  # fmt: skip
        beat = CeleryTestBeat("tests.apps.beating", *arguments, env=given)
        beats.append(beat)
        beat.start(wait=False)
        beat.wait_for_log(wait_for)
        return beat

    yield begin
    for beat in beats:
        beat.teardown()


@pytest.fixture
def crash(tmp_path: Path) -> Callable[[str], None]:
    """Say how the next publish of a crashing beat ends."""
    return lambda how: (tmp_path / "crash").write_text(how) and None  # type: ignore[func-returns-value]


def lateness(app: Celery) -> list[float]:
    found = rows(app, "select extract(epoch from dispatched_at - due_at)::float8 as late from {schema}.outcome")
    return [each.late for each in found]


@pytest.mark.parametrize(("how", "copies"), [("before", 1), ("after", 2)])
def test_a_beat_killed_around_its_publish(
    app: Celery, published: Published, start: Start, crash: Callable[[str], None], how: str, copies: int
) -> None:
    """C47: killed between claim and publish, and between the broker's confirm and the mark; the ids stay the same."""
    doomed = start(*CRASHING)
    crash(how)
    timer = apply_at("elsewhere.leased", NOW, app=app, durable=True, key="order-1")
    eventually(lambda: not doomed.alive(), message="the fault has fired")
    assert states(app) == {"claimed": 1}
    start()
    eventually(lambda: states(app) == {"dispatched": 1})
    published.collect()
    assert published.ids == {str(timer.id): copies}
    assert {each["id"] for each in published.headers} == {str(timer.id)}
    assert {each["durable_key"] for each in published.headers} == {"order-1"}


def test_a_frozen_beat_wakes_up_too_late(
    app: Celery, published: Published, start: Start, crash: Callable[[str], None]
) -> None:
    """C44: stopped between claim and publish for longer than its claim; another publishes; the late copy has the same id."""
    frozen = start(*CRASHING)
    crash("stop")
    timer = apply_at("beating.plain", NOW, app=app)
    eventually(lambda: states(app) == {"claimed": 1})
    start()
    published.until(1)
    eventually(lambda: states(app) == {"sent": 1})
    frozen.send_signal(signal.SIGCONT)
    published.until(2)
    assert published.ids == {str(timer.id): 2} and states(app) == {"sent": 1}
    later = apply_at("beating.plain", NOW, app=app)
    published.until(3)
    assert published.ids[str(later.id)] == 1 and frozen.alive()


def test_the_others_go_on_when_one_is_killed(app: Celery, published: Published, start: Start) -> None:
    """C46: a job every 0.1 s, one beat killed in the middle: none is later than a claim lives."""
    first, second = start(), start()
    begin = datetime.now(timezone.utc) + timedelta(seconds=1)
    timers = apply_many("beating.plain", [(begin + timedelta(seconds=each / 10),) for each in range(60)], app=app)
    published.until(20)
    first.kill()
    eventually(lambda: states(app) == {"sent": 60})
    published.collect()
    assert set(published.ids) == {str(each.id) for each in timers}
    assert max(lateness(app)) < 2 + 2, "claim timeout and a sweep, with room for a slow machine"
    assert second.alive() and "Traceback" not in second.logs()


def test_the_broker_comes_late_and_goes_away(app: Celery, start: Start) -> None:
    """C48: beat starts without a broker, and outlives one that stops while jobs fall due."""
    broker = ValkeyServer()
    published = Published(broker.url)
    beat = start(TEST_BROKER=broker.url)
    try:
        apply_at("beating.plain", NOW, app=app)
        beat.wait_for_log("does not take messages")
        broker.start()
        published.until(1, timeout=15)
        broker.stop()
        timers = apply_many("beating.plain", [(0.2 * each,) for each in range(10)], app=app)
        eventually(lambda: beat.logs().count("does not take messages") == 2, message="the fault has fired")
        time.sleep(3)  # they fall due meanwhile
        assert states(app)["sent"] == 1
        broker.start()
        back = time.monotonic()
        published.until(11, timeout=15)
        assert time.monotonic() - back < 10
        eventually(lambda: states(app) == {"sent": 11})
        published.collect()
        assert all(published.ids[str(each.id)] == 1 for each in timers)
        assert beat.alive() and beat.logs().count("takes messages again") == 2
    finally:
        broker.teardown()


def test_a_broker_that_never_answers(app: Celery, valkey: ValkeyServer, published: Published, start: Start) -> None:
    """C50: publishing gives up in time, and holds nothing meanwhile."""
    proxy = Proxy(valkey.port)
    beat = start(TEST_BROKER=f"redis://127.0.0.1:{proxy.port}/0")
    try:
        apply_at("beating.plain", NOW, app=app)
        published.until(1)
        proxy.mode = "blackhole"
        timers = apply_many("beating.plain", [(NOW,)] * 5, app=app)
        beat.wait_for_log("does not take messages", timeout=10)
        assert proxy.swallowed > 0
        late = apply_at("beating.plain", 3600, app=app)
        began = time.monotonic()
        assert str(cancel(late, app=app)) == "cancelled"
        apply_at("beating.plain", NOW, app=app)
        rows(app, "vacuum {schema}.timer")
        assert time.monotonic() - began < 1
        proxy.mode = "forward"
        proxy.cut()
        eventually(lambda: states(app) == {"sent": 7, "cancelled": 1}, timeout=20)
        published.collect()
        assert {str(each.id) for each in timers} <= set(published.ids)
        assert beat.alive()
    finally:
        proxy.close()


def test_postgres_restarts_while_jobs_fall_due(valkey: ValkeyServer, start: Start) -> None:
    """C51: the same beat goes on; a beat that starts without Postgres waits for it."""
    server = PostgresServer("18").start()
    try:
        name = server.create_database()
        app = make_app(server.url(name), valkey.url)
        published = Published(valkey.url)
        items = [(timedelta(seconds=1 + each / 10), (each,)) for each in range(80)]
        timers = apply_many("beating.plain", items, app=app)
        beat = start(CELERY_DURABLE_DATABASE_URL=server.url(name))
        published.until(5)
        server.stop(signal.SIGQUIT)
        beat.wait_for_log("Postgres does not answer")
        late = start(wait_for="Postgres does not answer", CELERY_DURABLE_DATABASE_URL=server.url(name))
        server.start()
        late.wait_for_log("Dispatching timers")
        beat.wait_for_log("Postgres answers again")
        eventually(lambda: states(app) == {"sent": 80}, timeout=25)
        published.collect()
        assert set(published.ids) == {str(each.id) for each in timers}
        # One page may have been published when Postgres went away, and not yet marked.
        assert sum(published.ids.values()) <= 80 + 5
        assert beat.alive() and late.alive()
        assert beat.logs().count("Postgres does not answer") == 1
        app.close()
        Database.of(app).close()
    finally:
        server.stop(signal.SIGQUIT)  # the other modes would wait for the beats
        server.teardown()


def test_a_beat_ends_at_once_while_everything_is_away(app: Celery, start: Start) -> None:
    nowhere = "postgresql+psycopg://postgres@127.0.0.1:1/nowhere"
    beat = start(wait_for="Postgres does not answer", CELERY_DURABLE_DATABASE_URL=nowhere)
    began = time.monotonic()
    assert beat.end(signal.SIGTERM) == 0
    assert time.monotonic() - began < 1.5
    assert "Traceback" not in beat.logs()
