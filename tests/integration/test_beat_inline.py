"""A beat turned by the test, with a broker that answers as told."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from celery import Celery

from celery_durable import apply_at, apply_many, cancel, dead_letters, get_timer, schedules
from celery_durable.errors import SchemaMismatch
from celery_durable.messages.delivery import BrokerUnavailable, Outcome
from celery_durable.store import claims
from celery_durable.store.database import Database
from tests.beats import Scripted, inline_beat, make_app, rows, states
from tests.servers.waiting import eventually

NOW = timedelta(0)


@pytest.fixture
def settings() -> dict[str, Any]:
    """Settings of the app, for a test to override."""
    return {}


@pytest.fixture
def local(database_url: str, settings: dict[str, Any]) -> Iterator[Celery]:
    """An app whose broker is a script."""
    app = make_app(database_url, "memory://", **settings)
    yield app
    Database.of(app).close()


def sent(app: Celery, number: int = 1) -> Callable[[], bool]:
    return lambda: states(app) == {"sent": number}


def test_what_the_broker_refuses_is_dead_and_what_it_returns_is_tried_again(local: Celery) -> None:
    publisher = Scripted(Outcome.REFUSED, Outcome.RETURNED, Outcome.RETURNED)
    with inline_beat(local, publisher=publisher) as beat:
        apply_at("beating.plain", NOW, app=local)
        beat.until(lambda: states(local) == {"dead": 1})
        timer = apply_at("beating.plain", NOW, app=local)
        beat.until(lambda: states(local) == {"dead": 1, "sent": 1})
    assert publisher.pages[1:] == [[timer.id]] * 3


def test_what_is_uncertain_is_published_again_when_its_claim_expires(local: Celery) -> None:
    publisher = Scripted(Outcome.UNCERTAIN)
    timer = apply_at("beating.plain", NOW, app=local)
    with inline_beat(local, publisher=publisher) as beat:
        beat.until(sent(local))
    assert publisher.pages == [[timer.id]] * 2


def test_while_the_broker_is_away_nothing_is_claimed(local: Celery, caplog: pytest.LogCaptureFixture) -> None:
    """C48: it is said once, one timer serves as probe, all follow when it is back."""
    away = BrokerUnavailable("gone")
    publisher = Scripted(*[away] * 4)
    apply_many("beating.plain", [(NOW, (each,)) for each in range(1200)], app=local)
    with inline_beat(local, publisher=publisher) as beat:
        beat.until(lambda: len(publisher.pages) >= 4, timeout=20)
        assert states(local)["waiting"] >= 190
        beat.until(sent(local, 1200), timeout=20)
    assert [len(page) for page in publisher.pages[:4]] == [500, 1, 1, 1]
    assert caplog.text.count("does not take messages") == 1
    assert caplog.text.count("takes messages again") == 1


def test_a_mark_that_comes_too_late_changes_nothing(local: Celery) -> None:
    """C44: while one beat held its claim too long, another has published; the late mark is fenced."""
    timer = apply_at("beating.plain", NOW, app=local)
    with inline_beat(local) as other:
        other.loop._dispatcher._publisher = Scripted()  # the beat that takes over

        def too_long() -> None:
            other.until(sent(local))

        with inline_beat(local, publisher=Scripted(too_long)) as slow:
            slow.turn()
    assert states(local) == {"sent": 1}
    assert get_timer(timer.id, app=local) is not None
    assert len(rows(local, "select fence from {schema}.outcome")) == 1


def test_no_transaction_is_open_while_publishing(local: Celery) -> None:
    """C50: cancelling, inserting and vacuum never wait for the broker."""
    seen: list[Any] = []

    def look() -> None:
        seen.extend(
            rows(
                local,
                "select state, xact_start, backend_xmin from pg_stat_activity "
                "where application_name like 'celery-durable beat%%' and state <> 'idle'",
            )
        )

    apply_at("beating.plain", NOW, app=local)
    publisher = Scripted(look)
    with inline_beat(local, publisher=publisher) as beat:
        beat.until(sent(local))
    assert publisher.pages and seen == []


def test_a_run_that_lost_its_worker_goes_back_to_waiting(local: Celery) -> None:
    timer = apply_at("elsewhere.leased", NOW, app=local, durable=True)
    with inline_beat(local, publisher=Scripted()) as beat:
        beat.until(lambda: states(local) == {"dispatched": 1})
        rows(
            local,
            "update {schema}.run set state = 'running', deadline = {schema}.clock(), attempt = 1, max_attempts = 2, "
            "retry_in = 0.1, worker = 'w', token = 't' where id = %(id)s",
            id=timer.id,
        )
        beat.until(lambda: states(local) == {"dispatched": 1})
        rows(
            local,
            "update {schema}.run set state = 'running', deadline = {schema}.clock(), attempt = 2, max_attempts = 2, "
            "retry_in = 0.1, worker = 'w', token = 't' where id = %(id)s",
            id=timer.id,
        )
        beat.until(lambda: states(local) == {"dead": 1})
    assert dead_letters.find_all(app=local)[0].reason == "worker lost"


@pytest.mark.parametrize("settings", [{"durable_page": 20}])
def test_long_runs_do_not_hide_a_lost_one(local: Celery) -> None:
    """More live leases than a page, all past their first deadline and kept alive by heartbeats."""
    timers = apply_many("elsewhere.leased", [(NOW, (each,)) for each in range(60)], app=local, durable=True)
    with inline_beat(local, publisher=Scripted()) as beat:
        beat.until(lambda: states(local) == {"dispatched": 60})
        rows(
            local,
            "update {schema}.run set state = 'running', deadline = {schema}.clock() - interval '1 hour', attempt = 1, "
            "worker = 'w', token = 't', retry_in = 3600, max_attempts = 9",
        )
        lost = timers[-1].id
        rows(local, "update {schema}.run set deadline = {schema}.clock() where id = %(id)s", id=lost)
        rows(
            local,
            "insert into {schema}.renewal (id, fence, until) select id, fence, {schema}.clock() + interval '1 hour' "
            "from {schema}.run where id <> %(id)s",
            id=lost,
        )
        beat.until(lambda: states(local) == {"running": 59, "waiting": 1})


@pytest.mark.parametrize("settings", [{"durable_retention": 0.5}])
def test_finished_timers_are_forgotten_after_the_retention(local: Celery) -> None:
    apply_many("beating.plain", [(NOW, (each,)) for each in range(600)], app=local)
    with inline_beat(local, publisher=Scripted()) as beat:
        beat.until(sent(local, 600))
        beat.until(lambda: states(local) == {})
    assert rows(local, "select count(*) as n from {schema}.call")[0].n == 0


def test_a_sweep_that_fails_stops_neither_the_others_nor_dispatching(
    local: Celery, caplog: pytest.LogCaptureFixture
) -> None:
    rows(local, "alter table {schema}.renewal rename column until to away")
    with inline_beat(local, publisher=Scripted()) as beat:
        apply_at("beating.plain", NOW, app=local)
        rows(local, "alter table {schema}.renewal rename column away to until")
        rows(local, "alter table {schema}.beat add constraint broken check (false) not valid")
        beat.until(lambda: "signs of life failed" in caplog.text)
        beat.until(sent(local))


def test_timers_of_every_shard_are_dispatched(local: Celery) -> None:
    rows(local, "update {schema}.meta set value = '3' where name = 'shards'")
    timers = apply_many("beating.plain", [(NOW, (each,)) for each in range(9)], app=local)
    for number, timer in enumerate(timers):
        rows(
            local, "update {schema}.timer set shard = %(shard)s where id = %(id)s", shard=number % 3, id=timer.id
        )  # fmt: skip
    with inline_beat(local, publisher=Scripted()) as beat:
        beat.until(sent(local, 9))


def test_a_late_commit_is_found_behind_the_watermark(local: Celery) -> None:
    """T3: a transaction open for longer than the watermark trails: its announcement lowers the bound."""
    connection = Database.of(local).connect("slow")
    with inline_beat(local, publisher=Scripted()) as beat:
        beat.turn()
        with connection.transaction():
            apply_at("beating.plain", NOW, app=local, connection=connection)
        (watermark,) = beat.loop._watermarks.values()
        watermark.begin(time.monotonic())
        watermark.emptied(time.time() + 60)  # as if the transaction had been open for 65 s
        beat.loop._sweeper._next_at = beat.loop._occurrences._look_at = time.monotonic() + 60  # type: ignore[union-attr]
        beat.loop.turn(5.0)
        beat.loop.turn(0.01)
        assert states(local) == {"sent": 1}
    connection.close()


def test_threads_may_schedule_while_a_beat_dispatches(local: Celery) -> None:
    """T4: timers that fall due between the claim and the look at the next one are not slept over."""
    publisher = Scripted()
    number = 300

    def insert() -> None:
        for each in range(number):
            apply_at("beating.plain", 0.05 * (each % 3), (each,), app=local)

    threads = [threading.Thread(target=insert) for _ in range(2)]
    with inline_beat(local, publisher=publisher) as beat:
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 30
        while not sent(local, 2 * number)():
            assert time.monotonic() < deadline
            beat.loop.turn(5.0)
        for thread in threads:
            thread.join()
    late = rows(local, "select max(extract(epoch from dispatched_at - due_at))::float8 as late from {schema}.outcome")
    assert late[0].late < 3
    assert sum(map(len, publisher.pages)) == 2 * number


def test_a_locked_timer_makes_no_beat_spin(local: Celery) -> None:
    """Somebody's open transaction holds a due timer: the beat looks again now and then, and takes it when it is free."""
    timer = apply_at("beating.plain", NOW, app=local)
    connection = Database.of(local).connect("holder")
    with inline_beat(local, publisher=Scripted()) as beat:
        with connection.transaction():
            connection.execute("select from celery_durable.timer where id = %s for update", (str(timer.id),))
            looks = 0
            until = time.monotonic() + 2
            while time.monotonic() < until:
                beat.loop.turn(5.0)
                looks += 1
            assert states(local) == {"waiting": 1}
            assert looks < 60
        beat.until(sent(local))
    connection.close()


def test_an_unexpected_error_ends_no_beat(local: Celery, caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> None:
        raise RuntimeError("a bug")

    publisher = Scripted(broken)
    apply_at("beating.plain", NOW, app=local)
    with inline_beat(local, publisher=publisher) as beat:
        beat.until(sent(local))
    assert "a bug" in caplog.text and len(publisher.pages) == 2


def test_a_timer_without_its_payload_is_not_forgotten(local: Celery) -> None:
    lame, sound = apply_at("beating.plain", NOW, app=local), apply_at("beating.plain", NOW, app=local)
    rows(local, f"delete from celery_durable.call where id = '{lame.id}' returning id")
    with inline_beat(local, publisher=Scripted()) as beat:
        beat.until(sent_or_dead(local))
    assert rows(local, f"select state, reason from celery_durable.outcome where id = '{lame.id}'") == [
        ("dead", "payload missing")
    ]
    assert sound.state == "sent"


def sent_or_dead(app: Celery) -> Callable[[], bool]:
    return lambda: states(app) == {"sent": 1, "dead": 1}


def test_whether_a_timer_has_expired_is_decided_once(local: Celery) -> None:
    """Each look at the clock is a second later than the one before: still every timer is somewhere."""
    timers = [apply_at("beating.plain", NOW, app=local, expires=3600 + each) for each in range(200)]
    rows(
        local,
        """
        create sequence celery_durable.looks;
        create or replace function celery_durable.clock() returns timestamptz language sql stable as
        $$ select pg_catalog.now() + interval '3600 s' + nextval('celery_durable.looks') * interval '0.1 s' $$;
        """,
    )
    Database.of(local).run(
        lambda executor: claims.claim(executor, shard=0, watermark=claims.UNBOUNDED, page=500, timeout=8.0)
    )
    found = states(local)
    assert sum(found.values()) == len(timers)
    assert found["expired"] > 0
    assert found["claimed"] > 0


def test_a_row_made_twice_stops_no_page(local: Celery) -> None:
    ended, fresh = apply_at("beating.plain", NOW, app=local), apply_at("beating.plain", 3600, app=local)
    with inline_beat(local, publisher=Scripted()) as beat:
        beat.until(lambda: ended.state == "sent")
        rows(
            local,
            f"""insert into {{schema}}.timer (id, call_id, due_at, wake_at, expires_at)
                values ('{ended.id}', '{ended.id}', now(), now(), now() - interval '1 s') returning id""",
        )
        fresh.reschedule(NOW)
        beat.until(lambda: states(local) == {"sent": 2})


@pytest.mark.parametrize("settings", [{"durable_publish_timeout": 0.5}])
def test_a_lock_on_a_table_holds_a_beat_up_for_a_bounded_time(local: Celery) -> None:
    """Somebody's ALTER TABLE: no statement waits for it longer than a page may take to publish, and nothing is lost."""
    made = apply_many("beating.plain", [(NOW, (each,)) for each in range(3)], app=local)
    connection = Database.of(local).connect("alter")
    with inline_beat(local, publisher=Scripted()) as beat:
        beat.loop.turn(0)  # connected
        with connection.transaction():
            connection.execute("lock table celery_durable.run, celery_durable.renewal, celery_durable.outcome")
            started = time.monotonic()
            later = apply_at("beating.plain", NOW, app=local)
            for _ in range(3):
                beat.turn()
            # A dozen statements of sweeps and dispatching, each of which gave up.
            assert time.monotonic() - started < 15
        beat.until(sent(local, 4))
    assert {each.state for each in (*made, later)} == {"sent"}
    connection.close()


def test_a_locked_run_does_not_keep_its_page_from_being_marked(local: Celery) -> None:
    """A cancel in an open transaction: the neighbours are marked at once; rolled back, it is dispatched again."""
    made = apply_many("elsewhere.durable", [(NOW, (each,)) for each in range(3)], durable=True, app=local)
    connection = Database.of(local).connect("holder")

    def hold() -> None:
        connection.execute("begin")
        assert cancel(made[1].id, connection=connection, app=local) == "cancelled"

    publisher = Scripted(hold)
    with inline_beat(local, publisher=publisher) as beat:
        beat.until(lambda: states(local) == {"dispatched": 2, "claimed": 1})
        connection.execute("rollback")
        beat.until(lambda: states(local) == {"dispatched": 3})
    assert [len(page) for page in publisher.pages] == [3, 1]
    connection.close()


def test_a_locked_schedule_makes_no_beat_spin(local: Celery) -> None:
    schedules.upsert("often", task="beating.plain", when=timedelta(hours=1), app=local)
    rows(
        local,
        "update {schema}.schedule set next_at = {schema}.clock(), cursor = {schema}.clock() - interval '1 h' returning name",
    )
    connection = Database.of(local).connect("holder")
    with inline_beat(local, publisher=Scripted()) as beat:
        with connection.transaction():
            connection.execute("select from celery_durable.schedule for update")
            looks, until = 0, time.monotonic() + 2
            while time.monotonic() < until:
                beat.loop.turn(5.0)
                looks += 1
            assert states(local) == {} and looks < 60
        beat.until(sent(local))
    connection.close()


@pytest.mark.parametrize(
    "settings", [{"durable_page": 5, "durable_redispatch_after": 0.2, "durable_redispatch_max": 0.2}]
)
def test_claims_of_a_dead_beat_come_before_messages_that_workers_leave_lying(local: Celery) -> None:
    many = apply_many("elsewhere.durable", [(NOW, (each,)) for each in range(40)], durable=True, app=local)
    publisher = Scripted()
    with inline_beat(local, publisher=publisher) as beat:
        beat.until(lambda: states(local) == {"dispatched": 40})
        one = apply_at("beating.plain", NOW, app=local)
        Database.of(local).run(
            lambda executor: claims.claim(executor, shard=0, watermark=claims.UNBOUNDED, page=5, timeout=0.001)
        )
        eventually(
            lambda: rows(
                local, "select 1 from {schema}.run having bool_and(deadline < {schema}.clock()) and count(*) = 41"
            ),
            message="all of them are overdue",
        )
        publisher.pages.clear()
        beat.turn()
        assert one.state == "sent"
        assert publisher.pages[0] == [one.id]
    assert len(many) == 40


def test_tables_that_vanish_are_looked_for_with_pauses(local: Celery, caplog: pytest.LogCaptureFixture) -> None:
    """Half a schema, whatever made it: said once, no busy loop, and work goes on when it is whole again."""
    with inline_beat(local, publisher=Scripted()) as beat:
        beat.turn()
        rows(local, "alter table {schema}.run rename to away")
        looks, until = 0, time.monotonic() + 2
        while time.monotonic() < until:
            beat.loop.turn(5.0)
            looks += 1
        assert looks < 20
        assert caplog.text.count("The tables have changed") == 1
        rows(local, "alter table {schema}.away rename to run")
        timer = apply_at("beating.plain", NOW, app=local)
        beat.until(lambda: timer.state == "sent", timeout=20)


def test_an_older_revision_of_the_schema_ends_the_beat_with_the_command_that_mends_it(local: Celery) -> None:
    rows(local, "update {schema}.alembic_version set version_num = '0000'")
    with inline_beat(local, publisher=Scripted()) as beat, pytest.raises(SchemaMismatch, match="durable migrate"):
        beat.turn()
    rows(local, "update {schema}.alembic_version set version_num = '9999'")
    with inline_beat(local, publisher=Scripted()) as beat:
        beat.turn()  # newer, of the same major version: it only adds


def test_a_timer_moved_into_the_past_was_not_late_before(local: Celery) -> None:
    timer = apply_at("beating.plain", 3600, app=local)
    assert timer.reschedule(datetime.now(timezone.utc) - timedelta(days=1)) == "rescheduled"
    with inline_beat(local, publisher=Scripted()) as beat:
        beat.until(sent(local))
    late = rows(local, "select extract(epoch from dispatched_at - due_at)::float8 as late from {schema}.outcome")
    assert 0 <= late[0].late < 60


def test_no_plan_for_a_small_store_is_kept_for_a_large_one(local: Celery) -> None:
    """A beat that has idled claims by fresh plans: one that was kept read the whole store for each row of a page."""
    with inline_beat(local, publisher=Scripted()) as beat:
        for each in range(20):
            apply_at("beating.plain", NOW, (each,), app=local)
            beat.until(sent(local, each + 1))
        connection = beat.loop._link.connection
        plans = connection.execute(
            "select sum(generic_plans), sum(custom_plans) from pg_prepared_statements where statement like '%moved%'"
        ).fetchone()
        assert plans is not None and plans[0] == 0 and plans[1] > 5
        assert connection.execute("show enable_seqscan").fetchone() == ("off",)
