"""The app that a benchmark's beat process runs with."""

from __future__ import annotations

import os

from celery import Celery

app = Celery("bench", broker=os.environ.get("BENCH_BROKER"))
app.conf.task_default_queue = "bench"
