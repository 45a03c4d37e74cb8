"""The states of a timer, and what may still be done to it in each.

::

              cancel / reschedule      lease expired, worker lost, failed with attempts left
                   |                  +------------------------------------------------------+
    schedule -> waiting --claim--> claimed --confirmed--> dispatched --lease--> running -> finishing -> succeeded
                                    ^  |                     |                    +-------------------> dead
                                    +--+--- re-dispatch -----+   plain tasks: confirmed -> sent

``expired``, ``cancelled`` and ``skipped`` end a timer where it is found.
A waiting timer has a row in ``timer``; one in motion has a row in ``run``; an
ended one has a row in ``outcome``, and only there is its state a matter of record.
"""

from __future__ import annotations

from enum import Enum


class State(str, Enum):
    """Where a timer stands; the value is what the tables, the CLI and JSON say."""

    WAITING = "waiting"
    CLAIMED = "claimed"
    DISPATCHED = "dispatched"
    RUNNING = "running"
    FINISHING = "finishing"
    SUCCEEDED = "succeeded"
    SENT = "sent"
    DEAD = "dead"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    SKIPPED = "skipped"

    def __str__(self) -> str:
        return self.value

    @property
    def ended(self) -> bool:
        """True when no later state can follow."""
        return self in ENDED


IN_MOTION = frozenset({State.CLAIMED, State.DISPATCHED, State.RUNNING, State.FINISHING})
ENDED = frozenset({State.SUCCEEDED, State.SENT, State.DEAD, State.CANCELLED, State.EXPIRED, State.SKIPPED})
LIVE = frozenset({State.WAITING}) | IN_MOTION


class Answer(str, Enum):
    """The definite answer to a cancel or a reschedule."""

    CANCELLED = "cancelled"
    RESCHEDULED = "rescheduled"
    TOO_LATE = "too_late"
    UNKNOWN = "unknown"

    def __str__(self) -> str:
        return self.value
