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


@contextmanager
def soft_limit_held(*, discard: bool = False) -> Iterator[None]:
    """Put the exception of a soft time limit off until the end of the block.

    In the middle of a statement it would leave the connection unusable.  Only the
    main thread of a pool's process gets it.  A signal mask would not do: the limit is
    sent to the process, and with a second thread there the kernel picks that one.

    Arguments:
        discard: forget a limit that came meanwhile: the body is over, and what is being
            stored about it stands.
    """
    handler: Any = None
    in_main_thread = threading.current_thread() is threading.main_thread()
    # Greenlets share the main thread, and would restore each other's handlers in the wrong order.
    if SIGNAL is not None and in_main_thread and detect_environment() == "default":
        handler = signal.getsignal(SIGNAL)
    if not callable(handler):
        yield
        return
    came = False

    def put_off(*_: Any) -> None:
        nonlocal came
        came = True

    signal.signal(SIGNAL, put_off)  # type: ignore[arg-type]  # not None here
    try:
        yield
    finally:
        signal.signal(SIGNAL, handler)  # type: ignore[arg-type]  # as above
        if came and not discard:
            handler(SIGNAL, None)
