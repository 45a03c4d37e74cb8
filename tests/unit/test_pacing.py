"""When a beat looks again, and from where."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from celery_durable.core.pacing import (
    FULL_SCAN,
    TRAIL,
    Clock,
    Outage,
    Watermark,
    jittered,
    pause_of_returned,
)


def test_the_first_scan_has_no_bound() -> None:
    watermark = Watermark()
    assert watermark.begin(0.0) is None


def test_a_full_page_moves_the_bound_to_its_last_timer() -> None:
    watermark = Watermark()
    watermark.begin(0.0)
    watermark.filled(1000.0)
    assert watermark.begin(0.1) == 1000.0


def test_an_empty_page_leaves_the_bound_trailing() -> None:
    watermark = Watermark()
    watermark.begin(0.0)
    watermark.emptied(1000.0)
    assert watermark.begin(0.1) == 1000.0 - TRAIL


def test_an_announcement_lowers_the_bound_and_never_raises_it() -> None:
    watermark = Watermark()
    watermark.lower(5.0)
    assert watermark.bound is None
    watermark.emptied(1000.0)
    watermark.lower(2000.0)
    assert watermark.bound == 1000.0 - TRAIL
    watermark.lower(900.0)
    assert watermark.bound == 900.0


def test_every_so_often_everything_is_scanned() -> None:
    watermark = Watermark()
    watermark.begin(0.0)
    watermark.emptied(1000.0)
    assert watermark.begin(FULL_SCAN - 0.01) is not None
    assert watermark.begin(FULL_SCAN) is None
    assert watermark.begin(FULL_SCAN + 0.01) is not None


def test_a_database_clock_set_back_takes_the_bound_with_it() -> None:
    watermark = Watermark()
    watermark.begin(0.0)
    watermark.emptied(10_000.0)
    watermark.emptied(1_000.0)
    assert watermark.bound == 1_000.0 - TRAIL


def test_the_clock_goes_on_between_two_readings() -> None:
    clock = Clock()
    clock.read(1_000_000.0, 5.0)
    assert clock.at(7.5) == 1_000_002.5
    assert clock.until(1_000_010.0, 7.5) == 7.5


def test_an_outage_is_news_once() -> None:
    outage = Outage(random=lambda: 0.0)
    assert outage.worked(0.0) is None
    assert outage.failed(1.0)
    assert not outage.failed(2.0)
    assert outage.active
    assert outage.worked(11.0) == 10.0
    assert not outage.active and outage.remaining(11.0) == 0.0
    assert outage.failed(12.0)


@given(failures=st.integers(1, 2000), share=st.floats(0, 1))
def test_pauses_grow_and_stay_within_the_cap(failures: int, share: float) -> None:
    outage = Outage(cap=5.0, random=lambda: share)
    for _ in range(failures):
        outage.failed(100.0)
    assert 0.099 < outage.remaining(100.0) < 5.001
    if failures > 10:
        assert outage.remaining(100.0) > 2.499


@given(share=st.floats(0, 1))
def test_jitter_shortens_by_a_fifth_at_most(share: float) -> None:
    assert 4.0 <= jittered(5.0, lambda: share) <= 5.0


def test_pauses_of_a_returned_message_grow_with_its_lateness() -> None:
    assert pause_of_returned(-3.0) == 1.0
    assert pause_of_returned(60.0) == 30.0
    assert pause_of_returned(86_400.0) == 300.0
