"""RabbitMQ: a page of messages on a confirming channel, one wait for all of them.

Confirms counted per page are five times as fast as one wait per message.
Every message is ``mandatory``: RabbitMQ acknowledges a message that reaches no
queue all the same, and only the return that comes before tells.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from amqp import Message as AMQPMessage
from amqp import spec
from amqp.exceptions import ChannelError
from amqp.serialization import dumps
from kombu import Producer

from .broker import Broker, Queues
from .delivery import BrokerUnavailable, Delivery, Outcome, Outgoing
from .events import TaskSent
from .message import revive

if TYPE_CHECKING:
    from celery import Celery

#: Messages sent between two looks at what the broker has to say.
LOOK = 50
#: What frames and method names take beside the header table in one frame.
OVERHEAD = 64


class ConfirmingPublisher:
    """See :class:`~.delivery.Publisher`.

    When RabbitMQ blocks the connection (memory or disk alarm) the messages
    just sent are uncertain, but the connection is kept: they may still
    arrive through it, and until it is unblocked nothing more is sent, so that
    copies do not pile up while the alarm lasts.
    """

    def __init__(self, app: Celery, broker: Broker) -> None:
        self._app = app
        self._broker = broker
        self._wire: Any = None
        self._channel: Any = None
        self._setup: Any = None
        self._queues: Queues
        self._exchanges: set[str] = set()
        self._tag = 0
        self._blocked = ""
        self._page: _Page | None = None
        self._events = TaskSent.of(app)
        self._event_producer: Any = None

    def publish(self, outgoing: Sequence[Outgoing]) -> list[Delivery]:
        """See :meth:`.delivery.Publisher.publish`."""
        if not outgoing:
            return []
        with self._broker.limited() as deadline:
            page = _Page(outgoing)
            try:
                self._open()
                self._prepare(page)
            except BrokerUnavailable:
                raise
            except Exception as exc:  # nothing was sent, whatever it is
                unavailable = self._broker.unavailable(exc)
                self._drop()
                raise unavailable from exc
            try:
                self._exchange(page, page.unsettled(), deadline)
            except ChannelError as exc:
                # One of them closed the channel; which one, only sending each alone tells.
                self._isolate(page, deadline, exc)
            except Exception as exc:  # a dead socket shows itself in many ways
                self._lost(page, exc)
            if self._events is not None and self._broker.connected and not self._blocked:
                self._send_events(outgoing, page.deliveries())
        return page.deliveries()

    def close(self) -> None:
        """See :meth:`.delivery.Publisher.close`."""
        self._broker.close()

    def abandon(self) -> None:
        """See :meth:`.delivery.Publisher.abandon`."""
        self._broker.abandon()

    # -- connection

    def _open(self) -> None:
        if self._broker.connected and self._channel is not None:
            try:
                # Sees a connection that the broker has closed since, before anything is sent into it.
                self._look()
            except Exception:  # a dead socket shows itself in many ways
                self._drop()
            if self._blocked:
                raise self._broker.unavailable(f"RabbitMQ has blocked this connection: {self._blocked}")
        if self._broker.connected and self._channel is not None:
            return
        connection = self._broker.connect()
        self._wire = connection.connection
        self._wire.on_blocked = self._on_blocked
        self._wire.on_unblocked = self._on_unblocked
        self._setup = self._broker.channel()
        self._queues = Queues(self._app, self._broker, self._setup)
        self._channel = self._broker.channel()
        self._arm()

    def _arm(self) -> None:
        """Put the channel, new or reopened by py-amqp, into confirm mode."""
        channel = self._channel
        channel.confirm_select()
        channel.events["basic_ack"].add(self._on_ack)
        channel.events["basic_nack"].add(self._on_nack)
        channel.events["basic_return"].add(self._on_return)
        self._tag = 0

    def _drop(self) -> None:
        self._broker.drop()
        self._wire = self._channel = self._setup = self._event_producer = None
        self._exchanges.clear()
        self._blocked = ""

    def _look(self) -> None:
        """Handle what has arrived, without waiting."""
        try:
            while True:
                self._wire.drain_events(timeout=0)
        except TimeoutError:
            pass

    def _on_blocked(self, reason: str) -> None:
        self._blocked = reason or "memory or disk alarm"

    def _on_unblocked(self) -> None:
        self._blocked = ""

    # -- publishing

    def _prepare(self, page: _Page) -> None:
        """Declare what is needed; what has no place to go is settled at once."""
        problems: dict[tuple[str | None, str], str] = {}
        for index, each in enumerate(page.outgoing):
            message = each.message
            place = (message.queue, message.exchange)
            if place not in problems:
                problems[place] = self._queues.declare(message.queue) or self._missing(message.exchange)
            if problems[place]:
                page.settle(index, Outcome.RETURNED, problems[place])

    def _missing(self, exchange: str) -> str:
        """Why nothing can be published to the exchange: a publish that fails would close the channel."""
        if not exchange or exchange in self._exchanges:
            return ""
        try:
            self._setup.exchange_declare(exchange, "direct", passive=True)
        except ChannelError as exc:
            return f"exchange {exchange!r}: {exc}"
        self._exchanges.add(exchange)
        return ""

    def _exchange(self, page: _Page, indexes: Sequence[int], deadline: float) -> None:
        """Send all, then wait until the broker has spoken about each."""
        self._page = page
        page.first_tag = self._tag + 1
        write, number, limit = (
            self._wire.frame_writer,
            self._channel.channel_id,
            self._wire.frame_max - OVERHEAD,
        )
        with self._wire.transport.having_timeout(max(deadline - time.monotonic(), 0.001)):
            for count, index in enumerate(indexes, 1):
                try:
                    content = Content(page.outgoing[index], limit)
                except Exception as exc:  # nothing is sent here: whatever it is, it is this message's
                    page.settle(index, Outcome.REFUSED, str(exc) or repr(exc))
                    continue
                self._tag += 1
                page.sent.append(index)
                page.waiting += 1
                page.whole = False
                write(1, number, spec.Basic.Publish, content.arguments, content)
                page.whole = True
                if count % LOOK == 0:
                    # Returned messages come back whole; unread they would fill the buffers of both sides.
                    self._look()
            while page.waiting:
                self._wire.drain_events(timeout=max(deadline - time.monotonic(), 0.001))

    def _isolate(self, page: _Page, deadline: float, first_error: Exception) -> None:
        """Send each unsettled message alone, on the channel that py-amqp has reopened."""
        self._exchanges.clear()
        error: Exception | None = first_error
        for index in page.unsettled():
            try:
                if error is not None:
                    self._arm()
                error = None
                page.again()
                self._exchange(page, [index], deadline)
            except ChannelError as exc:
                error = exc
                page.settle(index, Outcome.RETURNED, str(exc))
            except Exception as exc:  # a dead socket shows itself in many ways
                self._lost(page, exc)
                return
        if error is not None:
            self._drop()

    def _lost(self, page: _Page, exc: Exception) -> None:
        reason = self._broker.reason(exc)
        if self._blocked:
            reason += f"; RabbitMQ has blocked the connection: {self._blocked}"
        for index in page.unsettled():
            page.settle(index, Outcome.UNCERTAIN, reason)
        if not (self._blocked and isinstance(exc, TimeoutError) and not self._broker.overdue and page.whole):
            self._drop()

    # -- the broker's word

    def _on_ack(self, tag: int, multiple: bool) -> None:
        if self._page is not None:
            self._page.answer(tag, multiple, Outcome.CONFIRMED, "")

    def _on_nack(self, tag: int, multiple: bool) -> None:
        if self._page is not None:
            self._page.answer(tag, multiple, Outcome.RETURNED, "RabbitMQ rejected it: the queue is full or failed")

    def _on_return(self, exc: Any, exchange: str, routing_key: str, message: Any) -> None:
        if self._page is None:
            return
        index = self._page.find(exchange, routing_key, message.properties.get("correlation_id"))
        if index is not None:
            self._page.settle(index, Outcome.RETURNED, f"{exc.reply_code} {exc.reply_text}")
            self._queues.forget(self._page.outgoing[index].message.queue)

    def _send_events(self, outgoing: Sequence[Outgoing], deliveries: Sequence[Delivery]) -> None:
        assert self._events is not None
        try:
            if self._event_producer is None:
                # A channel of its own: events would disturb the count of the confirms.
                self._event_producer = Producer(self._broker.channel(), auto_declare=False)
            self._events.send(self._event_producer, outgoing, deliveries)
        except Exception as exc:  # an event is a courtesy: the messages are out
            self._events.failed(exc)
            self._drop()


class Content(AMQPMessage):
    """A message with its header frame packed beforehand, so that a bad one is found before it is sent.

    Raises:
        Exception: whatever the client library raises for what it cannot write; ValueError for more than `limit` bytes.
    """

    def __init__(self, each: Outgoing, limit: int) -> None:
        message = each.message
        properties = revive(message.properties)
        if each.expiration is not None:
            properties["expiration"] = str(int(each.expiration * 1000))
        super().__init__(
            message.body,
            content_type=message.content_type,
            content_encoding=message.content_encoding,
            application_headers=revive(message.headers),
            **properties,
        )
        self.packed: bytes = super()._serialize_properties()  # type: ignore[misc]  # not in the stubs
        if len(self.packed) > limit:
            raise ValueError(f"the headers take {len(self.packed)} bytes, but a frame of this broker only {limit}")
        self.arguments: bytes = dumps("Bssbb", (0, message.exchange, message.routing_key, True, False))

    def _serialize_properties(self) -> bytes:
        return self.packed


class _Page:
    """The messages of one call and what is known about each."""

    def __init__(self, outgoing: Sequence[Outgoing]) -> None:
        self.outgoing = outgoing
        self._known: list[Delivery | None] = [None] * len(outgoing)
        #: Indexes in the order of their delivery tags, from `first_tag` on.
        self.sent: list[int] = []
        self.first_tag = 1
        self._answered = 0
        #: Sent, and neither acked nor nacked.
        self.waiting = 0
        #: The last frame was written to its end.
        self.whole = True

    def settle(self, index: int, outcome: Outcome, reason: str) -> None:
        self._known[index] = Delivery(self.outgoing[index].timer_id, outcome, reason)

    def answer(self, tag: int, multiple: bool, outcome: Outcome, reason: str) -> None:
        """Take an ack or nack; tags of an earlier page are left alone."""
        position = tag - self.first_tag
        if position < 0 or position >= len(self.sent):
            return
        start = self._answered if multiple else position
        for each in range(start, position + 1):
            index = self.sent[each]
            if index < 0:
                continue
            self.sent[each] = -1 - index
            self.waiting -= 1
            if self._known[index] is None:
                self.settle(index, outcome, reason)
        if multiple:
            self._answered = position + 1

    def find(self, exchange: str, routing_key: str, correlation_id: str | None) -> int | None:
        """Which message came back; they come in the order in which they were sent."""
        for index in self.sent:
            if index < 0 or self._known[index] is not None:
                continue
            message = self.outgoing[index].message
            if (message.exchange, message.routing_key) == (exchange, routing_key) and (
                message.properties.get("correlation_id") == correlation_id
            ):
                return index
        return None

    def again(self) -> None:
        """Forget what was sent, for another channel."""
        self.sent.clear()
        self._answered = self.waiting = 0

    def unsettled(self) -> list[int]:
        return [index for index, known in enumerate(self._known) if known is None]

    def deliveries(self) -> list[Delivery]:
        return [
            known or Delivery(each.timer_id, Outcome.UNCERTAIN, "not sent")
            for known, each in zip(self._known, self.outgoing, strict=True)
        ]
