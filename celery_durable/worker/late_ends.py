"""Ends of runs that nobody waits for: stored with the next lease of their process, in one transaction.

A lease and an end, each with a commit of its own, cost a task that does nothing
more than all that Celery does for it.  Where a run has succeeded, and no
result, callback or hook depends on that, its end waits for the statement that
takes the process's next lease, for :data:`DELAY` at most.

No promise depends on it: an end that is lost with its process leaves the run to
its lease, as the loss of the process one statement earlier would have.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import TYPE_CHECKING, Any

from celery.signals import worker_process_shutdown

from celery_durable import signals
from celery_durable.store import runs
from celery_durable.store.database import DATABASE_ERRORS
from celery_durable.store.executor import Executor
from celery_durable.worker.attempt import patiently

if TYPE_CHECKING:
    from celery_durable.worker.leased_run import LeasedRun

logger = logging.getLogger(__name__)

#: Runs, and since when their ends wait.
Waiting = list[tuple[float, "LeasedRun"]]

#: How long an end waits for another statement to go with, in seconds.
DELAY = 0.005


class LateEnds:
    """The ends that wait in this process, in the order in which the bodies returned."""

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._waiting: Waiting = []
        self._some = threading.Event()
        self._storing = threading.Lock()
        self._started = False

    def add(self, run: LeasedRun) -> None:
        """Store the end of `run` soon."""
        if self._pid != os.getpid():
            self._forget()
        if not self._started:
            threading.Thread(target=self._watch, name="durable-late-ends", daemon=True).start()
            self._started = True
        with self._lock:
            self._waiting.append((time.monotonic(), run))
            if not self._some.is_set():
                self._some.set()

    def lease(self, executor: Executor, wanted: runs.Wanted) -> runs.Lease | str:
        """Take a lease, as :func:`celery_durable.store.runs.lease`, and store what waits."""
        waiting = self._taken(0.0)
        if not waiting:
            return runs.lease(executor, wanted)
        try:
            *others, (_, last) = waiting
            for _, run in others:
                _finish(executor, run)
            ended, lease = runs.finish_and_lease(executor, last.lease.timer_id, last.lease.fence, wanted)
            if not ended:
                _judge(executor, last)
        except BaseException:
            self._put_back(waiting)
            raise
        return lease

    def _put_back(self, waiting: Waiting) -> None:
        with self._lock:
            self._waiting = waiting + self._waiting
            self._some.set()  # the thread may have seen that nothing waits

    def store(self, older: float = 0.0) -> None:
        """Store what has waited for `older` seconds, in a transaction of its own."""
        # One at a time, or who comes second would find nothing and take it for stored.
        with self._storing:
            waiting = self._taken(older)
            if not waiting:
                return
            database = waiting[0][1].database

            def operation(executor: Executor) -> None:
                for _, run in waiting:
                    _finish(executor, run)

            def renew(executor: Executor) -> bool:
                # The heartbeat, in another process, has taken them for ended.
                pairs = [(run.lease.timer_id, run.delivery.token) for _, run in waiting]
                return bool(runs.renew(executor, pairs, seconds=database.settings.lease))

            try:
                patiently(database, operation, database.settings.lease, ours=renew)
            except DATABASE_ERRORS as exc:
                for _, run in waiting:
                    logger.error(
                        "End of %s[%s] not stored, its lease will expire: %s", run.task.name, run.lease.timer_id, exc
                    )

    def _taken(self, older: float) -> Waiting:
        with self._lock:
            if self._pid != os.getpid() or not self._waiting or time.monotonic() - self._waiting[0][0] < older:
                return []
            waiting, self._waiting = self._waiting, []
            return waiting

    def _watch(self) -> None:
        while True:
            self._some.wait()
            time.sleep(DELAY)
            try:
                self.store(DELAY)
            except Exception:  # the thread must live: it is the only one that looks
                logger.exception("Ends of runs are left to their leases.")
            with self._lock:
                if not self._waiting:
                    self._some.clear()


def _finish(executor: Executor, run: LeasedRun) -> None:
    if not runs.finish(executor, run.lease.timer_id, run.lease.fence):
        _judge(executor, run)


def _judge(executor: Executor, run: LeasedRun) -> None:
    lease = run.lease
    # A cut connection may have swallowed the answer to our own statement.
    if "succeeded" in runs.endings(executor, lease.timer_id, lease.fence):
        return
    runs.refused(executor, lease.timer_id, lease.fence, lease.attempt, run.worker)
    logger.warning("Lease of %s[%s] lost, fence %s.", run.task.name, lease.timer_id, lease.fence)
    run.tell(signals.lease_lost, fence=lease.fence)


#: Of this process.
LATE_ENDS = LateEnds()


@worker_process_shutdown.connect(weak=False, dispatch_uid="celery-durable-late-ends")
def _store_the_last(**_: Any) -> None:
    LATE_ENDS.store()
