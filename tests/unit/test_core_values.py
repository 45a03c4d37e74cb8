"""Identities, states and due times: pure values."""

from __future__ import annotations

import math
from datetime import datetime, timedelta, timezone
from uuid import RFC_4122
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_durable.core.identity import instant_text, new_id, occurrence_key
from celery_durable.core.moments import FARTHEST, moment
from celery_durable.core.states import ENDED, LIVE, State

NOW = datetime(2026, 12, 1, tzinfo=timezone.utc)


def test_ids_are_uuid_version_7_and_distinct() -> None:
    made = [new_id() for _ in range(1000)]
    assert {(each.version, each.variant) for each in made} == {(7, RFC_4122)}
    assert len(set(made)) == 1000


def test_ids_of_later_milliseconds_sort_later() -> None:
    first = new_id()
    while (later := new_id()).int >> 80 == first.int >> 80:
        pass
    assert later > first


def test_an_occurrence_has_one_key_in_every_zone() -> None:
    instant = datetime(2026, 7, 1, 9, tzinfo=ZoneInfo("Europe/Berlin"))
    assert occurrence_key("nightly", instant) == "nightly@2026-07-01T07:00:00Z"
    assert instant_text(instant) == instant_text(instant.astimezone(timezone.utc))


def test_every_state_is_live_or_ended() -> None:
    assert set(State) == LIVE | ENDED
    assert not LIVE & ENDED
    assert {state for state in State if state.ended} == ENDED
    assert str(State.DEAD) == "dead" == State.DEAD


@given(st.floats(min_value=-FARTHEST.total_seconds(), max_value=FARTHEST.total_seconds()))
def test_seconds_and_timedelta_mean_the_same(seconds: float) -> None:
    after = moment(seconds).after
    assert after is not None
    assert math.isclose(after, seconds, abs_tol=1e-6)
    of_timedelta = moment(timedelta(seconds=seconds)).after
    assert of_timedelta is not None
    assert math.isclose(of_timedelta, seconds, abs_tol=1e-6)


@given(st.one_of(st.integers(), st.floats(), st.timedeltas(), st.datetimes(timezones=st.just(timezone.utc))))
def test_whatever_is_refused_is_refused_by_a_value_error(when: object) -> None:
    """C40: no number, however absurd, raises anything else or slips through as something else."""
    try:
        due = moment(when, now=NOW)  # type: ignore[arg-type]
    except ValueError:
        return
    assert (due.at is None) is not (due.after is None)
    assert abs(due.approximate(NOW) - NOW) <= FARTHEST


def test_naive_in_a_zone() -> None:
    naive = datetime(2026, 7, 1, 9)
    assert moment(naive, naive=ZoneInfo("Europe/Berlin")).at == datetime(2026, 7, 1, 7, tzinfo=timezone.utc)
    with pytest.raises(ValueError, match="no time zone"):
        moment(naive)
