"""What a running task may know about its run: ``self.durable``."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID


@dataclass(frozen=True, kw_only=True)
class DurableContext:
    """The present attempt; all instants are UTC, by the database's clock.

    A run without a timer (``delay()``, eager, a plain function call) has a number
    of its attempt and nothing else: everything about a timer is None.
    """

    attempt: int
    """Number of this attempt; the first is 1."""
    timer_id: UUID | None = None
    fence: int | None = None
    """Rises with every lease: give it to other systems as a fencing token."""
    due_at: datetime | None = None
    """When this attempt was due; after a retry, the end of the back-off."""
    dispatched_at: datetime | None = None
    """When the broker had the message."""
    started_at: datetime | None = None
    """When the lease was taken."""
    schedule: str | None = None
    """Name of the schedule that made the timer."""
    nominal: datetime | None = None
    """The occurrence's instant in its schedule."""
    missed: int = 0
    """How many occurrences before this one did not run."""
    reason: str | None = None
    """``schedule``, ``catchup``, ``trigger`` or ``backfill``; None for a timer that no schedule made."""

    @property
    def lateness(self) -> timedelta | None:
        """How long after its due time the message was dispatched."""
        if self.dispatched_at is None or self.due_at is None:
            return None
        return self.dispatched_at - self.due_at
