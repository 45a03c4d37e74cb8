"""Keeps a soft time limit out of our own statements."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kombu.utils.compat import detect_environment

#: The signal of a pool's soft time limit; None where there is none.
SIGNAL = getattr(signal, "SIGUSR1", None)


@contextmanager
def soft_limit_held(*, discard: bool = False) -> Iterator[None]:
    """Hold the signal of a soft time limit back until the end of the block.

    Its exception in the middle of a statement would leave the connection unusable.
    Only the main thread of a prefork or solo pool gets it.

    Arguments:
        discard: forget a signal that came meanwhile: the body is over, and what is being
            stored about it stands.
    """
    if SIGNAL is None or threading.current_thread() is not threading.main_thread() or detect_environment() != "default":
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {SIGNAL})
    try:
        yield
    finally:
        if discard and SIGNAL in signal.sigpending():
            # Ignoring a blocked signal throws the pending one away.
            handler = signal.signal(SIGNAL, signal.SIG_IGN)
            signal.signal(SIGNAL, handler if handler is not None else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
