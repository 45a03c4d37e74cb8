"""A run of a message that was published directly: no row, no lease; its first retry makes a timer."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Any

from celery_durable import calls
from celery_durable.core.identity import new_id
from celery_durable.store import timers
from celery_durable.store.timers import NewTimer
from celery_durable.worker.attempt import Attempt, Call, patiently


class DirectRun(Attempt):
    """One attempt without a timer; the timer of its retry has the same task id and counts this attempt."""

    def __init__(self, task: Any) -> None:
        super().__init__(task, task.request.retries + 1)
        self.attach(task.request)

    def again(self) -> Call:
        """The present call as it runs next, made by Celery's own rules."""
        request = self.task.request
        signature = self.task.signature_from_request(request, retries=request.retries + 1)
        self.capture(signature.args, signature.kwargs, dict(signature.options))
        assert self.captured is not None
        return self.captured

    def prepare(self, call: Call) -> NewTimer:
        """See :meth:`Attempt.prepare`: a new timer with the task id and, as its key, that id too."""
        request = self.task.request
        timer = calls.prepare(
            self.task.app, self.task, call.args, call.kwargs, call.options, timer_id=new_id(), leased=True,
            delay=0.0, max_payload=self.database.settings.max_payload,
            # A header alone: the key column would refuse a second use of a task id that somebody chose.
            headers={"durable_key": request.get("durable_key") or str(request.id)},
        )  # fmt: skip
        return replace(timer, attempt=self.number)

    def store(self, message: NewTimer, *, delay: float | None = None, due_at: datetime | None = None) -> None:
        """Store the timer of the retry.

        Raises:
            DatabaseUnavailable: Postgres was away all the time.
        """
        timer = replace(message, delay=delay, due_at=due_at)
        patiently(
            self.database, lambda executor: timers.insert(executor, timer), self.database.settings.connect_timeout
        )
