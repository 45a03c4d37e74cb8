"""Celery's schedule objects as recurrences, and recurrences as data."""

from __future__ import annotations

import logging
import math
from datetime import datetime, timedelta, timezone, tzinfo
from importlib.resources import files
from itertools import pairwise
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from celery import Celery
from celery.schedules import BaseSchedule, crontab, schedstate, schedule, solar
from celery.utils.time import LocalTimezone

from celery_durable.core.recurrence import EPOCH, Crontab
from celery_durable.errors import InvalidSchedule
from celery_durable.recurrence import Cron, Every, Recurrence, Spec, from_celery, from_spec, to_spec
from celery_durable.schedule_objects import ObjectRecurrence, Solar, host_zone

UTC = timezone.utc
START = datetime(2026, 6, 1, tzinfo=UTC)


@pytest.fixture
def berlin() -> Celery:
    app = Celery("berlin", set_as_current=False)
    app.conf.timezone = "Europe/Berlin"
    return app


class TestCrontab:
    def test_zone_of_the_app(self, berlin: Celery) -> None:
        recurrence = from_celery(crontab(minute=0, hour=9, app=berlin))
        assert recurrence.next_after(START) == datetime(2026, 6, 1, 7, tzinfo=UTC)

    def test_zone_given(self, berlin: Celery) -> None:
        asked = crontab(minute=0, hour=9, app=berlin)
        assert asked.tz == ZoneInfo("Europe/Berlin")  # Celery caches the app's zone on the object
        recurrence = from_celery(asked, tz="Asia/Tokyo")
        assert recurrence.next_after(START) == datetime(2026, 6, 2, tzinfo=UTC)

    def test_zone_of_its_own_goes_first(self, berlin: Celery) -> None:
        own = crontab(minute=0, hour=9, app=berlin)
        own.tz = ZoneInfo("Asia/Tokyo")
        for given in (None, "Europe/London"):
            assert from_celery(own, tz=given).next_after(START) == datetime(2026, 6, 2, tzinfo=UTC)

    def test_django_celery_beat(self) -> None:
        class TzAwareCrontab(crontab):
            def __init__(self, *args: Any, tz: tzinfo, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                self.tz = tz

            def is_due(self, last_run_at: datetime) -> Any:
                raise AssertionError("evaluated by our rule")

        TzAwareCrontab.__module__ = "django_celery_beat.tzcrontab"
        nightly = from_celery(TzAwareCrontab(30, 2, tz=ZoneInfo("Europe/Berlin")))
        assert isinstance(nightly, Crontab)
        assert nightly.next_after(datetime(2026, 3, 29, tzinfo=UTC)) == datetime(2026, 3, 29, 1, tzinfo=UTC)

    def test_host_zone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What Celery gives where it is to use the host's zone: its own tzinfo, which knows no gaps."""
        monkeypatch.setenv("TZ", "Europe/Berlin")
        recurrence = from_celery(crontab(minute=30, hour=2), tz=LocalTimezone())
        assert recurrence.next_after(datetime(2026, 3, 29, tzinfo=UTC)) == datetime(2026, 3, 29, 1, tzinfo=UTC)
        monkeypatch.setenv("TZ", "CET-1CEST")
        assert host_zone(LocalTimezone()).utcoffset(START) is not None

    def test_zone_from_a_file_is_kept_in_code(self) -> None:
        with (files("tzdata") / "zoneinfo" / "Europe" / "Berlin").open("rb") as file:
            local = ZoneInfo.from_file(file, key="local")  # as tzlocal makes it
        nightly = crontab(minute=30, hour=2)
        at = datetime(2026, 3, 29, tzinfo=UTC)
        assert from_celery(nightly, tz=local).next_after(at) == datetime(2026, 3, 29, 1, tzinfo=UTC)
        assert to_spec(nightly, tz=local) is None

    def test_star_counts_as_written(self) -> None:
        overlap = datetime(2025, 11, 2, 5, 30, tzinfo=UTC)  # 01:30, first pass
        star = from_celery(crontab(minute="30", hour="*"), tz="America/New_York")
        listed = from_celery(crontab(minute="30", hour=range(24)), tz="America/New_York")
        assert star.next_after(overlap) == overlap + timedelta(hours=1)
        assert listed.next_after(overlap) == overlap + timedelta(hours=2)

    def test_warns_of_text_celery_misreads(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.WARNING, logger="celery_durable"):
            from_celery(crontab(0, 0, day_of_week="mon-fri,sunday", month_of_year="*/3,jan"), tz="UTC")
            assert not caplog.records
            from_celery(crontab(0, 0, day_of_week="FRI#2"), tz="UTC")
        assert "'FRI#2': Celery reads the field as [5]" in caplog.text

    def test_empty_set(self) -> None:
        with pytest.raises(InvalidSchedule, match="minute is empty"):
            from_celery(crontab(minute=[]), tz="UTC")

    def test_date_that_never_comes(self) -> None:
        # Celery 5.7 refuses it in its own words, before ours.
        with pytest.raises(InvalidSchedule, match=r"never occurs|no date that ever comes"):
            from_spec(Spec("crontab", "0 0 31 4 *", "UTC"))


class TestIntervals:
    @pytest.mark.parametrize("seconds", [90, 300, 7_200, 86_400, 604_800])
    def test_any_unit(self, seconds: int) -> None:
        """C104: the next run is the creation plus the interval, in whatever unit it was given."""
        for given in (seconds, float(seconds), timedelta(seconds=seconds), schedule(seconds)):
            recurrence = from_celery(given, anchor=START)
            assert recurrence.next_after(START) == START + timedelta(seconds=seconds)

    @pytest.mark.parametrize("given", [0, -5, 0.05, timedelta(0), schedule(0), schedule(timedelta(-1))])
    def test_too_short(self, given: Any) -> None:
        """C35: an interval that would be a busy loop is refused, and the minimum named."""
        with pytest.raises(InvalidSchedule, match=r"minimum is 0\.1 s"):
            from_celery(given)

    @pytest.mark.parametrize("given", [math.nan, math.inf, 10**18, 1e300])
    def test_no_time(self, given: float) -> None:
        with pytest.raises(InvalidSchedule, match="is not a number of seconds"):
            from_celery(given)

    def test_schedule_without_interval(self) -> None:
        with pytest.raises(InvalidSchedule, match="has no interval"):
            from_celery(schedule())

    def test_relative_keeps_celerys_rounding(self) -> None:
        hourly = from_celery(schedule(timedelta(hours=1), relative=True), tz="UTC")
        at = START + timedelta(minutes=20)
        assert hourly.next_after(at) == START + timedelta(hours=1)
        assert hourly.latest_before(at) == START
        assert to_spec(schedule(timedelta(hours=1), relative=True), tz="UTC") is None

    def test_relative_days_are_those_of_the_zone(self) -> None:
        daily = from_celery(schedule(timedelta(days=1), relative=True), tz="Europe/Berlin")
        assert daily.next_after(START) == datetime(2026, 6, 1, 22, tzinfo=UTC)

    def test_relative_too_short(self) -> None:
        with pytest.raises(InvalidSchedule, match="minimum"):
            from_celery(schedule(0, relative=True), tz="UTC")


class Weekly(crontab):
    """Overrides how Celery finds the next run."""

    def remaining_estimate(self, last_run_at: datetime, ffwd: Any = None) -> timedelta:
        return last_run_at + timedelta(days=7) - self.now()


class DueOnly(BaseSchedule):
    """Overrides is_due alone, and takes arguments of its own."""

    def __init__(self, minutes: int, *, app: Celery | None = None) -> None:
        super().__init__(app=app)
        self.minutes = minutes

    def is_due(self, last_run_at: datetime) -> Any:
        return schedstate(False, (last_run_at + timedelta(minutes=self.minutes) - self.now()).total_seconds())


class Once(BaseSchedule):
    """A one-off, like django-celery-beat's clocked schedule."""

    def remaining_estimate(self, last_run_at: datetime) -> timedelta:
        return START + timedelta(hours=1) - self.now()


class Broken(BaseSchedule):
    def remaining_estimate(self, last_run_at: datetime) -> timedelta:
        raise KeyError("holidays")


class TestOtherObjects:
    def test_overriding_crontab_decides_itself(self) -> None:
        recurrence = from_celery(Weekly(0, 0), tz="UTC")
        assert isinstance(recurrence, ObjectRecurrence)
        assert recurrence.upcoming(START, 2) == [START + timedelta(days=7), START + timedelta(days=14)]

    def test_is_due_alone(self) -> None:
        recurrence = from_celery(DueOnly(5), tz="UTC")
        assert recurrence.next_after(START) == START + timedelta(minutes=5)

    def test_one_off(self) -> None:
        recurrence = from_celery(Once(), tz="UTC")
        due = START + timedelta(hours=1)
        assert recurrence.upcoming(START, 5) == [due]
        assert recurrence.latest_before(START) is None
        assert recurrence.latest_before(due + timedelta(days=400)) == due

    def test_object_is_left_alone(self) -> None:
        obj = DueOnly(5)
        before = dict(vars(obj))
        from_celery(obj, tz="UTC").next_after(START)
        assert vars(obj) == before

    def test_error_of_the_object(self) -> None:
        with pytest.raises(InvalidSchedule, match="cannot say when it is due"):
            from_celery(Broken(), tz="UTC").next_after(START)

    def test_kept_in_code(self) -> None:
        for obj in (Weekly(0, 0), DueOnly(5), Once()):
            assert to_spec(obj, tz="UTC") is None

    def test_recurrence_passes(self) -> None:
        cron = Cron("0 0 * * *")
        assert from_celery(cron) is cron

    @pytest.mark.parametrize("obj", [None, True, object(), [5]])
    def test_anything_else(self, obj: Any) -> None:
        with pytest.raises(InvalidSchedule, match="is no schedule"):
            from_celery(obj)

    def test_naive_instant(self) -> None:
        for recurrence in (from_celery(Once(), tz="UTC"), from_celery(solar("sunset", 52, 13))):
            for method in (recurrence.next_after, recurrence.latest_before):
                with pytest.raises(ValueError, match="is naive"):
                    method(datetime(2026, 6, 1))


class TestSolar:
    def test_once_a_day_and_the_same_from_everywhere(self) -> None:
        sunset = from_celery(solar("sunset", 52.5, 13.4))
        found = sunset.upcoming(START, 20)
        assert all(timedelta(hours=23) < b - a < timedelta(hours=25) for a, b in pairwise(found))
        for event in found[1:4]:
            assert event.microsecond == 0
            for seconds in (1, 59, 3_600, 43_000):
                assert sunset.next_after(event - timedelta(seconds=seconds)) == event
                assert sunset.latest_before(event + timedelta(seconds=seconds)) == event
            assert sunset.latest_before(event) == event

    def test_months_without_the_event(self) -> None:
        dawn = from_celery(solar("dawn_astronomical", 69, 18))
        following = dawn.next_after(START)
        assert following is not None
        assert following.month == 9
        newest = dawn.latest_before(START)
        assert newest is not None
        assert newest.month == 3

    def test_event_that_never_happens(self) -> None:
        """The date at which Celery's search gives up is no sunrise."""
        with pytest.raises(InvalidSchedule, match="'sunrise' never happens at latitude 90"):
            from_celery(solar("sunrise", 90, 0))

    def test_refused(self) -> None:
        for text in ("moonrise 1 1", "sunset 91 0", "sunset", "sunset a b", "sunset 1 2 3"):
            with pytest.raises(InvalidSchedule):
                from_spec(Spec("solar", text))


ROUND_TRIPS: list[tuple[Any, Spec]] = [
    ("0 2 * * *", Spec("cron", "0 2 * * *", "Europe/Berlin")),
    (" @daily ", Spec("cron", "@daily", "Europe/Berlin")),
    (Cron("*/5 * * * * *", "Asia/Tokyo"), Spec("cron", "*/5 * * * * *", "Asia/Tokyo")),
    (crontab(minute={30, 0}, hour="9-17"), Spec("crontab", "0,30 9-17 * * *", "Europe/Berlin")),
    (crontab(5, "1, 2", "mon", "1-7", [1, 12]), Spec("crontab", "5 1,2 1-7 1,12 mon", "Europe/Berlin")),
    (90, Spec("interval", "90", None, START)),
    (timedelta(days=1, microseconds=1), Spec("interval", "86400.000001", None, START)),
    (schedule(0.5), Spec("interval", "0.5", None, START)),
    (Every(timedelta(hours=1)), Spec("interval", "3600", None, EPOCH)),
    (solar("sunset", -37.81753, 144.96715), Spec("solar", "sunset -37.81753 144.96715")),
]


@pytest.mark.parametrize(("given", "spec"), ROUND_TRIPS, ids=[str(s.text) for _, s in ROUND_TRIPS])
def test_round_trip(given: Any, spec: Spec) -> None:
    assert to_spec(given, tz="Europe/Berlin", anchor=START) == spec
    recurrence = from_celery(given, tz="Europe/Berlin", anchor=START)
    again = from_spec(spec)
    assert isinstance(again, Recurrence)
    assert to_spec(again) == spec
    assert again.upcoming(START, 5) == recurrence.upcoming(START, 5)
    assert again.describe() == recurrence.describe()


def test_hash_is_stored_as_its_value() -> None:
    spec = to_spec("H H(1-5) * * *", name="nightly")
    assert spec is not None
    assert "H" not in spec.text
    assert from_spec(spec).upcoming(START, 3) == Cron("H H(1-5) * * *", name="nightly").upcoming(START, 3)


def test_zone_without_a_name_is_kept_in_code() -> None:
    assert to_spec("0 0 * * *", tz=timezone(timedelta(hours=2))) is None
    assert to_spec("0 0 * * *", tz=UTC) == Spec("cron", "0 0 * * *", "UTC")
    assert to_spec("0 0 * * *") == Spec("cron", "0 0 * * *", "UTC")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (Spec("lunar", "full"), "kind 'lunar' is unknown"),
        (Spec("cron", "nonsense", "UTC"), "1 fields"),
        (Spec("cron", "0 0 * * *", "Mars/Phobos"), "'Mars/Phobos' is not a time zone"),
        (Spec("crontab", "* * * *", "UTC"), "must have 5 fields"),
        (Spec("crontab", "61 * * * *", "UTC"), "61"),
        (Spec("crontab", "*/0 * * * *", "UTC"), "crontab text"),
        (Spec("crontab", "mon * * * *", "Mars/Phobos"), "Mars/Phobos"),
        (Spec("interval", "soon"), "is not a number of seconds"),
        (Spec("interval", "nan"), "is not a number of seconds"),
        (Spec("interval", "1e400"), "is not a number of seconds"),
        (Spec("interval", "0"), "minimum is 0.1 s"),
        (Spec("solar", "sunset 1"), "event latitude longitude"),
    ],
)
def test_spec_that_does_not_fit(spec: Spec, words: str) -> None:
    with pytest.raises(InvalidSchedule, match=words):
        from_spec(spec)


def test_found_class_of_each() -> None:
    assert isinstance(from_celery("0 0 * * *"), Cron)
    assert isinstance(from_celery(5), Every)
    assert isinstance(from_celery(solar("sunset", 1, 1)), Solar)
