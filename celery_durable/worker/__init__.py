"""The worker's side: a task base class that runs each timer under a lease, and what it needs in the worker's process.

``DurableTask`` names :class:`~celery_durable.worker.request.DurableRequest` as its
request class and installs :class:`~celery_durable.worker.heartbeat.LeaseStep` when it
is bound; both are loaded in workers only.
"""

from __future__ import annotations

from celery_durable.worker.context import DurableContext
from celery_durable.worker.task import DurableTask

__all__ = ["DurableContext", "DurableTask"]
