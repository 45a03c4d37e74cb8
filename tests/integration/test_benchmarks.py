"""The benchmarks run against the statements and columns of today; the figures are not judged here."""

from __future__ import annotations

from datetime import datetime, timezone

from benchmarks import lateness, schedules, throughput
from benchmarks.beats import Durable, full_minute
from benchmarks.servers import servers


def test_lateness_is_measured_of_every_timer() -> None:
    found = lateness.run(waiting=10_500, rate=25, seconds=1)
    assert found["number"] == 25
    assert 0 < found["ours"] <= found["p99"] and found["ratio"] > 0


def test_a_beat_with_many_entries_starts() -> None:
    with servers() as (_, database, valkey):
        ours = Durable(database, valkey)
        found = schedules._started(ours, 1000)
        assert 0 < found["ready"] < schedules.START and found["rss"] > 0
        ours.fill(10, 1000, full_minute(0.0))
        rows = database.run(lambda executor: executor.fetch("select next_at from {schema}.schedule order by name"))
        assert len(rows) == 1010, "the far entries, and those of the minute"
        assert sum(each.next_at == datetime(1970, 1, 1, tzinfo=timezone.utc) for each in rows) == 10


def test_a_share_of_the_messages_is_not_later() -> None:
    assert [schedules._nth([float(each) for each in range(1, 1001)], share) for share in (0.5, 0.99)] == [500, 990]


def test_bodies_of_both_kinds_are_counted() -> None:
    found = throughput.run(number=60)
    assert {kind: len(rates) for kind, rates in found["samples"].items()} == {"leased": 3, "nothing": 3}
    assert found["ratio"] > 0 and found["goal"] == 0.9
