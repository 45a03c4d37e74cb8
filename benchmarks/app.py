"""The app that a benchmark's beat process runs with; the apps of other beats are made by the same function."""

from __future__ import annotations

import os
from typing import Any

from celery import Celery


def make_app(broker: str | None, **settings: Any) -> Celery:
    """An app with one plain task, and no entry but those that a benchmark makes."""
    made = Celery("bench", broker=broker)
    made.conf.update(task_default_queue="bench", result_expires=None, **settings)

    @made.task(name="bench.plain", shared=False)
    def plain(number: int) -> int:
        return number

    return made


app = make_app(os.environ.get("BENCH_BROKER"))
