"""How a body is run, and what its end means: one function for each kind of run."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from typing import Any

import psycopg
from billiard.exceptions import TimeLimitExceeded, WorkerLostError
from celery import signals, states
from celery.exceptions import Ignore, Reject, Retry, WorkerShutdown, WorkerTerminate

from celery_durable.calls import due
from celery_durable.errors import DuplicateDelivery, DurableError, InvalidTimer
from celery_durable.worker.attempt import Attempt, Wanted
from celery_durable.worker.delivery import DELIVERIES, Delivery
from celery_durable.worker.direct_run import DirectRun
from celery_durable.worker.failure import describe
from celery_durable.worker.leased_run import LeasedRun, UnserializableResult, ignores_result
from celery_durable.worker.policy import RetryPolicy
from celery_durable.worker.soft_limit import soft_limit_held

logger = logging.getLogger(__name__)

Body = Callable[[], Any]


def run_leased(task: Any, delivery: Delivery, body: Body) -> Any:
    """Run a timer's body under a lease.

    Returns:
        What the body returned, now or in an earlier attempt whose callbacks were not sent.

    Raises:
        DuplicateDelivery: this delivery may not run it, or its lease was lost.
        celery.exceptions.Retry: the timer waits for its next attempt; nothing was published.
        BaseException: what the body raised, when it was the last attempt.
    """
    policy = RetryPolicy.of(task)
    run: LeasedRun | None = None
    try:
        with soft_limit_held():
            run = LeasedRun.take(task, delivery, policy)
            mark_started(task)
        if run.lease.held is not None:
            with soft_limit_held():
                return run.resume()
        value = body()
        with soft_limit_held(discard=True):
            if run.wanted is None and not run.completed:
                run.succeed(value)
    except BaseException as error:
        if run is not None and run.completed and isinstance(error, Exception):
            # Its data and its end are committed: it has succeeded, whatever came after.
            logger.exception("%s[%s] raised after it had completed.", task.name, run.lease.timer_id)
            return run.result
        if run is None or run.settled:
            raise
        with soft_limit_held(discard=True):
            outcome = _failed(run, policy, error)
        if outcome is error:
            raise
        raise outcome from error
    if run.wanted is not None and not run.completed:  # what has committed is not tried again
        with soft_limit_held(discard=True):
            raise _retry_wanted(run, run.wanted, None)
    return value


def run_direct(task: Any, body: Body) -> Any:
    """Run the body of a message that was published directly; the first retry stores a timer."""
    policy = RetryPolicy.of(task)
    run = DirectRun(task)
    mark_started(task)
    try:
        value = body()
    except (Ignore, Reject):
        raise
    except Exception as error:
        with soft_limit_held(discard=True):
            outcome = _failed_directly(run, policy, error)
        if outcome is error:
            raise
        raise outcome from error
    if run.wanted is not None:
        with soft_limit_held(discard=True):
            _store_wanted(run, run.wanted)
        raise run.wanted.signal
    return value


def run_eagerly(task: Any, body: Body) -> Any:
    """Run the body in the caller's process (``apply``, ``task_always_eager``): Celery's own eager retry, at once."""
    policy = RetryPolicy.of(task)
    try:
        return body()
    except (Ignore, Reject, Retry):
        raise
    except Exception as error:
        if not policy.covers(error) or not policy.allows(task.request.retries + 1):
            raise
        raise task.retry(exc=error, countdown=0, max_retries=policy.max_retries) from error


def mark_started(task: Any) -> None:
    """Store STARTED if the user wants it: after the lease, because a late duplicate would write it over a result."""
    if task.stores_started and not ignores_result(task):
        request = task.request
        meta = {"pid": os.getpid(), "hostname": request.hostname}
        task.backend.store_result(request.id, meta, states.STARTED, request=request)


def _failed(run: LeasedRun, policy: RetryPolicy, error: BaseException) -> BaseException:
    """Settle a run whose body raised; returns what Celery shall see."""
    if run.held:  # the body has returned, in an earlier attempt, and its value cannot be read
        if run.postpone(error) or not isinstance(error, Exception):
            return error
        return _announced(error, policy.delay(run.number))
    if isinstance(error, Reject) and getattr(error, "requeue", False):  # not in celery-types
        # The broker has no copy to give back: what is asked for is another attempt.
        cause = getattr(error, "reason", None)
        error = Retry(str(cause), exc=cause if isinstance(cause, Exception) else None)
    wanted = run.wanted
    if wanted is None and isinstance(error, Retry):
        try:
            wanted = _raised_by_hand(run, policy, error)
        except InvalidTimer as invalid:
            error = invalid
        else:
            if wanted is None:
                error = error.exc if isinstance(error.exc, Exception) else run.task.MaxRetriesExceededError(str(error))
                run.gave_up = True
    if wanted is not None:
        return _retry_wanted(run, wanted, error)
    if isinstance(error, (Ignore, Reject)):
        run.skip(f"{type(error).__name__}: {error}")
        return error
    if not isinstance(error, Exception):
        if run.delivery.elsewhere:
            # The parent of a prefork pool sees its child end, and settles the run.
            return error
        killed = isinstance(error, _greenlet_exit()) and getattr(DELIVERIES.get(run.delivery.token), "ending", None)
        if killed == "terminated":
            return error  # its request says what becomes of the timer
        if killed or isinstance(error, (WorkerShutdown, WorkerTerminate, KeyboardInterrupt)):
            run.back_off(delay=0.0, ending="lost", lost=True, failure=describe(error))
            return _announced(WorkerLostError("cancelled by its worker's shutdown"), 0.0) if killed else error
        # Thread, greenlet and solo pools do not notice: the request would stay active for ever.
        error = _ordinary(error)
    failure = describe(error)
    covered = policy.covers(error) and not isinstance(error, UnserializableResult)
    if covered and not run.gave_up and policy.allows(run.number):
        delay = policy.delay(run.number)
        run.back_off(delay=delay, failure=failure)
        return _announced(error, delay)
    run.bury(_reason(error, exhausted=covered or run.gave_up), failure)
    return error


def _reason(error: Exception, *, exhausted: bool) -> str:
    """Why a dead letter is dead, in the same words as where the parent of a prefork pool settles it."""
    if isinstance(error, TimeLimitExceeded):
        return "time limit"
    if isinstance(error, WorkerLostError):
        return "worker lost"
    return "exhausted" if exhausted else "failed"


def _retry_wanted(run: LeasedRun, wanted: Wanted, error: BaseException | None) -> Retry:
    cause = wanted.signal.exc or (error if not isinstance(error, Retry) else None)
    failure = describe(cause if isinstance(cause, BaseException) else wanted.signal)
    run.back_off(delay=wanted.delay, due_at=wanted.due.at, message=wanted.message, failure=failure, ending="retried")
    return wanted.signal


def _raised_by_hand(run: Attempt, policy: RetryPolicy, signal: Retry) -> Wanted | None:
    """``raise Retry(when=…)`` without ``self.retry()``: nothing was sent, so the timer carries it.

    Raises:
        InvalidTimer: that is no time.
    """
    if not policy.allows(run.number):
        return None
    return Wanted(signal=signal, due=due(policy.delay(run.number) if signal.when is None else signal.when))


def _failed_directly(run: DirectRun, policy: RetryPolicy, error: Exception) -> BaseException:
    wanted = run.wanted
    if wanted is not None:
        _store_wanted(run, wanted)
        return wanted.signal
    if run.gave_up or isinstance(error, Retry) or not policy.covers(error) or not policy.allows(run.number):
        return error
    delay = policy.delay(run.number)
    try:
        run.store(run.prepare(run.again()), delay=delay)
    except (DurableError, psycopg.Error, TypeError):
        # The failure itself is what the caller must learn.
        logger.exception("No retry of %s[%s] could be stored; it has failed.", run.task.name, run.task.request.id)
        return error
    return _announced(error, delay)


def _store_wanted(run: DirectRun, wanted: Wanted) -> None:
    assert wanted.message is not None
    run.store(wanted.message, delay=wanted.delay, due_at=wanted.due.at)


def _announced(error: Exception, delay: float) -> Retry:
    seconds: Any = round(delay, 3)  # celery-types asks for numbers.Real, which no float is
    return Retry(exc=error, when=seconds)


def _greenlet_exit() -> tuple[type[BaseException], ...]:
    """What kills a greenlet; nothing where there are none."""
    return (sys.modules["greenlet"].GreenletExit,) if "greenlet" in sys.modules else ()


def _ordinary(error: BaseException) -> Exception:
    seconds = getattr(error, "seconds", None)  # the Timeout of gevent and eventlet is the hard time limit there
    if seconds is not None:
        ordinary: Exception = TimeLimitExceeded(seconds)
    else:
        ordinary = WorkerLostError(f"The body of the task raised {error!r}.")
    ordinary.__cause__ = error
    return ordinary


def _finish_held(sender: Any = None, **_: Any) -> None:
    """Callbacks are out and the result is stored: a run whose value was kept has succeeded."""
    run = Attempt.of(sender.request)
    if isinstance(run, LeasedRun) and run.held and not run.settled:
        with soft_limit_held(discard=True):
            try:
                run.finish()
            except DuplicateDelivery:
                logger.warning(
                    "The end of %s[%s] could not be stored; it is sent again.", sender.name, run.lease.timer_id
                )


def _postpone_held(sender: Any = None, retval: Any = None, **_: Any) -> None:
    """Callbacks that were not sent, for whatever reason, are sent later: the value is kept, the body does not run again.

    Celery tells of an error that it knows as the call's value, of any other by raising it.
    """
    run = Attempt.of(sender.request)
    error = retval if isinstance(retval, BaseException) else sys.exc_info()[1]
    if isinstance(run, LeasedRun) and run.held and not run.settled and error is not None:
        with soft_limit_held(discard=True):
            try:
                if not run.postpone(error):
                    # Celery is about to tell errbacks and the chord of a failure; there is none yet.
                    sender.request.update(errbacks=None, chord=None)
            except DuplicateDelivery:
                logger.warning("The callbacks of %s[%s] are left to its lease.", sender.name, run.lease.timer_id)


signals.task_success.connect(_finish_held, weak=False, dispatch_uid="celery-durable-finish")
signals.task_postrun.connect(_postpone_held, weak=False, dispatch_uid="celery-durable-postpone")
