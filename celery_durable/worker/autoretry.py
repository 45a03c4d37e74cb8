"""Keeps Celery's own automatic retries away from a durable task, whose ``__call__`` does them.

Celery's ``add_autoretry_behaviour`` reads ``autoretry_for`` and the ``retry_*``
options when a task is made, and wraps ``run`` in a second policy, which would
publish each retry with a broker ETA.  It leaves alone a task that has
``_orig_run`` already, because it takes it for one that it has wrapped itself.
"""

from __future__ import annotations

from typing import Any


class Unwrapped:
    """Mixed into a task class, makes Celery believe that ``run`` is wrapped already."""

    @property
    def _orig_run(self) -> Any:
        return self.run  # type: ignore[attr-defined]  # of the task class this is mixed into
