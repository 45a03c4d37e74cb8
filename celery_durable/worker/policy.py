"""Which failures are tried again, how often and when: Celery's option names read as one value."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from celery.exceptions import ImproperlyConfigured

from celery_durable.core import backoff


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """The retry policy of one task; build it with :meth:`of`."""

    autoretry_for: tuple[type[BaseException], ...]
    dont_autoretry_for: tuple[type[BaseException], ...]
    max_retries: int | None
    """Attempts after the first; None: no limit."""
    base: float
    """Seconds after the first attempt."""
    cap: float
    """Seconds at most."""
    jitter: bool

    @classmethod
    def of(cls, task: Any) -> RetryPolicy:
        """Read a task's options, each with Celery's meaning.

        ``retry_backoff`` is the base in seconds; True means 1, and False means the
        constant ``default_retry_delay``.  ``retry_kwargs`` may hold ``max_retries``, and
        ``countdown`` for a constant delay.

        Raises:
            celery.exceptions.ImproperlyConfigured: exceptions that are no tuple of classes.
        """
        given: Mapping[str, Any] = getattr(task, "retry_kwargs", None) or {}
        base, cap, jitter = task.retry_backoff, task.retry_backoff_max, bool(task.retry_jitter)
        constant = given.get("countdown", task.default_retry_delay if base is False else None)
        if constant is not None:
            base, cap, jitter = constant, constant, False
        return cls(
            autoretry_for=_classes(task, "autoretry_for"), dont_autoretry_for=_classes(task, "dont_autoretry_for"),
            max_retries=given.get("max_retries", task.max_retries), base=1.0 if base is True else base, cap=cap,
            jitter=jitter,
        )  # fmt: skip

    def check(self, name: str) -> None:
        """Refuse what would go wrong at the first failure only.

        Raises:
            celery.exceptions.ImproperlyConfigured: names the task, the option, its value and the fix.
        """
        try:
            backoff.check(self.base, self.cap)
        except ValueError as exc:
            raise ImproperlyConfigured(f"Task {name}: {exc}.") from exc
        limit = self.max_retries
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 0):
            raise ImproperlyConfigured(
                f"Task {name}: max_retries={limit!r} must be a whole number of at least 0, or None for no limit."
            )

    @property
    def max_attempts(self) -> int | None:
        """How often the body may start; None: no limit."""
        return None if self.max_retries is None else self.max_retries + 1

    def covers(self, error: BaseException) -> bool:
        """Whether this failure is one to try again."""
        return isinstance(error, self.autoretry_for) and not isinstance(error, self.dont_autoretry_for)

    def allows(self, attempt: int) -> bool:
        """Whether another attempt may follow the one of this number (the first is 1)."""
        return self.max_retries is None or attempt <= self.max_retries

    def delay(self, attempt: int) -> float:
        """Seconds to wait after the attempt of this number has failed."""
        return backoff.delay(attempt, base=self.base, cap=self.cap, jitter=self.jitter, random=random.random)


def _classes(task: Any, option: str) -> tuple[type[BaseException], ...]:
    given = getattr(task, option)
    kinds = tuple(given) if isinstance(given, (tuple, list, set, frozenset)) else (None,)
    if all(isinstance(kind, type) and issubclass(kind, BaseException) for kind in kinds):
        return kinds
    example = f"({given.__name__},)" if isinstance(given, type) else "(ConnectionError, TimeoutError)"
    raise ImproperlyConfigured(
        f"Task {task.name}: {option}={given!r} must be a tuple of exception classes, such as {example}."
    )
