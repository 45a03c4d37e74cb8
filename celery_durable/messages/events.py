"""The ``task-sent`` events of what a publisher has published.

Celery sends them from the caller (``task_send_sent_event``); for a timer the
message is sent at dispatch, so its event is too.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .delivery import Delivery, Outcome, Outgoing

if TYPE_CHECKING:
    from celery import Celery

logger = logging.getLogger(__name__)

#: Event field -> message header (celery/app/amqp.py, as_task_v2).
_FIELDS = {
    "uuid": "id", "root_id": "root_id", "parent_id": "parent_id", "name": "task", "args": "argsrepr",
    "kwargs": "kwargsrepr", "retries": "retries", "eta": "eta", "expires": "expires",
}  # fmt: skip


class TaskSent:
    """Sends ``task-sent`` events for confirmed messages."""

    def __init__(self, app: Celery) -> None:
        # Not enabled: only its publish() with our producer is used.
        self._dispatcher: Any = app.events.Dispatcher(enabled=False)

    @classmethod
    def of(cls, app: Celery) -> TaskSent | None:
        """The sender, or None where ``task_send_sent_event`` is off."""
        return cls(app) if app.conf.task_send_sent_event else None

    def send(self, producer: Any, outgoing: Sequence[Outgoing], deliveries: Sequence[Delivery]) -> None:
        """Publish the event of each confirmed message with `producer`."""
        for each, delivery in zip(outgoing, deliveries, strict=True):
            if delivery.outcome is not Outcome.CONFIRMED:
                continue
            message = each.message
            fields = {field: message.headers.get(header) for field, header in _FIELDS.items()}
            fields.update(
                queue=message.queue or message.routing_key,
                exchange=message.exchange,
                routing_key=message.routing_key,
            )
            self._dispatcher.publish("task-sent", fields, producer, retry=False)

    def failed(self, exc: Exception) -> None:
        """Say that events were lost; the messages themselves are not."""
        logger.warning("task-sent events could not be sent: %s", exc)
