"""Back-off between attempts."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_durable.core.backoff import MINIMUM, check, delay


def full() -> float:
    raise AssertionError("no random number is needed without jitter")


def test_hour_is_never_cut_silently() -> None:
    """C82: a base of an hour doubles up to the cap, and a base above the cap is refused."""
    assert [delay(n, base=3600, cap=86_400, jitter=False, random=full) for n in (1, 2, 3, 4)] == [
        3600,
        7200,
        14_400,
        28_800,
    ]
    with pytest.raises(ValueError, match=r"retry_backoff=3600 s exceeds retry_backoff_max=600 s.*raise"):
        check(3600, 600)
    with pytest.raises(ValueError, match="exceeds"):
        delay(1, base=3600, cap=600, jitter=False, random=full)


def test_doubles_up_to_the_cap() -> None:
    delays = [delay(n, base=1, cap=600, jitter=False, random=full) for n in range(1, 13)]
    assert delays == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 600, 600]


@pytest.mark.parametrize("attempt", [1_024, 1_025, 10_000, 10**400])
def test_no_attempt_overflows(attempt: int) -> None:
    assert delay(attempt, base=1.5, cap=600.0, jitter=False, random=full) == 600.0
    assert delay(attempt, base=5e-324, cap=1.7e308, jitter=False, random=full) > 0


def test_jitter_spans_the_upper_half() -> None:
    assert delay(3, base=1, cap=600, jitter=True, random=lambda: 0.0) == 2
    assert delay(3, base=1, cap=600, jitter=True, random=lambda: 0.5) == 3
    assert delay(3, base=1, cap=600, jitter=True, random=lambda: math.nextafter(1, 0)) < 4.000001


positive = st.floats(min_value=5e-324, max_value=1e300, allow_nan=False)


@given(
    attempt=st.integers(1, 5_000),
    pair=st.tuples(positive, positive).map(sorted),
    jitter=st.booleans(),
    number=st.floats(0, 1, exclude_max=True),
)
def test_bounds(attempt: int, pair: list[float], jitter: bool, number: float) -> None:
    base, cap = pair
    found = delay(attempt, base=base, cap=cap, jitter=jitter, random=lambda: number)
    assert MINIMUM <= found <= max(cap, MINIMUM)
    assert found >= min(base, cap) / 2
    assert found <= delay(attempt + 1, base=base, cap=cap, jitter=jitter, random=lambda: number)


@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, -math.inf, "5", None, 10**400])
def test_refuses_what_is_no_time(value: float) -> None:
    with pytest.raises(ValueError, match="retry_backoff="):
        check(value, 600)
    with pytest.raises(ValueError, match="retry_backoff_max="):
        check(1, value)


def test_refuses_attempt_zero() -> None:
    with pytest.raises(ValueError, match="the first attempt is 1"):
        delay(0, base=1, cap=600, jitter=False, random=full)
