"""Retry options, the description of failures, the soft time limit's signal: no services."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import ImproperlyConfigured

from celery_durable import DurableTask
from celery_durable.worker.failure import carried, describe
from celery_durable.worker.policy import RetryPolicy
from celery_durable.worker.soft_limit import soft_limit_held


def make(**options: Any) -> Any:
    app = Celery("proj", set_as_current=False)
    app.finalize()

    @app.task(base=DurableTask, name="proj.work", shared=False, **options)
    def work() -> None:
        """Nothing."""

    return app.tasks["proj.work"]


def test_the_defaults() -> None:
    policy = RetryPolicy.of(make())
    assert policy == RetryPolicy(
        autoretry_for=(Exception,), dont_autoretry_for=(), max_retries=3, base=1.0, cap=600, jitter=True
    )
    assert policy.max_attempts == 4
    assert [policy.allows(attempt) for attempt in (1, 3, 4)] == [True, True, False]
    assert policy.covers(ValueError())
    assert not policy.covers(SystemExit())
    assert all(2 <= policy.delay(3) <= 4 for _ in range(100))


def test_hours_are_not_cut_to_minutes() -> None:
    """C82: delays double from an hour; a base above the cap is refused when the task is defined, never cut."""
    policy = RetryPolicy.of(make(retry_backoff=3600, retry_backoff_max=10**6, retry_jitter=False, max_retries=4))
    assert [policy.delay(attempt) for attempt in range(1, 5)] == [3600, 7200, 14400, 28800]
    for options in ({"retry_backoff": 3600}, {"retry_backoff": 3600, "retry_backoff_max": 600}):
        with pytest.raises(ImproperlyConfigured, match=r"proj\.work.*retry_backoff=3600.*retry_backoff_max=600"):
            make(**options)


@pytest.mark.parametrize(
    ("options", "delays"),
    [
        ({"retry_backoff": True, "retry_jitter": False}, [1, 2, 4]),
        ({"retry_backoff": False, "default_retry_delay": 5}, [5, 5, 5]),
        ({"retry_kwargs": {"countdown": 7}}, [7, 7, 7]),
        ({"retry_backoff": 0.5, "retry_backoff_max": 1, "retry_jitter": False}, [0.5, 1, 1]),
    ],
)
def test_delays(options: dict[str, Any], delays: list[float]) -> None:
    policy = RetryPolicy.of(make(**options))
    assert [policy.delay(attempt) for attempt in (1, 2, 3)] == delays


def test_limits_of_retry_kwargs_and_none() -> None:
    assert RetryPolicy.of(make(retry_kwargs={"max_retries": 7})).max_attempts == 8
    endless = RetryPolicy.of(make(max_retries=None))
    assert endless.max_attempts is None
    assert endless.allows(10**9)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_retries": -1}, "max_retries=-1"),
        ({"max_retries": "3"}, "max_retries='3'"),
        ({"retry_backoff": 0}, "retry_backoff=0"),
        ({"retry_backoff": float("nan")}, "retry_backoff=nan"),
        ({"autoretry_for": ("ValueError",)}, "autoretry_for"),
        ({"autoretry_for": ValueError}, r"such as \(ValueError,\)"),
        ({"dont_autoretry_for": "ValueError"}, "dont_autoretry_for='ValueError' must be a tuple"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ImproperlyConfigured, match=rf"proj\.work.*{said}"):
        make(**options)


def test_which_failures_are_tried_again() -> None:
    policy = RetryPolicy.of(make(autoretry_for=(OSError,), dont_autoretry_for=(FileNotFoundError,)))
    assert policy.covers(ConnectionError())
    assert not policy.covers(FileNotFoundError())
    assert not policy.covers(ValueError())


def raised(make_error: Any) -> BaseException:
    try:
        make_error()
    except BaseException as exc:
        return exc
    raise AssertionError("nothing was raised")


def test_a_failure_tells_its_whole_chain() -> None:
    def first() -> None:
        try:
            raise KeyError("a")
        except KeyError:
            raise ValueError("b")  # noqa: B904 - the context is what is tested

    def second() -> None:
        try:
            first()
        except ValueError as exc:
            raise RuntimeError("c") from exc

    kept = describe(raised(second))
    assert kept.error_type == "RuntimeError"
    assert kept.error == "c\ncaused by ValueError: b\nwhile handling KeyError: 'a'"
    assert kept.traceback is not None
    assert kept.traceback.count("Traceback (most recent call last)") == 3


def test_a_failure_with_a_suppressed_or_circular_chain() -> None:
    def hidden() -> None:
        try:
            raise KeyError("a")
        except KeyError:
            raise ValueError("b") from None

    assert describe(raised(hidden)).error == "b"
    one, two = ValueError("one"), ValueError("two")
    one.__cause__, two.__cause__ = two, one
    assert describe(one).error == "one\ncaused by ValueError: two"


class Mute(Exception):
    def __str__(self) -> str:
        raise LookupError


def test_a_failure_that_cannot_be_shown() -> None:
    kept = describe(Mute())
    assert kept.error_type.endswith("test_task_policy.Mute")
    assert kept.error == "<its text cannot be shown: LookupError>"


def test_a_failure_from_another_process_keeps_its_traceback() -> None:
    class Info:
        traceback = "from the child"

    assert carried(ValueError("x"), Info).traceback == "from the child"
    assert carried(ValueError("x"), None).error == "x"


class Limit(Exception):
    """What the pool's handler raises."""


@pytest.fixture
def handler() -> Any:
    def on_signal(*_: Any) -> None:
        raise Limit

    before = signal.signal(signal.SIGUSR1, on_signal)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.usefixtures("handler")
def test_a_soft_limit_waits_for_the_end_of_a_statement() -> None:
    seen = []

    def statement() -> None:
        with soft_limit_held():
            signal.raise_signal(signal.SIGUSR1)
            seen.append("whole")

    with pytest.raises(Limit):
        statement()
    assert seen == ["whole"]


@pytest.mark.usefixtures("handler")
def test_a_soft_limit_after_the_body_is_forgotten() -> None:
    with soft_limit_held(discard=True):
        signal.raise_signal(signal.SIGUSR1)
    with pytest.raises(Limit):
        signal.raise_signal(signal.SIGUSR1)
