"""The handle of one stored timer."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any
from uuid import UUID

from celery.result import AsyncResult

from celery_durable.core.states import Answer, State
from celery_durable.store import timers
from celery_durable.store.database import Database

if TYPE_CHECKING:
    from celery import Celery

    from celery_durable.core.moments import When


class Timer:
    """One stored timer; what may have changed since is read from the database each time.

    Attributes:
        id: the timer's id, a UUIDv7; also the Celery task id unless another was chosen.
        task: name of the task.
        task_id: the Celery task id, the same for every attempt.
        key: the idempotency key.
        due_at: when it is due, in UTC, as of the call that made this handle.
        created: False when an older timer already held the key.
    """

    def __init__(
        self, app: Celery, *, id: UUID, task: str, task_id: str, key: str, due_at: datetime | None, created: bool
    ) -> None:
        self.app = app
        self.id = id
        self.task = task
        self.task_id = task_id
        self.key = key
        self.due_at = due_at
        self.created = created
        self._result: Any = None

    @classmethod
    def of(cls, app: Celery, found: timers.Found, *, created: bool = False) -> Timer:
        """The handle of what a query found."""
        return cls(
            app, id=found.id, task=found.task, task_id=found.task_id, key=found.key or str(found.id),
            due_at=found.due_at, created=created,
        )  # fmt: skip

    def __repr__(self) -> str:
        return f"<Timer {self.id} {self.task} due {self.due_at.isoformat() if self.due_at else '?'} key {self.key!r}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Timer) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)

    @property
    def details(self) -> timers.Found | None:
        """Everything known of it now; None once it has been pruned, or before its transaction has committed."""
        return Database.of(self.app).run(lambda executor: timers.find(executor, self.id))

    @property
    def state(self) -> State | None:
        """Where it stands now; None as for :attr:`details`."""
        found = self.details
        return None if found is None else found.state

    @property
    def result(self) -> AsyncResult[Any]:
        """Celery's result of the task; of a canvas that this handle has stored, the canvas' own result."""
        result: AsyncResult[Any] = self._result or self.app.AsyncResult(self.task_id)
        return result

    @result.setter
    def result(self, result: Any) -> None:
        self._result = result

    def cancel(self, *, connection: Any = None) -> Answer:
        """See :func:`celery_durable.cancel`."""
        from celery_durable.scheduling import cancel

        return cancel(self, connection=connection)

    def reschedule(self, when: When, *, connection: Any = None) -> Answer:
        """See :func:`celery_durable.reschedule`; updates :attr:`due_at`."""
        from celery_durable.scheduling import reschedule

        return reschedule(self, when, connection=connection)
