"""Rows that only plain SQL can bring about, and text that JSON allows and Postgres does not: nothing stops the rest."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from celery import Celery

from celery_durable import apply_at, apply_many, cancel, dead_letters, get_timer, schedules
from celery_durable.core.states import State
from celery_durable.errors import KeyConflict
from celery_durable.store import beats, claims, leases, listing, runs
from celery_durable.store.database import Database
from celery_durable.store.executor import PsycopgExecutor
from tests.beats import Scripted, inline_beat, make_app, rows, states
from tests.servers.waiting import eventually

NOW = timedelta(0)
LATER = timedelta(hours=1)
#: A task that only the workers know.
DURABLE = "elsewhere.durable"
#: Legal in JSON, and in no text column.
STRANGE = "nul \x00, lone surrogate \ud800"


@pytest.fixture
def local(each_database_url: str) -> Iterator[Celery]:
    """An app whose broker is a script, on the newest and the oldest PostgreSQL."""
    app = make_app(each_database_url, "memory://")
    yield app
    Database.of(app).close()


def run(app: Celery, timer_id: Any, **columns: object) -> None:
    """Put a dispatched run of a timer into the state that `columns` say."""
    assignments = ", ".join(f"{name} = %({name})s" for name in columns)
    rows(app, f"update {{schema}}.run set {assignments} where id = %(id)s returning id", id=timer_id, **columns)


def lease(app: Celery, timer_id: Any) -> leases.Lease | str:
    """Take a timer's lease as a worker does."""
    return Database.of(app).run(
        lambda executor: leases.lease(executor, leases.Wanted(
            timer_id=timer_id, call_id=timer_id, token="1-a", worker="w", seconds=30, max_attempts=3, base=1,
            cap=60,
        ))
    )  # fmt: skip


def test_arguments_of_any_text_are_found_listed_and_taken_back(local: Celery) -> None:
    """C43: NUL and lone surrogates travel in arguments and in their shown form, and stop no query over headers."""
    database = Database.of(local)
    strange = apply_at("beating.plain", LATER, (STRANGE,), key="strange", headers={"x": STRANGE}, app=local)
    keyless = apply_at("beating.plain", LATER, (STRANGE,), app=local)
    found = get_timer(strange.id, app=local)
    assert found is not None and found.key == "strange"
    assert (found := get_timer(keyless.id, app=local)) is not None and found.key == str(keyless.id)
    page = database.run(lambda executor: listing.page_of_timers(executor, listing.Filter(key="str")))
    assert [each.id for each in page.timers] == [strange.id]
    page = database.run(lambda executor: listing.page_of_timers(executor, listing.Filter()))
    assert {each.key for each in page.timers} == {"strange", str(keyless.id)}
    assert cancel(key="strange", app=local) == "cancelled"
    assert cancel(keyless, app=local) == "cancelled"


def test_a_dead_letter_of_any_text_is_listed_and_replayed_under_its_key(local: Celery) -> None:
    dead = apply_at(DURABLE, NOW, (STRANGE,), key="strange", durable=True, app=local)
    with inline_beat(local, publisher=Scripted()) as beat:
        beat.until(lambda: dead.state == "dispatched")
    taken = lease(local, dead.id)
    assert isinstance(taken, leases.Lease)
    failure = runs.Failure(error_type="E", error=STRANGE, traceback=STRANGE)
    buried = Database.of(local).run(
        lambda executor: runs.bury(executor, dead.id, taken.fence, reason="failed", failure=failure)
    )
    assert buried
    assert [each.key for each in dead_letters.find_all(app=local)] == ["strange"]
    again = dead_letters.replay(dead.id, when=LATER, app=local)
    found = get_timer(again.id, app=local)
    assert found is not None and found.key == "strange"
    stored = rows(local, "select headers::text as headers from {schema}.call where id = %(id)s", id=again.id)
    assert json.loads(stored[0].headers)["durable_key"] == "strange"


def test_a_row_whose_id_has_ended_runs_nothing_again_and_holds_up_nobody(local: Celery) -> None:
    ended = apply_at("beating.plain", NOW, app=local)
    publisher = Scripted()
    with inline_beat(local, publisher=publisher) as beat:
        beat.until(lambda: ended.state == "sent")
        rows(
            local,
            "insert into {schema}.timer (id, call_id, due_at, wake_at) "
            "select id, call_id, due_at, due_at from {schema}.outcome returning id",
        )
        beside = apply_many("beating.plain", [(NOW, (each,)) for each in range(20)], app=local)
        beat.until(lambda: states(local) == {"sent": 21})
        beat.turn(5)
    published = [each for page in publisher.pages for each in page]
    assert sorted(published) == sorted([ended.id, *(each.id for each in beside)])
    [note] = rows(local, "select ending, error from {schema}.attempt where timer_id = %(id)s", id=ended.id)
    assert note.ending == "refused" and "exists already" in note.error


def test_an_outcome_made_by_hand_does_not_keep_a_run_from_ending(local: Celery) -> None:
    timer = apply_at(DURABLE, NOW, durable=True, app=local)
    with inline_beat(local, publisher=Scripted()) as beat:
        beat.until(lambda: timer.state == "dispatched")
    taken = lease(local, timer.id)
    assert isinstance(taken, leases.Lease)
    rows(
        local,
        "insert into {schema}.outcome (id, call_id, attempt, state) "
        "select id, call_id, 1, 'sent' from {schema}.run returning id",
    )
    assert Database.of(local).run(lambda executor: runs.finish(executor, timer.id, taken.fence))
    assert states(local) == {"sent": 1}


@pytest.mark.parametrize("instant", ["infinity", "200000-01-01", "0001-01-01", "0300-01-01 BC", "-infinity"])
def test_an_instant_that_no_datetime_can_say_is_shown_and_stepped_over(local: Celery, instant: str) -> None:
    """C40: a row of any due time is listed once, found, leased, cancelled; status counts it."""
    database = Database.of(local)
    made = apply_many(DURABLE, [(LATER, (each,)) for each in range(3)], durable=True, app=local)
    odd = made[1]
    rows(
        local,
        "update {schema}.timer set due_at = %(at)s, wake_at = %(at)s, expires_at = 'infinity' where id = %(id)s returning id",
        at=instant, id=odd.id,
    )  # fmt: skip
    found = get_timer(odd.id, app=local)
    assert found is not None and found.state is State.WAITING and found.due_at is not None
    database.run(beats.counts)
    listed: list[Any] = []
    cursor: str | None = None
    for _ in range(5):
        page = database.run(
            lambda executor, cursor=cursor: listing.page_of_timers(executor, listing.Filter(), limit=1, cursor=cursor)
        )
        listed += [each.id for each in page.timers]
        cursor = page.cursor
        if cursor is None:
            break
    assert cursor is None and sorted(listed) == sorted(each.id for each in made)
    rows(local, "update {schema}.timer set wake_at = {schema}.clock() where id = %(id)s returning id", id=odd.id)
    with inline_beat(local, publisher=Scripted()) as beat:
        beat.until(lambda: odd.state == "dispatched")
    taken = lease(local, odd.id)
    assert isinstance(taken, leases.Lease) and 1 < taken.due_at.year < 9999
    assert database.run(lambda executor: runs.finish(executor, odd.id, taken.fence))
    assert odd.state == "succeeded"


def test_a_cursor_that_is_no_instant_is_refused(local: Celery) -> None:
    made_up = "waiting,2026-19-39_00:00:00_UTC,00000000-0000-0000-0000-000000000000"
    with pytest.raises(ValueError, match="is no cursor"):
        Database.of(local).run(lambda executor: listing.page_of_timers(executor, listing.Filter(), cursor=made_up))


def test_a_run_made_by_hand_is_swept_like_any_other(local: Celery) -> None:
    timers_ = [apply_at(DURABLE, NOW, durable=True, app=local) for _ in range(3)]
    with inline_beat(local, publisher=Scripted()) as beat:
        beat.until(lambda: states(local) == {"dispatched": 3})
        for each in timers_:
            run(local, each.id, state="running", deadline=datetime(2026, 1, 1, tzinfo=timezone.utc), retry_in=None)
        beat.until(lambda: states(local) == {"dispatched": 3})
    assert {each.attempt for each in (timer.details for timer in timers_) if each} == {0}
    assert all(row.lost == 1 for row in rows(local, "select lost from {schema}.run"))


def test_a_message_replaced_while_its_timer_is_claimed_is_dispatched(local: Celery) -> None:
    """The claim locks a row that was replaced after its snapshot: it does not see the new payload yet."""
    database = Database.of(local)
    timer = apply_at("beating.plain", NOW, (1,), key="k", app=local)
    gate = database.connect("gate")
    gate.execute("select pg_advisory_lock(7)")
    gate.execute(
        "create function celery_durable.held_clock() returns timestamptz language plpgsql stable as "
        "$$ begin perform pg_advisory_lock_shared(7); perform pg_advisory_unlock_shared(7); "
        "return pg_catalog.clock_timestamp(); end $$"
    )
    gate.execute(
        "create or replace function celery_durable.clock() returns timestamptz language sql stable "
        "as 'select celery_durable.held_clock()'"
    )
    gate.execute("select pg_advisory_unlock(7)")
    beat = database.connect("beat")
    beat.execute("set plan_cache_mode = force_generic_plan")

    def claim() -> claims.Claimed:
        return claims.claim(PsycopgExecutor(beat, database.schema), shard=0, watermark="-infinity", page=10, timeout=8)

    rows(local, "update {schema}.timer set wake_at = 'infinity' returning id")
    for _ in range(10):
        claim()  # until it is prepared: planning asks for the time as well, before there is a snapshot
    rows(local, "update {schema}.timer set wake_at = due_at returning id")
    gate.execute("select pg_advisory_lock(7)")
    claimed: list[Any] = []
    claiming = threading.Thread(target=lambda: claimed.append(claim()))
    claiming.start()
    waiting = "select count(*) as n from pg_locks where locktype = 'advisory' and not granted"
    eventually(lambda: gate.execute(waiting).fetchone() == (1,), message="the claim has its snapshot")
    with gate.transaction():
        # As a replacement does it, without asking for the time.
        gate.execute(
            "insert into celery_durable.call select (jsonb_populate_record(c, jsonb_build_object("
            "'id', gen_random_uuid(), 'key', null))).* from celery_durable.call c where id = %s",
            (timer.id,),
        )
        gate.execute(
            "update celery_durable.timer set call_id = (select id from celery_durable.call where id <> %s)", (timer.id,)
        )
    gate.execute("select pg_advisory_unlock(7)")
    claiming.join()
    [(found, seen, _)] = claimed
    assert (found, seen) == ([], 1)
    assert states(local) == {"waiting": 1}
    with inline_beat(local, publisher=Scripted()) as inline:
        inline.until(lambda: timer.state == "sent")
    gate.close()
    beat.close()


def test_a_body_that_has_returned_is_past_cancelling(local: Celery) -> None:
    """C56: it is neither cancelled, moved, replaced nor expired; only its callbacks are tried, and not for ever."""
    database = Database.of(local)
    timer = apply_at(DURABLE, NOW, key="k", expires=3600, durable=True, app=local)
    held = runs.Held(body=b"1", content_type="application/json", content_encoding="utf-8")
    for tries in range(runs.MAX_LOST):
        with inline_beat(local, publisher=Scripted()) as beat:
            rows(local, "update {schema}.timer set wake_at = {schema}.clock() returning id")
            beat.until(lambda: timer.state == "dispatched")
            if tries:
                assert (timer.cancel(), timer.reschedule(LATER)) == ("too_late", "too_late")
            taken = lease(local, timer.id)
            assert isinstance(taken, leases.Lease) and (taken.held is None) is (tries == 0)
            assert database.run(lambda executor, fence=taken.fence: runs.hold(executor, timer.id, fence, held))
            run(local, timer.id, deadline=datetime(2026, 1, 1, tzinfo=timezone.utc))
            beat.until(lambda: timer.state != "finishing")
        if tries == 0:
            assert (timer.cancel(), timer.reschedule(LATER)) == ("too_late", "too_late")
            with pytest.raises(KeyConflict, match="no longer waits"):
                apply_at("beating.plain", LATER, key="k", on_conflict="replace", app=local)
    [dead] = dead_letters.find_all(app=local)
    assert (dead.id, dead.reason) == (timer.id, "callbacks failed")
    assert rows(local, "select count(*) as n from {schema}.held_result")[0].n == 0


def test_a_schedule_that_cannot_be_read_stops_alone(local: Celery) -> None:
    for name in ("good", "bad"):
        schedules.upsert(name, task="beating.plain", when=timedelta(hours=1), app=local)
    # Legal JSON with a number that Python refuses to read.
    digits = "1" * 5000
    rows(
        local,
        f"update {{schema}}.schedule set next_at = {{schema}}.clock(), cursor = {{schema}}.clock() - interval '1 h', "
        f"args = case when name = 'bad' then '[{digits}]' else '[]' end::json returning name",
    )
    with inline_beat(local, publisher=Scripted()) as beat:
        beat.until(lambda: states(local) == {"sent": 1})
        beat.until(lambda: bool(rows(local, "select 1 from {schema}.schedule where fault like %(x)s", x="%4300%")))
    assert rows(local, "select name from {schema}.schedule where fault is null")[0].name == "good"
