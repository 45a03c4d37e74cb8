"""The worker's heartbeat: one thread of the parent process that keeps the leases of all its runs.

In the parent, because a body that holds the GIL stops every thread of its own
process; a thread, because Celery's event loop sleeps in a soft shutdown and blocks
while the broker is away.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import UUID

import psycopg
from celery import bootsteps
from celery.exceptions import ImproperlyConfigured, WorkerShutdown
from celery.worker import state

from celery_durable.errors import DatabaseUnavailable, SchemaMismatch
from celery_durable.store import leases, meta
from celery_durable.store.database import DATABASE_ERRORS, Database, Trouble, translated
from celery_durable.store.executor import Executor, PsycopgExecutor
from celery_durable.worker import former, unknown
from celery_durable.worker.delivery import DELIVERIES, Delivery
from celery_durable.worker.native import Switch, start_thread
from celery_durable.worker.request import cancel_leased, release

if TYPE_CHECKING:
    from celery import Celery

logger = logging.getLogger(__name__)

#: How much longer than its hard limit a run is kept alive: its end has to be noticed.
_MARGIN = 60.0

#: Pause before a renewal that met another statement halfway is tried once more, in seconds.
_PAUSE = 0.1

#: Exit code of a worker that meets the wrong schema: the configuration is wrong (sysexits.h).
_EXIT_CONFIG = 78

#: What a cold shutdown calls of Celery's consumer, and its name in Celery 5.5.
CANCELLING, CANCELLING_5_5 = "cancel_active_requests", "cancel_all_unacked_requests"


class Heartbeat:
    """Renews the leases of this node, one statement a period, on a connection of its own.

    A broken connection is made anew at the next beat, which then comes within a second.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._connection: psycopg.Connection[Any] | None = None
        self._stop = Switch()
        self._stopped = Switch()
        self._failing = False
        #: The deliveries that held a lease at the last beat, by token.
        self.kept: dict[str, Delivery] = {}

    def start(self) -> None:
        """Begin to beat."""
        start_thread(self._run)

    def stop(self) -> None:
        """End the thread; waits for a statement in progress, but not for a server that does not answer."""
        self._stop.set()
        self._stopped.wait(self._database.settings.connect_timeout)

    def _run(self) -> None:
        period = self._database.settings.heartbeat
        try:
            while not self._stop.wait(min(period, 1.0) if self._failing else period):
                self._try_to_beat()
        finally:
            self._disconnect()
            self._stopped.set()

    def _try_to_beat(self) -> None:
        try:
            self.beat()
        except DATABASE_ERRORS as exc:
            self._disconnect()
            if not self._failing:
                logger.error("Leases cannot be renewed: %s. Trying again until it works.", exc)
            self._failing = True
        except Exception:  # a beat that fails must not end the thread: every later lease would expire
            self._disconnect()
            logger.exception("A heartbeat failed.")
        else:
            if self._failing:
                logger.warning("Leases are renewed again.")
            self._failing = False

    def beat(self) -> None:
        """Renew the leases of all runs in hand."""
        wanted = {each.token: each for each in running()}
        self.kept = wanted
        if not wanted:
            return
        with translated():
            if self._connection is None or self._connection.closed:
                self._connection = self._database.connect(
                    "celery-durable heartbeat", limits=self._database.lease_limits
                )
            executor = PsycopgExecutor(self._connection, self._database.schema)
            pairs = [(each.timer_id, each.token) for each in wanted.values()]
            held = self._renewed(executor, pairs)
        self.kept = {token: each for token, each in wanted.items() if each.timer_id in held}

    def _renewed(self, executor: Executor, pairs: Sequence[tuple[UUID, str]]) -> set[UUID]:
        """Renew; once more if a sweep that clears old renewals was met halfway, each with what the other wanted."""
        try:
            return leases.renew(executor, pairs, seconds=self._database.settings.lease)
        except psycopg.Error as exc:
            # The other goes first: at once, the same two would meet again.
            if Trouble.of(exc) is not Trouble.PASSING or self._stop.wait(_PAUSE):
                raise
            logger.debug("Leases were not renewed, trying once more: %s", exc)
        return leases.renew(executor, pairs, seconds=self._database.settings.lease)

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            try:
                connection.close()
            except psycopg.Error:
                pass  # it was broken before


def running() -> list[Delivery]:
    """The deliveries whose bodies run in this worker's pool, but for those beyond their time."""
    found = []
    for request in DELIVERIES.requests():
        limit = (request.time_limits or (None, None))[0] or request.task.time_limit
        longest = Database.of(request.task.app).settings.max_run if limit is None else limit + _MARGIN
        if request.active and time.time() - (request.time_start or 0) < longest:
            found.append(request.delivery)
    return found


class LeaseStep(bootsteps.StartStopStep):
    """Runs the heartbeat of a worker; ``DurableTask.on_bound`` installs it.

    Celery stops consumer steps at each loss of the broker, but shuts them down once,
    after the pool is gone: only then the heartbeat may end.
    """

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def __init__(self, parent: Any, **kwargs: Any) -> None:
        super().__init__(parent, **kwargs)
        self._heartbeat: Heartbeat | None = None

    def start(self, parent: Any) -> None:
        """Check the schema and begin to beat, unless that was done before the broker went away."""
        if self._heartbeat is not None:
            return
        name = CANCELLING if hasattr(parent, CANCELLING) else CANCELLING_5_5
        setattr(parent, name, partial(cancel_leased, parent, getattr(parent, name)))
        former.watch()
        unknown.watch()
        self._heartbeat = Heartbeat(usable_database(parent.app))
        self._heartbeat.start()

    def stop(self, parent: Any) -> None:
        """Nothing: bodies go on while the broker is away."""

    def terminate(self, parent: Any) -> None:
        """Nothing, as :meth:`stop`."""

    def shutdown(self, parent: Any) -> None:
        """End the heartbeat, and let go of runs that were cut short."""
        heartbeat, self._heartbeat = self._heartbeat, None
        if heartbeat is None:
            return
        heartbeat.stop()
        left = {**heartbeat.kept, **{each.token: each for each in running()}}
        if not left:
            return

        def let_go(executor: Executor) -> int:
            return sum(release(executor, each, "its worker was shut down") for each in left.values())

        try:
            count = Database.of(parent.app).run(let_go, bounded=True)
        except DATABASE_ERRORS as exc:
            logger.error("Runs are left to their leases: %s", exc)
        else:
            if count:
                logger.warning("%d runs were cut short and wait for their next attempt.", count)


def usable_database(app: Celery) -> Database:
    """Wait until Postgres can be reached, and check that this worker may use its schema.

    Raises:
        celery.exceptions.WorkerShutdown: with a wrong setting or schema, or when the worker is told to end meanwhile.
    """
    told = False
    while True:
        try:
            database = Database.of(app)
            meta.verify(database, app.main)
        except (SchemaMismatch, ImproperlyConfigured) as exc:
            logger.critical("This worker cannot run durable tasks: %s", exc)
            raise WorkerShutdown(getattr(os, "EX_CONFIG", _EXIT_CONFIG)) from exc
        except DatabaseUnavailable as exc:
            if not told:
                logger.error("%s. Waiting for it.", exc)
            told = True
            state.maybe_shutdown()
            time.sleep(0.5)
        else:
            return database
