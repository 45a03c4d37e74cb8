"""Countdowns and etas of whole apps, kept in Postgres: no broker ETA for calls that wait long.

``DurableTask`` keeps its own; this is for calls by name and for plain tasks,
which all go through the app's ``send_task``.
"""

from __future__ import annotations

import logging
from datetime import datetime, timezone
from functools import wraps
from typing import TYPE_CHECKING, Any

from celery_durable import calls, scheduling
from celery_durable.core.moments import When
from celery_durable.errors import DatabaseUnavailable
from celery_durable.messages.capture import CapturingProducer
from celery_durable.store.database import Database

if TYPE_CHECKING:
    from celery import Celery
    from celery.result import AsyncResult

#: How a direct call would reach the broker; a stored one does not.
BROKER_OPTIONS = ("producer", "publisher", "connection", "router", "retry", "retry_policy", "task_type", "result_cls")

logger = logging.getLogger(__name__)

_MARK = "_durable_intercepts"


def intercept(app: Celery) -> None:
    """Let ``app.send_task`` keep calls with a countdown or an eta in Postgres; may be called again.

    Every ``apply_async`` goes through it.  A DurableTask's calls are always kept, those of plain tasks from
    ``durable_intercept_eta`` seconds on; without that setting they are left alone, and Celery's own tasks always.
    While Postgres is away a plain task's own retry goes to the broker after all, rather than being lost.
    An app with a DurableTask does this by itself once its tasks are finalized (a worker, ``app.tasks``, the first
    call of a task); call it right after making the app where it has none, or where ``send_task`` may come first.

    Arguments:
        app: the app.
    """
    if getattr(app, _MARK, False):
        return
    send_task = app.send_task

    @wraps(send_task)
    def keeping(
        name: str, args: Any = None, kwargs: Any = None, countdown: float | None = None, eta: Any = None, *rest: Any,
        **options: Any,
    ) -> AsyncResult[Any]:  # fmt: skip
        # Further positional arguments are nobody's habit: such a call is Celery's.
        if (countdown or eta) and not rest and not isinstance(options.get("producer"), CapturingProducer):
            when = _wanted(app, name, countdown, eta, options)
            if when is not None:
                try:
                    return _kept(app, name, when, args, kwargs, options)
                except DatabaseUnavailable as exc:
                    if not options.get("retries") or getattr(app.tasks.get(name), "takes_lease", False):
                        raise
                    # A plain task's own retry: Celery would drop the task for good.
                    logger.warning("The retry of %s goes to the broker with an ETA: %s", name, exc)
        return send_task(name, args, kwargs, countdown, eta, *rest, **options)

    vars(app)["send_task"] = keeping
    vars(app)[_MARK] = True


def _wanted(app: Celery, name: str, countdown: float | None, eta: Any, options: dict[str, Any]) -> When | None:
    """When the call is due, if it is one to keep."""
    if name.startswith(calls.INTERNAL):
        return None
    takes_lease = bool(getattr(app.tasks.get(name), "takes_lease", False))
    if not takes_lease and app.conf.get("durable_intercept_eta") is None:
        return None
    due = calls.due(eta if eta else countdown)
    when: When = due.at if due.at is not None else due.after or 0.0
    if takes_lease:
        return when
    least = Database.of(app).settings.intercept_eta
    now = datetime.now(timezone.utc)
    return when if least is not None and (due.approximate(now) - now).total_seconds() >= least else None


def _kept(app: Celery, name: str, when: When, args: Any, kwargs: Any, options: dict[str, Any]) -> AsyncResult[Any]:
    task: Any = options.get("task_type") or app.tasks.get(name, name)
    chosen = {key: value for key, value in options.items() if value is not None and key not in BROKER_OPTIONS}
    timer = scheduling.defer(task, when, args, kwargs, chosen, app=app)
    result: AsyncResult[Any] = app.AsyncResult(timer.task_id)
    return result
