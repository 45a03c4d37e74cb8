"""The entries of programs: two versions at once, restarts, time zones whose data changes, nights when clocks change."""

from __future__ import annotations

from collections import Counter
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from celery import Celery
from celery.schedules import crontab

from celery_durable import schedules
from celery_durable.core import zone_data
from tests.beats import Published, Start, entry, nominals, rows, set_clock, utc

NOON = utc("2026-03-02T12:00:00")
HOUR = timedelta(hours=1)


def in_force() -> dict[str, str]:
    """The enabled entries and their rhythm."""
    return {each.name: each.when for each in schedules.list() if each.enabled}


def test_a_changed_program_changes_its_entries(app: Celery, start: Start, published: Published) -> None:
    """C68: v1 {a: hourly, b: daily}; restart with v2 {a: every 10 min}; a user's row is left alone."""
    beat = start(NOON, a=entry(3600), b=entry(86400))
    schedules.upsert("u", task="beating.plain", when=7200)
    beat.at(NOON + HOUR)
    assert nominals(published) == ["2026-03-02T13:00:00Z"]
    beat = start(NOON + HOUR + timedelta(minutes=5), a=entry(600))
    assert len(nominals(published)) == 1, "nothing extra at the start"
    assert in_force() == {"a": "600", "u": "7200"}
    assert [each.reason for each in schedules.history("a")] == ["schedule"]
    beat.at(NOON + 26 * HOUR)
    assert {name for name, _ in published_pairs(published)[1:]} == {"a", "u"}


def published_pairs(published: Published) -> list[tuple[str, str]]:
    published.collect()
    return published.nominals


def test_while_two_versions_run_the_later_one_stands(
    app: Celery, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """A restart of the old program during the roll-out brings nothing back; ended, or rolled back, it may."""
    start(NOON, a=entry(3600), gone=entry(60))
    new = start(NOON + timedelta(seconds=1), a=entry(600), fresh=entry(60))
    assert in_force() == {"a": "600", "fresh": "60"}
    old = start(NOON + timedelta(seconds=5), a=entry(3600), gone=entry(60))
    assert "a beat with later recurring entries runs" in caplog.text.lower()
    assert in_force() == {"a": "600", "fresh": "60"}
    old.loop._sync_at = 0.0
    old.turn()
    assert in_force() == {"a": "600", "fresh": "60"}, "it tries again, and waits again"
    assert caplog.text.lower().count("a beat with later recurring entries runs") == 1
    # Rolled back: the beats of the newer program are silent.
    new.loop.close()
    set_clock(app, NOON + timedelta(seconds=60))
    old.loop._sync_at = old.loop._sweeper._alive_at = 0.0
    old.turn()
    assert in_force() == {"a": "3600", "gone": "60"}
    # And forward again.
    start(NOON + timedelta(seconds=61), a=entry(600), fresh=entry(60))
    assert in_force() == {"a": "3600", "gone": "60"}, "the other is alive"


def test_missed_runs_after_a_short_outage(app: Celery, start: Start, published: Published) -> None:
    """C76: stopped 09:39:30, started 09:40:10: both run once for 09:40, then each at its own minute."""
    stopped = utc("2026-03-02T09:39:30")
    entries = {"ten": entry(crontab("*/10")), "one": entry(crontab())}
    start(stopped, **entries)
    beat = start(utc("2026-03-02T09:40:10"), **entries)
    assert sorted(published_pairs(published)) == [("one", "2026-03-02T09:40:00Z"), ("ten", "2026-03-02T09:40:00Z")]
    for minute in range(41, 51):
        beat.at(utc(f"2026-03-02T09:{minute}:00"))
    counted = Counter(name for name, _ in published_pairs(published))
    assert counted == {"one": 11, "ten": 2}
    assert published_pairs(published)[-1][1] == "2026-03-02T09:50:00Z"


@pytest.mark.parametrize("enable_utc", [True, False])
@pytest.mark.parametrize("zone", ["UTC", "Asia/Shanghai"])
def test_the_zone_of_an_entry_is_its_own(
    database_url: str, app: Celery, start: Start, published: Published, zone: str, enable_utc: bool
) -> None:
    """C111: whatever the app's zone and enable_utc: nine o'clock in Shanghai, and one minute after creation."""
    app.conf.update(timezone=zone, enable_utc=enable_utc)
    beat = start(NOON, nine=entry("0 9 * * *", durable={"tz": "Asia/Shanghai"}))
    assert schedules.next_times("nine", 1) == [utc("2026-03-03T01:00:00")]
    beat.at(utc("2026-03-03T01:00:00"))
    assert nominals(published) == ["2026-03-03T01:00:00Z"]


ZONES = ("Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Pacific/Chatham")


@pytest.mark.parametrize(
    "day", ["2026-03-08", "2026-03-29", "2026-04-05", "2026-09-27", "2026-10-04", "2026-10-25", "2026-11-01"]
)
def test_two_beats_over_a_change_of_clocks(app: Celery, start: Start, published: Published, day: str) -> None:
    """C01, C03, C07, C16: each occurrence once, in four zones, on every day of the year on which one changes its clock."""
    begin = utc(f"{day}T00:00:00") - timedelta(hours=16)
    entries: dict[str, Any] = {}
    for zone in ZONES:
        for name, when in (("hourly", "30 * * * *"), ("daily", "15 2 * * *"), ("quarter", "*/15 * * * *")):
            entries[f"{name} {zone}"] = entry(when, durable={"tz": zone, "catchup": "all"})
    beats = [start(begin, **entries) for _ in range(2)]
    for quarter in range(1, 4 * 40 + 1):
        beats[quarter % 2].at(begin + timedelta(minutes=15 * quarter))
    counted = Counter(published_pairs(published))
    assert set(counted.values()) == {1}
    for zone in ZONES:
        seen = {
            name: [at for each, at in counted if each == f"{name} {zone}"] for name in ("hourly", "daily", "quarter")
        }
        for name, minutes in (("hourly", {30}), ("quarter", {0, 15, 30, 45})):
            walls = [begin + timedelta(minutes=each) for each in range(1, 40 * 60 + 1)]
            wanted = sum(each.astimezone(ZoneInfo(zone)).minute in minutes for each in walls)
            assert len(seen[name]) == wanted, (zone, name)
        last = begin + timedelta(hours=40)
        dates = {datetime.fromisoformat(at).astimezone(ZoneInfo(zone)).date() for at in seen["daily"]}
        assert len(dates) == len(seen["daily"]), "once a local day"
        local = [each.astimezone(ZoneInfo(zone)) for each in (begin, last)]
        passed = (local[1] - timedelta(hours=3, minutes=15)).date() - (local[0] - timedelta(hours=2, minutes=15)).date()
        assert len(seen["daily"]) in (passed.days, passed.days + 1), zone


def test_new_time_zone_data_moves_what_waits(
    app: Celery, start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """C27's cache: the stored next time follows the data, which a beat looks at when it starts and daily."""
    caplog.set_level("INFO")
    set_clock(app, utc("2026-06-01T00:00:00"))
    for name, zone in (("here", "Europe/Berlin"), ("there", "Asia/Tokyo")):
        schedules.upsert(name, task="beating.plain", when="0 9 * * *", tz=zone)
    beat = start()
    assert [each.hour for each in schedules.next_times("here", 1)] == [7]
    # As if Berlin had been at UTC+1 when the row was computed.
    rows(app, "update {schema}.schedule set next_at = next_at + interval '1 h' where name = 'here' returning name")
    rows(
        app,
        """update {schema}.meta set value = jsonb_set(value::jsonb, '{Europe/Berlin}', '"older"')::json
                 where name = 'zones' returning name""",
    )
    beat.loop._zones.soon()
    beat.turn()
    assert schedules.get("here").next_at == utc("2026-06-01T07:00:00")  # type: ignore[union-attr]
    assert "Europe/Berlin has changed" in caplog.text and "1 schedules moved" in caplog.text
    assert "Asia/Tokyo" not in caplog.text


def test_the_data_of_zones_is_told_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "zoneinfo"
    (folder / "Europe").mkdir(parents=True)
    data = zone_data.package("Europe/Moscow")
    assert data is not None
    (folder / "Europe" / "Berlin").write_bytes(data)
    monkeypatch.setattr("zoneinfo.TZPATH", (str(folder),))
    names = ["Europe/Berlin", "Europe/Paris"]
    assert zone_data.system("Europe/Paris") is None
    assert zone_data.differing(names, datetime(2026, 1, 1, tzinfo=timezone.utc)) == ["Europe/Berlin"]
    before = zone_data.fingerprints(names)
    (folder / "Europe" / "Berlin").write_bytes(zone_data.package("Europe/Berlin") or b"")
    after = zone_data.fingerprints(names)
    assert before["Europe/Paris"] == after["Europe/Paris"] and before["Europe/Berlin"] != after["Europe/Berlin"]
    assert zone_data.differing(names) == []


def test_a_beat_is_seen_from_the_moment_its_entries_are_in_force(app: Celery, start: Start) -> None:
    """Also before its first sweep: an earlier version that starts just then leaves them alone."""
    start(NOON, a=entry(3600))
    rows(app, "delete from {schema}.beat returning id")
    new = start(None, a=entry(600))
    rows(app, "update {schema}.beat set code = null returning id")
    new.loop._link.drop()
    new.turn()
    [row] = rows(app, "select code from {schema}.beat")
    assert row.code == new.loop._sweeper.code
    start(None, a=entry(3600))
    assert in_force() == {"a": "600"}
