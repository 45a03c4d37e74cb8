"""Durable timers for Celery: one-shot and recurring jobs kept in Postgres, dispatched as ordinary tasks.

Names are imported at first use (PEP 562), so that a program pays only for what it touches.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from celery_durable import dead_letters, schedules
    from celery_durable.beat import DurableScheduler
    from celery_durable.core.states import Answer, State
    from celery_durable.errors import (
        DatabaseUnavailable,
        DuplicateDelivery,
        DurableError,
        InvalidSchedule,
        InvalidTimer,
        KeyConflict,
        LeaseLost,
        SchemaMismatch,
    )
    from celery_durable.interception import intercept
    from celery_durable.scheduling import apply_at, apply_many, cancel, get_timer, reschedule
    from celery_durable.timer import Timer
    from celery_durable.worker import DurableTask

_HOMES = {
    "celery_durable.beat": ("DurableScheduler",),
    "celery_durable.core.states": ("Answer", "State"),
    "celery_durable.errors": (
        "DatabaseUnavailable", "DuplicateDelivery", "DurableError", "InvalidSchedule", "InvalidTimer", "KeyConflict",
        "LeaseLost", "SchemaMismatch",
    ),
    "celery_durable.interception": ("intercept",),
    "celery_durable.scheduling": ("apply_at", "apply_many", "cancel", "get_timer", "reschedule"),
    "celery_durable.timer": ("Timer",),
    "celery_durable.worker": ("DurableTask",),
}  # fmt: skip
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}
_MODULES = ("dead_letters", "schedules")

__all__ = [
    "Answer", "DatabaseUnavailable", "DuplicateDelivery", "DurableError", "DurableScheduler", "DurableTask",
    "InvalidSchedule", "InvalidTimer", "KeyConflict", "LeaseLost", "SchemaMismatch", "State", "Timer",
    "apply_at", "apply_many", "cancel", "dead_letters", "get_timer", "intercept", "reschedule", "schedules",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        return getattr(import_module(_HOME_OF[name]), name)
    if name in _MODULES:
        return import_module(f"celery_durable.{name}")
    raise AttributeError(f"module 'celery_durable' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
