"""Timers of a task that was a DurableTask when they were stored, and is a plain one now."""

from __future__ import annotations

import logging
from typing import Any

from celery import signals

from celery_durable.worker.delivery import Delivery
from celery_durable.worker.request import DurableRequest

logger = logging.getLogger(__name__)

#: The tasks that were told of.
_told: set[str] = set()


def _tell(request: Any = None, **_: Any) -> None:
    """Say once for each task what cannot be mended here: the plain body runs, and nobody ends the timer."""
    if isinstance(request, DurableRequest) or Delivery.of(request.request_dict) is None:
        return
    name = request.task.name
    if name in _told or getattr(request.task, "takes_lease", False):
        return
    _told.add(name)
    logger.warning(
        "Task %s is no DurableTask here, but timers of it were stored as such: their bodies run without a lease, and "
        "again at each re-dispatch. Make it a DurableTask until they have ended, or cancel them.",
        name,
    )


def watch() -> None:
    """Look at the messages that this worker receives."""
    signals.task_received.connect(_tell, weak=False, dispatch_uid="celery-durable-former")
