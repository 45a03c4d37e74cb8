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

from celery_durable.store import leases, runs
from celery_durable.store.database import DATABASE_ERRORS
from celery_durable.store.executor import Executor
from celery_durable.worker.attempt import patiently

if TYPE_CHECKING:
    from celery_durable.worker.leased_run import LeasedRun

logger = logging.getLogger(__name__)

#: How long an end waits for another statement to go with, in seconds.
DELAY = 0.005


class LateEnds:
    """The end that waits in this process.

    One at most: a body runs under a lease, and taking that has taken the end before along, or the thread had.
    """

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._waiting: LeasedRun | None = None
        self._since = 0.0
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
        self._since = time.monotonic()
        self._put(run)

    def lease(self, executor: Executor, wanted: leases.Wanted) -> leases.Lease | str:
        """Take a lease, as :func:`celery_durable.store.leases.lease`, and store what waits."""
        run = self._taken(0.0)
        if run is None:
            return leases.lease(executor, wanted)
        try:
            ended, lease = leases.finish_and_lease(executor, run.lease.timer_id, run.lease.fence, wanted)
            _judge(executor, run, ended)
        except BaseException:
            self._put(run)
            raise
        return lease

    def store(self, older: float = 0.0) -> None:
        """Store what has waited for `older` seconds, alone."""
        # One at a time, or who comes second would find nothing and take it for stored.
        with self._storing:
            run = self._taken(older)
            if run is None:
                return
            id, fence, token = run.lease.timer_id, run.lease.fence, run.delivery.token
            database = run.database

            def finish(executor: Executor) -> None:
                _judge(executor, run, runs.finish(executor, id, fence))

            def renew(executor: Executor) -> bool:
                # The heartbeat, in another process, has taken it for ended.
                return bool(leases.renew(executor, [(id, token)], seconds=database.settings.lease))

            try:
                patiently(database, finish, database.settings.lease, ours=renew)
            except DATABASE_ERRORS as exc:
                run.tell_unstored(exc)

    def _put(self, run: LeasedRun) -> None:
        with self._lock:
            self._waiting = run
            if not self._some.is_set():
                self._some.set()  # also for one that comes back: the thread may have seen that nothing waits

    def _taken(self, older: float) -> LeasedRun | None:
        with self._lock:
            if self._pid != os.getpid() or time.monotonic() - self._since < older:
                return None
            run, self._waiting = self._waiting, None
            return run

    def _remaining(self) -> float:
        with self._lock:
            return 0.0 if self._waiting is None else max(0.0, self._since + DELAY - time.monotonic())

    def _watch(self) -> None:
        while True:
            self._some.wait()
            time.sleep(self._remaining())
            try:
                self.store(DELAY)
            except Exception:  # the thread must live: it is the only one that looks
                logger.exception("An end is left to its lease.")
            with self._lock:
                if self._waiting is None:
                    self._some.clear()


def _judge(executor: Executor, run: LeasedRun, done: bool) -> None:
    if not run.confirmed(executor, done, "succeeded"):
        run.tell_lost()


#: Of this process.
LATE_ENDS = LateEnds()


@worker_process_shutdown.connect(weak=False, dispatch_uid="celery-durable-late-ends")
def _store_the_last(**_: Any) -> None:
    LATE_ENDS.store()
