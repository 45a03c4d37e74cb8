"""From a Celery call to the row that is stored for it: what is called, under which key, leased or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any
from uuid import UUID

from celery import current_app
from celery.app.task import Task
from celery.canvas import Signature, _chain, chord, group
from celery.local import maybe_evaluate
from celery.utils.time import maybe_iso8601, maybe_make_aware

from celery_durable.core.identity import instant_text
from celery_durable.core.moments import Moment, moment
from celery_durable.errors import InvalidTimer
from celery_durable.messages.rendering import Rendered, render
from celery_durable.store.timers import NewTimer

if TYPE_CHECKING:
    from celery import Celery

#: Longest idempotency key, task id and tenant, in bytes of UTF-8: well inside what a btree entry can hold.
MAX_NAME = 1024

#: Celery's own tasks are never leased, whatever their class: they poll, and know nothing of attempts.
INTERNAL = "celery."


def present_app() -> Celery:
    """The current app itself, not the proxy for it."""
    app: Celery = current_app._get_current_object()  # type: ignore[attr-defined]  # the proxy's own method
    return app


def split(
    call: Task[..., Any] | Signature[Any] | str, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None,
    options: Mapping[str, Any], app: Celery | None,
) -> tuple[Celery, Task[..., Any] | str, Sequence[Any] | None, Mapping[str, Any] | None, dict[str, Any]]:  # fmt: skip
    """Take a task, a signature or a task's name apart.

    Returns:
        The app, the registered task or its name, arguments, keyword arguments, Celery's options.

    Raises:
        InvalidTimer: for a canvas of several tasks, what is no call at all, and arguments that are none.
    """
    check_arguments(args, kwargs)
    if isinstance(call, str):
        app = app or present_app()
        return app, app.tasks.get(call, call), args, kwargs, dict(options)
    call = maybe_evaluate(call)
    if isinstance(call, Signature):
        if isinstance(call, (_chain, chord, group)):
            raise InvalidTimer(
                f"A timer stores one call, not a {type(call).__name__.strip('_')}. "
                "Store a task that applies the canvas when it runs."
            )
        merged = call.clone(tuple(args or ()), dict(kwargs or {}), **options)
        app = app or merged.app
        name = str(merged.task)
        return app, app.tasks.get(name, name), merged.args, merged.kwargs, dict(merged.options)
    if isinstance(call, Task):
        return app or call.app, call, args, kwargs, dict(options)
    raise InvalidTimer(f"A timer stores a task, a signature or a task's name, not {call!r}.")


def check_arguments(args: object, kwargs: object) -> None:
    """Raise InvalidTimer unless they are what a call can be made with."""
    if args is not None and not isinstance(args, (list, tuple)):
        raise InvalidTimer(f"args = {args!r}: it must be a list or a tuple; one argument is written (argument,).")
    if kwargs is not None and not (isinstance(kwargs, Mapping) and all(isinstance(name, str) for name in kwargs)):
        raise InvalidTimer(f"kwargs = {kwargs!r}: it must be a dict with text keys.")


def is_leased(task: Task[..., Any] | str, durable: bool | None) -> bool:
    """Decide whether workers take a lease for this call.

    Arguments:
        task: the registered task, or a name that is not registered here.
        durable: the caller's word, needed for such a name.

    Raises:
        InvalidTimer: when only the caller can know and has not said, or says otherwise than the task.
    """
    name = task if isinstance(task, str) else task.name
    if name.startswith(INTERNAL):
        return False
    if isinstance(task, str):
        if durable is None:
            raise InvalidTimer(
                f"Task {name!r} is not registered in this app, so celery-durable cannot see whether it is a "
                "DurableTask. Say durable=True (it is) or durable=False (a plain task)."
            )
        return durable
    registered = bool(getattr(task, "takes_lease", False))
    if durable is not None and durable is not registered:
        raise InvalidTimer(
            f"durable={durable} does not fit: {name!r} is {'a DurableTask' if registered else 'a plain task'} in this app."
        )
    return registered


def prepare(
    app: Celery, task: Task[..., Any] | str, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None,
    options: Mapping[str, Any], *, timer_id: UUID, leased: bool, max_payload: int, call_id: UUID | None = None,
    key: str | None = None, due_at: datetime | None = None, delay: float | None = None, tenant: str | None = None,
    schedule: str | None = None, nominal: datetime | None = None, headers: Mapping[str, Any] | None = None,
) -> NewTimer:  # fmt: skip
    """Render a call and make the row to be stored for it.

    Arguments:
        app: the app.
        task: a registered task, or a name.
        args: positional arguments.
        kwargs: keyword arguments.
        options: of Celery's ``apply_async``, without eta and countdown; ``task_id`` may be among them.
        timer_id: the new timer's id.
        leased: see :func:`is_leased`.
        max_payload: most bytes of body and headers together.
        call_id: version of the message; the timer's id for its first one.
        key: idempotency key chosen by the caller or a schedule; the timer's id otherwise.
        due_at: an aware instant; or
        delay: seconds from the database's now.
        tenant: fairness group.
        schedule: name of the schedule that makes the call.
        nominal: the occurrence's nominal instant.
        headers: further flat headers.

    Raises:
        InvalidTimer: the call cannot be stored.
        TypeError: the arguments do not fit the task's signature.
    """
    check_name("key", key)
    check_name("tenant", tenant)
    chosen_id = options.get("task_id")
    check_name("task_id", None if chosen_id is None else str(chosen_id))
    own = {
        "durable_timer": str(timer_id), "durable_call": str(call_id or timer_id),
        "durable_key": key or str(timer_id), "durable_leased": leased,
    }  # fmt: skip
    if schedule is not None and nominal is not None:
        own |= {"durable_schedule": schedule, "durable_nominal": instant_text(nominal)}
    rendered = render(
        app, task, args, kwargs, {**options, "task_id": chosen_id or str(timer_id)}, headers={**own, **(headers or {})}
    )
    return stored(
        rendered, timer_id=timer_id, leased=leased, max_payload=max_payload, key=key, due_at=due_at, delay=delay,
        tenant=tenant, schedule=schedule, nominal=nominal,
    )  # fmt: skip


def stored(rendered: Rendered, *, timer_id: UUID, leased: bool, max_payload: int, **rest: Any) -> NewTimer:
    """Make the row of a rendered call.

    Raises:
        InvalidTimer: when it is larger than `max_payload`.
    """
    message = rendered.message
    check_size(rendered, max_payload)
    return NewTimer(
        id=timer_id, task=rendered.task, leased=leased, body=message.body, content_type=message.content_type,
        content_encoding=message.content_encoding, headers=message.headers, properties=message.properties,
        exchange=message.exchange, routing_key=message.routing_key, queue=message.queue,
        expires_at=rendered.expires_at, task_id=rendered.task_id, **rest,
    )  # fmt: skip


def check_size(rendered: Rendered, max_payload: int) -> None:
    """Raise InvalidTimer when the message is larger than `max_payload` bytes."""
    size = rendered.message.size
    if size > max_payload:
        raise InvalidTimer(
            f"The message of {rendered.task} takes {size:,} bytes, more than durable_max_payload = {max_payload:,}. "
            "Pass a reference to the data instead of the data, or raise the setting."
        )


def check_name(argument: str, value: str | None) -> None:
    """Raise InvalidTimer unless `value` is None or text that Postgres can index as it is."""
    if value is None:
        return
    if not isinstance(value, str) or not value:
        raise InvalidTimer(f"{argument} = {value!r}: it must be text, and not empty.")
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise InvalidTimer(f"{argument} = {value!r}: it holds a lone surrogate, which is no character.") from None
    if "\x00" in value:
        raise InvalidTimer(f"{argument} = {value!r}: it holds a NUL character, which Postgres cannot store.")
    if size > MAX_NAME:
        raise InvalidTimer(f"{argument} of {size:,} bytes is too long: at most {MAX_NAME:,}. Use a digest of it.")


def instant(eta: datetime | str) -> datetime:
    """An eta as Celery's worker reads it: ISO text is parsed, and what has no zone is UTC.

    Raises:
        ValueError: for text that is no date.
    """
    parsed = maybe_iso8601(eta)
    if parsed is None:
        raise ValueError("an empty text is no date")
    return maybe_make_aware(parsed).astimezone(timezone.utc)


def due(when: Any) -> Moment:
    """Read the ``eta`` or ``countdown`` of a call or a retry, each as Celery does.

    Raises:
        InvalidTimer: it is no time, not finite, or over a hundred years away.
    """
    try:
        if isinstance(when, (datetime, str)):
            return moment(instant(when))
        # Celery takes every number: Decimal, numpy's.
        plain = (
            when if isinstance(when, (bool, int, float, timedelta)) or not hasattr(when, "__float__") else float(when)
        )
        return moment(plain)
    except (TypeError, ValueError, OverflowError) as exc:
        raise InvalidTimer(f"eta or countdown {when!r} cannot be used: {exc}") from exc
