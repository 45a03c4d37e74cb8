"""What operators do to schedules: pause, resume, backfill, read the history, edit rows by plain SQL."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from celery import Celery

from celery_durable import InvalidSchedule, schedules
from celery_durable.store import leases, runs
from celery_durable.store.database import Database
from tests.beats import Published, Start, entry, nominals, rows, set_clock, states, utc

NOON = utc("2026-03-02T12:00:00")
#: A DurableTask that only the workers know.
DURABLE = {"task": "elsewhere.durable", "durable": True}


def lease(app: Celery, timer_id: Any) -> leases.Lease:
    """Take a timer's lease as a worker does."""
    taken = Database.of(app).run(
        lambda executor: leases.lease(executor, leases.Wanted(
            timer_id=timer_id, call_id=timer_id, token=f"1-{timer_id}", worker="w", seconds=3600,
            max_attempts=3, base=60, cap=60,
        ))
    )  # fmt: skip
    assert isinstance(taken, leases.Lease)
    return taken


def finish(app: Celery, taken: leases.Lease) -> None:
    """The body has ended."""
    assert Database.of(app).run(lambda executor: runs.finish(executor, taken.timer_id, taken.fence))


def reasons(name: str) -> list[tuple[str, str]]:
    """The history, oldest first: nominal time and why it ran or did not."""
    return [(f"{each.nominal:%H:%M:%S}", each.reason) for each in reversed(schedules.history(name))]


# --- pause and resume -----------------------------------------------------------------------------------------------


def test_a_resumed_schedule_makes_up_for_nothing(app: Celery, start: Start, published: Published) -> None:
    """C69: paused over its time, resumed later that day: the next run is tomorrow's; also for the rare one."""
    evening = utc("2024-07-14T14:50:00")
    set_clock(app, evening)
    schedules.upsert("daily", task="beating.plain", when="0 17 * * *", tz="Europe/Berlin")
    schedules.upsert("weekly", task="beating.plain", when="0 10 * * 6", tz="UTC")
    beat = start(evening)
    for name in ("daily", "weekly"):
        paused = schedules.pause(name, note="migration", by="ann")
        assert (paused.paused_note, paused.paused_by, paused.next_at) == ("migration", "ann", None)
        assert schedules.next_times(name) == []
    beat.at(evening + timedelta(minutes=20))
    resumed = schedules.resume("daily")
    beat.at(evening + timedelta(minutes=30))
    assert nominals(published) == [] and not resumed.paused
    assert schedules.next_times("daily", 1) == [utc("2024-07-15T15:00:00")]
    assert reasons("daily") == [("15:00:00", "paused")]
    assert schedules.get("daily").not_run == {"paused": 1}  # type: ignore[union-attr]
    beat.at(utc("2024-07-24T09:00:00"))
    before = nominals(published)
    schedules.resume("weekly")
    beat.turn(2)
    assert nominals(published) == before
    assert schedules.next_times("weekly", 1) == [utc("2024-07-27T10:00:00")]
    beat.at(utc("2024-07-27T10:00:00"))
    assert ("weekly", "2024-07-27T10:00:00Z") in published_names(published)


def published_names(published: Published) -> list[tuple[str, str]]:
    published.collect()
    return published.nominals


def test_a_pause_set_and_ended_by_plain_sql(app: Celery, start: Start, published: Published) -> None:
    """C69, by SQL."""
    beat = start(NOON, tick=entry(600))
    rows(app, "update {schema}.schedule set paused_at = {schema}.clock() returning name")
    beat.at(NOON + timedelta(seconds=1500))
    rows(app, "update {schema}.schedule set paused_at = null returning name")
    beat.turn(2)
    assert nominals(published) == []
    beat.at(NOON + timedelta(seconds=1800))
    assert nominals(published) == ["2026-03-02T12:30:00Z"]


def test_a_pause_that_ends_by_itself(app: Celery, start: Start, published: Published) -> None:
    beat = start(NOON, tick=entry(600))
    schedules.pause("tick", until=timedelta(seconds=1500))
    for second in (600, 1200, 1500, 1800):
        beat.at(NOON + timedelta(seconds=second))
    assert nominals(published) == ["2026-03-02T12:30:00Z"]
    found = schedules.get("tick")
    assert found is not None and not found.paused and found.not_run == {"paused": 2}
    assert reasons("tick") == [("12:10:00", "paused"), ("12:20:00", "paused"), ("12:30:00", "schedule")]


def test_a_restart_does_not_resume_an_entry_of_code(app: Celery, start: Start, published: Published) -> None:
    start(NOON, tick=entry(600))
    schedules.pause("tick")
    beat = start(NOON + timedelta(seconds=10), tick=entry(300))
    beat.at(NOON + timedelta(seconds=900))
    assert nominals(published) == [] and schedules.get("tick").paused  # type: ignore[union-attr]


@pytest.mark.parametrize("until", [NOON.replace(tzinfo=None), NOON - timedelta(seconds=1), timedelta(0)])
def test_a_pause_until_nonsense_is_refused(app: Celery, until: Any) -> None:
    set_clock(app, NOON)
    schedules.upsert("tick", task="beating.plain", when=600)
    with pytest.raises(InvalidSchedule, match="until"):
        schedules.pause("tick", until=until)
    with pytest.raises(InvalidSchedule, match="no schedule"):
        schedules.pause("tock")
    with pytest.raises(InvalidSchedule, match="no schedule"):
        schedules.resume("tock")


# --- overlap ---------------------------------------------------------------------------------------------------------


def test_skip_lets_no_two_runs_overlap(app: Celery, start: Start) -> None:
    """C96: every 60 s, the body takes 150 s: skipped runs are counted, and it resumes after the body."""
    set_clock(app, NOON)
    schedules.upsert("slow", when=60, overlap="skip", **DURABLE)
    beat = start(NOON)
    beat.at(NOON + timedelta(seconds=60))
    [first] = rows(app, "select id from {schema}.run")
    taken = lease(app, first.id)
    for second in (120, 180):
        beat.at(NOON + timedelta(seconds=second))
    assert states(app) == {"running": 1}
    finish(app, taken)
    beat.at(NOON + timedelta(seconds=240))
    assert states(app) == {"succeeded": 1, "dispatched": 1}
    assert reasons("slow") == [
        ("12:01:00", "schedule"), ("12:02:00", "overlap"), ("12:03:00", "overlap"), ("12:04:00", "schedule"),
    ]  # fmt: skip
    found = schedules.get("slow")
    assert found is not None and found.not_run == {"overlap": 2} and found.fired == 2


def test_a_run_between_two_attempts_still_goes_on(app: Celery, start: Start) -> None:
    """C96: a body that was killed: its timer waits for the next attempt, which is no room for another run."""
    set_clock(app, NOON)
    schedules.upsert("slow", when=60, overlap="skip", **DURABLE)
    beat = start(NOON)
    beat.at(NOON + timedelta(seconds=60))
    [first] = rows(app, "select id from {schema}.run")
    taken = lease(app, first.id)
    Database.of(app).run(lambda executor: runs.retry(executor, first.id, taken.fence, delay=70, lost=True))
    beat.at(NOON + timedelta(seconds=120))
    assert states(app) == {"waiting": 1}
    beat.at(NOON + timedelta(seconds=130))
    finish(app, lease(app, first.id))
    beat.at(NOON + timedelta(seconds=180))
    assert states(app) == {"succeeded": 1, "dispatched": 1}


def test_queue_lets_one_wait(app: Celery, start: Start) -> None:
    set_clock(app, NOON)
    schedules.upsert("slow", when=60, overlap="queue", **DURABLE)
    beat = start(NOON)
    beat.at(NOON + timedelta(seconds=60))
    [first] = rows(app, "select id from {schema}.run")
    taken = lease(app, first.id)
    for second in (120, 180, 200):
        beat.at(NOON + timedelta(seconds=second))
    assert states(app) == {"running": 1} and schedules.get("slow").queued == 1  # type: ignore[union-attr]
    finish(app, taken)
    beat.at(NOON + timedelta(seconds=202))
    assert states(app) == {"succeeded": 1, "dispatched": 1}
    assert reasons("slow") == [("12:01:00", "schedule"), ("12:02:00", "schedule"), ("12:03:00", "overlap")]
    [second_] = rows(app, "select id from {schema}.run")
    finish(app, lease(app, second_.id))
    beat.at(NOON + timedelta(seconds=240))
    assert states(app) == {"succeeded": 2, "dispatched": 1}
    assert schedules.get("slow").queued == 0  # type: ignore[union-attr]


def test_runs_that_nobody_sees_the_end_of_cannot_be_kept_apart(
    app: Celery, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    for task in ("beating.plain", "elsewhere.unknown"):
        with pytest.raises(InvalidSchedule, match="needs a DurableTask"):
            schedules.upsert("slow", task=task, when=60, overlap="skip")
    start(NOON, slow=entry(60, durable={"overlap": "skip"}), good=entry(60))
    assert "needs a DurableTask" in caplog.text
    assert [each.name for each in schedules.list()] == ["good"]


# --- backfill ------------------------------------------------------------------------------------------------------------


def test_a_backfill_runs_what_did_not_run(app: Celery, start: Start, published: Published) -> None:
    beat = start(NOON, tick=entry(600))
    beat.at(NOON + timedelta(seconds=600))
    beat.at(NOON + timedelta(seconds=3000))
    assert nominals(published) == ["2026-03-02T12:10:00Z", "2026-03-02T12:50:00Z"]
    span = (NOON + timedelta(seconds=1), NOON + timedelta(minutes=50))
    dry = schedules.backfill("tick", *span, dry_run=True)
    assert [f"{each:%H:%M}" for each in dry.nominals] == ["12:20", "12:30", "12:40"]
    assert [f"{each:%H:%M}" for each in dry.held] == ["12:10", "12:50"] and dry.overlap == "allow"
    beat.turn(2)
    assert len(nominals(published)) == 2, "a dry run runs nothing"
    told: list[int] = []
    assert schedules.backfill("tick", *span, progress=told.append) == dry and told == [3]
    beat.at(NOON + timedelta(seconds=3001))
    assert nominals(published)[2:] == ["2026-03-02T12:20:00Z", "2026-03-02T12:30:00Z", "2026-03-02T12:40:00Z"]
    assert {each["durable_reason"] for each in published.headers[2:]} == {"backfill"}
    assert schedules.backfill("tick", *span).nominals == []
    found = schedules.get("tick")
    assert found is not None and found.fired == 2 and schedules.next_times("tick", 1) == [NOON + timedelta(hours=1)]
    assert {reason for _, reason in reasons("tick")} == {"schedule", "catchup", "backfill"}


def test_a_backfill_one_after_the_other(app: Celery, start: Start) -> None:
    set_clock(app, NOON)
    schedules.upsert("slow", when="0 * * * *", **DURABLE)
    beat = start(NOON)
    set_clock(app, NOON + timedelta(minutes=30))
    filled = schedules.backfill("slow", NOON - timedelta(hours=3), NOON - timedelta(hours=1), overlap="queue")
    assert len(filled.nominals) == 3
    seen = []
    for _ in range(3):
        beat.until(lambda: states(app).get("dispatched") == 1)
        [row] = rows(app, "select r.id, c.nominal from {schema}.run r join {schema}.call c on c.id = r.call_id")
        taken = lease(app, row.id)
        beat.turn(3)
        assert states(app).get("dispatched") is None, "one at a time"
        finish(app, taken)
        seen.append(row.nominal)
        now = rows(app, "select {schema}.clock() as now")[0].now
        set_clock(app, now + timedelta(seconds=2))
    assert seen == list(filled.nominals)
    found = schedules.get("slow")
    assert found is not None and (found.queued, found.fired) == (0, 0)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"start": NOON.replace(tzinfo=None)}, "start"), ({"end": NOON + timedelta(hours=1)}, "end by now"),
        ({"start": NOON, "end": NOON - timedelta(hours=1)}, "end by now"), ({"overlap": "skip"}, "overlap"),
        ({"start": NOON - timedelta(days=365)}, "10,000"), ({"name": "tock"}, "no schedule"),
        ({"overlap": "queue"}, "needs a DurableTask"),
    ],
)  # fmt: skip
def test_a_backfill_of_nonsense_is_refused(app: Celery, wrong: dict[str, Any], said: str) -> None:
    set_clock(app, NOON)
    schedules.upsert("tick", task="beating.plain", when="* * * * *")
    arguments = {"name": "tick", "start": NOON - timedelta(hours=1), "end": NOON, **wrong}
    with pytest.raises(InvalidSchedule, match=said):
        schedules.backfill(**arguments)
    assert states(app) == {}


# --- plain SQL --------------------------------------------------------------------------------------------------------------


def test_edits_by_plain_sql_take_effect(app: Celery, start: Start, published: Published) -> None:
    """C67: disable A, enable B, delete C, change the arguments of D, with no marker, signal or restart."""
    set_clock(app, NOON)
    for name in "abcd":
        schedules.upsert(name, task="beating.plain", when=60, args=(name,), enabled=name != "b")
    beat = start(NOON)
    rows(app, "update {schema}.schedule set enabled = false where name = 'a' returning name")
    set_clock(app, NOON + timedelta(seconds=90))
    rows(app, "update {schema}.schedule set enabled = true where name = 'b' returning name")
    rows(app, "delete from {schema}.schedule where name = 'c' returning name")
    rows(app, "update {schema}.schedule set args = '[\"new\"]' where name = 'd' returning name")
    beat.at(NOON + timedelta(seconds=119))
    assert published_names(published) == [("d", "2026-03-02T12:01:00Z")]
    assert published.headers[0]["argsrepr"] == "['new']"
    beat.at(NOON + timedelta(seconds=120))
    assert sorted(published_names(published)[1:]) == [("b", "2026-03-02T12:02:00Z"), ("d", "2026-03-02T12:02:00Z")]


def test_a_new_rhythm_by_plain_sql_begins_now(app: Celery, start: Start, published: Published) -> None:
    """C29: a new zone, a new cron text; no run at the moment of the edit, nothing of the old rhythm."""
    three = utc("2026-03-01T03:00:00")
    set_clock(app, three)
    schedules.upsert("nine", task="beating.plain", when="30 9 * * *", tz="UTC")
    schedules.upsert("often", task="beating.plain", when="0 * * * *", tz="UTC")
    beat = start(three)
    rows(app, "update {schema}.schedule set tz = 'Asia/Kolkata' where name = 'nine' returning name")
    rows(app, "update {schema}.schedule set text = '45 * * * *' where name = 'often' returning name")
    beat.turn(2)
    assert nominals(published) == []
    assert schedules.get("nine").next_at == utc("2026-03-01T04:00:00")  # type: ignore[union-attr]
    assert schedules.get("often").next_at == utc("2026-03-01T03:45:00")  # type: ignore[union-attr]
    for minute in (30, 45, 60):
        beat.at(three + timedelta(minutes=minute))
    assert published_names(published) == [("often", "2026-03-01T03:45:00Z"), ("nine", "2026-03-01T04:00:00Z")]


def test_a_row_made_by_plain_sql(app: Celery, start: Start, published: Published) -> None:
    """C18: with what a definition needs and nothing else; an impossible date is flagged and stops nobody."""
    beat = start(NOON)
    for name, text in (("mine", "* * * * *"), ("never", "0 12 31 4 *")):
        rows(
            app, "insert into {schema}.schedule (name, task, kind, text) values (%(name)s, 'beating.plain', 'cron', %(text)s) "
            "returning name", name=name, text=text,
        )  # fmt: skip
    for minute in (0, 1, 2):
        beat.at(NOON + timedelta(minutes=minute))
    assert published_names(published) == [("mine", "2026-03-02T12:01:00Z"), ("mine", "2026-03-02T12:02:00Z")]
    assert "0 12 31 4 *" in str(schedules.get("never").fault)  # type: ignore[union-attr]
    assert schedules.get("mine").owner == "api"  # type: ignore[union-attr]


def test_disabling_keeps_what_is_known_of_the_runs(app: Celery, start: Start) -> None:
    """C75: last run and count remain."""
    beat = start(NOON)
    schedules.upsert("tick", task="beating.plain", when=60)
    for minute in (1, 2, 3):
        beat.at(NOON + timedelta(minutes=minute))
    rows(app, "update {schema}.schedule set enabled = false returning name")
    found = schedules.pause("tick")
    assert (found.fired, found.last_fired_at, found.enabled) == (3, NOON + timedelta(minutes=3), False)
    assert len(schedules.history("tick")) == 3


# --- the history --------------------------------------------------------------------------------------------------------------


def test_the_history_goes_on_from_page_to_page(app: Celery, start: Start) -> None:
    beat = start(NOON)
    schedules.upsert("tick", task="beating.plain", when=60, catchup="latest")
    beat.at(NOON + timedelta(minutes=5))
    beat.at(NOON + timedelta(minutes=6))
    whole = schedules.history("tick")
    assert [each.reason for each in whole] == ["schedule", "catchup", "missed", "missed", "missed", "missed"]
    assert [each.state for each in whole] == ["sent", "sent", None, None, None, None]
    first = schedules.history("tick", 2)
    assert first + schedules.history("tick", 4, before=first[-1].nominal) == whole
    with pytest.raises(InvalidSchedule, match="before"):
        schedules.history("tick", before=NOON.replace(tzinfo=None))
    assert schedules.history("tock") == []


def test_an_entry_that_ends(app: Celery, start: Start, published: Published) -> None:
    """C74: every 10 s, ended after 25 s: two runs and nothing more."""
    set_clock(app, NOON)
    schedules.upsert("short", task="beating.plain", when=10, end=NOON + timedelta(seconds=25))
    beat = start(NOON)
    for second in range(5, 65, 5):
        beat.at(NOON + timedelta(seconds=second))
    assert nominals(published) == ["2026-03-02T12:00:10Z", "2026-03-02T12:00:20Z"]
    assert schedules.get("short").next_at is None  # type: ignore[union-attr]


# --- what waits for the run before --------------------------------------------------------------------------------------


def waiting_behind(app: Celery, start: Start, **words: Any) -> tuple[Any, leases.Lease]:
    """A schedule whose run goes on, with an occurrence of 12:02 behind it."""
    set_clock(app, NOON)
    schedules.upsert("slow", when="* * * * *", overlap="queue", **DURABLE, **words)
    beat = start(NOON)
    beat.at(NOON + timedelta(seconds=60))
    [first] = rows(app, "select id from {schema}.run")
    taken = lease(app, first.id)
    beat.at(NOON + timedelta(seconds=120))
    assert schedules.get("slow").queued == 1  # type: ignore[union-attr]
    return beat, taken


def test_a_change_does_not_put_off_what_waits(app: Celery, start: Start) -> None:
    beat, taken = waiting_behind(app, start)
    schedules.upsert("slow", when="* * * * *", overlap="queue", args=(1,), **DURABLE)
    schedules.pause("slow")
    schedules.resume("slow")
    finish(app, taken)
    beat.at(NOON + timedelta(seconds=125))
    assert states(app) == {"succeeded": 1, "dispatched": 1}
    assert reasons("slow")[:2] == [("12:01:00", "schedule"), ("12:02:00", "schedule")]


@pytest.mark.parametrize("how", ["api", "sql"])
def test_what_waits_goes_with_its_schedule(app: Celery, start: Start, how: str) -> None:
    beat, taken = waiting_behind(app, start)
    if how == "api":
        assert schedules.delete("slow")
    else:
        rows(app, "delete from {schema}.schedule returning name")
    finish(app, taken)
    assert rows(app, "select * from {schema}.occurrence") == []
    schedules.upsert("slow", when="* * * * *", overlap="queue", **DURABLE)
    beat.at(NOON + timedelta(seconds=150))
    assert states(app) == {"succeeded": 1}


def test_what_waits_past_its_deadline_does_not_run(app: Celery, start: Start) -> None:
    beat, taken = waiting_behind(app, start, deadline=30)
    finish(app, taken)
    beat.at(NOON + timedelta(seconds=155))
    assert states(app) == {"succeeded": 1}
    assert reasons("slow") == [("12:01:00", "schedule"), ("12:02:00", "deadline")]
    found = schedules.get("slow")
    assert found is not None and (found.queued, found.not_run) == (0, {"deadline": 1})


def test_a_backfill_takes_no_place_from_the_clock(app: Celery, start: Start) -> None:
    beat, _ = waiting_behind(app, start)
    schedules.backfill("slow", NOON - timedelta(minutes=5), NOON - timedelta(minutes=1))
    found = schedules.get("slow")
    assert found is not None and found.queued == 6
    rows(app, "delete from {schema}.occurrence where reason = 'queued' returning nominal")
    beat.at(NOON + timedelta(seconds=180))
    assert ("12:03:00", "queued") in reasons("slow")


def test_an_occurrence_that_a_backfill_was_quicker_to_run_is_counted_once(app: Celery, start: Start) -> None:
    beat = start(NOON)
    schedules.upsert("tick", task="beating.plain", when="* * * * *")
    set_clock(app, NOON + timedelta(seconds=61))
    assert len(schedules.backfill("tick", NOON + timedelta(seconds=1), NOON + timedelta(seconds=61)).nominals) == 1
    beat.at(NOON + timedelta(seconds=62))
    found = schedules.get("tick")
    assert found is not None and found.fired == 0
    assert states(app) == {"sent": 1} and reasons("tick") == [("12:01:00", "backfill")]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"options": {"serializer": "nonsense"}}, "cannot be made"), ({"options": {"priority": "high"}}, "priority"),
        ({"args": (1, 2, 3)}, "cannot be made"), ({"options": {"queue": "a\x00b"}}, "cannot be made"),
    ],
)  # fmt: skip
def test_a_call_that_no_occurrence_could_make_is_refused(app: Celery, wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidSchedule, match=said):
        schedules.upsert("tick", task="beating.plain", when=60, **wrong)
    assert schedules.list() == []


def test_a_schedule_that_has_run_as_often_as_it_may_is_not_made_again(app: Celery, start: Start) -> None:
    beat = start(NOON)
    schedules.upsert("once", task="beating.plain", when=60, max_runs=1)
    beat.at(NOON + timedelta(seconds=60))
    with pytest.raises(InvalidSchedule, match="has run 1 times already"):
        schedules.upsert("once", task="beating.plain", when=90, max_runs=1)
    rows(app, "update {schema}.schedule set text = '30' returning name")
    beat.at(NOON + timedelta(seconds=180))
    assert states(app) == {"sent": 1} and schedules.get("once").next_at is None  # type: ignore[union-attr]


@pytest.mark.parametrize("how", ["api", "sql"])
def test_switched_on_again_nobody_waits_for_the_run_of_before(app: Celery, start: Start, how: str) -> None:
    beat, taken = waiting_behind(app, start)
    words: dict[str, Any] = {"when": "* * * * *", "overlap": "queue", **DURABLE}
    for enabled in (False, True):
        if how == "api":
            schedules.upsert("slow", enabled=enabled, **words)
        else:
            rows(app, "update {schema}.schedule set enabled = %(enabled)s returning name", enabled=enabled)
    finish(app, taken)
    beat.at(NOON + timedelta(seconds=150))
    assert states(app) == {"succeeded": 1} and schedules.get("slow").queued == 0  # type: ignore[union-attr]


@pytest.mark.parametrize("how", ["api", "sql"])
def test_an_end_that_is_put_off_makes_no_backlog(app: Celery, start: Start, published: Published, how: str) -> None:
    set_clock(app, NOON)
    words: dict[str, Any] = {"task": "beating.plain", "when": "* * * * *", "catchup": "all"}
    schedules.upsert("short", max_runs=2, **words)
    beat = start(NOON)
    for minute in (1, 2, 3, 30):
        beat.at(NOON + timedelta(minutes=minute))
    assert len(nominals(published)) == 2
    if how == "api":
        schedules.upsert("short", max_runs=4, **words)
    else:
        rows(app, """update {schema}.schedule set policy = '{"catchup": "all", "max_runs": 4}' returning name""")
    for minute in (30, 31, 32, 33):
        beat.at(NOON + timedelta(minutes=minute))
    assert [each[11:16] for each in nominals(published)] == ["12:01", "12:02", "12:31", "12:32"]


def test_what_waits_counts_among_the_runs(app: Celery, start: Start) -> None:
    beat, taken = waiting_behind(app, start, max_runs=2)
    finish(app, taken)
    beat.at(NOON + timedelta(seconds=180))
    beat.at(NOON + timedelta(seconds=190))
    assert sum(states(app).values()) == 2 and schedules.get("slow").fired == 2  # type: ignore[union-attr]


def test_a_pause_covers_what_the_jitter_would_have_run_after_it(
    app: Celery, start: Start, published: Published
) -> None:
    set_clock(app, NOON)
    schedules.upsert("late", task="beating.plain", when="*/10 * * * *", jitter=599, catchup="all")
    delay = schedules.next_times("late", 1)[0] - (NOON + timedelta(minutes=10))
    assert delay > timedelta(seconds=10)
    beat = start(NOON)
    schedules.pause("late", until=NOON + timedelta(minutes=10, seconds=5))
    beat.at(NOON + timedelta(minutes=10, seconds=6))
    beat.at(NOON + timedelta(minutes=10, seconds=7) + delay)
    assert nominals(published) == [] and reasons("late") == [("12:10:00", "paused")]
    beat.at(NOON + timedelta(minutes=20) + delay)
    assert nominals(published) == ["2026-03-02T12:20:00Z"]


def test_a_row_that_somebody_holds_stops_one_schedule(app: Celery, start: Start, published: Published) -> None:
    """An open transaction over an occurrence that waits: the others run meanwhile, and it later."""
    beat, taken = waiting_behind(app, start)
    schedules.upsert("tick", task="beating.plain", when=10)
    holder = Database.of(app).connect("holder")
    with holder.transaction():
        holder.execute("update celery_durable.occurrence set noted_at = noted_at")
        finish(app, taken)
        beat.at(NOON + timedelta(seconds=130))
        beat.until(lambda: nominals(published)[-1:] == ["2026-03-02T12:02:10Z"])
        assert "lock" in str(schedules.get("slow").fault)  # type: ignore[union-attr]
    holder.close()
    beat.at(NOON + timedelta(seconds=200))
    beat.until(lambda: states(app).get("dispatched") == 1)
