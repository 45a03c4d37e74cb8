"""Dispatching on real servers, with beats as processes or turned by the test."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta, timezone
from uuid import UUID

import pytest
from celery import Celery

from celery_durable import apply_at, apply_many, dead_letters
from celery_durable.messages.delivery import Delivery, Outcome, Outgoing
from celery_durable.store.database import Database
from tests.beats import Published, Scripted, inline_beat, make_app, rows, states
from tests.servers.processes import CeleryTestBeat
from tests.servers.proxy import Proxy
from tests.servers.waiting import eventually

NOW = timedelta(0)
StartBeats = Callable[..., list[CeleryTestBeat]]


@pytest.fixture
def app(database_url: str, broker_url: str) -> Iterator[Celery]:
    app = make_app(database_url, broker_url)
    yield app
    app.close()
    Database.of(app).close()


@pytest.fixture
def published(broker_url: str) -> Published:
    return Published(broker_url)


@pytest.fixture
def start_beats(app: Celery, database_url: str, broker_url: str) -> Iterator[StartBeats]:
    """Start so many beats as processes, side by side."""
    beats: list[CeleryTestBeat] = []

    def start(number: int, **env: str) -> list[CeleryTestBeat]:
        given = {"CELERY_DURABLE_DATABASE_URL": database_url, "TEST_BROKER": broker_url, **env}
        new = [CeleryTestBeat("tests.apps.beating", env=given) for _ in range(number)]
        for beat in new:
            beat.start(wait=False)
        beats.extend(new)
        for beat in new:
            beat.wait_for_log("Dispatching timers")
        return new

    yield start
    for beat in beats:
        beat.teardown()


@pytest.mark.parametrize("number", [2, 3])
def test_beats_share_a_burst(app: Celery, published: Published, start_beats: StartBeats, number: int) -> None:
    """C42: 2,000 timers due at once, each published exactly once, plain and leased ones."""
    start_beats(number)
    due = datetime.now(timezone.utc) + timedelta(seconds=1)
    timers = apply_many("beating.plain", [(due, (each,)) for each in range(1000)], app=app)
    timers += apply_many("elsewhere.leased", [(due, (each,)) for each in range(1000)], app=app, durable=True)
    published.until(2000)
    eventually(lambda: states(app) == {"sent": 1000, "dispatched": 1000})
    published.collect()
    assert set(published.ids) == {str(each.id) for each in timers}
    assert set(published.ids.values()) == {1}


def test_three_beats_share_one_shots_and_schedules(app: Celery, published: Published, start_beats: StartBeats) -> None:
    """C42, shortened: nothing twice, nothing missing, every beat had a part in it."""
    entries = {f"every-{each}": {"task": "beating.plain", "schedule": 1.0} for each in range(5)}
    start_beats(3, TEST_ENTRIES=json.dumps(entries))
    begin = datetime.now(timezone.utc)
    items = [(begin + timedelta(seconds=6 * each / 500), (each,)) for each in range(500)]
    timers = apply_many("beating.plain", items, app=app)

    def all_had_a_part() -> bool:
        counted = rows(app, "select dispatched from {schema}.beat")
        return len(counted) == 3 and all(each.dispatched > 0 for each in counted)

    eventually(lambda: states(app).get("waiting", 0) == 0, timeout=30)
    eventually(all_had_a_part, timeout=30)
    published.collect()
    one_shots = {str(each.id) for each in timers}
    assert one_shots <= set(published.ids)
    assert set(published.ids.values()) == {1}
    ticks = [each for each in published.headers if each.get("durable_schedule")]
    made = {(each["durable_schedule"], each["durable_nominal"]) for each in ticks}
    assert len(made) == len(ticks) >= 25, "no occurrence twice"
    assert all(each["durable_missed"] == 0 for each in ticks)


def test_an_idle_beat_wakes_for_a_timer(app: Celery, published: Published, start_beats: StartBeats) -> None:
    """C56: though it may sleep for five seconds, it hears of a timer due in two, and of one due at once."""
    start_beats(1, TEST_POLL="60")
    time.sleep(1.5)
    soon, at_once = apply_at("beating.plain", 2.0, app=app), apply_at("beating.plain", NOW, app=app)
    published.until(2)
    lateness = rows(app, "select id, extract(epoch from dispatched_at - due_at)::float8 as late from {schema}.outcome")
    assert {each.id for each in lateness} == {soon.id, at_once.id}
    assert all(0 <= each.late < 1.0 for each in lateness)


def test_timers_of_one_instant_all_run(app: Celery, published: Published) -> None:
    """C71: 2, then 50 with an identical due time, different tasks and arguments."""
    due = datetime.now(timezone.utc)
    with inline_beat(app) as beat:
        for number in (2, 50):
            for each in range(number):
                apply_at(f"elsewhere.task{each}", due, (each,), app=app, durable=False)
            beat.until(lambda: "waiting" not in states(app) and "claimed" not in states(app))
    assert published.collect() == 52
    assert states(app) == {"sent": 52}
    assert sorted(each["task"] for each in published.headers)[-1] == "elsewhere.task9"


def test_more_pages_than_one(app: Celery, published: Published) -> None:
    apply_many("beating.plain", [(NOW, (each,)) for each in range(1050)], app=app)
    with inline_beat(app) as beat:
        beat.until(lambda: states(app) == {"sent": 1050})
    assert published.collect() == 1050 and set(published.ids.values()) == {1}


def test_a_tick_returns_nought(app: Celery, published: Published) -> None:
    from celery_durable.beat import DurableScheduler

    apply_at("beating.plain", NOW, app=app)
    scheduler = DurableScheduler(app, max_interval=0.2)
    assert scheduler.tick() == 0
    assert published.collect() == 1
    before = time.monotonic()
    assert scheduler.tick() == 0
    assert time.monotonic() - before < 3
    scheduler.close()
    scheduler.close()


def test_a_beat_that_is_only_shown_connects_to_nothing() -> None:
    from celery_durable.beat import DurableScheduler

    app = Celery("nowhere", broker="redis://127.0.0.1:1/0", set_as_current=False)
    app.conf.durable_database_url = "postgresql://me:secret@127.0.0.1:1/db"
    for lazy in (True, False):
        scheduler = DurableScheduler(app, lazy=lazy)
        assert scheduler.max_interval == 5
        assert "127.0.0.1:1/db" in scheduler.info and "secret" not in scheduler.info
        scheduler.close()


def test_bad_rows_are_set_aside_and_the_rest_goes_on(app: Celery, published: Published) -> None:
    names = ("list", "null", "infinite", "never", "good")
    timers = {name: apply_at("beating.plain", NOW, (1,), app=app) for name in names}
    for name, column in (("list", "headers = '[1]'"), ("null", "properties = 'null'")):
        rows(app, "update {schema}.call set " + column + " where id = %(id)s", id=timers[name].id)
    rows(app, "update {schema}.timer set expires_at = 'infinity' where id = %(id)s", id=timers["infinite"].id)
    rows(
        app, "update {schema}.timer set due_at = '-infinity', wake_at = '-infinity' where id = %(id)s",
        id=timers["never"].id,
    )  # fmt: skip
    with inline_beat(app) as beat:
        beat.until(lambda: states(app) == {"sent": 3, "dead": 2})
    assert published.collect() == 3
    found = {each.id: each for each in dead_letters.find_all(app=app)}
    assert set(found) == {timers["list"].id, timers["null"].id}
    assert all(each.reason == "undispatchable" and "JSON" in (each.error or "") for each in found.values())


def test_an_expired_timer_is_not_published(app: Celery, published: Published) -> None:
    timer = apply_at("beating.plain", 0.2, app=app, expires=0.4)
    eventually(
        lambda: rows(app, "select 1 from {schema}.timer where expires_at < {schema}.clock()"), message="it has expired"
    )
    with inline_beat(app) as beat:
        beat.until(lambda: states(app) == {"expired": 1})
    assert published.collect() == 0 and str(timer.state) == "expired"


def choking(app: Celery, number: int) -> list[UUID]:
    """Timers whose message the client library of Redis chokes on, in a way that it does not foresee."""
    made = apply_many("beating.plain", [(NOW, (each,)) for each in range(number)], app=app)
    ids = [str(each.id) for each in made]
    rows(
        app, """update {schema}.call set properties = (properties::jsonb || '{"delivery_info": 5}')::json
                where id = any(%(ids)s::uuid[])""", ids=ids,
    )  # fmt: skip
    return [each.id for each in made]


@pytest.mark.parametrize("broker_url", ["valkey"], indirect=True)
def test_messages_that_cannot_be_written_hold_up_nobody(app: Celery, published: Published) -> None:
    """Four hundred of them before, and one beside, each good one: no outage is seen, they are dead letters."""
    bad = choking(app, 400)
    good = apply_many("beating.plain", [(NOW, (each,)) for each in range(50)], app=app)
    started = time.monotonic()
    with inline_beat(app) as beat:
        beat.until(lambda: states(app).get("sent") == len(good))
        assert time.monotonic() - started < 5
        beat.until(lambda: states(app) == {"sent": len(good), "dead": len(bad)})
    assert published.collect() == len(good)
    assert {each.reason for each in dead_letters.find_all(app=app)} == {"undispatchable"}


def test_an_unknown_failure_of_one_message_is_tried_again_and_is_no_outage(app: Celery) -> None:
    class Failing(Scripted):
        def publish(self, outgoing: Sequence[Outgoing]) -> list[Delivery]:
            answers = super().publish(outgoing)
            return [
                Delivery(each.timer_id, Outcome.FAILED if each.timer_id == odd.id else each.outcome) for each in answers
            ]

    odd, even = (apply_at("beating.plain", NOW, app=app) for _ in range(2))
    publisher = Failing()
    with inline_beat(app, publisher=publisher) as beat:
        beat.until(lambda: even.state == "sent" and odd.state == "claimed")
        assert not beat.loop._broker.active
        eventually(lambda: beat.turn() or sum(odd.id in page for page in publisher.pages) >= 2, message="tried again")
        assert not beat.loop._broker.active
        rows(app, "update {schema}.run set due_at = due_at - interval '2 days' returning id")

        def dead() -> bool:
            """Once it has failed often while others came through."""
            apply_at("beating.plain", NOW, app=app)
            rows(app, "update {schema}.run set deadline = {schema}.clock() returning id")
            return odd.state == "dead"

        beat.until(dead)
        assert sum(odd.id in page for page in publisher.pages) >= 5


POISON = "drop-me-at-once"


@pytest.fixture(params=["valkey", "one by one", "rabbitmq"])
def choosy(request: pytest.FixtureRequest, database_url: str) -> Iterator[tuple[Celery, Proxy]]:
    """An app whose broker breaks the connection over a certain message."""
    server = request.getfixturevalue("rabbitmq" if request.param == "rabbitmq" else "valkey")
    if request.param == "rabbitmq":
        url = server.create_vhost()
    else:
        server.client().flushall()
        url = server.url
    proxy = Proxy(server.port)
    proxy.poison = POISON.encode()
    # So told, redis-py might repeat a pipeline: each message is sent by itself, as to any other transport.
    options = {"broker_transport_options": {"retry_on_timeout": True}} if request.param == "one by one" else {}
    app = make_app(database_url, url.replace(f":{server.port}", f":{proxy.port}"), **options)
    yield app, proxy
    app.close()
    Database.of(app).close()
    proxy.close()


@pytest.mark.parametrize("number", [5, 40])
def test_messages_that_break_the_connection_hold_up_nobody(choosy: tuple[Celery, Proxy], number: int) -> None:
    """Neighbours of their page go out when their claims have expired, later ones at once; in the end they are dead."""
    app, proxy = choosy
    bad = apply_many("beating.plain", [(NOW, (each,)) for each in range(number)], app=app, headers={"note": POISON})
    apply_many("beating.plain", [(NOW, (each,)) for each in range(60)], app=app)
    with inline_beat(app) as beat:
        beat.until(lambda: states(app).get("sent") == 60, timeout=40)
        assert proxy.poisoned > 1
        for _ in range(3):
            late = apply_at("beating.plain", NOW, app=app)
            started = time.monotonic()
            beat.until(lambda late=late: late.state == "sent")
            assert time.monotonic() - started < 3
        assert states(app) == {"sent": 63, "claimed": number}
        rows(app, "update {schema}.run set due_at = due_at - interval '2 days' returning id")

        def ended() -> bool:
            rows(app, "update {schema}.run set deadline = least(deadline, {schema}.clock()) returning id")
            apply_at("beating.plain", NOW, app=app)
            return states(app).get("dead") == number

        beat.until(ended, timeout=40)
    assert {each.id for each in dead_letters.find_all(app=app)} == {each.id for each in bad}


def test_what_was_sent_is_marked_though_the_next_claim_fails(database_url: str) -> None:
    """A lock on the waiting timers while full pages are on their way."""
    app = make_app(database_url, "memory://", durable_page=10)
    made = apply_many("beating.plain", [(NOW, (each,)) for each in range(45)], app=app)
    holder = Database.of(app).connect("holder")

    class Locking(Scripted):
        def publish(self, outgoing: Sequence[Outgoing]) -> list[Delivery]:
            if len(self.pages) == 1:
                holder.execute("begin")
                holder.execute("lock table celery_durable.timer")
            return super().publish(outgoing)

    publisher = Locking()
    with inline_beat(app, publisher=publisher) as beat:
        beat.turn()
        published = sum(map(len, publisher.pages))
        assert published < len(made), "a claim has failed"
        assert states_of_ended(app) == {"sent": published}
        holder.execute("rollback")
        beat.until(lambda: states(app) == {"sent": len(made)})
    sent = [each for page in publisher.pages for each in page]
    assert sorted(sent) == sorted(each.id for each in made)
    holder.close()
    Database.of(app).close()


def states_of_ended(app: Celery) -> dict[str, int]:
    return {row.state: row.n for row in rows(app, "select state, count(*) as n from {schema}.outcome group by state")}
