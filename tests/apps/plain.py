"""An app without any of the product: what the servers of the tests are tried with."""

from __future__ import annotations

import os

from celery import Celery

app = Celery("plain", broker=os.environ.get("TEST_BROKER"), backend=os.environ.get("TEST_BACKEND"))
app.conf.update(broker_connection_retry_on_startup=True, worker_hijack_root_logger=False)


@app.task(shared=False, name="plain.add")
def add(x: int, y: int) -> int:
    """Add two numbers."""
    return x + y
