"""SIGTERM and SIGINT, held back for as long as a page is on its way."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def end_held_back() -> Iterator[Sequence[int]]:
    """Let a signal that ends the beat wait until the block is over.

    Celery's handler cuts the sockets in the middle of whatever is going on.  A page
    that was published and not yet marked would be published again, and a plain task
    in it would run twice.  Publishing has its own time limit, so this wait has one.

    Handlers are exchanged, not blocked: a blocked signal would go to another thread.

    Yields:
        The signals that have come meanwhile: a long piece of work looks at it.
    """
    arrived: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield arrived
        return
    before = {number: signal.signal(number, lambda number, frame: arrived.append(number)) for number in _SIGNALS}
    try:
        yield arrived
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if arrived:
            signal.raise_signal(arrived[0])
