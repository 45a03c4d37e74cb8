"""A small app with durable timers.  Run it as the README beside it says."""

from __future__ import annotations

import os
from datetime import timedelta

from celery import Celery
from celery.schedules import crontab

from celery_durable import DurableTask, apply_at

app = Celery(
    "proj",
    broker=os.environ.get("BROKER", "redis://localhost/0"),
    backend=os.environ.get("BACKEND", "redis://localhost/1"),
    task_cls="celery_durable:DurableTask",
)
app.conf.update(
    beat_scheduler="durable",
    durable_database_url="embedded:./var-postgres",
    timezone="Europe/Berlin",
    beat_schedule={
        "every-ten-seconds": {"task": "proj.heartbeat", "schedule": 10.0},
        "nightly": {"task": "proj.report", "schedule": crontab(hour="2", minute="30")},
    },
)


@app.task(bind=True, autoretry_for=(ConnectionError,), max_retries=5, retry_backoff=2, retry_backoff_max=300)
def charge(self: DurableTask, order: int) -> str:
    """Charge an order; the key lets the payment service recognise a repeated attempt."""
    return f"charged {order} as {self.idempotency_key}, attempt {self.durable.attempt}"


@app.task
def heartbeat() -> None:
    """Runs every ten seconds."""


@app.task
def report() -> None:
    """Runs every night at half past two, once, also on the days when the clocks change."""


if __name__ == "__main__":
    timer = apply_at(charge.s(42), timedelta(seconds=5), key="order-42-charge")
    print(timer, "new" if timer.created else "was there before")
