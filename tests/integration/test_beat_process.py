"""The beat as a program: how it starts, ends, and what it leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import psutil
import pytest
from celery import Celery

from celery_durable import apply_at
from celery_durable.store.database import Database
from tests.beats import Published, make_app, rows, states
from tests.servers.brokers import ValkeyServer
from tests.servers.processes import ROOT, CeleryNode, CeleryTestBeat
from tests.servers.waiting import eventually

APP = "tests.apps.beating"
NOW = timedelta(0)
Start = Callable[..., CeleryTestBeat]


@pytest.fixture
def environment(database_url: str, valkey: ValkeyServer) -> dict[str, str]:
    valkey.client().flushall()
    return {"CELERY_DURABLE_DATABASE_URL": database_url, "TEST_BROKER": valkey.url}


@pytest.fixture
def app(database_url: str, valkey: ValkeyServer) -> Iterator[Celery]:
    app = make_app(database_url, valkey.url)
    yield app
    app.close()
    Database.of(app).close()


@pytest.fixture
def start(environment: dict[str, str]) -> Iterator[Start]:
    """Start a beat as a program."""
    beats: list[CeleryTestBeat] = []

    def begin(*arguments: str, wait_for: str = "Dispatching timers", **env: str) -> CeleryTestBeat:
        beat = CeleryTestBeat(APP, *arguments, env={**environment, **env})
        beats.append(beat)
        beat.start(wait=False)
        beat.wait_for_log(wait_for)
        return beat

    yield begin
    for beat in beats:
        beat.teardown()


def seconds_to_end(beat: CeleryNode, number: int) -> float:
    began = time.monotonic()
    beat.send_signal(number)

    def ended() -> bool:
        assert not beat.alive(), f"it runs on, and has said:\n{beat.logs()[-3000:]}"
        return True

    eventually(ended, timeout=10, every=0.005)
    return time.monotonic() - began


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_beat_ends_within_a_second(app: Celery, start: Start, number: int) -> None:
    beat = start(TEST_POLL="60")
    eventually(lambda: rows(app, "select 1 from pg_stat_activity where application_name like '%%listening'"))
    assert seconds_to_end(beat, number) < 1.0
    assert beat.process is not None and beat.process.returncode == 0
    assert "Traceback" not in beat.logs()
    eventually(
        lambda: not rows(app, "select 1 from pg_stat_activity where application_name like 'celery-durable beat%%'"),
        message="its connections are gone",
    )


def test_a_busy_beat_ends_within_a_second_and_loses_nothing(app: Celery, start: Start, valkey: ValkeyServer) -> None:
    from celery_durable import apply_many

    apply_many("beating.plain", [(NOW, (each,)) for each in range(20_000)], app=app)
    beat = start(wait_for="beat: Starting")
    eventually(lambda: valkey.client().llen("celery") > 1000, every=0.001)
    assert seconds_to_end(beat, signal.SIGTERM) < 1.5
    left = states(app)
    assert left.get("waiting", 0) > 0, "it ended in the middle"
    assert "claimed" not in left, "what was published is marked"
    assert "Traceback" not in beat.logs()
    start()
    eventually(lambda: states(app) == {"sent": 20_000}, timeout=40, every=0.2)
    assert valkey.client().llen("celery") == 20_000


def test_a_killed_beat_starts_again_and_leaves_no_file(app: Celery, start: Start, environment: dict[str, str]) -> None:
    """C59: no stale file keeps it from starting, because there is none."""
    published = Published(environment["TEST_BROKER"])
    beat = start()
    before = set(beat.folder.iterdir())
    for number in range(1, 6):
        beat.end(signal.SIGKILL)
        beat.start(wait=False)
        beat.wait_for_log("Dispatching timers")
        apply_at("beating.plain", NOW, (number,), app=app)
        published.until(number)
    assert set(beat.folder.iterdir()) == before
    assert set(published.ids.values()) == {1}


def test_a_timer_is_not_sent_again_after_a_restart(app: Celery, start: Start, environment: dict[str, str]) -> None:
    """C73: beat ended shortly after its publish, by SIGTERM and by SIGKILL."""
    published = Published(environment["TEST_BROKER"])
    beat = start()
    count = 0
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pause in (0.0, 0.2, 1.0):
            apply_at("beating.plain", NOW, app=app)
            count += 1
            eventually(lambda count=count: states(app) == {"sent": count})  # type: ignore[misc]  # bound now
            time.sleep(pause)  # the case says when
            beat.end(number)
            beat.start(wait=False)
            beat.wait_for_log("Dispatching timers")
    # Longer than a claim lives, so that a forgotten one would have been published again.
    apply_at("beating.plain", 3.0, app=app)
    published.until(count + 1)
    assert set(published.ids.values()) == {1} and len(published.messages) == count + 1


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("drop schema celery_durable cascade", "durable migrate"),
        ("update celery_durable.meta set value = '0' where name = 'schema_major'", "durable migrate"),
        ("update celery_durable.meta set value = '99' where name = 'schema_major'", "Upgrade celery-durable"),
        ("update celery_durable.meta set value = '\"other\"' where name = 'app'", "belongs to the app 'other'"),
    ],
)
def test_a_schema_it_cannot_work_on_stops_it_with_the_cure(app: Celery, start: Start, change: str, says: str) -> None:
    rows(app, change)
    beat = start(wait_for="This beat stops")
    eventually(lambda: not beat.alive(), message="it has ended")
    assert says in beat.logs()
    assert beat.process is not None and beat.process.returncode == 1
    assert "Traceback" not in beat.logs()


def test_wrong_settings_are_said_at_the_start(environment: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "celery", "-A", APP, "beat", "--pidfile="],
        env={**os.environ, **environment, "PYTHONPATH": str(ROOT), "TEST_POLL": "-1"},
        capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    assert done.returncode == 1
    (said,) = [line for line in done.stderr.splitlines() if "durable_poll_interval" in line]
    assert "This beat stops" in said
    assert "Traceback" not in done.stderr


def test_a_wrong_setting_of_a_beat_inside_a_worker_is_said(environment: dict[str, str]) -> None:
    worker = CeleryNode(
        APP, ("worker", "-B", "-S", "durable", "-c", "1", "-P", "prefork"), {**environment, "TEST_POLL": "-1"}
    )
    try:
        worker.start(wait=False)
        worker.wait_for_log("This beat stops: durable_poll_interval")
        assert "Traceback" not in worker.logs()
    finally:
        worker.teardown()


def test_a_private_server_that_cannot_be_had_stops_it(start: Start) -> None:
    beat = start(wait_for="This beat stops", CELERY_DURABLE_DATABASE_URL="embedded:/proc/no-folder-here")
    eventually(lambda: not beat.alive(), message="it has ended")
    assert "Choose a folder" in beat.logs()
    assert "Traceback" not in beat.logs()


def test_only_a_beat_that_was_killed_is_shown_after_its_end(app: Celery, start: Start) -> None:
    first, second = start(), start()

    def shown() -> set[int]:
        return {each.pid for each in rows(app, "select pid from {schema}.beat")}

    eventually(lambda: shown() == {first.pid, second.pid})
    killed = second.pid
    second.end(signal.SIGKILL)
    first.send_signal(signal.SIGTERM)
    eventually(lambda: not first.alive(), message="it has ended")
    assert shown() == {killed}


def test_a_beat_inside_a_worker(app: Celery, environment: dict[str, str]) -> None:
    """``celery worker -B``: a process of its own, whose inherited sockets are closed."""
    worker = CeleryNode(
        APP,
        ("worker", "-B", "-S", "durable", "-c", "1", "-l", "INFO", "--without-gossip", "--without-mingle", "-P", "prefork"),
        env=environment,
    )  # fmt: skip
    try:
        worker.start(wait=False)
        worker.wait_for_log("Dispatching timers")
        apply_at("beating.plain", NOW, (7,), app=app)
        worker.wait_for_log("Task beating.plain")
        eventually(lambda: states(app) == {"sent": 1})
        children = psutil.Process(worker.pid).children(recursive=True)
        assert seconds_to_end(worker, signal.SIGTERM) < 8
        assert not [each for each in children if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
        assert not rows(app, "select 1 from {schema}.beat"), "it has said that it ends"
        assert "Traceback" not in worker.logs()
    finally:
        worker.teardown()
