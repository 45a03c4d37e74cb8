"""Which occurrences run now, and which are settled as missed."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from celery_durable.core.catchup import COUNTED, MOST, Plan, Policy, first, plan
from celery_durable.core.recurrence import Cron, Every

NINE = datetime(2026, 3, 2, 9, tzinfo=timezone.utc)
FIVE_MINUTES = Cron("*/5 * * * *")


def at(minute: float) -> datetime:
    return NINE + timedelta(minutes=minute)


def after_outage(minutes: float, fired: int = 0, **policy: Any) -> Plan:
    return plan(FIVE_MINUTES, Policy(**policy), cursor=NINE, now=at(minutes), fired=fired)


def test_nothing_is_due_before_the_next_occurrence() -> None:
    found = after_outage(4.9)
    assert found.run == [] and found.missed == [] and found.cursor == NINE and found.next_nominal == at(5)


def test_an_occurrence_runs_when_its_time_has_come() -> None:
    found = after_outage(5)
    assert found.run == [at(5)] and found.missed_count == 0 and found.cursor == at(5) and found.next_nominal == at(10)


def test_latest_runs_the_newest_and_counts_the_rest() -> None:
    """C77: down for hours, one run."""
    found = after_outage(182)
    assert found.run == [at(180)] and found.missed_count == 35 and found.missed == [at(5 * k) for k in range(1, 36)]
    assert found.next_nominal == at(185)


def test_all_runs_each_in_order() -> None:
    """C77: policy all."""
    found = after_outage(182, catchup="all")
    assert found.run == [at(5 * k) for k in range(1, 37)] and found.missed == [] and found.missed_count == 0


def test_none_runs_only_what_is_punctual() -> None:
    """C77: policy skip."""
    assert after_outage(182, catchup="none").run == []
    assert after_outage(180.5, catchup="none").run == [at(180)]


def test_a_deadline_settles_what_is_later() -> None:
    """C77: policy once with a grace of a minute."""
    assert after_outage(182, deadline=60).run == []
    assert after_outage(182, deadline=60).missed_count == 36
    assert after_outage(180.5, deadline=60).run == [at(180)]


def test_runs_are_limited_in_number() -> None:
    found = after_outage(182, catchup="all", max_runs=10, fired=8)
    assert len(found.run) == 2 and found.next_nominal is None
    assert after_outage(182, max_runs=2, fired=2).run == []


def test_occurrences_lie_between_start_and_end() -> None:
    found = after_outage(182, catchup="all", start=at(10), end=at(20))
    assert found.run == [at(10), at(15), at(20)] and found.next_nominal is None
    assert first(FIVE_MINUTES, Policy(start=at(10)), NINE) == at(10)


def test_a_very_long_outage_stays_bounded() -> None:
    every = Every(timedelta(seconds=0.1), NINE)
    found = plan(every, Policy(), cursor=NINE, now=NINE + timedelta(days=70), fired=0)
    assert len(found.run) == 1 and found.missed_count == 70 * 864_000 - 1 and len(found.missed) == MOST - 1
    assert found.missed[-1] == found.run[0] - timedelta(seconds=0.1)
    cron = plan(Cron("* * * * *"), Policy(catchup="all"), cursor=NINE, now=NINE + timedelta(days=70), fired=0)
    assert len(cron.run) == MOST and cron.run[-1] == NINE + timedelta(days=70) == cron.cursor
    assert cron.missed_count == COUNTED + 1 - MOST


def test_the_cursor_never_goes_back() -> None:
    found = plan(FIVE_MINUTES, Policy(), cursor=at(60), now=NINE, fired=0)
    assert found.run == [] and found.cursor == at(60) and found.next_nominal == at(65)


def test_jitter_is_the_same_each_time_and_below_its_limit() -> None:
    policy = Policy(jitter=300.0)
    delays = {name: policy.delay(name) for name in map(str, range(100))}
    assert all(timedelta(0) <= each < timedelta(minutes=5) for each in delays.values())
    assert len(set(delays.values())) == 100 and delays["7"] == policy.delay("7")


def test_a_policy_survives_json() -> None:
    policy = Policy(catchup="all", deadline=60.0, start=at(0), end=at(90), max_runs=3, jitter=5.0, durable=True)
    assert Policy.of(policy.written()) == policy
    assert Policy().written() == {}


@pytest.mark.parametrize(
    "words",
    [
        {"catchup": "some"}, {"deadline": -1}, {"deadline": True}, {"jitter": float("nan")}, {"start": "tomorrow"},
        {"start": NINE.replace(tzinfo=None)}, {"start": at(1), "end": NINE}, {"max_runs": 0}, {"max_runs": 1.5},
        {"overlapp": "skip"}, {"durable": "yes"},
    ],
)  # fmt: skip
def test_nonsense_is_refused_by_name(words: dict[str, Any]) -> None:
    with pytest.raises(
        ValueError, match=next(iter(words)) if "start" not in words else "start|tomorrow|tzinfo|isoformat"
    ):
        Policy.of(words)
