"""The publisher that fits an app's broker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kombu import Producer
from kombu.transport.pyamqp import Transport as AMQPTransport

from .amqp_confirms import ConfirmingPublisher
from .broker import Broker
from .delivery import BrokerUnavailable, Delivery, Outcome, Outgoing, Publisher
from .one_by_one import OneByOnePublisher
from .redis_batch import RedisBatchPublisher

if TYPE_CHECKING:
    from celery import Celery

__all__ = ("BrokerUnavailable", "Delivery", "Outcome", "Outgoing", "Publisher", "publisher_for")


def publisher_for(app: Celery, *, timeout: float) -> Publisher:
    """Make the publisher for the transport of the app's broker; connects to nothing yet.

    RabbitMQ through py-amqp: confirmed batches.  Redis and Valkey with
    Kombu 5.7 or newer: pipelines, unless the transport options ask redis-py
    to repeat commands (``retry_on_timeout``), which could publish a pipeline
    twice.  Everything else: one by one.

    Arguments:
        app: whose ``broker_write_url`` and ``task_queues`` to use.
        timeout: hard limit of one ``publish`` in seconds, connecting included.
    """
    broker = Broker(app, timeout)
    if issubclass(broker.transport, AMQPTransport):
        return ConfirmingPublisher(app, broker)
    if getattr(Producer(app.connection_for_write()), "supports_batch_publish", False):
        return RedisBatchPublisher(app, broker)
    return OneByOnePublisher(app, broker)
