"""What a running task may know about its run: ``self.durable``."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID


@dataclass(frozen=True, kw_only=True)
class DurableContext:
    """The present attempt of a timer; all instants are UTC, by the database's clock."""

    timer_id: UUID
    attempt: int
    """Number of this attempt; the first is 1."""
    fence: int
    """Rises with every lease: give it to other systems as a fencing token."""
    due_at: datetime
    """When this attempt was due; after a retry, the end of the back-off."""
    dispatched_at: datetime
    """When the broker had the message."""
    started_at: datetime
    """When the lease was taken."""
    schedule: str | None
    """Name of the schedule that made the timer."""
    nominal: datetime | None
    """The occurrence's instant in its schedule."""
    missed: int
    """How many occurrences before this one did not run."""
    reason: str | None
    """``schedule``, ``catchup``, ``trigger`` or ``backfill``; None for a timer that no schedule made."""

    @property
    def lateness(self) -> timedelta:
        """How long after its due time the message was dispatched."""
        return self.dispatched_at - self.due_at
