"""Which occurrences run now, and which are settled as missed."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from celery_durable.core.catchup import (
    COUNTED,
    ENDED,
    LATE,
    MISSED,
    MOST,
    OVERLAP,
    PAUSED,
    Pause,
    Plan,
    Policy,
    first,
    plan,
)
from celery_durable.core.recurrence import Cron, Every

NINE = datetime(2026, 3, 2, 9, tzinfo=timezone.utc)
FIVE_MINUTES = Cron("*/5 * * * *")


def at(minute: float) -> datetime:
    return NINE + timedelta(minutes=minute)


def after_outage(minutes: float, fired: int = 0, standing: Mapping[str, Any] | None = None, **policy: Any) -> Plan:
    return plan(FIVE_MINUTES, Policy(**policy), cursor=NINE, now=at(minutes), fired=fired, **(standing or {}))


def test_nothing_is_due_before_the_next_occurrence() -> None:
    found = after_outage(4.9)
    assert found.run == () and found.skipped == {} and found.cursor == NINE and found.next_nominal == at(5)


def test_an_occurrence_runs_when_its_time_has_come() -> None:
    found = after_outage(5)
    assert found.run == [at(5)] and found.missed == 0 and found.cursor == at(5) and found.next_nominal == at(10)


def test_latest_runs_the_newest_and_counts_the_rest() -> None:
    """C77: down for hours, one run."""
    found = after_outage(182)
    assert found.run == [at(180)] and found.skipped == {MISSED: ([at(5 * k) for k in range(1, 36)], 35)}
    assert found.next_nominal == at(185)


def test_all_runs_each_in_order() -> None:
    """C77: policy all."""
    found = after_outage(182, catchup="all")
    assert found.run == [at(5 * k) for k in range(1, 37)] and found.skipped == {}


def test_none_runs_only_what_is_punctual() -> None:
    """C77: policy skip."""
    assert after_outage(182, catchup="none").run == []
    assert after_outage(180.5, catchup="none").run == [at(180)]


def test_a_deadline_settles_what_is_later() -> None:
    """C77: policy once with a grace of a minute."""
    assert after_outage(182, deadline=60).run == []
    assert after_outage(182, deadline=60).missed == 36
    assert after_outage(180.5, deadline=60).run == [at(180)]


def test_runs_are_limited_in_number() -> None:
    found = after_outage(182, catchup="all", max_runs=10, fired=8)
    assert len(found.run) == 2 and found.next_nominal is None
    assert found.skipped == {ENDED: ([at(5 * k) for k in range(3, 37)], 34)}
    assert after_outage(182, max_runs=2, fired=2).run == []


def test_the_reason_of_each_that_does_not_run() -> None:
    found = after_outage(182, catchup="all", deadline=600)
    assert found.run == [at(175), at(180)]
    assert found.skipped == {LATE: ([at(5 * k) for k in range(1, 35)], 34)} and found.missed == 34


def test_a_pause_is_settled_as_such_and_makes_no_backlog() -> None:
    """C69."""
    standing = {"pause": Pause(at(7), None)}
    found = after_outage(22, standing=standing, catchup="all")
    assert found.run == [] and found.skipped == {PAUSED: ([at(5), at(10), at(15), at(20)], 4)}
    assert found.next_nominal is None and found.missed == 0


def test_a_pause_that_ends_by_itself_goes_on_with_what_comes_after() -> None:
    standing = {"pause": Pause(at(7), at(15))}
    found = after_outage(12, standing=standing)
    assert found.run == [] and found.next_nominal == at(20)
    found = after_outage(26, standing=standing, catchup="all")
    assert found.run == [at(20), at(25)] and found.skipped == {PAUSED: ([at(5), at(10), at(15)], 3)}
    assert found.next_nominal == at(30)


@pytest.mark.parametrize(
    ("overlap", "live", "queued", "run", "queue", "skipped"),
    [
        ("allow", True, False, 3, 0, 0),
        ("skip", False, False, 1, 0, 2),
        ("skip", True, False, 0, 0, 3),
        ("queue", False, False, 1, 1, 1),
        ("queue", True, False, 0, 1, 2),
        ("queue", True, True, 0, 0, 3),
        ("queue", False, True, 0, 0, 3),
    ],
)
def test_runs_are_kept_apart(overlap: str, live: bool, queued: bool, run: int, queue: int, skipped: int) -> None:
    """C96: at most one runs, at most one waits, the first that came."""
    found = after_outage(17, catchup="all", overlap=overlap, standing={"live": live, "queued": queued})
    times = [at(5), at(10), at(15)]
    assert (found.run, found.queue) == (times[:run], times[run : run + queue])
    assert found.skipped == ({OVERLAP: (times[run + queue :], skipped)} if skipped else {})


def test_what_is_kept_apart_counts_only_when_it_runs() -> None:
    found = after_outage(17, catchup="all", overlap="queue", max_runs=1)
    assert (found.run, found.queue, found.next_nominal) == ([at(5)], [], None)


def test_jitter_stays_below_the_gap_between_runs() -> None:
    Policy(jitter=299).check_jitter(FIVE_MINUTES, NINE)
    with pytest.raises(ValueError, match="shortest gap of the next runs, 300 s"):
        Policy(jitter=300).check_jitter(FIVE_MINUTES, NINE)


def test_occurrences_lie_between_start_and_end() -> None:
    found = after_outage(182, catchup="all", start=at(10), end=at(20))
    assert found.run == [at(10), at(15), at(20)] and found.next_nominal is None
    assert first(FIVE_MINUTES, Policy(start=at(10)), NINE) == at(10)


def test_a_very_long_outage_stays_bounded() -> None:
    every = Every(timedelta(seconds=0.1), NINE)
    found = plan(every, Policy(), cursor=NINE, now=NINE + timedelta(days=70), fired=0)
    nominals, number = found.skipped[MISSED]
    assert len(found.run) == 1 and number == 70 * 864_000 - 1 and len(nominals) == MOST - 1
    assert nominals[-1] == found.run[0] - timedelta(seconds=0.1)
    cron = plan(Cron("* * * * *"), Policy(catchup="all"), cursor=NINE, now=NINE + timedelta(days=70), fired=0)
    assert len(cron.run) == MOST and cron.run[-1] == NINE + timedelta(days=70) == cron.cursor
    assert cron.missed == COUNTED - MOST


def test_the_cursor_never_goes_back() -> None:
    found = plan(FIVE_MINUTES, Policy(), cursor=at(60), now=NINE, fired=0)
    assert found.run == () and found.cursor == at(60) and found.next_nominal == at(65)


def test_jitter_is_the_same_each_time_and_below_its_limit() -> None:
    policy = Policy(jitter=300.0)
    delays = {name: policy.delay(name) for name in map(str, range(100))}
    assert all(timedelta(0) <= each < timedelta(minutes=5) for each in delays.values())
    assert len(set(delays.values())) == 100 and delays["7"] == policy.delay("7")


def test_a_policy_survives_json() -> None:
    policy = Policy(
        catchup="all", overlap="queue", deadline=60.0, start=at(0), end=at(90), max_runs=3, jitter=5.0, durable=True
    )
    assert Policy.of(policy.written()) == policy
    assert Policy().written() == {}


@pytest.mark.parametrize(
    "words",
    [
        {"catchup": "some"}, {"deadline": -1}, {"deadline": True}, {"jitter": float("nan")}, {"start": "tomorrow"},
        {"start": NINE.replace(tzinfo=None)}, {"start": at(1), "end": NINE}, {"max_runs": 0}, {"max_runs": 1.5},
        {"overlapp": "skip"}, {"overlap": "forbid"}, {"durable": "yes"},
    ],
)  # fmt: skip
def test_nonsense_is_refused_by_name(words: dict[str, Any]) -> None:
    with pytest.raises(
        ValueError, match=next(iter(words)) if "start" not in words else "start|tomorrow|tzinfo|isoformat"
    ):
        Policy.of(words)


def test_of_very_many_the_newest_run() -> None:
    """Eight days of minutes, beyond what is counted: a deadline of an hour leaves the sixty of the last hour."""
    now = NINE + timedelta(days=8)
    found = plan(Cron("* * * * *"), Policy(catchup="all", deadline=3600), cursor=NINE, now=now, fired=0)
    assert list(found.run) == [now - timedelta(minutes=60 - each) for each in range(61)]
    pause = Pause(NINE, now - timedelta(minutes=30))
    found = plan(Cron("* * * * *"), Policy(catchup="all"), cursor=NINE, now=now, fired=0, pause=pause)
    assert len(found.run) == 30 and found.run[-1] == now
