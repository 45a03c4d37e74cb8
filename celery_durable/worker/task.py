"""The task base class whose timers run under a lease."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from celery.app.task import Task
from celery.exceptions import ImproperlyConfigured, Reject

from celery_durable import canvas, scheduling
from celery_durable.calls import INTERNAL, due
from celery_durable.core.moments import When
from celery_durable.errors import LeaseLost
from celery_durable.interception import BROKER_OPTIONS, intercept
from celery_durable.messages.capture import CapturingProducer
from celery_durable.messages.rendering import own_headers
from celery_durable.signals import lease_lost
from celery_durable.store.database import Database
from celery_durable.timer import Timer
from celery_durable.worker import execution, overrides
from celery_durable.worker.attempt import Attempt, Wanted
from celery_durable.worker.autoretry import Unwrapped
from celery_durable.worker.completion import Completion, completing
from celery_durable.worker.context import DurableContext
from celery_durable.worker.delivery import Delivery
from celery_durable.worker.leased_run import LeasedRun
from celery_durable.worker.policy import RetryPolicy

if TYPE_CHECKING:
    from celery import Celery
    from celery.result import AsyncResult

    Base = Task[..., Any]
else:
    Base = Task

logger = logging.getLogger(__name__)

#: Loaded by name, in workers only.
LEASE_STEP = "celery_durable.worker.heartbeat:LeaseStep"

#: Set on a running request, so that a body which calls its own task does not take another lease.
_ENTERED = "_durable_entered"


class DurableTask(Unwrapped, Base):
    """A task whose timers run under a lease, are retried through Postgres, and end as dead letters.

    Use it for one task (``base=DurableTask``) or for a whole app
    (``Celery(task_cls="celery_durable:DurableTask")``).  With Django's task class:
    ``class MyTask(DurableTask, DjangoTask): ...``.

    The options have Celery's names and meaning; only some defaults differ.

    ``acks_late`` and what belongs to it count for messages without a timer
    (``delay()``).  A timer's message is always acknowledged when its body begins: from
    there on the lease, not the broker, brings the timer back.
    """

    Request = "celery_durable.worker.request:DurableRequest"

    autoretry_for: tuple[type[BaseException], ...] = (Exception,)
    dont_autoretry_for: tuple[type[BaseException], ...] = ()
    #: Attempts after the first; None: no limit.
    max_retries: int | None = 3
    #: Seconds after the first attempt, doubling; False: always ``default_retry_delay``.
    retry_backoff: float | bool = 1
    #: Seconds at most.
    retry_backoff_max: float = 600
    #: Draw the delay uniformly from its upper half.
    retry_jitter: bool = True

    #: Tells scheduling that workers take a lease for this task.
    takes_lease = True
    #: The app whose binding has come to our ``on_bound``.
    _checked_for: Celery | None = None
    #: What the user said as ``track_started``; STARTED is stored after the lease, not before it.
    stores_started = False

    @classmethod
    def on_bound(cls, app: Celery) -> None:
        """Check the retry options, and install the heartbeat in workers of `app`.

        Raises:
            celery.exceptions.ImproperlyConfigured: for options that do not fit together, or a ``Request`` that is none
                of ours.
        """
        super().on_bound(app)
        cls._checked_for = app
        if cls.name is not None and cls.name.startswith(INTERNAL):
            cls._leave_to_celery(app)
            return
        RetryPolicy.of(cls).check(str(cls.name or cls.__qualname__))
        overrides.check_request(cls, DurableTask.Request)
        overrides.lease_around_call(cls, DurableTask)
        cls.stores_started = cls.stores_started or bool(cls.track_started)
        cls.track_started = False
        app.steps["consumer"].add(LEASE_STEP)
        intercept(app)
        if cls.name is not None:
            canvas.register(app, DurableTask)

    @classmethod
    def _leave_to_celery(cls, app: Celery) -> None:
        """With ``task_cls`` Celery's own tasks are of this class too: they poll, and know nothing of attempts."""
        cls.takes_lease = False
        cls.Request = Task.Request
        cls.autoretry_for = ()

    def _internal(self) -> bool:
        return self.name is not None and self.name.startswith(INTERNAL)

    @classmethod
    def bind(cls, app: Celery) -> Celery:
        """As Celery's.

        Raises:
            celery.exceptions.ImproperlyConfigured: the class has an ``on_bound`` that leaves ours out.
        """
        cls._checked_for = None
        bound: Celery = super().bind(app)
        if cls._checked_for is not app:
            raise ImproperlyConfigured(
                f"Task {cls.name}: its on_bound must call super().on_bound(app), which installs the heartbeat in workers."
            )
        return bound

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the body: under a lease if the message is a timer's."""
        return self._leased(partial(super().__call__, *args, **kwargs))

    def _leased(self, body: Callable[[], Any]) -> Any:
        request = self.request
        if request.called_directly or request.get(_ENTERED) or self._internal():
            return body()
        setattr(request, _ENTERED, True)
        if request.is_eager:
            return execution.run_eagerly(self, body)
        delivery = Delivery.of(vars(request))
        if delivery is None:
            return execution.run_direct(self, body)
        return execution.run_leased(self, delivery, body)

    @property
    def durable(self) -> DurableContext:
        """The present attempt, and the timer that it runs for, if it has one."""
        run = Attempt.of(self.request)
        return run.context if isinstance(run, LeasedRun) else DurableContext(attempt=self.request.retries + 1)

    @property
    def idempotency_key(self) -> str | None:
        """The same text in every attempt: the caller's key, the occurrence's, or else the timer's or task's id."""
        key: str | None = self.request.get("durable_key") or self.request.id
        return key

    def check_lease(self) -> None:
        """Make sure that no other attempt may have begun; to be called before side effects of a long body.

        Raises:
            LeaseLost: the lease has expired or was replaced.
            DatabaseUnavailable: Postgres cannot tell.
        """
        run = Attempt.of(self.request)
        if isinstance(run, LeasedRun) and not run.holds:
            run.tell(lease_lost, fence=run.lease.fence)
            raise LeaseLost(
                f"The lease of {self.name}[{run.lease.timer_id}], fence {run.lease.fence}, is no longer ours."
            )

    def complete_in(self, connection: Any) -> AbstractContextManager[Completion]:
        """End the run in the task's own transaction: its data and its completion commit together, or neither.

        ::

            with self.complete_in(session):
                session.add(Payment(order))

        Without a timer (``delay()``, eager) there is no run to end: the block's work is committed, and that is all.
        It begins the transaction and commits it at the end of the block, with the fenced completion as the last
        statement; an exception rolls it back, and the attempt has failed.  Where the answer to COMMIT is lost the
        run's row is read.  After the block nothing of this run is tried again: what the body raises then is logged, and the
        call's value is ``result``.  The heartbeat touches no row
        that the statement reads, so REPEATABLE READ and SERIALIZABLE see no conflict with it.

        Arguments:
            connection: a SQLAlchemy Session or Connection, a psycopg or a Django connection to the database
                that holds the timers: a psycopg connection without an open transaction, a Django one outside
                ``atomic()``; what a SQLAlchemy Session or Connection has begun is taken over, and committed.

        Returns:
            A context manager; where callbacks, a chain or a chord follow, set ``result`` of what it gives.

        Raises:
            LeaseLost: at the end of the block: another attempt may run; nothing was committed.
            RuntimeError: the transaction is not ours to commit.
            TypeError: no such connection.
        """
        run = Attempt.of(self.request)
        schema = Database.of(self.app).schema
        return completing(run if isinstance(run, LeasedRun) else None, connection, schema)

    def apply_at(
        self, when: When, args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None, *,
        key: str | None = None, on_conflict: Literal["keep", "replace", "error"] = "keep", connection: Any = None,
        tenant: str | None = None, **options: Any,
    ) -> Timer:  # fmt: skip
        """Store a call of this task for later; see :func:`celery_durable.apply_at`."""
        return scheduling.apply_at(
            self, when, args, kwargs, key=key, on_conflict=on_conflict, connection=connection, tenant=tenant, **options
        )

    def apply_async(
        self, args: Any = None, kwargs: Any = None, task_id: str | None = None, producer: Any = None,
        link: Any = None, link_error: Any = None, shadow: str | None = None, *, durable: bool = False, **options: Any,
    ) -> AsyncResult[Any]:  # fmt: skip
        """As Celery's; with ``eta`` or ``countdown`` the call waits in Postgres, never as a broker ETA.

        Arguments:
            args: positional arguments.
            kwargs: keyword arguments.
            task_id: as Celery's.
            producer: as Celery's; of no use to a call that waits.
            link: as Celery's.
            link_error: as Celery's.
            shadow: as Celery's.
            durable: store a call that is due at once, too: it survives the broker and runs under a lease.
            options: as Celery's.  A call whose ``expires`` comes before it is due is taken, as by Celery, and
                expires; ``apply_at`` refuses it.
        """
        named = {"task_id": task_id, "link": link, "link_error": link_error, "shadow": shadow}
        publish = partial(super().apply_async, args, kwargs, producer=producer, **named)
        if isinstance(producer, CapturingProducer) or self._internal():
            return publish(**options)
        run = Attempt.of(self.request)
        if run is not None and run.capturing:
            run.capture(args, kwargs, {**named, **options})
            return self.AsyncResult(str(task_id))
        eta, countdown = options.get("eta"), options.get("countdown")
        if self.app.conf.task_always_eager or not (eta or countdown or durable):
            if options.get("headers"):
                # Copied from a running task's request: another delivery's lease is not ours to give.
                options["headers"] = own_headers(options["headers"])
            return publish(**options)
        asked = due(eta or countdown or 0)
        when: When = asked.at if asked.at is not None else asked.after or 0.0
        chosen = {name: value for name, value in {**named, **options}.items() if value is not None}
        for name in ("eta", "countdown", *BROKER_OPTIONS):
            chosen.pop(name, None)
        timer = scheduling.defer(self, when, args, kwargs, chosen)
        return self.AsyncResult(timer.task_id)

    def retry(
        self, args: Any = None, kwargs: Any = None, exc: Exception | None = None, throw: bool = True,
        eta: datetime | None = None, countdown: float | None = None, max_retries: int | None = None, **options: Any,
    ) -> Any:  # fmt: skip
        """As Celery's, but the next attempt waits in Postgres and no broker is needed.

        The retry is stored when the body ends; with ``throw=False`` it takes place
        whatever the body does after this call.  Headers given here are added to the
        message's own.

        Raises:
            celery.exceptions.Retry: as Celery's.
            InvalidTimer: the changed arguments cannot be stored, or `eta` or `countdown` is no time or over a
                hundred years away: an ordinary failure of this attempt, as ``raise Retry(when=…)`` with such a
                time is.
            Exception: `exc`, or MaxRetriesExceededError, when no attempt is left.
        """
        request = self.request
        run = Attempt.of(request)
        if run is None:
            return super().retry(args, kwargs, exc, throw, eta, countdown, max_retries, **options)
        limit = self.max_retries if max_retries is None else max_retries
        if limit is not None and request.retries + 1 > limit:
            run.gave_up = True
        asked = due(eta or (self.default_retry_delay if countdown is None else countdown))
        if options.get("headers"):
            options["headers"] = {**own_headers(request.headers), **options["headers"]}
        run.capturing = True
        try:
            # Celery decides what is called, and whether; the call ends up in our apply_async.
            signal = super().retry(args, kwargs, exc, False, eta, countdown, max_retries, **options)
        except Reject as rejected:
            # What Celery makes of an apply_async of the user's that raises; it would end the timer without a retry.
            logger.exception("apply_async of %s, called by retry(), has raised; the run fails by it.", self.name)
            cause = getattr(rejected, "reason", None)  # not in celery-types
            raise cause if isinstance(cause, Exception) else rejected from None
        finally:
            run.capturing = False
            vars(self).pop("override_max_retries", None)
        call = run.captured
        assert call is not None
        changed = args is not None or kwargs is not None or bool(options)
        message = run.prepare(call) if changed or not isinstance(run, LeasedRun) else None
        run.wanted = Wanted(signal=signal, message=message, due=asked)
        if throw:
            raise signal
        return signal
