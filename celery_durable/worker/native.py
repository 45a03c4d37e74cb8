"""Threads and locks of the operating system, also where gevent or eventlet have replaced Python's.

A greenlet would not beat while a body computes without switching.
"""

from __future__ import annotations

import _thread
import sys
from typing import Any


def _original(name: str) -> Any:
    for module in ("gevent.monkey", "eventlet.patcher"):
        if module in sys.modules:
            get = getattr(sys.modules[module], "get_original", None) or sys.modules[module].original
            return get("_thread", name) if module == "gevent.monkey" else getattr(get("_thread"), name)
    return getattr(_thread, name)


class Switch:
    """A flag that one thread sets and another waits for."""

    def __init__(self) -> None:
        self._lock: Any = _original("allocate_lock")()
        self._lock.acquire()

    def set(self) -> None:
        """Let the waiting thread go on, now and later."""
        if self._lock.locked():
            self._lock.release()

    def wait(self, seconds: float) -> bool:
        """Wait until it is set, `seconds` at most; returns whether it is."""
        if not self._lock.acquire(True, seconds):
            return False
        self._lock.release()
        return True


def start_thread(target: Any) -> None:
    """Start a thread of the operating system that does not keep the process alive."""
    _original("start_new_thread")(target, ())
