"""An app for tests of beats: short times, recurring entries and crashes as the environment says.

No worker runs it: what its beats publish stays in the queue and is counted there.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from celery import Celery

from celery_durable import DurableScheduler
from celery_durable.messages.delivery import Delivery, Outgoing, Publisher

app = Celery("beating", broker=os.environ.get("TEST_BROKER"))
app.conf.update(
    beat_scheduler="durable",
    beat_schedule=json.loads(os.environ.get("TEST_ENTRIES", "{}")),
    broker_connection_retry_on_startup=True,
    durable_claim_timeout=2,
    durable_publish_timeout=1,
    durable_sweep_interval=0.3,
    durable_poll_interval=float(os.environ.get("TEST_POLL", "1")),
)


@app.task(shared=False, name="beating.plain")
def plain(number: int = 0) -> int:
    """Never runs."""
    return number


class CrashingPublisher:
    """Kills its process around one publish, if and as the file of ``TEST_CRASH`` says; the file goes first."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher

    def publish(self, outgoing: Sequence[Outgoing]) -> list[Delivery]:
        """Publish, or die before or after it."""
        file = Path(os.environ["TEST_CRASH"])
        crash = file.read_text() if file.exists() else ""
        if crash:
            file.unlink()
        if crash == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        if crash == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        deliveries = self._publisher.publish(outgoing)
        if crash == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return deliveries

    def close(self) -> None:
        """See Publisher."""
        self._publisher.close()

    def abandon(self) -> None:
        """See Publisher."""
        self._publisher.abandon()


class CrashingScheduler(DurableScheduler):
    """A beat with that publisher: ``-S tests.apps.beating:CrashingScheduler``."""

    def make_publisher(self) -> Publisher:
        """See DurableScheduler."""
        return CrashingPublisher(super().make_publisher())
