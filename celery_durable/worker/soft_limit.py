"""Keeps a soft time limit out of our own statements."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kombu.utils.compat import detect_environment

#: The signal of a pool's soft time limit; None where there is none.
SIGNAL = getattr(signal, "SIGUSR1", None)


#: The holds under way, the innermost last; True once a limit has come in it.
_holds: list[bool] = []
#: Celery's handler, while ours stands before it.
_celerys: list[Any] = []


@contextmanager
def soft_limit_held(*, discard: bool = False) -> Iterator[None]:
    """Put the exception of a soft time limit off until the end of the block.

    In the middle of a statement it would leave the connection unusable.  Only the
    main thread of a pool's process gets it.  A signal mask would not do: the limit is
    sent to the process, and with a second thread there the kernel picks that one.
    Our handler stays: exchanging handlers for each statement takes as long as preparing one.

    Arguments:
        discard: forget a limit that came meanwhile: the body is over, and what is being
            stored about it stands.
    """
    if not _stands_before_celerys():
        yield
        return
    _holds.append(False)
    try:
        yield
    finally:
        if _holds.pop() and not discard:
            _limit(SIGNAL, None)


def _stands_before_celerys() -> bool:
    # Greenlets share the main thread, and their blocks do not end in the order of a stack.
    if SIGNAL is None or threading.current_thread() is not threading.main_thread() or detect_environment() != "default":
        return False
    handler = signal.getsignal(SIGNAL)
    if handler is _limit:
        return True
    if not callable(handler):
        return False
    _celerys[:] = [handler]
    signal.signal(SIGNAL, _limit)
    return True


def _limit(number: Any, frame: Any) -> None:
    if _holds:
        _holds[-1] = True
    else:
        _celerys[-1](number, frame)
