"""Every error celery-durable raises of its own accord, in one tree.

Wrong settings are the exception: they raise Celery's
:exc:`~celery.exceptions.ImproperlyConfigured`, as Celery's own do.
"""

from __future__ import annotations

from celery.exceptions import Ignore


class DurableError(Exception):
    """The root of the tree: catch it to catch everything below."""


class InvalidTimer(DurableError, ValueError):
    """The call cannot be stored as a timer; nothing was stored."""


class InvalidSchedule(DurableError, ValueError):
    """The recurring definition cannot be stored; nothing was stored."""


class KeyConflict(DurableError):
    """Another timer holds the idempotency key and ``on_conflict`` does not allow sharing it."""


class SchemaMismatch(DurableError):
    """The database schema is missing, or of another major version than this code."""


class DatabaseUnavailable(DurableError):
    """Postgres cannot be reached, went away in the middle of a statement, or refuses for now.

    For now: a server that only reads after a failover, a lock or a time limit, a conflict.
    In a transaction of the caller's own the last two stay the driver's errors.
    """


class LeaseLost(DurableError):
    """The lease of the running attempt has expired or was replaced: stop making side effects."""


class DuplicateDelivery(DurableError, Ignore):
    """This delivery may not run the timer: the worker acknowledges it and leaves no trace.

    An :exc:`~celery.exceptions.Ignore`, so Celery stores no result, sends no
    callback and no retry for it.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        #: Why: ``duplicate``, ``cancelled``, ``expired``, ``lease lost``, ``unavailable``.
        self.reason = reason
