"""``apply_at`` and its family: store a call for later, find it, move it, take it back.

A call is rendered here, in the caller's process, and stored by one INSERT, in
the caller's own transaction if it hands its connection over.  Neither the
broker nor the result backend is asked anything.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from itertools import count, islice
from typing import TYPE_CHECKING, Any, Literal
from uuid import UUID

from celery.app.task import Task
from celery.canvas import Signature

from celery_durable import calls, canvas
from celery_durable.core.identity import new_id
from celery_durable.core.moments import Moment, When, moment
from celery_durable.core.states import Answer
from celery_durable.errors import InvalidTimer, KeyConflict
from celery_durable.messages.rendering import render_many
from celery_durable.store import timers
from celery_durable.store.database import Database
from celery_durable.store.executor import Executor
from celery_durable.timer import Timer

if TYPE_CHECKING:
    from celery import Celery

OnConflict = Literal["keep", "replace", "error"]
_CONFLICTS = ("keep", "replace", "error")

#: Rows of one INSERT of apply_many: larger ones gain nothing and hold more memory.
BULK = 1000


def apply_at(
    call: Task[..., Any] | Signature[Any] | str, when: When, args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None, *, key: str | None = None, on_conflict: OnConflict = "keep",
    connection: Any = None, tenant: str | None = None, durable: bool | None = None, app: Celery | None = None,
    **options: Any,
) -> Timer:  # fmt: skip
    """Store a call that runs once, at or soon after its due time.

    Arguments:
        call: a task, a signature, or a task's name; or a chain, group or chord, which a task of ours applies
            when it is due: some worker must have a DurableTask.
        when: an aware datetime, or a delay as a timedelta or in seconds, counted by the
            database's clock.  An instant in the past runs at once.
        args: positional arguments.
        kwargs: keyword arguments.
        key: idempotency key: at most one timer holds it, while it is live and for
            ``durable_retention`` after its end.  The task reads it as ``self.idempotency_key``.
        on_conflict: if another timer holds the key: ``keep`` returns that one,
            ``replace`` gives it this message and due time while it waits, ``error`` raises.
        connection: a SQLAlchemy Session or Connection, a psycopg or a Django connection:
            the timer commits or rolls back with the caller's transaction.
        tenant: group for fairness.
        durable: for a name that is not registered here: is it a DurableTask?
        app: the app, when the call does not say.
        options: Celery's, as for ``apply_async``: queue, priority, expires, headers, link, task_id …

    Returns:
        The timer's handle; ``created`` is False when an older one holds the key.

    Raises:
        InvalidTimer: naive datetime, NaN, absurd delay, unserialisable or too large arguments,
            ``expires`` before the due time … Nothing was stored, the transaction is usable.
        TypeError: the arguments do not fit the task's signature.
        KeyConflict: the key is taken, and `on_conflict` does not allow that.
        DatabaseUnavailable: Postgres cannot be reached.
    """
    if on_conflict not in _CONFLICTS:
        raise InvalidTimer(f"on_conflict = {on_conflict!r} is none of {', '.join(_CONFLICTS)}.")
    if canvas.is_canvas(call):
        app = app or call.app  # type: ignore[union-attr]  # a canvas is a signature
        args, options, result = canvas.frozen(call, args, kwargs, options)  # type: ignore[arg-type]  # as above
        timer = _apply(
            canvas.APPLY, when, args, None, key=key, on_conflict=on_conflict, connection=connection, tenant=tenant,
            durable=True, app=app, options=options, check_expiry=True,
        )  # fmt: skip
        timer.result = result if timer.created else None
        return timer
    return _apply(
        call, when, args, kwargs, key=key, on_conflict=on_conflict, connection=connection, tenant=tenant, durable=durable,
        app=app, options=options, check_expiry=True,
    )  # fmt: skip


def defer(
    task: Task[..., Any] | str,
    when: When,
    args: Any,
    kwargs: Any,
    options: Mapping[str, Any],
    *,
    app: Celery | None = None,
) -> Timer:
    """Store what ``apply_async`` was given a countdown or an eta for.

    As :func:`apply_at`, but for a call that expires before it is due: Celery takes it and lets it expire, and
    so does this.
    """
    named: dict[str, Any] = {name: options.get(name) for name in ("key", "connection", "tenant")}
    rest = {name: value for name, value in options.items() if name not in (*named, "on_conflict")}
    return _apply(
        task, when, args, kwargs, **named, on_conflict=options.get("on_conflict", "keep"),
        durable=False if isinstance(task, str) else None, app=app,
        options=rest, check_expiry=False,
    )  # fmt: skip


def _apply(
    call: Task[..., Any] | Signature[Any] | str, when: When, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None,
    *, key: str | None, on_conflict: OnConflict, connection: Any, tenant: str | None, durable: bool | None,
    app: Celery | None, options: Mapping[str, Any], check_expiry: bool,
) -> Timer:  # fmt: skip
    app, task, args, kwargs, options = calls.split(call, args, kwargs, options, app)
    database = Database.of(app)
    due = _moment(when, database)
    timer_id = new_id()
    timer = calls.prepare(
        app, task, args, kwargs, options, timer_id=timer_id, leased=calls.is_leased(task, durable), key=key,
        due_at=due.at, delay=due.after, tenant=tenant, max_payload=database.settings.max_payload,
    )  # fmt: skip
    if check_expiry:
        _check_expiry(timer.expires_at, due)
    return database.perform(lambda executor: _store(executor, app, timer, on_conflict), connection)


def _store(executor: Executor, app: Celery, timer: timers.NewTimer, on_conflict: OnConflict) -> Timer:
    task_id = timer.task_id or str(timer.id)
    due_at = timers.insert(executor, timer)
    if due_at is not None:
        key = timer.key or str(timer.id)
        return Timer(app, id=timer.id, task=timer.task, task_id=task_id, key=key, due_at=due_at, created=True)
    if on_conflict == "replace" and timer.key is not None:
        replaced = _replace(executor, app, timer)
        if replaced is not None:
            return replaced
    holder = timers.find(executor, timer.id)
    if holder is not None:
        # Our own row: the connection broke after the first try had committed.
        return Timer.of(app, holder, created=True)
    holder = timers.find_key(executor, timer.key) if timer.key is not None else None
    if holder is None:
        raise KeyConflict(f"The key {timer.key!r} is held by a timer that this transaction cannot see. Try again.")
    if on_conflict == "keep":
        return Timer.of(app, holder)
    cure = (
        'on_conflict="keep" returns that one, "replace" gives it this call while it waits; or use another key'
        if on_conflict == "error"
        else "it no longer waits, so it cannot be replaced. Use another key, or wait until durable_retention is over"
    )
    raise KeyConflict(f"The key {timer.key!r} is held by timer {holder.id} of {holder.task}, {holder.state}: {cure}.")


def _replace(executor: Executor, app: Celery, timer: timers.NewTimer) -> Timer | None:
    assert timer.key is not None
    holder = timers.find_key(executor, timer.key)
    if holder is None or holder.id == timer.id:
        return None
    # The message says which timer it belongs to, and which version of its message it is.
    headers = {**timer.headers, "durable_timer": str(holder.id), "id": holder.task_id}
    if headers.get("root_id") == timer.headers["id"]:
        headers["root_id"] = holder.task_id
    properties = {**timer.properties, "correlation_id": holder.task_id}
    fresh = replace(timer, headers=headers, properties=properties, task_id=holder.task_id)
    done = timers.replace(executor, fresh)
    if done is None:
        again = timers.find_key(executor, timer.key)
        # Ours, where the connection broke after a first try had committed.
        return Timer.of(app, again) if again is not None and again.call_id == timer.id else None
    return Timer(app, id=done[0], task=timer.task, task_id=holder.task_id, key=timer.key, due_at=done[1], created=False)


def apply_many(
    call: Task[..., Any] | Signature[Any] | str, items: Iterable[Sequence[Any]], *,
    on_conflict: Literal["keep", "error"] = "keep", connection: Any = None, tenant: str | None = None,
    durable: bool | None = None, app: Celery | None = None, **options: Any,
) -> list[Timer]:  # fmt: skip
    """Store many calls of one task, all or none, many times faster than one by one.

    Arguments:
        call: a task, a signature, or a task's name.
        items: ``(when, args, kwargs, key)`` each; the end of the tuple may be left out.
        on_conflict: ``keep`` returns the older holder of a key in its place, ``error`` stores nothing.
        connection: as for :func:`apply_at`.
        tenant: as for :func:`apply_at`.
        durable: as for :func:`apply_at`.
        app: as for :func:`apply_at`.
        options: Celery's, for all of them.

    Returns:
        One handle per item, in order; ``created`` tells which are new.

    Raises:
        As :func:`apply_at`; the message names the item.
    """
    if on_conflict not in ("keep", "error"):
        raise InvalidTimer(f"on_conflict = {on_conflict!r}: apply_many knows keep and error. Use apply_at to replace.")
    app, task, args, kwargs, options = calls.split(call, None, None, options, app)
    calls.check_name("tenant", tenant)
    if "task_id" in options:
        raise InvalidTimer("task_id cannot be one for many timers. Leave it out, or use apply_at.")
    database = Database.of(app)
    leased = calls.is_leased(task, durable)
    rows = _bulk_rows(app, database, task, leased, items, args, kwargs, options)

    def store(executor: Executor) -> list[Timer]:
        return _store_rows(executor, app, rows, tenant, on_conflict)

    if connection is not None:
        return database.perform(store, connection)
    # Rendered before the connection is taken: a second try after a broken one needs them again.
    rendered = list(rows)

    def again(executor: Executor) -> list[Timer]:
        nonlocal rows
        rows = iter(rendered)
        return store(executor)

    return database.run(again)


_BulkRow = tuple[timers.NewTimer, Moment]


def _bulk_rows(
    app: Celery, database: Database, task: Task[..., Any] | str, leased: bool, items: Iterable[Sequence[Any]],
    args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None, options: Mapping[str, Any],
) -> Iterator[_BulkRow]:  # fmt: skip
    read: list[tuple[UUID, Moment, str | None]] = []

    def wanted() -> Iterator[tuple[str, Sequence[Any], Mapping[str, Any]]]:
        for number, item in enumerate(items):
            when, more_args, more_kwargs, key = _item(number, item)
            try:
                due = _moment(when, database)
                calls.check_name("key", key)
                calls.check_arguments(more_args, more_kwargs)
            except InvalidTimer as exc:
                raise InvalidTimer(f"Item {number}: {exc}") from exc
            timer_id = new_id()
            read.append((timer_id, due, key))
            yield str(timer_id), (*(more_args or ()), *(args or ())), {**(kwargs or {}), **(more_kwargs or {})}

    rendering = render_many(app, task, wanted(), options)
    for number in count():
        try:
            rendered = next(rendering)
        except StopIteration:
            return
        except (InvalidTimer, TypeError) as exc:
            raise type(exc)(str(exc) if str(exc).startswith("Item ") else f"Item {number}: {exc}") from exc
        timer_id, due, key = read.pop()
        headers = rendered.message.headers
        headers |= {
            "durable_timer": str(timer_id), "durable_call": str(timer_id), "durable_key": key or str(timer_id),
            "durable_leased": leased,
        }  # fmt: skip
        try:
            _check_expiry(rendered.expires_at, due)
            timer = calls.stored(
                rendered, timer_id=timer_id, leased=leased, max_payload=database.settings.max_payload, key=key,
                due_at=due.at, delay=due.after,
            )  # fmt: skip
        except InvalidTimer as exc:
            raise InvalidTimer(f"Item {number}: {exc}") from exc
        yield timer, due


def _item(number: int, item: Sequence[Any]) -> tuple[Any, Any, Any, str | None]:
    if isinstance(item, (str, bytes)) or not isinstance(item, Sequence) or not 1 <= len(item) <= 4:
        raise InvalidTimer(
            f"Item {number} = {item!r}: it must be (when, args, kwargs, key); all but when may be left out."
        )
    when, args, kwargs, key = (*item, None, None, None)[:4]
    return when, args, kwargs, key


def _store_rows(
    executor: Executor, app: Celery, rows: Iterable[_BulkRow], tenant: str | None, on_conflict: str
) -> list[Timer]:
    ids: list[UUID] = []
    keyed: list[_BulkRow] = []
    made: dict[UUID, Timer] = {}

    def without_key() -> Iterator[_BulkRow]:
        for row in rows:
            ids.append(row[0].id)
            if row[0].key is None:
                yield row
            else:
                keyed.append(row)

    def store(some: Iterator[_BulkRow]) -> None:
        while page := list(islice(some, BULK)):
            stored = _store_page(executor, app, page, tenant, on_conflict)
            made.update(zip((each.id for each, _ in page), stored, strict=True))

    with executor.atomic():
        store(without_key())
        # One order over all pages: calls that take the same keys in different orders would wait for each other.
        store(iter(sorted(keyed, key=lambda row: row[0].key or "")))
    return [made[each] for each in ids]


def _store_page(
    executor: Executor, app: Celery, page: Sequence[_BulkRow], tenant: str | None, on_conflict: str
) -> list[Timer]:
    if len({_shared(each) for each, _ in page}) > 1:
        # A router has looked at the arguments, or an option is another for each.
        new = timers.insert_each(executor, [replace(each, tenant=tenant) for each, _ in page])
    else:
        new = timers.insert_many(
            executor,
            replace(page[0][0], tenant=tenant),
            [
                (each.id, each.key, each.body, json.dumps(each.headers), json.dumps(each.properties), due.at, due.after)
                for each, due in page
            ],
        )
    made: list[Timer] = []
    for each, _ in page:
        due_at = new.get(each.id)
        holder = None if due_at is not None else _holder(executor, each)
        if holder is not None and holder.id != each.id:
            if on_conflict == "error":
                raise KeyConflict(
                    f"The key {each.key!r} is held by timer {holder.id}, {holder.state}; nothing was stored. "
                    'Say on_conflict="keep" to get that one instead, or use another key.'
                )
            made.append(Timer.of(app, holder))
            continue
        key = each.key or str(each.id)
        due_at = due_at or (holder.due_at if holder else None)
        made.append(Timer(app, id=each.id, task=each.task, task_id=str(each.id), key=key, due_at=due_at, created=True))
    return made


def _shared(timer: timers.NewTimer) -> tuple[object, ...]:
    """What :func:`~celery_durable.store.timers.insert_many` stores once for a page."""
    return (
        timer.task, timer.exchange, timer.routing_key, timer.queue, timer.content_type, timer.content_encoding,
        timer.expires_at,
    )  # fmt: skip


def _holder(executor: Executor, timer: timers.NewTimer) -> timers.Found:
    holder = timers.find(executor, timer.id) or (timers.find_key(executor, timer.key) if timer.key else None)
    if holder is None:
        raise KeyConflict(f"The key {timer.key!r} is held by a timer that this transaction cannot see. Try again.")
    return holder


def get_timer(
    identity: Timer | UUID | str | None = None,
    *,
    key: str | None = None,
    connection: Any = None,
    app: Celery | None = None,
) -> Timer | None:
    """Find a timer.

    Arguments:
        identity: a handle, a timer id or a Celery task id; of several timers of a task id the live one; or
        key: an idempotency key.
        connection: as for :func:`apply_at`.
        app: the app, when the handle does not say.

    Returns:
        The handle, or None when there is none (never was, or pruned).
    """
    app = app or _app_of(identity)
    _check_named(identity, key)

    def look(executor: Executor) -> timers.Found | None:
        if key is not None:
            return _find_key(executor, key)
        assert identity is not None
        return timers.find(executor, identity.id if isinstance(identity, Timer) else identity)

    found = Database.of(app).perform(look, connection)
    return None if found is None else Timer.of(app, found)


def cancel(
    timer: Timer | UUID | str | None = None, *, key: str | None = None, reason: str | None = None,
    connection: Any = None, app: Celery | None = None,
) -> Answer:  # fmt: skip
    """Take a timer back; the answer is definite, and needs no worker to be up.

    A leased timer can be cancelled until a worker has taken its lease, a plain task
    until a beat has claimed it.

    Arguments:
        timer: a handle, a timer id or a Celery task id; or
        key: an idempotency key.
        reason: kept in the history.
        connection: as for :func:`apply_at`.
        app: the app, when the handle does not say.

    Returns:
        ``cancelled`` (now or before), ``too_late`` or ``unknown``.
    """
    app = app or _app_of(timer)

    def operation(executor: Executor) -> Answer:
        timer_id = _resolve(executor, timer, key)
        return Answer.UNKNOWN if timer_id is None else timers.cancel(executor, timer_id, reason)

    return Database.of(app).perform(operation, connection)


def reschedule(
    timer: Timer | UUID | str | None = None, when: When | None = None, *, key: str | None = None, connection: Any = None,
    app: Celery | None = None,
) -> Answer:  # fmt: skip
    """Move a timer to another due time, as long as it could be cancelled.

    Arguments:
        timer: a handle, a timer id or a Celery task id; or
        when: as for :func:`apply_at`.
        key: an idempotency key, instead of `timer`.
        connection: as for :func:`apply_at`.
        app: the app, when the handle does not say.

    Returns:
        ``rescheduled``, ``too_late`` or ``unknown``.

    Raises:
        InvalidTimer: for a due time that :func:`apply_at` would refuse, or one after the timer's ``expires``.
    """
    app = app or _app_of(timer)
    database = Database.of(app)
    if when is None:
        raise InvalidTimer("when is missing: reschedule(timer, when).")
    due = _moment(when, database)

    def operation(executor: Executor) -> tuple[Answer, datetime | None]:
        timer_id = _resolve(executor, timer, key)
        if timer_id is None:
            return Answer.UNKNOWN, None
        found = timers.find(executor, timer_id)
        _check_expiry(None if found is None else found.expires_at, due)
        return timers.reschedule(executor, timer_id, due.at, due.after)

    answer, due_at = database.perform(operation, connection)
    if isinstance(timer, Timer) and due_at is not None:
        timer.due_at = due_at
    return answer


def _check_named(timer: Timer | UUID | str | None, key: str | None) -> None:
    if (timer is None) == (key is None):
        raise InvalidTimer("Name the timer either by its id or by key=, and not by both.")


def _resolve(executor: Executor, timer: Timer | UUID | str | None, key: str | None) -> UUID | None:
    _check_named(timer, key)
    if key is not None:
        found = _find_key(executor, key)
        return None if found is None else found.id
    if isinstance(timer, Timer):
        return timer.id
    found = timers.find(executor, timer)  # type: ignore[arg-type]  # None was refused above
    return None if found is None else found.id


def _find_key(executor: Executor, key: str) -> timers.Found | None:
    found = timers.find_key(executor, key)
    if found is not None:
        return found
    try:
        found = timers.find(executor, UUID(key))
    except (ValueError, TypeError, AttributeError):
        return None
    # Nobody has chosen a key for it: then its id is what handle and task show.
    return found if found is not None and found.key == key else None


def _app_of(identity: object) -> Celery:
    return identity.app if isinstance(identity, Timer) else calls.present_app()


def _moment(when: When, database: Database) -> Moment:
    try:
        return moment(when, naive=database.settings.naive_datetimes)
    except (ValueError, TypeError, OverflowError) as exc:
        raise InvalidTimer(str(exc)) from exc


def _check_expiry(expires_at: datetime | None, due: Moment) -> None:
    if expires_at is None:
        return
    at = due.approximate(datetime.now(timezone.utc))
    if expires_at <= at:
        raise InvalidTimer(
            f"The timer would expire at {expires_at.isoformat()}, before it is due at {at.isoformat()}, and never run. "
            "expires counts from the call, as in apply_async: give an instant, or seconds, after the due time."
        )
