"""Every other transport: one message after the other through Kombu's producer.

That is what Celery does, and as much as the transport promises: where Kombu
has no confirmation to wait for, a message counts as confirmed when ``publish``
returns.  Where the sockets belong to a library of which we know nothing (SQS,
MongoDB …) that library's own timeouts apply within one message; between
messages the time limit is kept.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from kombu import Producer

from .broker import Broker, Queues
from .delivery import Delivery, Outcome, Outgoing
from .events import TaskSent
from .message import Message, revive
from .routability import Routes

if TYPE_CHECKING:
    from celery import Celery


class OneByOnePublisher:
    """See :class:`~.delivery.Publisher`."""

    def __init__(self, app: Celery, broker: Broker) -> None:
        self._app = app
        self._broker = broker
        self._generation = 0
        self._producer: Any
        self._queues: Queues
        self._routes: Routes
        self._events = TaskSent.of(app)

    def publish(self, outgoing: Sequence[Outgoing]) -> list[Delivery]:
        """See :meth:`.delivery.Publisher.publish`."""
        if not outgoing:
            return []
        deliveries: list[Delivery] = []
        with self._broker.limited() as deadline:
            self._open()
            reason = ""
            for each in outgoing:
                if time.monotonic() >= deadline:
                    reason = f"not reached within {self._broker.timeout:g} s"
                    break
                try:
                    deliveries.append(self._one(each))
                except Exception as exc:  # sorted out by the broker's own error classes
                    outcome, reason = self._broker.outcome(exc), self._broker.reason(exc)
                    if outcome is None:
                        self._broker.drop()
                        break
                    deliveries.append(Delivery(each.timer_id, outcome, reason))
            rest = outgoing[len(deliveries) :]
            deliveries += [Delivery(each.timer_id, Outcome.UNCERTAIN, reason) for each in rest]
            self._send_events(outgoing, deliveries)
        return deliveries

    def close(self) -> None:
        """See :meth:`.delivery.Publisher.close`."""
        self._broker.close()

    def abandon(self) -> None:
        """See :meth:`.delivery.Publisher.abandon`."""
        self._broker.abandon()

    def _open(self) -> None:
        """Connect if need be, with a producer for this connection."""
        if self._broker.connected and self._generation == self._broker.generation:
            return
        channel = self._broker.channel()
        self._producer = Producer(channel, auto_declare=False)
        self._queues = Queues(self._app, self._broker, channel)
        self._routes = Routes(channel)
        self._generation = self._broker.generation

    def _problem(self, message: Message) -> str:
        """Declare the queue; why the message cannot reach it, or the empty string."""
        return self._queues.declare(message.queue) or (message.exchange and self._routes.problem(message))

    def _one(self, each: Outgoing) -> Delivery:
        message = each.message
        problem = self._problem(message)
        if problem:
            return Delivery(each.timer_id, Outcome.RETURNED, problem)
        self._producer.publish(
            message.body,
            exchange=message.exchange,
            routing_key=message.routing_key,
            content_type=message.content_type,
            content_encoding=message.content_encoding,
            headers=revive(message.headers),
            expiration=each.expiration,
            retry=False,
            **revive(message.properties),
        )
        return Delivery(each.timer_id, Outcome.CONFIRMED)

    def _send_events(self, outgoing: Sequence[Outgoing], deliveries: Sequence[Delivery]) -> None:
        if self._events is None or not self._broker.connected:
            return
        try:
            with self._grouped():
                self._events.send(self._producer, outgoing, deliveries)
        except Exception as exc:  # an event is a courtesy: the messages are out
            self._events.failed(exc)
            self._broker.drop()

    def _grouped(self) -> AbstractContextManager[Any]:
        """What is published inside may be sent together at its end."""
        return nullcontext()
