"""How long a timer waits between two attempts."""

from __future__ import annotations

import math
from collections.abc import Callable

#: The shortest delay in seconds: a retry never competes with the attempt that failed.
MINIMUM = 0.001


def delay(attempt: int, *, base: float, cap: float, jitter: bool, random: Callable[[], float]) -> float:
    """The delay after an attempt has failed: ``base * 2 ** (attempt - 1)``, at most ``cap``.

    Unlike Celery's ``get_exponential_backoff_interval`` it never returns zero (full
    jitter there starts at 0), and it cannot overflow at any attempt.

    Arguments:
        attempt: The number of the attempt that failed; the first is 1.
        base: Seconds after the first attempt.
        cap: Seconds at most.
        jitter: Draw the delay uniformly from [d/2, d] instead of taking d.
        random: A number from [0, 1), asked once if ``jitter`` is set.

    Returns:
        Seconds, at least :data:`MINIMUM`.

    Raises:
        ValueError: ``attempt`` is below 1, or :func:`check` refuses ``base`` and ``cap``.
    """
    if attempt < 1:
        raise ValueError(f"attempt={attempt}: the first attempt is 1")
    check(base, cap)
    # Logarithms, because base * 2 ** (attempt - 1) overflows from attempt 1,025 on.
    doublings = math.log2(cap) - math.log2(base)
    full = cap if attempt - 1 > doublings else min(cap, math.ldexp(base, attempt - 1))
    if jitter:
        full *= 0.5 + 0.5 * random()
    return max(full, MINIMUM)


def check(base: float, cap: float) -> None:
    """Refuse a base and cap that make no sense together, before any task runs with them.

    Arguments:
        base: Seconds after the first attempt (a task's ``retry_backoff``).
        cap: Seconds at most (a task's ``retry_backoff_max``).

    Raises:
        ValueError: One is not a finite number above zero, or ``base`` exceeds ``cap``,
            which would silently shorten every delay.
    """
    for name, value in (("retry_backoff", base), ("retry_backoff_max", cap)):
        try:
            finite = math.isfinite(value)
        except (TypeError, OverflowError):  # no number; an int beyond any float
            finite = False
        if not finite or value <= 0:
            raise ValueError(f"{name}={value!r} is not a number of seconds above 0")
    if base > cap:
        raise ValueError(
            f"retry_backoff={base!r} s exceeds retry_backoff_max={cap!r} s, so every delay would be cut to the "
            f"maximum: raise retry_backoff_max to {base!r} or more, or lower retry_backoff"
        )
