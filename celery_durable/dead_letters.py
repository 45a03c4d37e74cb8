"""Dead letters: timers that used up their attempts, or could never run; look at them, run them again, let go."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

from celery_durable.calls import present_app
from celery_durable.core.identity import new_id
from celery_durable.core.moments import When, moment
from celery_durable.errors import InvalidTimer, KeyConflict
from celery_durable.store import dead_letters as store
from celery_durable.store import history, timers
from celery_durable.store.database import Database
from celery_durable.store.executor import Executor, Row
from celery_durable.timer import Timer

if TYPE_CHECKING:
    from celery import Celery

_NOW = timedelta(0)


def find_all(
    *, task: str | None = None, replayed: bool = False, limit: int = 100, app: Celery | None = None
) -> Sequence[Row]:
    """The newest dead letters.

    Arguments:
        task: only of this task.
        replayed: also those that were run again.
        limit: most rows.
        app: the app; the current one otherwise.

    Returns:
        Rows with id, task, key, queue, died_at, attempt, reason, error_type, error, replayed_as, replayed_at.
    """
    return _database(app).run(lambda executor: store.find_all(executor, task=task, replayed=replayed, limit=limit))


def get(identity: UUID | str, *, app: Celery | None = None) -> tuple[Row, Sequence[Row]] | None:
    """One dead letter with its payload, and its attempts with their errors; None when there is none."""

    def operation(executor: Executor) -> tuple[Row, Sequence[Row]] | None:
        timer_id = _id(executor, identity)
        row = None if timer_id is None else store.get(executor, timer_id)
        return None if row is None or timer_id is None else (row, history.attempts(executor, timer_id))

    return _database(app).run(operation)


def replay(identity: UUID | str, *, when: When = _NOW, app: Celery | None = None) -> Timer:
    """Run a dead letter again, once, as a new timer with the same message and idempotency key.

    Arguments:
        identity: the dead timer's id or Celery task id.
        when: as for :func:`~celery_durable.apply_at`; now if not given.
        app: the app; the current one otherwise.

    Returns:
        The new timer; the dead letter is linked to it.

    Raises:
        InvalidTimer: there is no such dead letter, or what is stored of it is no message.
        KeyConflict: it has been replayed already; names the timer that did.
    """
    app = app or present_app()
    try:
        due = moment(when)
    except (ValueError, TypeError, OverflowError) as exc:
        raise InvalidTimer(str(exc)) from exc
    timer_id = new_id()

    def operation(executor: Executor) -> Timer:
        dead_id = _id(executor, identity)
        row = None if dead_id is None else store.get(executor, dead_id)
        if row is None or dead_id is None:
            raise InvalidTimer(f"{identity} is no dead letter.")
        if not store.mark_replayed(executor, dead_id, timer_id):
            again = store.get(executor, dead_id)
            # Ours, where the connection broke after a first try had committed.
            if again is None or again.replayed_as != timer_id:
                raise KeyConflict(
                    f"{identity} was replayed already, as timer {again.replayed_as if again else '?'}: look at that "
                    "one. Should it end as a dead letter too, replay it; a call of its own needs another key."
                )
        timer = _renewed(row, timer_id, due.at, due.after)
        due_at = timers.insert(executor, timer) or due.at
        return Timer(
            app, id=timer_id, task=row.task, task_id=str(timer_id), key=timer.headers["durable_key"],
            due_at=due_at, created=True,
        )  # fmt: skip

    return _database(app).transact(operation)


def discard(identity: UUID | str, *, app: Celery | None = None) -> bool:
    """Let a dead letter go: its payload is pruned with its outcome; False when there is none."""

    def operation(executor: Executor) -> bool:
        timer_id = _id(executor, identity)
        return timer_id is not None and store.discard(executor, timer_id)

    return _database(app).run(operation)


def _renewed(row: Row, timer_id: UUID, due_at: datetime | None, delay: float | None) -> timers.NewTimer:
    """The stored message under a new identity; the idempotency key goes with it, its old `expires` does not."""
    headers, properties = _object(row, "headers"), _object(row, "properties")
    old_id, new = headers.get("id"), str(timer_id)
    headers |= {
        "id": new, "durable_timer": new, "durable_call": new, "durable_key": row.key or str(row.id), "expires": None,
    }  # fmt: skip
    if headers.get("root_id") == old_id:
        headers["root_id"] = new
    return timers.NewTimer(
        id=timer_id, task=row.task, leased=row.leased, body=bytes(row.body), content_type=row.content_type,
        content_encoding=row.content_encoding, headers=headers,
        properties={**properties, "correlation_id": new}, exchange=row.exchange,
        routing_key=row.routing_key, queue=row.queue, due_at=due_at, delay=delay, tenant=row.tenant, replay_of=row.id,
    )  # fmt: skip


def _object(row: Row, column: str) -> dict[str, Any]:
    try:
        found = json.loads(getattr(row, column))
    except (ValueError, RecursionError) as exc:
        raise InvalidTimer(f"{row.id} holds no message: its {column} cannot be read ({exc}).") from exc
    if not isinstance(found, dict):
        raise InvalidTimer(
            f"{row.id} holds no message: its {column} are no JSON object. Mend the row in call, or discard it."
        )
    return found


def _id(executor: Executor, identity: UUID | str) -> UUID | None:
    found = timers.find(executor, identity)
    return None if found is None else found.id


def _database(app: Celery | None) -> Database:
    return Database.of(app or present_app())
