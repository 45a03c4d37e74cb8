"""Waiting on conditions, never on time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def eventually(condition: Callable[[], T], *, timeout: float = 20.0, message: str = "", every: float = 0.02) -> T:
    """Poll until `condition` is true and return what it said.

    Raises:
        AssertionError: after `timeout` seconds, with `message` and the last answer or error.
    """
    deadline = time.monotonic() + timeout
    last: object = None
    while True:
        try:
            answer = condition()
            if answer:
                return answer
            last = answer
        except Exception as exc:  # a server that is starting refuses in many ways
            last = exc
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout:g} s: {message or condition} (last: {last!r})")
        time.sleep(every)
