"""The one error of the recurrence rules, kept here because ``core`` imports no Celery."""

from __future__ import annotations


class RecurrenceError(ValueError):
    """A recurrence that cannot be evaluated; the message names the value and the fix.

    :mod:`celery_durable.recurrence` turns it into
    :exc:`~celery_durable.errors.InvalidSchedule`.
    """
