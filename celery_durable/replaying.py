"""Dead letters run again: each once, as a new timer with the same message."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

from celery_durable.calls import present_app
from celery_durable.core.identity import new_id
from celery_durable.core.moments import Moment, When, moment
from celery_durable.dead_letter import Filters, Progress, Tally, chunks, filter_of, id_of
from celery_durable.errors import InvalidTimer, KeyConflict
from celery_durable.messages.checks import check_message
from celery_durable.messages.message import Message
from celery_durable.store import dead_letters as store
from celery_durable.store import timers
from celery_durable.store.database import Database
from celery_durable.store.executor import Executor, Row
from celery_durable.timer import Timer

if TYPE_CHECKING:
    from celery import Celery
    from typing_extensions import Unpack

_NOW = timedelta(0)


def replay(identity: UUID | str, *, when: When = _NOW, dry_run: bool = False, app: Celery | None = None) -> Timer:
    """Run a dead letter again, once, as a new timer with the same message and idempotency key.

    Arguments:
        identity: the dead timer's id or Celery task id.
        when: as for :func:`~celery_durable.apply_at`; now if not given.
        dry_run: only check that it can be.
        app: the app; the current one otherwise.

    Returns:
        The new timer; the dead letter is linked to it.  After a dry run it is what would have been made.

    Raises:
        InvalidTimer: there is no such dead letter, or what is stored of it is no message.
        KeyConflict: it has been replayed already; names the timer that did.
    """
    app = app or present_app()
    database = Database.of(app)
    due = _moment(when, database)
    timer_id = new_id()

    def operation(executor: Executor) -> Timer:
        dead_id = id_of(executor, identity)
        if dead_id is None:
            raise InvalidTimer(f"{identity} is no dead letter.")
        answer = _replayed(executor, app, {dead_id: timer_id}, due, dry_run)[dead_id]
        if isinstance(answer, Timer):
            return answer
        raise answer

    return database.transact(operation)


def replay_all(
    *, when: When = _NOW, dry_run: bool = False, progress: Progress | None = None, app: Celery | None = None,
    **filters: Unpack[Filters],
) -> Tally:  # fmt: skip
    """Run every dead letter again that the filters let pass, oldest first, each once as :func:`replay` does.

    A hundred are replayed in one transaction: what was replayed before an error stays so, and another call goes on.
    Several calls at the same time share the work.  What dies after the call began is left out.

    Arguments:
        when: as for :func:`~celery_durable.apply_at`; now if not given.
        dry_run: only say how many would be.
        progress: is told after each transaction how many are replayed so far.
        app: the app; the current one otherwise.
        filters: see :class:`~celery_durable.dead_letter.Filters`; all of them without any.

    Returns:
        How many were replayed, and which could not be since what is stored of them is no message.

    Raises:
        InvalidTimer: for a due time or a filter that says nothing; nothing was replayed.
        DatabaseUnavailable: Postgres went away on the way.
    """
    app = app or present_app()
    database = Database.of(app)
    due, wanted = _moment(when, database), filter_of(database, filters)
    if wanted.replayed:
        raise InvalidTimer("replayed = True: a dead letter is replayed once. Leave it out.")
    tally = Tally()
    for chunk in chunks(database, wanted):
        # Made here, so that a second try after a broken connection finds its own.
        ids = {row.id: new_id() for row in chunk}

        def operation(executor: Executor, ids: Mapping[UUID, UUID] = ids) -> dict[UUID, Timer | Exception]:
            return _replayed(executor, app, ids, due, dry_run)

        for dead_id, answer in database.transact(operation).items():
            if isinstance(answer, Timer):
                tally.done += 1
            elif isinstance(answer, _Gone | KeyConflict):
                tally.elsewhere += 1
            else:
                tally.refuse(dead_id, str(answer))
        if progress is not None:
            progress(tally.done)
    return tally


class _Gone(InvalidTimer):
    """There is no such dead letter."""


def _replayed(
    executor: Executor, app: Celery, ids: Mapping[UUID, UUID], due: Moment, dry_run: bool
) -> dict[UUID, Timer | Exception]:
    """Replay dead letters as the timers that `ids` names; returns for each its timer, or why there is none."""
    if not dry_run:
        store.lock(executor, ids)
    found = {row.id: row for row in store.payloads(executor, ids)}
    answers: dict[UUID, Timer | Exception] = {}
    fresh: dict[UUID, timers.NewTimer] = {}
    for dead_id, timer_id in ids.items():
        row = found.get(dead_id)
        if row is None:
            answers[dead_id] = _Gone(f"{dead_id} is no dead letter.")
        # Ours, where the connection broke after a first try had committed.
        elif row.replayed_as not in (None, timer_id):
            answers[dead_id] = KeyConflict(
                f"{dead_id} was replayed already, as timer {row.replayed_as}: look at that one. Should it end as a dead "
                "letter too, replay it; a call of its own needs another key."
            )
        else:
            try:
                timer = _renewed(row, timer_id, due)
            except InvalidTimer as exc:
                answers[dead_id] = exc
                continue
            if row.replayed_as is None:
                fresh[dead_id] = timer
            answers[dead_id] = Timer(
                app, id=timer_id, task=row.task, task_id=str(timer_id), key=timer.headers["durable_key"], due_at=due.at,
                created=not dry_run,
            )  # fmt: skip
    if not dry_run and fresh:
        store.mark_replayed(executor, {dead_id: timer.id for dead_id, timer in fresh.items()})
        for dead_id, timer in fresh.items():
            made = answers[dead_id]
            assert isinstance(made, Timer)
            made.due_at = timers.insert(executor, timer)
    return answers


def _renewed(row: Row, timer_id: UUID, due: Moment) -> timers.NewTimer:
    """The stored message under a new identity; the idempotency key goes with it, its old `expires` does not.

    Raises:
        InvalidTimer: what is stored is no message; says what of it.
    """
    if row.body is None:
        raise InvalidTimer(f"{row.id} holds no message: its row in call is gone. Discard it.")
    headers, properties = _object(row, "headers"), _object(row, "properties")
    old_id, new = headers.get("id"), str(timer_id)
    headers |= {
        "id": new, "durable_timer": new, "durable_call": new, "durable_key": row.key, "expires": None,
    }  # fmt: skip
    if headers.get("root_id") == old_id:
        headers["root_id"] = new
    message = Message(
        body=bytes(row.body), content_type=row.content_type, content_encoding=row.content_encoding, headers=headers,
        properties={**properties, "correlation_id": new}, exchange=row.exchange, routing_key=row.routing_key,
        queue=row.queue,
    )  # fmt: skip
    try:
        check_message(message)
    except InvalidTimer as exc:
        raise InvalidTimer(f"{row.id} holds no message: {exc} {_MEND}") from exc
    return timers.NewTimer(
        id=timer_id, task=row.task, leased=row.leased, body=message.body, content_type=message.content_type,
        content_encoding=message.content_encoding, headers=headers, properties=message.properties,
        exchange=message.exchange, routing_key=message.routing_key, queue=message.queue, due_at=due.at, delay=due.after,
        tenant=row.tenant, replay_of=row.id,
    )  # fmt: skip


_MEND = "Mend the row in call, or discard it."


def _object(row: Row, column: str) -> dict[str, Any]:
    try:
        found = json.loads(getattr(row, column))
        # A number beyond a float's range is read as Infinity, which no json column takes back.
        json.dumps(found, allow_nan=False)
    except (ValueError, RecursionError) as exc:
        raise InvalidTimer(f"{row.id} holds no message: its {column} cannot be read ({exc}). {_MEND}") from exc
    if not isinstance(found, dict):
        raise InvalidTimer(f"{row.id} holds no message: its {column} are no JSON object. {_MEND}")
    return found


def _moment(when: When, database: Database) -> Moment:
    try:
        return moment(when, naive=database.settings.naive_datetimes)
    except (ValueError, TypeError, OverflowError) as exc:
        raise InvalidTimer(str(exc)) from exc
