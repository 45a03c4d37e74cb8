"""The demo's application: what a user would write, with tasks that misbehave on purpose."""

from __future__ import annotations

import os
import time
from pathlib import Path

from celery import Celery

from celery_durable import DurableTask

#: Where the demo and its tasks leave marks for each other.
MARKS = Path(os.environ.get("DEMO_MARKS", "."))

app = Celery("demo", broker=os.environ.get("DEMO_BROKER"), backend=os.environ.get("DEMO_BACKEND"))
app.conf.update(
    beat_scheduler="durable",
    task_default_queue="demo",
    result_expires=None,
    broker_connection_retry_on_startup=True,
    worker_hijack_root_logger=False,
    # Shorter than anybody needs in production, so that recovery can be watched.
    durable_lease=6, durable_heartbeat=2, durable_claim_timeout=2, durable_publish_timeout=1, durable_sweep_interval=0.5,
)  # fmt: skip


@app.task(base=DurableTask, name="demo.tick")
def tick() -> None:
    """Runs every two seconds, by a cron text with seconds."""


@app.task(base=DurableTask, name="demo.work")
def work(number: int) -> int:
    """One of the burst."""
    return number * number


@app.task(base=DurableTask, bind=True, name="demo.flaky", retry_backoff=1, retry_backoff_max=2)
def flaky(self: DurableTask) -> str:
    """Fails twice, then works."""
    if self.durable.attempt < 3:
        raise ConnectionError(f"attempt {self.durable.attempt} finds nobody there")
    return f"worked at attempt {self.durable.attempt}"


@app.task(base=DurableTask, bind=True, name="demo.doomed", max_retries=1, retry_backoff=1, retry_backoff_max=2)
def doomed(self: DurableTask) -> str:
    """Fails until somebody has mended what it needs."""
    if not (MARKS / "mended").exists():
        raise LookupError("the thing that this task needs is missing")
    return f"{self.idempotency_key} done after all"


@app.task(base=DurableTask, bind=True, name="demo.long")
def long(self: DurableTask) -> str:
    """Tells its process id and waits: its first attempt is killed meanwhile."""
    if self.durable.attempt == 1:
        (MARKS / "victim.part").write_text(str(os.getpid()))
        (MARKS / "victim.part").rename(MARKS / "victim")
        time.sleep(600)
    return f"finished by attempt {self.durable.attempt}"
