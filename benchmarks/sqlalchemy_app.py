"""sqlalchemy-celery-beat as `schedules` runs it."""

from __future__ import annotations

import os

from sqlalchemy_celery_beat.schedulers import DatabaseScheduler

from benchmarks.app import make_app
from benchmarks.ready import SaysReady

app = make_app(
    os.environ["BENCH_BROKER"], beat_dburi=os.environ["CELERY_DURABLE_DATABASE_URL"], beat_schema="peer"
)  # fmt: skip


class Scheduler(SaysReady, DatabaseScheduler):
    """As it is, but for the word that it is ready."""
