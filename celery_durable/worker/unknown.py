"""Timers whose task this worker does not know: another worker may, or the next release will."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from celery import signals

from celery_durable.signals import timer_dead
from celery_durable.store import runs
from celery_durable.store.database import DATABASE_ERRORS, Database
from celery_durable.worker.delivery import Delivery

logger = logging.getLogger(__name__)


def _put_off(sender: Any = None, message: Any = None, name: str = "", **_: Any) -> None:
    """Have the timer dispatched again after a growing pause; dead when nobody has known its task for too long."""
    delivery = Delivery.of(message.headers or {})
    if delivery is None:
        return
    app = sender.app
    database = Database.of(app)
    operation = partial(
        runs.unknown, timer_id=delivery.timer_id, call_id=delivery.call_id, worker=str(sender.hostname),
        grace=database.settings.unknown_task_grace,
    )  # fmt: skip
    try:
        ended = database.run(operation, bounded=True)
    except DATABASE_ERRORS as exc:
        logger.error("%s[%s] is not known here, it is dispatched again later: %s", name, delivery.timer_id, exc)
        return
    if ended:
        error = f"no worker knew it for {database.settings.unknown_task_grace:g} s"
        timer_dead.send(app, timer_id=delivery.timer_id, task=name, reason="unknown task", error=error)


def watch() -> None:
    """Look at the messages that this worker cannot place."""
    signals.task_unknown.connect(_put_off, weak=False, dispatch_uid="celery-durable-unknown")
