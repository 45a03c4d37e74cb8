"""Recurring schedules on a real Postgres, with the database's clock in the test's hand."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from celery import Celery
from celery.beat import BeatLazyFunc, ScheduleEntry
from celery.schedules import BaseSchedule, crontab, schedule, solar

from celery_durable import InvalidSchedule, schedules
from celery_durable.recurrence import Every
from celery_durable.store.database import Database
from tests.beats import Published, Start, entry, migrate, nominals, rows, set_clock, utc


class Odd(BaseSchedule):
    """A third-party schedule: every full 7 seconds of the day."""

    def remaining_estimate(self, last_run_at: datetime) -> timedelta:
        second = last_run_at.second + last_run_at.microsecond / 1e6
        return timedelta(seconds=7 - second % 7)

    def is_due(self, last_run_at: datetime) -> Any:
        raise AssertionError("not asked")


def test_every_kind_of_entry_comes_due(start: Start, published: Published) -> None:
    noon = utc("2026-03-02T12:00:00")
    beat = start(
        noon,
        seconds=entry(10), delta=entry(timedelta(seconds=10)), object=entry(schedule(10)),
        crontab=entry(crontab()), text=entry("*/15 * * * * *"), odd=entry(Odd()),
        sun=entry(solar("sunset", 52.5, 13.4)), entry=ScheduleEntry("entry", "beating.plain", schedule=schedule(10)),
        relative=entry(10, relative=True),
    )  # fmt: skip
    assert nominals(published) == [], "nothing runs at the start"
    beat.at(noon + timedelta(seconds=10))
    published.collect()
    assert sorted(name for name, _ in published.nominals) == ["delta", "entry", "object", "odd", "relative", "seconds"]
    beat.at(noon + timedelta(seconds=61))
    published.collect()
    assert {name for name, _ in published.nominals} >= {"crontab", "text"}
    beat.at(noon + timedelta(hours=6))
    published.collect()
    assert ("sun", "2026-03-02T16:4") in [(name, at[:15]) for name, at in published.nominals]


def test_an_occurrence_carries_what_the_task_wants_to_know(start: Start, published: Published) -> None:
    noon = utc("2026-03-02T12:00:00")
    beat = start(noon, tick=entry(10, args=(3,), options={"priority": 5, "headers": {"mine": 1}}))
    beat.at(noon + timedelta(seconds=10))
    published.collect()
    (headers,) = published.headers
    assert headers["durable_schedule"] == "tick" and headers["durable_nominal"] == "2026-03-02T12:00:10Z"
    assert headers["durable_key"] == "tick@2026-03-02T12:00:10Z" and headers["durable_reason"] == "schedule"
    assert headers["durable_missed"] == 0 and headers["celery_beat_task"] is True and headers["mine"] == 1
    assert headers["argsrepr"] == "[3]" and headers["task"] == "beating.plain" and headers["durable_leased"] is False


def test_only_the_newest_missed_occurrence_runs(app: Celery, start: Start, published: Published) -> None:
    """C77, and R2 for two beats: each occurrence once, the missed ones on record."""
    noon = utc("2026-03-02T12:00:00")
    beat, other = start(noon, tick=entry(10)), start(noon, tick=entry(10))
    for each in (beat, other):
        each.at(noon + timedelta(seconds=45))
    published.collect()
    assert published.nominals == [("tick", "2026-03-02T12:00:40Z")]
    assert published.headers[0]["durable_missed"] == 3 and published.headers[0]["durable_reason"] == "catchup"
    noted = rows(app, "select nominal, reason from {schema}.occurrence order by nominal")
    assert [(each.nominal.second, each.reason) for each in noted] == [(10, "missed"), (20, "missed"), (30, "missed")]
    other.at(noon + timedelta(seconds=50))
    assert nominals(published)[1:] == ["2026-03-02T12:00:50Z"]


def test_catchup_words_stand_in_the_entry(start: Start, published: Published) -> None:
    noon = utc("2026-03-02T12:00:00")
    beat = start(
        noon, every=entry(10, durable={"catchup": "all"}), none=entry(600, options={"durable": {"catchup": "none"}})
    )
    beat.at(noon + timedelta(seconds=1999))
    published.collect()
    assert [name for name, _ in published.nominals] == ["every"] * 199
    assert len(set(published.nominals)) == 199


@pytest.mark.parametrize(
    ("fixed", "frequent"), [("30 2 * * *", "30 * * * *"), (crontab(minute="30", hour="2"), crontab(minute="30"))]
)
def test_the_night_the_clock_goes_forward(start: Start, published: Published, fixed: Any, frequent: Any) -> None:
    """The rule of cron(8): a fixed time in the gap runs once, right after it; a frequent one follows the clock."""
    midnight = utc("2026-03-28T23:00:00")
    beat = start(midnight, fixed=entry(fixed), frequent=entry(frequent))
    for quarter in range(1, 17):
        beat.at(midnight + timedelta(minutes=15 * quarter))
    published.collect()
    assert [at for name, at in published.nominals if name == "fixed"] == ["2026-03-29T01:00:00Z"]
    assert [at for name, at in published.nominals if name == "frequent"] == [
        "2026-03-28T23:30:00Z", "2026-03-29T00:30:00Z", "2026-03-29T01:30:00Z", "2026-03-29T02:30:00Z",
    ]  # fmt: skip


@pytest.mark.parametrize("fixed", ["30 2 * * *", crontab(minute="30", hour="2")])
def test_the_night_the_clock_goes_back(start: Start, published: Published, fixed: Any) -> None:
    midnight = utc("2026-10-24T22:00:00")
    beat = start(midnight, fixed=entry(fixed), frequent=entry("30 * * * *"))
    for quarter in range(1, 20):
        beat.at(midnight + timedelta(minutes=15 * quarter))
    published.collect()
    assert [at for name, at in published.nominals if name == "fixed"] == ["2026-10-25T00:30:00Z"]
    assert len([at for name, at in published.nominals if name == "frequent"]) == 5


def test_a_restart_keeps_the_cursor_and_fires_nothing(app: Celery, start: Start, published: Published) -> None:
    noon = utc("2026-03-02T12:00:00")
    start(noon, tick=entry(600)).at(noon + timedelta(seconds=600))
    later = start(noon + timedelta(seconds=900), tick=entry(600))
    assert nominals(published) == ["2026-03-02T12:10:00Z"]
    later.at(noon + timedelta(seconds=1200))
    assert nominals(published) == ["2026-03-02T12:10:00Z", "2026-03-02T12:20:00Z"]


def test_changed_timing_begins_anew_and_changed_arguments_do_not(start: Start, published: Published) -> None:
    noon = utc("2026-03-02T12:00:00")
    start(noon, tick=entry(600))
    start(noon + timedelta(seconds=300), tick=entry(600, args=(7,))).at(noon + timedelta(seconds=600))
    assert nominals(published) == ["2026-03-02T12:10:00Z"] and published.headers[0]["argsrepr"] == "[7]"
    beat = start(noon + timedelta(seconds=700), tick=entry(60, args=(7,)))
    assert len(nominals(published)) == 1
    beat.at(noon + timedelta(seconds=760))
    assert nominals(published)[1:] == ["2026-03-02T12:12:40Z"]


def test_a_vanished_entry_stops_and_comes_back_from_now(app: Celery, start: Start, published: Published) -> None:
    """C53: rows made at run time are never touched by what the code says."""
    noon = utc("2026-03-02T12:00:00")
    start(noon, tick=entry(600))
    schedules.upsert("mine", task="beating.plain", when=600)
    before = schedules.get("mine")
    start(noon + timedelta(seconds=10)).at(noon + timedelta(seconds=600))
    found = schedules.get("tick")
    assert found is not None and not found.enabled and found.next_at is None
    assert [name for name, _ in published.nominals if name == "tick"] == []
    start(noon + timedelta(seconds=500), tick=entry(600))
    assert schedules.next_times("tick", 1) == [noon + timedelta(seconds=1100)]
    after = schedules.get("mine")
    assert before is not None and after is not None
    assert (before.when, before.args, before.policy, before.owner) == (
        after.when,
        after.args,
        after.policy,
        after.owner,
    )


def test_a_bad_entry_stops_no_other(start: Start, published: Published, caplog: pytest.LogCaptureFixture) -> None:
    noon = utc("2026-03-02T12:00:00")
    beat = start(
        noon, never=entry("0 0 30 2 *"), word=entry(10, colour="red"), nothing=entry(None), text=entry("often"),
        zero=entry(0), good=entry(10),
    )  # fmt: skip
    beat.at(noon + timedelta(seconds=10))
    assert nominals(published) == ["2026-03-02T12:00:10Z"]
    for name in ("never", "word", "nothing", "text", "zero"):
        assert f"entry '{name}' cannot be used" in caplog.text


def test_a_row_that_cannot_be_loaded_is_flagged_and_the_rest_goes_on(
    app: Celery, start: Start, published: Published
) -> None:
    noon = utc("2026-03-02T12:00:00")
    set_clock(app, noon)
    for name in ("kind", "text", "zone", "args", "policy", "endless", "good"):
        schedules.upsert(name, task="beating.plain", when="*/1 * * * *")
    for name, change in {
        "kind": "kind = 'lunar'", "text": "text = 'often'", "zone": "tz = 'Atlantis'", "args": "args = '{\"a\": 1}'",
        "policy": "policy = '{\"catchup\": 7}'", "endless": "cursor = 'infinity', anchor = '-infinity'",
    }.items():  # fmt: skip
        rows(app, "update {schema}.schedule set " + change + " where name = %(name)s", name=name)
    beat = start()
    beat.at(noon + timedelta(seconds=60))
    published.collect()
    assert ("good", "2026-03-02T12:01:00Z") in published.nominals
    faults = {each.name: each.fault for each in schedules.list()}
    assert faults["good"] is None
    for name in ("kind", "text", "zone", "policy"):
        assert faults[name], name
    rows(app, "update {schema}.schedule set kind = 'cron' where name = 'kind'")
    beat.at(noon + timedelta(seconds=180))
    published.collect()
    assert "kind" in dict(published.nominals)
    assert schedules.get("kind").fault is None  # type: ignore[union-attr]


def test_arguments_that_only_the_process_has(app: Celery, start: Start, published: Published) -> None:
    noon = utc("2026-03-02T12:00:00")
    calls: list[int] = []

    def current() -> int:
        calls.append(len(calls))
        return 40 + len(calls)

    tick = entry(10, args=(BeatLazyFunc(current),))
    beat, stranger = start(noon, tick=tick), start(noon, tick=tick)
    stranger.loop._occurrences._known.clear()  # type: ignore[union-attr]  # a beat of other code
    stranger.at(noon + timedelta(seconds=10))
    assert nominals(published) == []
    beat.at(noon + timedelta(seconds=10))
    beat.at(noon + timedelta(seconds=20))
    assert nominals(published) == ["2026-03-02T12:00:10Z", "2026-03-02T12:00:20Z"]
    assert [each["argsrepr"] for each in published.headers] == ["[41]", "[42]"]
    assert rows(app, "select kind from {schema}.schedule where name = 'tick'")[0].kind == "code"
    # A newer program has changed it: this one leaves it alone.
    rows(app, "update {schema}.schedule set fingerprint = 'other' where name = 'tick'")
    beat.at(noon + timedelta(seconds=30))
    assert len(nominals(published)) == 2


def test_a_timer_and_the_cursor_are_one_transaction(app: Celery, start: Start, published: Published) -> None:
    """An occurrence whose timer cannot be stored stays due."""
    noon = utc("2026-03-02T12:00:00")
    beat = start(noon, tick=entry(10))
    rows(app, "alter table {schema}.timer add constraint broken check (false) not valid")
    beat.at(noon + timedelta(seconds=10))
    found = schedules.get("tick")
    assert nominals(published) == [] and found is not None and found.fired == 0 and "broken" in str(found.fault)
    assert rows(app, "select cursor from {schema}.schedule")[0].cursor == noon
    rows(app, "alter table {schema}.timer drop constraint broken")
    beat.at(noon + timedelta(seconds=71))
    assert nominals(published) == ["2026-03-02T12:01:10Z"]


def test_a_database_clock_set_back_repeats_nothing(start: Start, published: Published) -> None:
    """C55."""
    noon = utc("2026-03-02T12:00:00")
    beat = start(noon, tick=entry(10))
    beat.at(noon + timedelta(seconds=10))
    for second in (-3600, 0, 5, 10, 19):
        beat.at(noon + timedelta(seconds=second))
    assert nominals(published) == ["2026-03-02T12:00:10Z"]
    beat.at(noon + timedelta(seconds=20))
    assert len(nominals(published)) == 2


def test_schedules_made_at_run_time(app: Celery, start: Start, published: Published) -> None:
    noon = utc("2026-03-02T12:00:00")
    beat = start(noon)
    made = schedules.upsert(
        "nightly", task="elsewhere.report", when="0 2 * * *", args=(1,), kwargs={"to": "x"}, jitter=timedelta(minutes=5),
        options={"queue": "celery"}, durable=True,
    )  # fmt: skip
    assert made.tz == "Europe/Berlin" and made.owner == "api" and made.kind == "cron" and made.args == (1,)
    first = schedules.next_times("nightly", 2)
    assert first[1] - first[0] == timedelta(days=1)
    assert utc("2026-03-03T01:00:00") <= first[0] < utc("2026-03-03T01:05:00")
    beat.at(first[0] - timedelta(milliseconds=1))
    assert nominals(published) == []
    beat.at(first[0])
    assert nominals(published) == ["2026-03-03T01:00:00Z"]
    assert published.headers[0]["durable_leased"] is True
    found = schedules.get("nightly")
    assert found is not None and found.fired == 1 and found.last_fired_at == first[0]
    again = schedules.upsert("nightly", task="elsewhere.report", when="0 2 * * *", max_runs=2)
    assert again.fired == 1 and len(schedules.next_times("nightly")) == 1
    assert [each.name for each in schedules.list()] == ["nightly"]
    assert schedules.delete("nightly") and not schedules.delete("nightly") and schedules.get("nightly") is None


def test_a_trigger_runs_now_and_moves_no_cursor(start: Start, published: Published) -> None:
    noon = utc("2026-03-02T12:00:00")
    beat = start(noon)
    schedules.upsert("tick", task="beating.plain", when=600, args=(5,))
    timers = [schedules.trigger("tick"), schedules.trigger("tick")]
    beat.turn(2)
    published.collect()
    assert {each["durable_timer"] for each in published.headers} == {str(each.id) for each in timers}
    assert all(each["durable_reason"] == "trigger" for each in published.headers)
    assert schedules.next_times("tick", 1) == [noon + timedelta(seconds=600)]
    with pytest.raises(InvalidSchedule, match="no schedule"):
        schedules.trigger("tock")


def test_an_anchor_is_kept(app: Celery) -> None:
    set_clock(app, utc("2026-03-02T12:00:00"))
    schedules.upsert("tick", task="t", when=Every(timedelta(hours=1), utc("2026-01-01T00:20:00")))
    assert schedules.next_times("tick", 1) == [utc("2026-03-02T12:20:00")]
    schedules.upsert("free", task="t", when=timedelta(hours=1))
    assert schedules.next_times("free", 2) == [utc("2026-03-02T13:00:00"), utc("2026-03-02T14:00:00")]


def test_a_schedule_commits_with_its_caller(app: Celery) -> None:
    connection = Database.of(app).connect("test")
    with pytest.raises(RuntimeError), connection.transaction():
        schedules.upsert("tick", task="t", when=60, connection=connection)
        assert schedules.get("tick") is None
        raise RuntimeError
    assert schedules.get("tick") is None
    with connection.transaction():
        schedules.upsert("tick", task="t", when=60, connection=connection)
    connection.close()
    assert schedules.get("tick") is not None


@pytest.mark.parametrize(
    "wrong",
    [
        {"when": "61 * * * *"}, {"when": "0 0 30 2 *"}, {"when": -5}, {"when": 0}, {"when": float("nan")},
        {"when": None}, {"when": Odd()}, {"when": "@reboot"}, {"tz": "Atlantis"}, {"task": ""}, {"task": None},
        {"name": ""}, {"name": "x" * 900}, {"name": "a\0b"}, {"args": (object(),)}, {"kwargs": {"a": float("inf")}},
        {"options": {"eta": "2026-01-01"}}, {"options": {"queue": object()}}, {"catchup": "some"}, {"deadline": -1},
        {"end": datetime(2020, 1, 1, tzinfo=timezone.utc)}, {"start": datetime(2020, 1, 1)}, {"max_runs": 0},
    ],
)  # fmt: skip
def test_nonsense_is_refused_and_nothing_stored(app: Celery, wrong: dict[str, Any]) -> None:
    definition: dict[str, Any] = {"name": "x", "task": "t", "when": "0 2 * * *", **wrong}
    with pytest.raises(InvalidSchedule):
        schedules.upsert(definition.pop("name"), **definition)
    assert schedules.list() == []


def test_names_belong_to_code_or_to_the_program_that_runs(
    app: Celery, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    schedules.upsert("mine", task="t", when=60)
    start(None, mine=entry(10), theirs=entry(10))
    assert schedules.get("mine").when == "60"  # type: ignore[union-attr]
    assert "made at run time" in caplog.text
    with pytest.raises(InvalidSchedule, match="beat_schedule"):
        schedules.upsert("theirs", task="t", when=60)
    with pytest.raises(InvalidSchedule, match="beat_schedule"):
        schedules.delete("theirs")


def test_two_programs_starting_together_make_each_entry_once(app: Celery, start: Start) -> None:
    migrate(app)
    for _ in range(3):
        start(None, **{f"entry-{number}": entry(60) for number in range(20)})
    assert len(schedules.list()) == 20
