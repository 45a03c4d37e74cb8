"""The request of a durable task in the worker's main process: what becomes of a run whose child is gone.

Celery calls :meth:`on_accepted`, :meth:`on_failure`, :meth:`on_timeout`,
``_announce_revoked`` and ``_announce_cancelled`` of whatever ``Task.Request`` names; its own
``create_request_cls`` replaces ``on_success`` and ``execute_using_pool``, so those
cannot be overridden.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

from billiard.einfo import ExceptionWithTraceback  # type: ignore[attr-defined]  # not in celery-types
from billiard.exceptions import TimeLimitExceeded, WorkerLostError
from celery import signals
from celery.concurrency.solo import TaskPool as SoloPool
from celery.exceptions import Retry, WorkerTerminate
from celery.worker import state
from celery.worker.request import Request
from kombu.utils.encoding import safe_repr, safe_str

from celery_durable.core.states import State
from celery_durable.errors import DuplicateDelivery
from celery_durable.signals import timer_dead, timer_retried
from celery_durable.store import runs, timers
from celery_durable.store.database import DATABASE_ERRORS, Database
from celery_durable.store.executor import Executor, Row
from celery_durable.worker.attempt import Attempt
from celery_durable.worker.delivery import DELIVERIES, TOKEN, Delivery
from celery_durable.worker.failure import carried
from celery_durable.worker.policy import RetryPolicy

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: A hard time limit is reported before the child is killed: the next attempt shall not meet it.
AFTER_HARD_LIMIT = 1.0

#: How a body can end without its process being able to say so.
_LOST = (WorkerLostError, TimeLimitExceeded, SystemExit, KeyboardInterrupt)


class DurableRequest(Request):
    """One delivery, as the parent sees it."""

    # Celery's own, and not in celery-types.
    _already_cancelled: bool
    _already_revoked: bool
    _context: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.delivery = Delivery.of(self.request_dict)
        #: The run has been settled here: a second report of its end is no news.
        self._durably_settled = False
        #: This worker is ending the body: ``cancelled`` or ``terminated``; a greenlet finds the reason here.
        self.ending: str | None = None
        if self.delivery is not None:
            # Celery hands this dict to the process that runs the body.
            self.request_dict[TOKEN] = self.delivery.token
            DELIVERIES.add(self.delivery.token, self)

    @property
    def active(self) -> bool:
        """Whether the pool has begun with it and not ended."""
        return self in state.active_requests

    def on_accepted(self, pid: Any, time_accepted: float) -> None:
        """The pool has begun with it."""
        super().on_accepted(pid, time_accepted)
        if self.delivery is not None:
            # Also with late acknowledgement: the lease brings a timer back, the broker would bring a duplicate.
            self.acknowledge()

    def on_failure(self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False) -> None:
        """The body has raised, or its process has gone."""
        error = exc_info.exception
        if isinstance(error, ExceptionWithTraceback):
            error = error.exc
        if isinstance(error, DuplicateDelivery):
            self._skip(error.reason)
        elif self.delivery is None:
            super().on_failure(exc_info, send_failed_event=send_failed_event, return_ok=return_ok)
        elif return_ok or not isinstance(error, _LOST):
            self._report_failure(exc_info, send_failed_event, return_ok)
        elif self._durably_settled or self._already_cancelled or self._already_revoked:
            self._ready()
        else:
            if not isinstance(error, Exception):
                error = WorkerLostError(f"The worker process exited prematurely: {error!r}.")
            if not self._lost(error, exc_info):
                self._report_death(error, exc_info)

    def _report_failure(self, exc_info: Any, send_failed_event: bool, return_ok: bool) -> None:
        """Celery's own report; a result backend that is away must not end the worker, as it would without this."""
        try:
            super().on_failure(exc_info, send_failed_event=send_failed_event, return_ok=return_ok)
        except MemoryError:
            raise  # Celery's way to end a worker
        except Exception:  # result backends raise what they like; how the timer ended stands in Postgres
            logger.exception("The failure of %s[%s] could not be reported.", self.name, self.id)

    def _report_death(self, error: Exception, exc_info: Any) -> None:
        """What Celery's own ``on_failure`` reports of a child that is gone.

        Not by it: with late acknowledgement, or retries of lost workers, it would
        leave the report to a message that does not come again.
        """
        self._ready()
        task, context, traceback = self.task, self._context, getattr(exc_info, "traceback", None)
        try:
            task.backend.mark_as_failure(self.id, error, request=context, store_result=self.store_errors)
        except Exception:  # result backends raise what they like; how the timer ended stands in Postgres
            logger.exception("The failure of %s[%s] could not be reported.", self.name, self.id)
        task.request_stack.push(context)
        try:
            signals.task_failure.send(
                sender=task, task_id=self.id, exception=error, args=self.args, kwargs=self.kwargs, traceback=traceback,
                einfo=exc_info,
            )  # fmt: skip
        finally:
            task.request_stack.pop()
        self.send_event("task-failed", exception=safe_repr(error), traceback=safe_str(traceback))
        logger.error("%s[%s] is dead: %s", self.name, self.id, error)

    def on_timeout(self, soft: bool, timeout: float) -> None:
        """A time limit is over; a hard one was reported to :meth:`on_failure` already, except by gevent's pool."""
        if not soft and self.delivery is not None:
            if self._durably_settled:
                self._ready()
                return
            error = TimeLimitExceeded(timeout)
            if self._lost(error, None):
                return
        super().on_timeout(soft, timeout)

    def terminate(self, pool: Any, signal: Any = None) -> None:
        """A user's revoke shall end the body."""
        if self.delivery is not None and self.active and getattr(pool, "is_green", False):
            if self.ending is not None:
                return  # a second kill would meet the greenlet in the middle of its last statement
            self.ending = "terminated"
        super().terminate(pool, signal)

    def cancel(self, pool: Any, *args: Any, **kwargs: Any) -> None:
        """A cold shutdown shall end the body; what a pool cannot do ends neither the worker nor the attempt.

        Celery calls it in a signal's handler.
        """
        if self.delivery is None or not self.active:
            super().cancel(pool, *args, **kwargs)
        elif self.ending is not None:
            pass  # as above
        elif getattr(pool, "is_green", False):
            # The handler runs in the hub, where nothing may wait: the greenlet itself gives its run back.
            self.ending = "cancelled"
            pool.terminate_job(self.worker_pid)
        elif isinstance(pool, SoloPool):
            # The handler runs on top of the body, and so does what it raises.
            run = Attempt.of(self.task.request)
            if run is not None and not getattr(run, "settled", True):
                raise WorkerTerminate(True)
        else:
            try:
                super().cancel(pool, *args, **kwargs)
            except NotImplementedError:
                self.ending = "cancelled"
                logger.warning(
                    "%s[%s] keeps its lease to the end of its body: this pool cannot end it.", self.name, self.id
                )

    def _announce_revoked(self, reason: str, terminated: bool, signum: Any, expired: bool) -> None:
        super()._announce_revoked(reason, terminated, signum, expired)  # type: ignore[misc]  # not in celery-types
        delivery = self.delivery
        # An expired timer ends in the database, by the database's clock.
        if delivery is None or expired or self._durably_settled:
            return
        self._durably_settled = True

        def cancel(executor: Executor) -> None:
            row = runs.by_token(executor, delivery.timer_id, delivery.token)
            if row is not None:
                runs.drop(executor, delivery.timer_id, row.fence, state="cancelled", reason=reason)
            elif not terminated:
                timers.cancel(executor, delivery.timer_id, reason)

        self._in_database(cancel)

    def _announce_cancelled(self, *args: Any, **kwargs: Any) -> None:
        if self.delivery is None or self._durably_settled:
            super()._announce_cancelled(*args, **kwargs)  # type: ignore[misc]  # not in celery-types
            return
        self._durably_settled = True
        if self.release("cancelled by its worker's shutdown"):
            # Whatever the caller said: also with late acknowledgement it is the timer that comes again.
            super()._announce_cancelled()  # type: ignore[misc]  # as above
        else:
            # The body has ended while the worker waited: RETRY would be stored over its failure.
            self._already_cancelled = True
            self._ready()

    def release(self, reason: str) -> bool:
        """Put a run that this worker will not end back to waiting, at once; True if there was one."""
        delivery = self.delivery
        if delivery is None:
            return False
        return bool(self._in_database(lambda executor: release(executor, delivery, reason)))

    def _skip(self, reason: str) -> None:
        if reason in ("cancelled", "expired"):
            expired = reason == "expired"
            self._durably_settled = True
            self._announce_revoked("expired" if expired else "revoked", False, None, expired)
        self._ready()

    def _ready(self) -> None:
        state.task_ready(self)
        self.acknowledge()
        # Celery's table is keyed by task id: a skipped copy has just taken the running one out of it.
        for other in DELIVERIES.requests():
            if other is not self and other.id == self.id and other.active:
                state.requests[self.id] = other

    def _lost(self, error: Exception, exc_info: Any) -> bool:
        """Settle the run of a child that is gone; False when Celery shall report the failure."""
        self._durably_settled = True
        delivery, limit = self.delivery, isinstance(error, TimeLimitExceeded)
        assert delivery is not None
        policy = RetryPolicy.of(self.task)
        failure = carried(error, exc_info)
        told: dict[str, Any] = {"timer_id": delivery.timer_id, "task": self.name, "error": failure.error}
        reason, attempt = "time limit" if limit else "worker lost", 0

        def settle(executor: Executor) -> float | State | None:
            nonlocal attempt
            row = runs.by_token(executor, delivery.timer_id, delivery.token)
            if row is None or row.state != State.RUNNING:
                # The child may have died before it took the lease: its message is gone, its timer is not.
                runs.nudge(executor, delivery.timer_id)
                found = timers.find(executor, delivery.timer_id)
                return None if found is None else found.state
            attempt = row.attempt
            if _attempts_left(row, counts_as_lost=not limit):
                delay = policy.delay(row.attempt)
                if limit:
                    delay = max(delay, AFTER_HARD_LIMIT)
                due = runs.retry(
                    executor, delivery.timer_id, row.fence, delay=delay, failure=failure,
                    ending="failed" if limit else "lost", lost=not limit,
                )  # fmt: skip
                return delay if due is not None else None
            runs.bury(
                executor, delivery.timer_id, row.fence, reason=reason, failure=failure,
                ending="failed" if limit else "lost",
            )  # fmt: skip
            return State.DEAD

        settled: float | State | None = None
        try:
            settled = self._in_database(settle)
            if settled is State.DEAD:
                timer_dead.send(self.task.app, **told, reason=reason)
                return False
        finally:
            # Whatever happens, this request has ended: one that stays active is kept alive by the heartbeat.
            if settled is not State.DEAD:
                self._ready()
        if isinstance(settled, float):
            timer_retried.send(self.task.app, **told, attempt=attempt)
            self._report_retry(error, settled, exc_info)
        else:
            logger.warning("%s[%s]: %s; its timer is %s.", self.name, self.id, error, settled or "left to its lease")
        return True

    def _report_retry(self, error: Exception, delay: float, exc_info: Any) -> None:
        """What Celery's own ``_retry_worker_lost`` reports."""
        task, context = self.task, self._context
        traceback = getattr(exc_info, "traceback", None)
        if self.store_errors:
            try:
                task.backend.mark_as_retry(self.id, error, traceback, request=context)
            except Exception:  # result backends raise what they like; the timer waits for its next attempt all the same
                logger.exception("The retry of %s[%s] could not be reported.", self.name, self.id)
        self.send_event("task-retried", exception=safe_repr(error), traceback=safe_str(traceback))
        seconds: Any = round(delay, 3)  # celery-types asks for numbers.Real, which no float is
        signal = Retry(exc=error, when=seconds)
        task.request_stack.push(context)
        try:
            task.on_retry(error, self.id, self.args, self.kwargs, exc_info)
            signals.task_retry.send(sender=task, request=context, reason=signal, einfo=exc_info)
        finally:
            task.request_stack.pop()
        logger.warning("%s[%s]: %s; next attempt in %.3g s.", self.name, self.id, error, delay)

    def _in_database(self, operation: Callable[[Executor], T]) -> T | None:
        """Run an operation without waiting for Postgres to come back.

        This is the worker's main loop, and what cannot be said here the lease's end says.
        """
        try:
            return Database.of(self.task.app).run(operation, bounded=True)
        except DATABASE_ERRORS as exc:
            logger.error("%s[%s] is left to its lease: %s", self.name, self.id, exc)
            return None


def cancel_leased(consumer: Any, others: Callable[[], None]) -> None:
    """A cold shutdown ends all bodies under a lease; Celery's own (`others`) leaves out what was acknowledged late."""
    others()
    for request in DELIVERIES.requests():
        if request.active:
            request.cancel(consumer.pool)


def release(executor: Executor, delivery: Delivery, reason: str) -> bool:
    """Put the run that `delivery` holds back to waiting, at once; True if it held one.

    An attempt that the worker's end cut short is not the task's fault: another
    follows even after the last one, but not more than :data:`~celery_durable.store.runs.MAX_LOST`.
    """
    row = runs.by_token(executor, delivery.timer_id, delivery.token)
    if row is None or row.state != State.RUNNING:
        return False
    failure = runs.Failure(error_type="WorkerLostError", error=reason)
    if row.lost + 1 >= runs.MAX_LOST:
        return runs.bury(executor, delivery.timer_id, row.fence, reason="worker lost", failure=failure, ending="lost")
    due = runs.retry(executor, delivery.timer_id, row.fence, delay=0.0, failure=failure, ending="lost", lost=True)
    return due is not None


def _attempts_left(row: Row, *, counts_as_lost: bool) -> bool:
    if row.max_attempts is not None and row.attempt >= row.max_attempts:
        return False
    return not counts_as_lost or row.lost + 1 < runs.MAX_LOST
