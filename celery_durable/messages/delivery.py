"""What goes into a publisher and what comes out of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol
from uuid import UUID

from ..errors import DurableError
from .message import Message


class BrokerUnavailable(DurableError):
    """No message of the call was sent: the broker cannot be reached, or has blocked us."""


class Outcome(str, Enum):
    """What is known about one message after :meth:`Publisher.publish`."""

    CONFIRMED = "confirmed"
    """The broker has it."""
    RETURNED = "returned"
    """The broker did not take it (no queue or exchange, full, not allowed); it may another time."""
    UNCERTAIN = "uncertain"
    """The time was up or the connection broke; the broker may have it."""
    FAILED = "failed"
    """An error of this message alone, of an unknown kind; the broker may have it, and takes others."""
    REFUSED = "refused"
    """It can never be published: this transport cannot encode it."""


@dataclass(frozen=True)
class Outgoing:
    """One message to publish."""

    timer_id: UUID | str
    message: Message
    expiration: float | None = None
    """Time to live in seconds."""


@dataclass(frozen=True)
class Delivery:
    """What became of one :class:`Outgoing`."""

    timer_id: UUID | str
    outcome: Outcome
    reason: str = ""


class Publisher(Protocol):
    """Publishes pages of messages over one connection of its own, made when first needed.

    Not for two threads at once, but for :meth:`abandon`.  A publisher whose
    connection broke makes a new one at the next call; it repeats nothing by
    itself.
    """

    def publish(self, outgoing: Sequence[Outgoing]) -> list[Delivery]:
        """Publish and wait for the broker's word, within the publisher's time limit.

        Returns:
            One delivery for each message, in order.

        Raises:
            BrokerUnavailable: nothing was sent.
        """

    def close(self) -> None:
        """Give up the connection for good, without asking the broker; may be called again."""

    def abandon(self) -> None:
        """Cut the connection for good: for signal handlers and other threads.

        A call of :meth:`publish` in progress ends with what it knows.
        """
