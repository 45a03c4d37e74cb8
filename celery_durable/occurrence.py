"""One occurrence of a schedule, made into a timer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

from celery_durable import calls
from celery_durable.core.catchup import Policy
from celery_durable.core.identity import new_id, occurrence_key
from celery_durable.errors import InvalidSchedule, InvalidTimer
from celery_durable.store.timers import NewTimer

if TYPE_CHECKING:
    from celery import Celery


def check_overlap(app: Celery, task: str, policy: Policy) -> None:
    """Refuse to keep runs apart whose end nobody knows.

    Raises:
        InvalidSchedule: `policy` says ``skip`` or ``queue`` for a plain task.
    """
    found = app.tasks.get(task, task)
    if policy.overlap != "allow" and not calls.is_leased(
        found, bool(policy.durable) if isinstance(found, str) else None
    ):
        raise InvalidSchedule(
            f"overlap = {policy.overlap!r} needs a DurableTask: nobody knows when a plain task such as {task!r} ends. "
            "Make it a DurableTask; if it is one that only the workers know, say durable=True."
        )


def timer_of(
    app: Celery, schedule: str, *, task: str, args: Sequence[Any], kwargs: Mapping[str, Any], options: Mapping[str, Any],
    durable: bool | None, nominal: datetime, due_at: datetime, missed: int, reason: str, max_payload: int,
    timer_id: UUID | None = None,
) -> NewTimer:  # fmt: skip
    """Render the call of one occurrence, as beat would have sent it.

    Arguments:
        app: the app; it need not know the task.
        schedule: the schedule's name.
        task: the task's name.
        args: positional arguments.
        kwargs: keyword arguments.
        options: of ``apply_async``; a countdown is added to the due time.
        durable: for a task unknown to this process: is it a DurableTask?  None counts as no.
        nominal: the occurrence's instant in its schedule.
        due_at: when it shall run.
        missed: how many occurrences before it did not run.
        reason: ``schedule``, ``catchup``, ``trigger`` or ``backfill``.
        max_payload: most bytes of the message.
        timer_id: the timer's; a new one otherwise.

    Raises:
        InvalidTimer: it cannot be rendered.
        TypeError: the arguments do not fit the task's signature.
    """
    options = dict(options)
    countdown = options.pop("countdown", None)
    if countdown:
        due_at += timedelta(seconds=countdown)
    if options.get("eta"):
        raise InvalidTimer(f"eta = {options['eta']!r} makes no sense for a schedule. Leave it out.")
    options.pop("task_id", None)  # one id for all occurrences would mix their results
    found = app.tasks.get(task, task)
    leased = calls.is_leased(found, bool(durable) if isinstance(found, str) else None)
    timer_id = timer_id or new_id()
    key = occurrence_key(schedule, nominal) if reason != "trigger" else f"{schedule}@trigger-{timer_id}"
    # Celery's own beat marks what it sends by that header.
    headers = {"celery_beat_task": True, "durable_missed": missed, "durable_reason": reason}
    timer = calls.prepare(
        app, found, args, kwargs, options, timer_id=timer_id, leased=leased, key=key, due_at=due_at,
        schedule=schedule, nominal=nominal, headers=headers, max_payload=max_payload,
    )  # fmt: skip
    return replace(timer, reason=reason)
