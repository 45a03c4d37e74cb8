"""How a beat that sleeps between its ticks says that it has read its entries and waits for the first of them."""

from __future__ import annotations

from typing import Any

READY = "benchmark: ready"


class SaysReady:
    """Writes :data:`READY` after the first tick that leaves nothing to do.  Stands before the scheduler's class."""

    _said = False

    def tick(self, *args: Any, **kwargs: Any) -> float:
        """The scheduler's tick."""
        seconds: float = super().tick(*args, **kwargs)  # type: ignore[misc]
        if not self._said and seconds > 0:
            self._said = True
            print(READY, flush=True)
        return seconds
