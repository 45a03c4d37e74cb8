"""One run of a body, and the retry that the task may ask for while it runs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from celery.exceptions import Retry

from celery_durable.core.moments import Moment
from celery_durable.errors import DatabaseUnavailable
from celery_durable.messages.rendering import own_headers
from celery_durable.store.database import Database
from celery_durable.store.executor import Executor
from celery_durable.store.timers import NewTimer

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Where the running request keeps its attempt.
_ATTRIBUTE = "_durable_attempt"

#: Pause between two tries to reach Postgres, in seconds.
_PAUSE = 0.2


@dataclass(frozen=True, kw_only=True)
class Call:
    """What ``Task.retry`` would have published."""

    args: Sequence[Any] | None
    kwargs: Mapping[str, Any] | None
    options: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A retry that the task asked for; it is stored when the body has ended."""

    signal: Retry
    due: Moment
    message: NewTimer | None = None
    """The changed message, if it changed."""

    @property
    def delay(self) -> float | None:
        """Seconds from the end of the body; None where there is an instant."""
        return None if self.due.after is None else max(0.0, self.due.after)


class Attempt:
    """The part that all runs have in common; found through the running request."""

    def __init__(self, task: Any, number: int) -> None:
        self.task = task
        self.number = number
        #: True while Celery's own ``retry`` makes the call that we keep instead of publishing it.
        self.capturing = False
        self.captured: Call | None = None
        self.wanted: Wanted | None = None
        #: The task itself has used up its retries: no other policy starts over.
        self.gave_up = False

    @property
    def database(self) -> Database:
        """The database of the task's app."""
        return Database.of(self.task.app)

    def attach(self, request: Any) -> None:
        """Make this the attempt of the running request."""
        setattr(request, _ATTRIBUTE, self)

    @staticmethod
    def of(request: Any) -> Attempt | None:
        """The attempt of the running request, if it is one of ours."""
        attempt: Attempt | None = getattr(request, _ATTRIBUTE, None)
        return attempt

    def capture(self, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None, options: dict[str, Any]) -> None:
        """Keep the call that Celery's ``retry`` was about to publish."""
        # Where the last delivery came from says nothing about the next one; this task is no child of itself.
        options = {key: value for key, value in options.items() if key not in ("eta", "countdown", "redelivered")}
        options |= {"headers": own_headers(options.get("headers")), "add_to_parent": False}
        self.captured = Call(args=args, kwargs=kwargs, options=options)

    def prepare(self, call: Call) -> NewTimer:
        """Render the call that runs next; raises InvalidTimer when it cannot be stored."""
        raise NotImplementedError


def patiently(
    database: Database,
    operation: Callable[[Executor], T],
    seconds: float,
    *,
    ours: Callable[[Executor], bool] | None = None,
) -> T:
    """Run an operation, waiting for Postgres to come back if it is away, or to let us in if it refuses for now.

    Arguments:
        database: where.
        operation: what to run; it may be run again after an answer that was lost.
        seconds: how long to wait.
        ours: whether the lease that the operation ends is still ours: as long as it is, the waiting begins anew.

    Raises:
        DatabaseUnavailable: it was not back in time.
        SchemaMismatch: the tables are missing; waiting would not help.
    """
    deadline = time.monotonic() + seconds
    told = False
    while True:
        try:
            return database.run(operation, bounded=True)
        except DatabaseUnavailable as exc:
            if not told:
                logger.warning("%s. Trying again.", exc)
            told = True
            now = time.monotonic()
            if ours is not None and _answers(database, ours):
                deadline = now + seconds
            elif now >= deadline:
                raise
            time.sleep(_PAUSE)


def _answers(database: Database, question: Callable[[Executor], bool]) -> bool:
    try:
        return database.run(question, bounded=True)
    except DatabaseUnavailable:
        return False
