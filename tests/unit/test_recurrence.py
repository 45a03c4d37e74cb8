"""Cron text and intervals against published vectors and trouble reports."""

from __future__ import annotations

import json
import pickle
from datetime import datetime, timedelta, timezone
from itertools import pairwise
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from celery.schedules import crontab

from celery_durable.core import recurrence as core
from celery_durable.errors import InvalidSchedule
from celery_durable.recurrence import Cron, Every, Recurrence, Spec, from_celery, from_spec

UTC = timezone.utc
VECTORS = json.loads((Path(__file__).parent / "data" / "cron-vectors.json").read_text())["vectors"]


def at(text: str) -> datetime:
    """``2025-01-01T00:00Z``, with any fraction of a second; Python 3.10 reads none of 1 digit."""
    body, _, fraction = text.removesuffix("Z").partition(".")
    moment = datetime.fromisoformat(body)
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return moment + timedelta(seconds=float(f"0.{fraction or 0}"))


def build(vector: dict[str, Any]) -> Recurrence:
    if vector["kind"] == "interval":
        return Every(timedelta(seconds=float(vector["expr"])), at(vector.get("anchor", vector["after"])))
    if vector["kind"] == "celery_crontab":
        return from_spec(Spec("crontab", vector["expr"], vector["tz"]))
    return Cron(vector["expr"], vector["tz"])


@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: v["id"])
def test_vector(vector: dict[str, Any]) -> None:
    if vector.get("never") or vector.get("invalid"):
        with pytest.raises(InvalidSchedule):
            build(vector)
        return
    try:
        recurrence = build(vector)
    except InvalidSchedule:
        assert vector.get("optional"), "only an extension may be refused"
        return
    expected = [at(text) for text in vector["expected"]]
    assert recurrence.upcoming(at(vector["after"]), len(expected)) == expected
    moment = timedelta(microseconds=1)
    for earlier, later in pairwise(expected):
        assert recurrence.latest_before(earlier) == earlier
        assert recurrence.latest_before(later - moment) == earlier


@pytest.mark.parametrize(
    "vector", [v for v in VECTORS if v["kind"] == "celery_crontab" and v["expected"]], ids=lambda v: v["id"]
)
def test_vector_as_celery_object(vector: dict[str, Any]) -> None:
    recurrence = from_celery(crontab.from_string(vector["expr"]), tz=vector["tz"])
    expected = [at(text) for text in vector["expected"]]
    assert recurrence.upcoming(at(vector["after"]), len(expected)) == expected


def between(recurrence: Recurrence, start: str, end: str) -> list[datetime]:
    """All occurrences in [start, end)."""
    found = []
    moment = recurrence.next_after(at(start) - timedelta(microseconds=1))
    while moment is not None and moment < at(end):
        found.append(moment)
        moment = recurrence.next_after(moment)
    return found


def test_hourly_keeps_both_passes() -> None:
    """C01: an hourly entry runs in both passes of the repeated hour: 25 runs that day, 23 in spring."""
    hourly = Cron("0 * * * *", "America/Los_Angeles")
    assert hourly.next_after(at("2026-11-01T08:00Z")) == at("2026-11-01T09:00Z")
    assert len(between(hourly, "2026-11-01T07:00Z", "2026-11-02T08:00Z")) == 25
    assert len(between(hourly, "2026-03-08T08:00Z", "2026-03-09T07:00Z")) == 23


def test_daily_on_the_day_clocks_go_forward() -> None:
    """C03: a daily job keeps its wall-clock hour on the day clocks go forward."""
    daily = Cron("4 16 * * *", "America/New_York")
    assert daily.next_after(at("2025-03-08T21:04Z")) == at("2025-03-09T20:04Z")
    assert len(between(daily, "2025-03-09T05:00Z", "2025-03-10T04:00Z")) == 1


def test_daily_on_the_day_clocks_go_back() -> None:
    """C05: a daily job runs at the new hour only on the day clocks go back."""
    daily = Cron("0 17 * * *", "America/New_York")
    assert daily.upcoming(at("2026-10-31T21:00Z"), 2) == [at("2026-11-01T22:00Z"), at("2026-11-02T22:00Z")]


def test_every_minute_through_the_end_of_summer_time() -> None:
    """C07: 240 runs in four real hours, one each minute."""
    runs = between(Cron("* * * * *", "Europe/Paris"), "2026-10-24T23:00Z", "2026-10-25T03:00Z")
    assert runs == [at("2026-10-24T23:00Z") + timedelta(minutes=n) for n in range(240)]


def test_interval_within_the_repeated_hour() -> None:
    """C08: an interval is elapsed time, also when asked in the second pass of the repeated hour."""
    every = Every(timedelta(minutes=80), at("2026-11-01T08:15Z"))
    second_pass = datetime(2026, 11, 1, 1, 34, fold=1, tzinfo=ZoneInfo("America/Los_Angeles"))
    assert second_pass.astimezone(UTC) == at("2026-11-01T09:34Z")
    assert every.next_after(second_pass) == at("2026-11-01T09:35Z")


def test_zone_of_forty_five_minutes() -> None:
    """C10: a zone whose offset has 45 minutes is not a day late after its spring change."""
    daily = Cron("50 3 * * *", "Pacific/Chatham")
    assert daily.next_after(at("2026-09-26T03:50:00+12:45")) == at("2026-09-26T14:05Z")


def test_slot_in_the_gap() -> None:
    """C13: a fixed slot that the clock skips runs once, at the first instant after the gap."""
    daily = Cron("30 2 * * *", "Europe/Berlin")
    assert daily.upcoming(at("2026-03-28T01:30Z"), 2) == [at("2026-03-29T01:00Z"), at("2026-03-30T00:30Z")]


def test_slot_in_the_repeated_hour() -> None:
    """C16: a fixed slot that the clock repeats runs once, in the first pass."""
    daily = Cron("30 2 * * *", "Europe/Berlin")
    assert daily.upcoming(at("2026-10-24T22:00Z"), 2) == [at("2026-10-25T00:30Z"), at("2026-10-26T01:30Z")]
    assert daily.next_after(at("2026-10-25T01:29Z")) == at("2026-10-26T01:30Z")
    assert daily.latest_before(at("2026-10-25T01:30Z")) == at("2026-10-25T00:30Z")


def test_rare_date_over_a_century() -> None:
    """C17: 29 February after 2096 is in 2104."""
    assert Cron("0 0 29 2 *").next_after(at("2096-03-01T00:00Z")) == at("2104-02-29T00:00Z")


def test_impossible_date_is_refused() -> None:
    """C18: a date that never comes is refused at construction."""
    with pytest.raises(InvalidSchedule, match=r"'0 12 31 4 \*' names no date that ever comes"):
        Cron("0 12 31 4 *")


def test_last_days_in_a_zone_behind_utc() -> None:
    """C19: the end of the month is that of the zone, not of UTC."""
    hourly = Cron("0 * 28-31 * *", "America/Los_Angeles")
    assert hourly.next_after(at("2023-01-29T23:00Z")) == at("2023-01-30T00:00Z")
    assert hourly.next_after(at("2023-02-01T07:59Z")) == at("2023-02-28T08:00Z")


def test_reference_in_another_zone() -> None:
    """C21: the zone of the reference instant does not matter, only the entry's own."""
    daily = Cron("40 8 * * *", "UTC")
    vilnius = at("2025-05-20T09:26:00+03:00")
    for reference in (vilnius, vilnius.astimezone(UTC), vilnius.astimezone(ZoneInfo("Europe/Vilnius"))):
        assert daily.upcoming(reference, 2) == [at("2025-05-20T08:40Z"), at("2025-05-21T08:40Z")]


def test_both_day_fields() -> None:
    """C24: Celery's crontab means day-of-month AND day-of-week, cron text means OR."""
    both = from_celery(crontab(minute=0, hour=22, day_of_month="1-7", day_of_week="sat"), tz="UTC")
    after = at("2026-01-01T00:00Z")
    assert both.upcoming(after, 3) == [at(f"2026-{day}T22:00Z") for day in ("01-03", "02-07", "03-07")]
    either = Cron("0 22 1-7 * 6")
    january = between(either, "2026-01-01T00:00Z", "2026-02-01T00:00Z")
    assert [run.day for run in january] == [*range(1, 8), 10, 17, 24, 31]


def test_one_month_of_the_year() -> None:
    """C25: an entry for one month does not run in others."""
    assert Cron("0 0 1 2 *").next_after(at("2026-07-11T12:00Z")) == at("2027-02-01T00:00Z")


def test_day_31() -> None:
    """C26: day 31 is skipped in short months, never moved to their last day."""
    runs = Cron("0 0 31 * *").upcoming(at("2026-01-31T00:00Z"), 3)
    assert runs == [at(f"2026-{month}-31T00:00Z") for month in ("03", "05", "07")]


def test_entry_with_its_own_zone() -> None:
    """C27: the next run of an entry in a zone of its own, as a UTC instant."""
    daily = Cron("0 7 * * *", "America/Los_Angeles")
    assert daily.next_after(at("2025-04-17T18:00Z")) == at("2025-04-18T14:00Z")


def test_change_of_zone() -> None:
    """C29: after a change of zone the next run is that of the new zone."""
    assert Cron("30 9 * * *", "Asia/Kolkata").next_after(at("2026-03-01T03:00Z")) == at("2026-03-01T04:00Z")


def test_start_in_the_past() -> None:
    """C30: nothing is due before the first slot, however long ago the start was."""
    daily = Cron("0 15 * * *")
    assert daily.next_after(at("2026-05-01T14:00Z")) == at("2026-05-01T15:00Z")
    assert daily.latest_before(at("2026-05-01T14:02Z")) == at("2026-04-30T15:00Z")


def test_interval_with_a_start() -> None:
    """C31: the first run of an interval is its start, the second one interval later."""
    daily = Every(timedelta(days=1), at("2026-05-01T10:00Z"))
    assert daily.upcoming(at("2026-05-01T09:00Z"), 2) == [at("2026-05-01T10:00Z"), at("2026-05-02T10:00Z")]
    assert daily.latest_before(at("2026-05-01T09:59:59Z")) is None
    assert daily.latest_before(at("2026-05-01T10:00Z")) == at("2026-05-01T10:00Z")


def test_entry_made_just_before_its_time() -> None:
    """C33: an entry made at 23:55 first runs at midnight."""
    assert Cron("0 0 * * *").next_after(at("2026-05-01T23:55Z")) == at("2026-05-02T00:00Z")


def test_short_intervals() -> None:
    """C35: half a second works: 20 runs in 10 s; zero, negative and under 0.1 s are refused."""
    half = Every(timedelta(milliseconds=500), at("2026-01-01T00:00Z"))
    assert len(between(half, "2026-01-01T00:00Z", "2026-01-01T00:00:10Z")) == 20
    for seconds in (0, -1, 0.099):
        with pytest.raises(InvalidSchedule, match=r"minimum is 0\.1 s"):
            Every(timedelta(seconds=seconds))


class FakePytz(type(UTC).__base__):  # type: ignore[misc]  # a bare tzinfo that carries pytz' attribute
    zone = "Europe/Berlin"


def test_kinds_of_zone() -> None:
    """C39: a zone may be a name or come from zoneinfo, pytz or dateutil; an unknown one is refused."""
    from dateutil import tz

    expected = at("2026-07-01T07:00Z")
    for zone in ("Europe/Berlin", ZoneInfo("Europe/Berlin"), FakePytz(), tz.gettz("Europe/Berlin")):
        assert Cron("0 9 * * *", zone).next_after(at("2026-07-01T00:00Z")) == expected
    for zone in (UTC, tz.UTC, timezone(timedelta(hours=2)), tz.tzoffset(None, 7200)):
        assert Cron("0 9 * * *", zone).next_after(at("2026-07-01T00:00Z")) is not None
    assert Cron("0 9 * * *", tz.tzoffset(None, 7200)).next_after(at("2026-07-01T00:00Z")) == expected
    for unknown in ("Mars/Phobos", "America", "", "../etc/passwd", "Europe/Berlin\0"):
        with pytest.raises(InvalidSchedule, match="is not a time zone known here"):
            Cron("0 9 * * *", unknown)
    with pytest.raises(InvalidSchedule, match="IANA name"):
        Cron("0 9 * * *", 2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "0 fields"),
        ("* * * *", "4 fields"),
        ("0 0 * * * * 2030", "7 fields"),
        ("@every 5m", "for an interval give a timedelta"),
        ("@reboot", "known aliases are"),
        ("R * * * *", "minute 'R' is not a number"),
        ("0 H(5-2) * * *", "lower number first"),
        ("0 H/30 * * *", "step outside 1-24"),
        ("h * * * *", "is not a form of H"),
        ("٣ * * * *", "minute"),
        ("0 0 * mon *", "month 'mon' is not one of"),
        ("0 0 * * jan", "day-of-week 'jan' is not one of"),
        ("0 0 ?,1 * *", "may stand alone"),
        ("0 ? * * *", "may stand alone"),
        ("0 0 LW * *", "write a day before W"),
        ("0 0 1,15W * *", "W stands alone"),
        ("0 0 * * 5L,1", "make two schedules"),
        ("0 0 * * MONL", "as 5L for Friday"),
        ("0 0 * * 8", "is outside 0-7"),
        ("0 0 * * 1#6", "day-of-week"),
        ("1/0 * * * *", "has step 0"),
        ("1,,2 * * * *", "remove the extra comma"),
        ("-1 * * * *", "minute '-1'"),
        ("1" * 300 + " * * * *", "at most 256"),
        ("0 0 1 1 *\u00a0", "day-of-week"),
        ("0 0 31W 2 sat#1", None),
    ],
)
def test_refused_text(text: str, words: str | None) -> None:
    if words is None:
        assert Cron(text).upcoming(at("2026-01-01T00:00Z"), 1)
        return
    with pytest.raises(InvalidSchedule, match=words):
        Cron(text, name="x")


def test_text_must_be_text() -> None:
    with pytest.raises(InvalidSchedule, match="must be a string"):
        Cron(5)  # type: ignore[arg-type]


def test_wrapping_range_keeps_its_step() -> None:
    assert [run.hour for run in Cron("0 22-4/3 * * *").upcoming(at("2026-01-01T00:00Z"), 3)] == [1, 4, 22]


class TestHash:
    def test_needs_a_name(self) -> None:
        with pytest.raises(InvalidSchedule, match="give name="):
            Cron("H * * * *")

    def test_is_stable_and_differs_by_name(self) -> None:
        after = at("2026-01-01T00:00Z")
        assert Cron("H H * * *", name="a").next_after(after) == at("2026-01-01T08:24Z")
        assert Cron("H H * * *", name="b").next_after(after) != at("2026-01-01T08:24Z")

    def test_reaches_all_values(self) -> None:
        pairs = {Cron("H H * * *", name=f"job-{n}").parsed.parts[1:3] for n in range(15_000)}
        assert len(pairs) == 60 * 24
        assert {Cron("0 0 H * *", name=str(n)).parsed.parts[3] for n in range(400)} == set(map(str, range(1, 29)))

    def test_steps_and_bounds(self) -> None:
        for n in range(100):
            stepped = Cron("H/15 * * * *", name=str(n)).parsed
            start = int(stepped.fields.minute.split(",")[0])
            assert stepped.fields.minute == ",".join(str(start + 15 * k) for k in range(4))
            assert 0 <= start < 15
            bounded = Cron("H(10-12) H(1-5)/2 * * *", name=str(n)).parsed.fields
            assert bounded.minute in {"10", "11", "12"}
            assert bounded.hour in {"1,3,5", "2,4"}

    def test_a_fixed_value_is_a_fixed_time_job(self) -> None:
        assert not Cron("H H * * *", name="a").frequent
        assert Cron("H * * * *", name="a").frequent


class TestEdges:
    def test_naive_instants_are_refused(self) -> None:
        naive = datetime(2026, 1, 1)
        for recurrence in (Cron("0 0 * * *"), Every(timedelta(hours=1))):
            for method in (recurrence.next_after, recurrence.latest_before):
                with pytest.raises(ValueError, match="is naive"):
                    method(naive)
        with pytest.raises(InvalidSchedule, match="is naive"):
            Every(timedelta(hours=1), naive)

    @pytest.mark.parametrize("zone", ["UTC", "America/New_York", "Asia/Tokyo"])
    @pytest.mark.parametrize("text", ["0 0 * * *", "*/5 * * * *", "0 0 29 2 *"])
    def test_ends_of_the_calendar(self, zone: str, text: str) -> None:
        cron = Cron(text, zone)
        newest = cron.latest_before(datetime.max.replace(tzinfo=UTC))
        assert newest is None or cron.next_after(newest) is None
        assert cron.next_after(datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)) is None
        assert cron.latest_before(datetime.min.replace(tzinfo=UTC)) in (
            None,
            datetime.min.replace(tzinfo=UTC),
        )
        assert cron.upcoming(datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC), 3) == []

    def test_interval_beyond_the_calendar(self) -> None:
        assert Every(timedelta(days=3_650_000)).next_after(at("2026-01-01T00:00Z")) is None

    def test_upcoming_of_none(self) -> None:
        assert Cron("0 0 * * *").upcoming(at("2026-01-01T00:00Z"), 0) == []

    def test_results_are_utc(self) -> None:
        here = datetime(2026, 1, 1, tzinfo=ZoneInfo("Asia/Tokyo"))
        for recurrence in (Cron("0 9 * * *", "Asia/Tokyo"), Every(timedelta(hours=1), here)):
            for found in (recurrence.next_after(here), recurrence.latest_before(here)):
                assert found is not None
                assert found.tzinfo is UTC

    def test_pickles_and_compares_by_value(self) -> None:
        crontab_ = from_celery(crontab(minute="*/5"), tz="Europe/Berlin")
        for recurrence in (Cron("0 2 * * *", "Europe/Berlin"), Every(timedelta(hours=1)), crontab_):
            again = pickle.loads(pickle.dumps(recurrence))
            assert again == recurrence
            assert again.next_after(at("2026-01-01T00:00Z")) == recurrence.next_after(at("2026-01-01T00:00Z"))
        assert Cron("0 2 * * *") != Cron("0 2 * * *", "Europe/Berlin")

    def test_core_raises_its_own_error(self) -> None:
        with pytest.raises(core.RecurrenceError):
            core.Cron("nonsense")

    def test_all_are_recurrences(self) -> None:
        assert isinstance(Cron("0 0 * * *"), Recurrence)
        assert isinstance(Every(timedelta(hours=1)), Recurrence)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("30 2 * * *", "at 02:30 (Europe/Berlin)"),
        ("0 9 * * mon-fri", "at 09:00 on Monday to Friday (Europe/Berlin)"),
        ("* * * * *", "every minute (Europe/Berlin)"),
        ("*/20 * * * * *", "every 20 seconds (Europe/Berlin)"),
        ("*/35 * * * *", "at minutes 0 and 35 of every hour (Europe/Berlin)"),
        ("30 */2 * * *", "at minute 30 of every 2 hours (Europe/Berlin)"),
        ("0 0 1,15 * 5", "at 00:00 on day 1 and day 15 or on Friday (Europe/Berlin)"),
        (
            "0 0 L feb 5#3",
            "at 00:00 on the last day of the month or on the third Friday in February (Europe/Berlin)",
        ),
        ("0 0 15W * *", "at 00:00 on the weekday nearest day 15 (Europe/Berlin)"),
        ("0 0 * * 5L", "at 00:00 on the last Friday (Europe/Berlin)"),
    ],
)
def test_described_in_words(text: str, words: str) -> None:
    assert Cron(text, "Europe/Berlin").describe() == words


def test_intervals_and_crontabs_in_words() -> None:
    assert Every(timedelta(minutes=90)).describe() == "every 1 hour 30 minutes"
    assert Every(timedelta(seconds=0.5)).describe() == "every 0.5 seconds"
    friday_13 = from_celery(crontab(0, 0, day_of_month=13, day_of_week="fri"), tz="UTC")
    assert friday_13.describe() == "at 00:00 on day 13 and on Friday (UTC)"
