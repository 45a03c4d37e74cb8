"""The app of the worker whose throughput is measured: two tasks that do nothing, one of them durable."""

from __future__ import annotations

import os
from typing import Any

from benchmarks.app import make_app
from celery_durable import DurableTask

app = make_app(os.environ.get("BENCH_BROKER"))


@app.task(name="bench.nothing", shared=False, ignore_result=True)
def nothing(number: int) -> Any:
    """A plain task."""


@app.task(name="bench.leased", shared=False, ignore_result=True, base=DurableTask)
def leased(number: int) -> Any:
    """The same, under a lease."""
