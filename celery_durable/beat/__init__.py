"""The beat: claims due timers, dispatches them, settles schedules and sweeps."""

from __future__ import annotations

from celery_durable.beat.scheduler import DurableScheduler

__all__ = ["DurableScheduler"]
