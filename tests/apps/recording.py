"""An app whose bodies leave a row in Postgres, so that a test can count them."""

from __future__ import annotations

import os
from typing import Any

import psycopg
from celery import Celery

from celery_durable import DurableTask

URL = os.environ.get("CELERY_DURABLE_DATABASE_URL", "")

app = Celery("recording", broker=os.environ.get("TEST_BROKER"), backend=os.environ.get("TEST_BACKEND"))
app.conf.update(
    beat_scheduler="durable",
    task_default_queue="recording",
    worker_prefetch_multiplier=1,
    broker_connection_retry_on_startup=True,
    broker_transport_options={"visibility_timeout": float(os.environ.get("TEST_VISIBILITY", "3600"))},
    durable_lease=3,
    durable_heartbeat=1,
    durable_claim_timeout=2,
    durable_publish_timeout=1,
    durable_sweep_interval=0.3,
    durable_poll_interval=1,
    # Default in production 300 s: a message that died with its worker between the queue and its lease.
    durable_redispatch_after=float(os.environ.get("TEST_REDISPATCH", "300")),
)

TABLE = "create table if not exists body (at timestamptz default clock_timestamp(), name text, task_id text)"


def record(name: str, task_id: str) -> None:
    """Note that a body ran."""
    with psycopg.connect(URL.replace("+psycopg", ""), autocommit=True) as connection:
        connection.execute("insert into body (name, task_id) values (%s, %s)", (name, task_id))


@app.task(shared=False, base=DurableTask, bind=True, name="recording.note")
def note(self: Any, name: str) -> str:
    """Leave a row, under a lease."""
    record(name, self.request.id)
    return name


@app.task(shared=False, bind=True, name="recording.plain")
def plain(self: Any, name: str) -> str:
    """Leave a row, as a plain task."""
    record(name, self.request.id)
    return name


@app.task(shared=False, base=DurableTask, bind=True, name="recording.order")
def order(self: Any, number: int) -> int:
    """Read a row that the scheduling transaction wrote; fail at once if it is not there."""
    with psycopg.connect(URL.replace("+psycopg", ""), autocommit=True) as connection:
        row = connection.execute("select number from orders where number = %s", (number,)).fetchone()
    assert row is not None, "the task ran before its data was there"
    record(f"order {number}", self.request.id)
    return number
