"""Redis and Valkey: a page of messages in one pipeline.

One pipeline is one round trip for the page.  It is not a transaction: if it
fails, some of its messages may be in their queues.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from .delivery import Delivery, Outcome, Outgoing
from .one_by_one import OneByOnePublisher

#: Messages per pipeline.
PIPELINE = 500
#: A message to a queue with ``x-expires`` is several commands, one to a topic exchange may be any number.
COMMANDS = PIPELINE * 20


class RedisBatchPublisher(OneByOnePublisher):
    """See :class:`~.delivery.Publisher`."""

    def publish(self, outgoing: Sequence[Outgoing]) -> list[Delivery]:
        """See :meth:`.delivery.Publisher.publish`."""
        if not outgoing:
            return []
        deliveries: list[Delivery] = []
        with self._broker.limited():
            self._open()
            for start in range(0, len(outgoing), PIPELINE):
                done, error = self._pipeline(outgoing[start : start + PIPELINE])
                deliveries += done
                if error is not None:
                    unavailable = self._broker.unavailable(error)
                    reason = self._broker.reason(error)
                    self._broker.drop()
                    if not deliveries:
                        raise unavailable from error
                    rest = outgoing[len(deliveries) :]
                    return deliveries + [Delivery(each.timer_id, Outcome.UNCERTAIN, reason) for each in rest]
            self._send_events(outgoing, deliveries)
        return deliveries

    def _pipeline(self, page: Sequence[Outgoing]) -> tuple[list[Delivery], Exception | None]:
        """Publish one pipeline.

        Returns:
            Its deliveries, and the error that broke the connection; with an
            error and no deliveries, nothing of this pipeline was sent.
        """
        failed: dict[int, Delivery] = {}
        sending = False
        try:
            channel = self._producer.channel
            # What Producer.batch() uses; without the layers above it a fifth faster.
            batch = channel.create_publish_batch(max_size=COMMANDS)
            prepare, publish, problem_of = channel.prepare_message, batch.publish, self._problem
            try:
                for index, each in enumerate(page):
                    message, declared = each.message, False
                    try:
                        problem = problem_of(message)
                        if problem:
                            failed[index] = Delivery(each.timer_id, Outcome.RETURNED, problem)
                            continue
                        declared = True
                        properties = message.properties.copy()
                        if each.expiration is not None:
                            properties["expiration"] = str(int(each.expiration * 1000))
                        priority = properties.pop("priority", 0)
                        # Redis carries JSON: the envelopes of the headers are sent as they are.
                        publish(
                            prepare(
                                message.body,
                                priority,
                                message.content_type,
                                message.content_encoding,
                                message.headers,
                                properties,
                            ),
                            exchange=message.exchange,
                            routing_key=message.routing_key,
                        )
                    except Exception as exc:  # sorted out by the broker's own error classes
                        outcome = self._broker.outcome(exc)
                        if outcome is None:
                            raise
                        if outcome is Outcome.FAILED and declared:
                            # Nothing of it is sent before the flush: either Redis is gone, or this cannot be written.
                            if not self._broker.alive(channel):
                                raise
                            outcome = Outcome.REFUSED
                        failed[index] = Delivery(each.timer_id, outcome, self._broker.reason(exc))
                sending = True
                batch.flush()
            finally:
                batch.close()
        except Exception as exc:  # the connection is of no more use, whatever it says
            if not sending:
                return [], exc
            # Kombu's BatchPublishError says no more than that; its cause says why.
            cause = exc.__cause__ if isinstance(exc.__cause__, Exception) else exc
            return self._settled(page, failed, Outcome.UNCERTAIN, self._broker.reason(cause)), cause
        return self._settled(page, failed, Outcome.CONFIRMED, ""), None

    @staticmethod
    def _settled(
        page: Sequence[Outgoing], failed: dict[int, Delivery], outcome: Outcome, reason: str
    ) -> list[Delivery]:
        deliveries = [Delivery(each.timer_id, outcome, reason) for each in page]
        for index, delivery in failed.items():
            deliveries[index] = delivery
        return deliveries

    def _grouped(self) -> AbstractContextManager[Any]:
        grouped: AbstractContextManager[Any] = self._producer.batch(max_size=COMMANDS)
        return grouped
