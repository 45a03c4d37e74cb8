"""Render a Celery call to a :class:`~.message.Message`, in the caller's process.

Celery's own ``apply_async`` or ``send_task`` does the work, with a producer that
keeps what it is given.  So argument checks, pydantic, shadow names, routes,
stamps, parent and root ids and the publish signals happen exactly as in a
direct call, and the message published later equals the one a direct call
would have sent.  Nothing here talks to a broker or to a result backend.

What Celery refuses is refused at the call, by the exception Celery raises
(:exc:`TypeError` for arguments that do not fit the signature); what cannot be
serialized raises :exc:`~celery_durable.errors.InvalidTimer`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import celery
from celery.app.routes import MapRoute
from celery.app.task import Task
from celery.exceptions import AlwaysEagerIgnored, ImproperlyConfigured
from celery.local import maybe_evaluate
from celery.result import AsyncResult
from celery.utils.saferepr import saferepr
from celery.utils.time import maybe_iso8601, maybe_make_aware
from kombu import uuid
from kombu.compression import compress

from ..errors import InvalidTimer
from .amqp_limits import check_amqp
from .capture import CapturingProducer, serialize
from .checks import check_message, check_options
from .message import Message

if TYPE_CHECKING:
    from celery import Celery

#: Reserved for the product: Celery copies a running task's headers into retries and children,
#: and the headers of one delivery must not travel into another.
PREFIX = "durable_"

#: How and where a direct call would publish: the beat has its own connection and never retries.
_PUBLISHING = (
    "eta", "countdown", "producer", "publisher", "connection", "event_dispatcher",
    "retry", "retry_policy", "timeout", "confirm_timeout", "headers",
)  # fmt: skip

#: What ``send_task`` writes into the header for a task it does not know: None since 5.7.
_UNKNOWN_IGNORE_RESULT = None if celery.VERSION >= (5, 7) else False


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """A call ready to be stored."""

    message: Message
    task: str
    """Name of the task."""
    task_id: str
    expires_at: datetime | None
    """When the call stops being wanted, in UTC; Celery's ``expires`` made absolute."""
    ignore_result: bool


def render(
    app: Celery,
    task: Task[..., Any] | str,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    *,
    headers: Mapping[str, Any] | None = None,
) -> Rendered:
    """Render one call.

    Arguments:
        app: the caller's app.
        task: a task, or the name of one; a name registered in ``app.tasks`` is called as that task.
        args: positional arguments.
        kwargs: keyword arguments.
        options: as for ``apply_async``, without ``eta`` and ``countdown``.  How a
            direct call would publish (``producer``, ``connection``, ``retry``,
            ``retry_policy``, ``timeout``) is left out.  Headers named
            ``durable_…`` are left out too: they belong to another delivery.
        headers: further flat headers of this call, ``durable_…`` ones among them.

    Returns:
        The message with what the store wants to know about it.  With
        ``task_always_eager`` the call is rendered all the same, never run.

    Raises:
        InvalidTimer: ``eta`` or ``countdown`` is given, or something cannot be serialized.
        TypeError: the arguments do not fit the task's signature.
        celery.exceptions.ImproperlyConfigured: ``task_protocol`` is 1, which has no headers.
    """
    return _render(app, _lookup(app, task), args, kwargs, options, headers)[0]


def render_many(
    app: Celery,
    task: Task[..., Any] | str,
    items: Iterable[tuple[str | None, Sequence[Any] | None, Mapping[str, Any] | None]],
    options: Mapping[str, Any] | None = None,
    *,
    headers: Mapping[str, Any] | None = None,
) -> Iterator[Rendered]:
    """Render many calls of one task, several times faster than one by one.

    The first call goes through Celery's path and the others are copies of it
    with their own id, arguments and argument texts; the signature is checked
    for each.  So the publish signals fire once, for the first call.  Where
    the arguments may decide more than that (``task_routes`` holds a router
    function, or the task names its own ``shadow_name`` or ``apply_async``),
    every call takes Celery's path.

    Arguments:
        app: the caller's app.
        task: a task, or the name of one.
        items: (task id or None, args, kwargs) of each call.
        options: of all calls, as for :func:`render`; a ``task_id`` in there is left out.
        headers: further flat headers of all calls.  Headers that differ may be
            added to each result's ``message.headers``.

    Yields:
        One result per item, in order.  Refusals as of :func:`render` come when their item is reached.
    """
    task = _lookup(app, task)
    options = {key: value for key, value in (options or {}).items() if key != "task_id"}
    copier: Callable[..., Rendered] | None = None
    for task_id, args, kwargs in items:
        if copier is not None:
            yield copier(task_id or uuid(), args, kwargs)
            continue
        rendered, producer = _render(app, task, args, kwargs, {**options, "task_id": task_id}, headers)
        if not _arguments_decide(app, task):
            copier = _copier(app, task, rendered, producer, options)
        yield rendered


def own_headers(headers: Mapping[str, Any] | None) -> dict[str, Any]:
    """The headers that are the user's: those not named ``durable_…``."""
    return {key: value for key, value in (headers or {}).items() if not str(key).startswith(PREFIX)}


def _lookup(app: Celery, task: Task[..., Any] | str) -> Task[..., Any] | str:
    if isinstance(task, str):
        registered: Task[..., Any] | str = app.tasks.get(task, task)
        return registered
    evaluated: Task[..., Any] = maybe_evaluate(task)  # a decorated task is a proxy until its first use
    return evaluated


def _render(
    app: Celery,
    task: Task[..., Any] | str,
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
    options: Mapping[str, Any] | None,
    headers: Mapping[str, Any] | None,
) -> tuple[Rendered, CapturingProducer]:
    given = dict(options or {})
    check_options(given)
    for name in ("eta", "countdown"):
        if given.get(name):
            raise InvalidTimer(
                f"{name} = {given[name]!r} has no place in the options of a stored call: "
                "the timer itself says when. Leave it out."
            )
    # Compared so because reading app.conf costs more than all the rest of this function.
    if app.amqp.create_task_message == app.amqp.as_task_v1:
        raise ImproperlyConfigured(
            "task_protocol = 1 cannot be used with durable timers: its messages have no headers. Set it to 2."
        )
    merged = own_headers(given.get("headers"))
    merged.update(headers or {})
    for name in _PUBLISHING:
        given.pop(name, None)
    if given.get("task_id") is not None:
        given["task_id"] = str(given["task_id"])

    unset: Any = _UNKNOWN_IGNORE_RESULT if isinstance(task, str) else task.ignore_result
    ignore_result = given.get("ignore_result", unset)
    producer = CapturingProducer(ignore_result)
    # With the true value send_task would call the result backend, which may subscribe to a
    # channel for the result: network, and one subscription for every waiting timer.
    given.update(producer=producer, headers=merged or None, retry=False, ignore_result=True)
    result = _call(app, task, args, kwargs, given)
    message = producer.message
    if message is None:
        raise InvalidTimer(f"apply_async of {_name(task)} did not publish anything, so there is nothing to store.")
    check_message(message)
    check_amqp(app, message)
    if isinstance(result, AsyncResult):
        result.ignored = ignore_result
    return (
        Rendered(
            message=message,
            task=message.headers["task"],
            task_id=message.headers["id"],
            expires_at=_instant(message.headers.get("expires")),
            ignore_result=bool(ignore_result),
        ),
        producer,
    )


def _call(app: Celery, task: Task[..., Any] | str, args: Any, kwargs: Any, options: dict[str, Any]) -> object:
    if not app.conf.task_always_eager:
        if isinstance(task, str):
            return app.send_task(task, args, kwargs, **options)
        return task.apply_async(args, kwargs, **options)
    if not isinstance(task, str):
        # apply_async would run the task here and now.
        args, kwargs = _checked(task, args, kwargs, options)
        celery_task: Any = task
        shadow = options.pop("shadow", None) or celery_task.shadow_name(args, kwargs, options)
        options = {**celery_task._get_exec_options(), **options, "shadow": shadow, "task_type": task}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AlwaysEagerIgnored)
        return app.send_task(_name(task), args, kwargs, **options)


def _name(task: Task[..., Any] | str) -> str:
    return task if isinstance(task, str) else str(task.name)


def _checked(task: Task[..., Any] | str, args: Any, kwargs: Any, options: Mapping[str, Any]) -> tuple[Any, Any]:
    """Check and convert the arguments as :meth:`celery.app.task.Task.apply_async` does before it sends."""
    if isinstance(task, str):
        return args, kwargs
    if task.typing:
        check_arguments: Callable[..., object] = getattr(task, "__header__")  # noqa: B009 - not in celery-types
        check_arguments(*(args or ()), **(kwargs or {}))
    dump = getattr(task, "_dump_pydantic_arguments", None)  # since Celery 5.7
    if dump is not None and (options.get("serializer") or task.serializer) != "pickle":
        args, kwargs = dump(args, kwargs)
    return args, kwargs


def _arguments_decide(app: Celery, task: Task[..., Any] | str) -> bool:
    if any(not isinstance(route, MapRoute) for route in app.amqp.routes):
        return True
    return not isinstance(task, str) and (
        type(task).shadow_name is not Task.shadow_name
        or not type(task).apply_async.__module__.startswith(("celery.", "celery_durable."))
    )


def _copier(
    app: Celery,
    task: Task[..., Any] | str,
    first: Rendered,
    producer: CapturingProducer,
    options: Mapping[str, Any],
) -> Callable[[str, Any, Any], Rendered]:
    template = first.message
    embed = producer.content[2]
    serializer = producer.serializer_used
    compression = template.headers.get("compression")
    own_root = template.headers["root_id"] == first.task_id
    own_correlation = template.properties.get("correlation_id") == first.task_id
    args_limit, kwargs_limit = app.amqp.argsrepr_maxsize, app.amqp.kwargsrepr_maxsize
    levels = app.conf.get("task_repr_maxlevels", 3)  # a setting since Celery 5.7

    def copy(task_id: str, args: Any, kwargs: Any) -> Rendered:
        task_id = str(task_id)
        args, kwargs = _checked(task, args, kwargs, options)
        args, kwargs = args or (), kwargs or {}
        if not isinstance(args, (list, tuple)):
            raise TypeError("task args must be a list or tuple")
        if not isinstance(kwargs, Mapping):
            raise TypeError("task keyword arguments must be a mapping")
        _, _, body = serialize((args, kwargs, embed), serializer)
        if compression:
            body, _ = compress(body, compression)
        headers = dict(template.headers)
        headers["id"] = task_id
        if "argsrepr" not in options:
            headers["argsrepr"] = shown(args, args_limit, levels)
        if "kwargsrepr" not in options:
            headers["kwargsrepr"] = shown(kwargs, kwargs_limit, levels)
        if own_root:
            headers["root_id"] = task_id
        properties = dict(template.properties)
        if own_correlation:
            properties["correlation_id"] = task_id
        return Rendered(
            message=Message(
                body=body,
                content_type=template.content_type,
                content_encoding=template.content_encoding,
                headers=headers,
                properties=properties,
                exchange=template.exchange,
                routing_key=template.routing_key,
                queue=template.queue,
            ),
            task=first.task,
            task_id=task_id,
            expires_at=first.expires_at,
            ignore_result=first.ignore_result,
        )

    return copy


def shown(value: Any, limit: int, levels: int = 3) -> str:
    """Celery's :func:`~celery.utils.saferepr.saferepr`, with a short way for flat, short arguments."""
    kind = type(value)
    if levels != 3 or kind not in (tuple, list, dict):
        return saferepr(value, limit, maxlevels=levels)
    parts: list[str] = []
    if kind is dict:
        for key, each in value.items():
            text, text_of_key = _shown_scalar(each), _shown_scalar(key)
            if text is None or type(key) is not str:
                return saferepr(value, limit, maxlevels=levels)
            parts.append(f"{text_of_key}: {text}")
        inner, opening, closing = ", ".join(parts), "{", "}"
    else:
        for each in value:
            text = _shown_scalar(each)
            if text is None:
                return saferepr(value, limit, maxlevels=levels)
            parts.append(text)
        inner = ", ".join(parts)
        opening, closing = ("[", "]") if kind is list else ("(", ",)" if len(parts) == 1 else ")")
    if len(inner) + 3 >= limit:
        return saferepr(value, limit, maxlevels=levels)
    return opening + inner + closing


def _shown_scalar(value: Any) -> str | None:
    kind = type(value)
    if kind is str:
        text: str = value
        return "'" + text.replace("'", "\\'") + "'"
    return str(value) if kind in (int, float, bool, type(None)) else None


def _instant(expires: Any) -> datetime | None:
    if expires is None:
        return None
    # Celery reads a naive expiry as UTC, whatever the app's zone.
    try:
        instant = maybe_iso8601(expires)
    except (TypeError, ValueError) as exc:
        raise InvalidTimer(f"expires = {expires!r}: it must be seconds, a datetime or ISO-8601 text.") from exc
    return None if instant is None else maybe_make_aware(instant).astimezone(timezone.utc)
