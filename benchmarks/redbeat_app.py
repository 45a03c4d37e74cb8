"""celery-redbeat as `schedules` runs it."""

from __future__ import annotations

import os

from redbeat import RedBeatScheduler

from benchmarks.app import make_app
from benchmarks.ready import SaysReady

app = make_app(os.environ["BENCH_BROKER"], redbeat_redis_url=os.environ["BENCH_BROKER"])


class Scheduler(SaysReady, RedBeatScheduler):
    """As it is, but for the word that it is ready."""
