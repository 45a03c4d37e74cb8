"""Would a message reach a queue?  For transports whose exchanges Kombu emulates."""

from __future__ import annotations

from typing import Any

from .message import Message


class Routes:
    """Asks the exchange's bindings once per exchange and routing key.

    Kombu drops a message that no binding matches without a word, as RabbitMQ
    would without ``mandatory``.

    Arguments:
        channel: a channel of the transport.
    """

    def __init__(self, channel: Any) -> None:
        self._channel = channel
        self._known: set[tuple[str, str]] = set()

    def problem(self, message: Message) -> str:
        """Why the message would reach no queue, or the empty string."""
        exchange, routing_key = message.exchange, message.routing_key
        lookup = getattr(self._channel, "_lookup", None)
        if not exchange or lookup is None or (exchange, routing_key) in self._known:
            return ""
        if self._channel.typeof(exchange).type != "fanout" and not lookup(exchange, routing_key):
            return f"no queue is bound to exchange {exchange!r} with routing key {routing_key!r}"
        self._known.add((exchange, routing_key))
        return ""
