"""A run under a lease: taken before the body, settled after it, every statement fenced."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from uuid import UUID

from celery.app.trace import task_has_custom
from celery.utils.dispatch import Signal
from kombu.exceptions import EncodeError
from kombu.serialization import dumps, loads

from celery_durable import calls, signals
from celery_durable.core.identity import new_id
from celery_durable.core.states import State
from celery_durable.errors import DuplicateDelivery
from celery_durable.store import leases, runs
from celery_durable.store.database import DATABASE_ERRORS, Database
from celery_durable.store.executor import Executor
from celery_durable.store.leases import Lease
from celery_durable.store.runs import Failure, Held
from celery_durable.store.timers import NewTimer
from celery_durable.worker.attempt import Attempt, Call, patiently
from celery_durable.worker.context import DurableContext
from celery_durable.worker.delivery import Delivery
from celery_durable.worker.failure import describe
from celery_durable.worker.late_ends import LATE_ENDS
from celery_durable.worker.policy import RetryPolicy

logger = logging.getLogger(__name__)

#: Headers that say which occurrence it is; they stay with the timer over a changed message.
_KEPT = ("durable_schedule", "durable_nominal", "durable_missed", "durable_reason")

#: The share of a lease after which the end of its run is stored at once.
YOUNG = 1 / 3

#: Whole numbers that every serializer takes: msgpack has 64 bits, and JSON as many digits as Python prints.
_INTEGERS = range(-(2**63), 2**63)


class UnserializableResult(EncodeError):
    """The body has returned something that the result backend's serializer does not take."""


class LeasedRun(Attempt):
    """One attempt of a timer.

    ::

        taken --body returned, no callbacks--> finished
          |  \\--body returned, callbacks wait--> held --task_success--> finished
          |                                         \\--callbacks not sent--> back to waiting, without the body
          +--failed or retry wanted--> back to waiting
          +--failed for the last time--> dead
          +--Ignore, Reject--> skipped

    A statement that finds the fence replaced ends the run as a duplicate: nothing
    is sent, nothing is stored in the result backend, and the refusal is recorded.
    """

    def __init__(self, task: Any, delivery: Delivery, lease: Lease, since: float) -> None:
        super().__init__(task, lease.attempt)
        #: The node's name.
        self.worker = str(task.request.hostname or "")
        #: Before the lease was there, on the monotonic clock.
        self._since = since
        self.delivery = delivery
        self.lease = lease
        #: No later statement is due.
        self.settled = False
        #: The return value is kept until callbacks are out.
        self.held = False
        #: The task has completed the run in its own transaction.
        self.completed = False
        #: What callbacks get, should the body not come to return it.
        self.result: Any = None

    @classmethod
    def take(cls, task: Any, delivery: Delivery, policy: RetryPolicy) -> LeasedRun:
        """Take the lease, and attach the run to the running request.

        Raises:
            DuplicateDelivery: this delivery may not run the timer.
        """
        request = task.request
        database = Database.of(task.app)
        settings = database.settings
        since = time.monotonic()

        wanted = leases.Wanted(
            timer_id=delivery.timer_id, call_id=delivery.call_id, token=delivery.token,
            worker=str(request.hostname or ""), seconds=settings.lease, max_attempts=policy.max_attempts,
            base=policy.base, cap=policy.cap,
        )  # fmt: skip

        try:
            lease = patiently(database, partial(LATE_ENDS.lease, wanted=wanted), settings.connect_timeout)
        except DATABASE_ERRORS as exc:
            # Whatever it is, the body has not begun: it is not the task that has failed.
            logger.error("No lease of %s[%s], it is dispatched again later: %s", task.name, delivery.timer_id, exc)
            raise DuplicateDelivery("unavailable") from exc
        if isinstance(lease, str):
            raise DuplicateDelivery(lease)
        run = cls(task, delivery, lease, since)
        run.attach(request)
        # A re-published message is the first one: only the lease knows how many attempts there were.
        request.retries = lease.attempt - 1
        run.tell(signals.timer_started, fence=lease.fence)
        return run

    def tell(self, signal: Signal, **more: Any) -> None:
        """Send one of our signals about this run."""
        attempt = {} if signal is signals.timer_dead else {"attempt": self.number}
        signal.send(self.task.app, timer_id=self.lease.timer_id, task=self.task.name, **attempt, **more)

    @property
    def context(self) -> DurableContext:
        """What the task is told about it."""
        lease, request = self.lease, self.task.request
        return DurableContext(
            timer_id=lease.timer_id, attempt=lease.attempt, fence=lease.fence, due_at=lease.due_at,
            dispatched_at=lease.dispatched_at, started_at=lease.started_at, schedule=lease.schedule,
            nominal=lease.nominal, missed=int(request.get("durable_missed") or 0), reason=request.get("durable_reason"),
        )  # fmt: skip

    @property
    def holds(self) -> bool:
        """Whether the lease is still the valid one."""
        return patiently(self.database, self._holds, self.database.settings.connect_timeout)

    def _holds(self, executor: Executor) -> bool:
        return leases.holds(executor, self.lease.timer_id, self.lease.fence)

    def succeed(self, value: Any) -> None:
        """The body has returned: finish, or keep the value until its callbacks are out.

        Raises:
            UnserializableResult: nothing is settled.
            DuplicateDelivery: the lease was lost.
        """
        held = self.encode(value)
        if held is not None:
            self.hold(held)
        elif self._may_end_late:
            self.settled = True
            LATE_ENDS.add(self)
        else:
            self.finish()

    @property
    def _may_end_late(self) -> bool:
        """Whether nothing but Postgres is told of a success, by a process that outlives it, and the lease is young."""
        return (
            self.delivery.elsewhere
            and time.monotonic() < self._since + self.database.settings.lease * YOUNG
            and ignores_result(self.task)
            and not any(task_has_custom(self.task, hook) for hook in ("on_success", "after_return"))
        )

    def encode(self, value: Any) -> Held | None:
        """Serialize the return value as the result backend will; None if nobody has to keep it.

        Raises:
            UnserializableResult: it cannot be serialized.
        """
        request = self.task.request
        follow_ups = bool(request.callbacks or request.chain or request.chord)
        if not follow_ups and (_plain(value) or ignores_result(self.task)):
            return None
        try:
            content_type, encoding, body = dumps(
                self.task.backend.prepare_value(value), serializer=self.task.app.conf.result_serializer
            )
        except Exception as exc:  # serializers are pluggable and raise what they like
            raise UnserializableResult(f"The result of {self.task.name} cannot be serialized: {exc}") from exc
        if not follow_ups:
            return None
        data = body if isinstance(body, bytes) else body.encode("utf-8")
        return Held(body=data, content_type=content_type, content_encoding=encoding)

    def resume(self) -> Any:
        """The value that an earlier attempt returned before its callbacks were known to be out."""
        held = self.lease.held
        assert held is not None
        self.hold(held)
        return loads(held.body, held.content_type, held.content_encoding, accept={held.content_type})

    def hold(self, held: Held) -> None:
        """Keep the return value; callbacks may be sent after this."""
        self._settle(None, lambda executor, id, fence: runs.hold(executor, id, fence, held))
        self.settled, self.held = False, True

    def finish(self) -> None:
        """End the run as succeeded."""
        self._settle("succeeded", runs.finish)

    def ending_with(self, value: Any) -> Ending:
        """The end of this run in the task's own transaction, with what its callbacks are to get.

        Raises:
            UnserializableResult: nothing is settled.
        """
        return Ending(self, self.encode(value))

    def back_off(
        self, *, delay: float | None = None, due_at: Any = None, failure: Failure = runs.NO_FAILURE,
        ending: str = "failed", lost: bool = False, message: NewTimer | None = None,
    ) -> None:  # fmt: skip
        """Put the timer back to waiting, with another message if it changed."""

        def operation(executor: Executor, id: UUID, fence: int) -> bool:
            call_id = None if message is None else UUID(message.headers["durable_call"])
            with executor.atomic() if message is not None else nullcontext():
                due = runs.retry(
                    executor, id, fence, delay=delay, due_at=due_at, failure=failure, ending=ending, lost=lost,
                    call_id=call_id,
                )  # fmt: skip
                if message is not None and call_id is not None and due is not None:
                    runs.new_message(executor, message, call_id)
            return due is not None

        self._settle(ending, operation, failure)
        self.tell(signals.timer_retried, error=failure.error)

    def bury(self, reason: str, failure: Failure) -> None:
        """Make a dead letter of the timer."""
        self._settle(
            "dead", lambda executor, id, fence: runs.bury(executor, id, fence, reason=reason, failure=failure), failure
        )
        self.tell(signals.timer_dead, reason=reason, error=failure.error)

    def postpone(self, error: BaseException) -> bool:
        """The callbacks of the held value could not be sent: they are due again after the task's pause.

        After :data:`~celery_durable.store.runs.MAX_LOST` times, or at once where the
        value fits into no message, the timer is a dead letter; True if it is one now.
        """
        failure, delay = describe(error), RetryPolicy.of(self.task).delay(self.number)
        dead = False

        def operation(executor: Executor, id: UUID, fence: int) -> bool:
            nonlocal dead
            row = runs.by_token(executor, id, self.delivery.token)
            if row is None or row.fence != fence:
                return False
            if isinstance(error, EncodeError) or row.lost + 1 >= runs.MAX_LOST:
                dead = True
                return runs.bury(executor, id, fence, reason="callbacks failed", failure=failure, ending="held")
            due = runs.retry(
                executor, id, fence, delay=delay, failure=failure, ending="held", lost=True, finishing=True
            )
            return due is not None

        self._settle("held", operation, failure)
        if dead:
            self.tell(signals.timer_dead, reason="callbacks failed", error=failure.error)
        return dead

    def skip(self, reason: str) -> None:
        """End the run because the task said so."""
        self._settle(
            "skipped", lambda executor, id, fence: runs.drop(executor, id, fence, state="skipped", reason=reason)
        )

    def _settle(
        self, ending: str | None, operation: Callable[[Executor, UUID, int], bool], failure: Failure = runs.NO_FAILURE
    ) -> None:
        id, fence = self.lease.timer_id, self.lease.fence

        def settle(executor: Executor) -> bool:
            return self.confirmed(executor, operation(executor, id, fence), ending, failure)

        self.settled = True
        # As long as the lease may last, the run is ours to settle: whoever gives up earlier has the body run again.
        try:
            ours = patiently(self.database, settle, self.database.settings.lease, ours=self._holds)
        except DATABASE_ERRORS as exc:
            self.tell_unstored(exc)
            raise DuplicateDelivery("unavailable") from exc
        if not ours:
            self.tell_lost()
            raise DuplicateDelivery("lease lost")

    def confirmed(self, executor: Executor, done: bool, ending: str | None, failure: Failure = runs.NO_FAILURE) -> bool:
        """Whether a fenced statement has ended the run; if it did not, and none before it, the refusal is recorded.

        Arguments:
            executor: in which it ran.
            done: whether it found its run.
            ending: what it would have left; None if that cannot be told later.
            failure: what it was about to record.
        """
        id, fence = self.lease.timer_id, self.lease.fence
        # A cut connection may have swallowed the answer to our own statement.
        if done or (ending is not None and ending in runs.endings(executor, id, fence)):
            return True
        runs.refused(executor, id, fence, self.number, self.worker, failure)
        return False

    def tell_lost(self) -> None:
        """The lease is somebody else's."""
        lease = self.lease
        logger.warning("Lease of %s[%s] lost, fence %s: nothing is sent.", self.task.name, lease.timer_id, lease.fence)
        self.tell(signals.lease_lost, fence=lease.fence)

    def tell_unstored(self, error: Exception) -> None:
        """Postgres was away for too long."""
        logger.error("End of %s[%s] not stored, its lease will expire: %s", self.task.name, self.lease.timer_id, error)

    def prepare(self, call: Call) -> NewTimer:
        """See :meth:`Attempt.prepare`: the same timer, task id and key, a new version of the message."""
        request = self.task.request
        timer = calls.prepare(
            self.task.app, self.task, call.args, call.kwargs, call.options, timer_id=self.lease.timer_id,
            call_id=new_id(), leased=True, key=request.get("durable_key"),
            headers={name: request.get(name) for name in _KEPT if request.get(name) is not None},
            max_payload=self.database.settings.max_payload,
        )  # fmt: skip
        return replace(timer, key=None)


def _plain(value: Any) -> bool:
    """Whether every serializer takes the value, as far as that is quickly said; a lone surrogate is no UTF-8."""
    kind = type(value)
    return value is None or kind is bool or (kind is int and value in _INTEGERS) or (kind is str and value.isascii())


class Ending:
    """The end of a run as the last statement of somebody else's transaction.

    Arguments:
        run: the run.
        held: the return value that callbacks wait for, if any do.
    """

    def __init__(self, run: LeasedRun, held: Held | None) -> None:
        self._run = run
        self._held = held

    def last_statement(self, executor: Executor) -> bool:
        """Finish the run, or keep its value; False when the lease is no longer ours."""
        timer_id, fence = self._run.lease.timer_id, self._run.lease.fence
        if self._held is None:
            return runs.finish(executor, timer_id, fence)
        return runs.hold(executor, timer_id, fence, self._held)

    def stands(self) -> bool:
        """Whether the transaction has committed, read from the run's row once no transaction holds it.

        Raises:
            DuplicateDelivery: Postgres did not tell for as long as the lease may last.
        """
        run = self._run
        timer_id, fence = run.lease.timer_id, run.lease.fence
        wanted = State.SUCCEEDED if self._held is None else State.FINISHING

        def look(executor: Executor) -> bool:
            return runs.standing(executor, timer_id, fence) == wanted

        try:
            return patiently(run.database, look, run.database.settings.lease)
        except DATABASE_ERRORS as exc:
            run.settled = True
            logger.error(
                "Whether %s[%s] has committed is not known, its lease will expire: %s", run.task.name, timer_id, exc
            )
            raise DuplicateDelivery("unavailable") from exc

    def settle(self, result: Any) -> None:
        """The transaction has committed: nothing more is due but callbacks."""
        self._run.result = result
        self._run.settled = self._held is None
        self._run.held = self._held is not None
        self._run.completed = True


def ignores_result(task: Any) -> bool:
    """Whether nobody wants this run's result; the call's word goes before the task's."""
    chosen = vars(task.request).get("ignore_result")
    return bool(task.ignore_result if chosen is None else chosen)
