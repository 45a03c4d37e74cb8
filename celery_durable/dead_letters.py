"""Dead letters: timers that used up their attempts, or could never run; look at them, run them again, let go.

All that is about many of them takes the same filters, see :class:`Filters`.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any
from uuid import UUID

from celery_durable.core.identity import instant_text
from celery_durable.dead_letter import Filters, Progress, Tally, chunks, database_of, filter_of, id_of
from celery_durable.errors import InvalidTimer
from celery_durable.messages import contents
from celery_durable.replaying import replay, replay_all
from celery_durable.store import dead_letters as store
from celery_durable.store import history
from celery_durable.store.dead_letters import Page
from celery_durable.store.executor import Executor, Row

if TYPE_CHECKING:
    from celery import Celery
    from typing_extensions import Unpack

__all__ = [
    "Filters", "Group", "Groups", "Page", "Tally", "discard", "discard_all", "export", "find_all", "get", "groups",
    "replay", "replay_all",
]  # fmt: skip

#: Columns that are shown apart, as a message.
_MESSAGE = frozenset(
    {"body", "content_type", "content_encoding", "headers", "properties", "exchange", "routing_key", "leased"}
)


@dataclass(frozen=True, kw_only=True)
class Group:
    """Dead letters that died of the same thing."""

    task: str | None
    error_type: str | None
    reason: str
    number: int
    oldest: datetime
    """When the first of them died."""
    newest: datetime
    """When the last of them died."""
    example: UUID
    """The last of them."""


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Groups, largest first, and what they were counted over."""

    groups: Sequence[Group]
    looked_at: int
    """How many dead letters were looked at: the newest of the time asked for."""
    complete: bool
    """Whether those were all of them."""


def find_all(
    *, limit: int = 100, before: str | None = None, app: Celery | None = None, **filters: Unpack[Filters]
) -> Page:
    """The newest dead letters, by the time of their death.

    Arguments:
        limit: most rows.
        before: ``cursor`` of the page before this one.
        app: the app; the current one otherwise.
        filters: see :class:`Filters`; without any, all that were not replayed.

    Returns:
        A list of rows with id, task, task_id, key, queue, tenant, created_at, due_at, started_at, worker, died_at,
        attempt, reason, error_type, error, replayed_as, replayed_at; its ``cursor`` is where the list goes on, None at
        its end.  Filters are tried on at most 100,000 a call: a page may hold few, or none, and still have a cursor.

    Raises:
        InvalidTimer: for a filter, a limit or a cursor that says nothing.
    """
    _check_limit(limit)
    database = database_of(app)
    wanted = filter_of(database, filters)

    def operation(executor: Executor) -> Page:
        try:
            return store.page_of(executor, wanted, limit=limit, cursor=before)
        except ValueError as exc:
            raise InvalidTimer(f"before: {exc}") from exc

    return database.run(operation)


def groups(*, limit: int = 100, app: Celery | None = None, **filters: Unpack[Filters]) -> Groups:
    """What the newest 100,000 dead letters died of: by task, type of error and reason.

    Arguments:
        limit: most groups.
        app: the app; the current one otherwise.
        filters: see :class:`Filters`; ``since`` and ``until`` choose which 100,000 are looked at.

    Raises:
        InvalidTimer: for a filter or a limit that says nothing.
    """
    _check_limit(limit)
    database = database_of(app)
    wanted = filter_of(database, filters)
    rows, looked_at = database.run(lambda executor: store.groups(executor, wanted, limit=limit))
    found = [
        Group(
            task=row.task, error_type=row.error_type, reason=row.reason, number=row.number, oldest=row.oldest,
            newest=row.newest, example=row.example,
        )
        for row in rows
    ]  # fmt: skip
    return Groups(groups=found, looked_at=looked_at, complete=looked_at < store.MOST_LOOKED_AT)


def get(identity: UUID | str, *, app: Celery | None = None) -> tuple[Row, Sequence[Row]] | None:
    """One dead letter with its payload, and its attempts with their errors; None when there is none."""

    def operation(executor: Executor) -> tuple[Row, Sequence[Row]] | None:
        timer_id = id_of(executor, identity)
        row = None if timer_id is None else store.get(executor, timer_id)
        return None if row is None or timer_id is None else (row, history.attempts(executor, timer_id))

    return database_of(app).run(operation)


def discard(identity: UUID | str, *, dry_run: bool = False, app: Celery | None = None) -> bool:
    """Let a dead letter go: its payload is pruned with its outcome; False when there is none.

    Arguments:
        identity: the dead timer's id or Celery task id.
        dry_run: only say whether there is one.
        app: the app; the current one otherwise.
    """

    def operation(executor: Executor) -> bool:
        timer_id = id_of(executor, identity)
        if timer_id is None:
            return False
        return bool(store.payloads(executor, [timer_id]) if dry_run else store.discard(executor, [timer_id]))

    return database_of(app).run(operation)


def discard_all(
    *, dry_run: bool = False, progress: Progress | None = None, app: Celery | None = None, **filters: Unpack[Filters]
) -> Tally:
    """Let every dead letter go that the filters let pass, oldest first, some at a time.

    What was discarded before an error stays so, and another call goes on.  What dies after the call began is left out.

    Arguments:
        dry_run: only say how many would be.
        progress: is told after each statement how many are discarded so far.
        app: the app; the current one otherwise.
        filters: see :class:`Filters`; without any, all that were not replayed.

    Raises:
        InvalidTimer: for a filter that says nothing; nothing was discarded.
        DatabaseUnavailable: Postgres went away on the way.
    """
    database = database_of(app)
    wanted = filter_of(database, filters)
    tally = Tally()
    for chunk in chunks(database, wanted):
        ids = [row.id for row in chunk]

        def operation(executor: Executor, ids: Sequence[UUID] = ids) -> int:
            return len(ids) if dry_run else store.discard(executor, ids, replayed=wanted.replayed)

        done = database.run(operation)
        tally.done += done
        tally.elsewhere += len(ids) - done
        if progress is not None:
            progress(tally.done)
    return tally


def export(
    *, show_args: bool = False, app: Celery | None = None, **filters: Unpack[Filters]
) -> Iterator[dict[str, Any]]:
    """Read every dead letter that the filters let pass, oldest first, with its message and its attempts.

    It reads as it is asked, one letter in memory at a time, and holds no transaction meanwhile::

        for letter in dead_letters.export(task="proj.charge"):
            file.write(json.dumps(letter) + "\\n")

    Arguments:
        show_args: with arguments: JSON decoded, other bodies as base64 (``body_base64`` of the message).
        app: the app; the current one otherwise.
        filters: see :class:`Filters`; without any, all that were not replayed.

    Returns:
        JSON values: what a row of :func:`find_all` has, instants as ISO-8601 text; ``message``, which is None where it
        was deleted by plain SQL; ``attempts`` with errors and tracebacks.

    Raises:
        InvalidTimer: for a filter that says nothing.
        DatabaseUnavailable: Postgres went away on the way.
    """
    database = database_of(app)
    wanted = filter_of(database, filters)

    def letter(timer_id: UUID) -> tuple[Row | None, Sequence[Row]]:
        return database.run(
            lambda executor: (store.get(executor, timer_id), history.attempts(executor, timer_id)),
        )

    def letters() -> Iterator[dict[str, Any]]:
        for chunk in chunks(database, wanted):
            for each in chunk:
                # One at a time: a payload may have a megabyte, and any number of tracebacks.
                row, attempts = letter(each.id)
                if row is not None:
                    yield _document(row, attempts, show_args)

    # Not a generator itself, so that a wrong filter is refused at the call.
    return letters()


def _document(row: Row, attempts: Sequence[Row], show_args: bool) -> dict[str, Any]:
    return {
        **{name: value for name, value in _plain(row).items() if name not in _MESSAGE},
        "message": None if row.body is None else _message(row, show_args),
        "attempts": [_plain(each) for each in attempts],
    }


def _message(row: Row, show_args: bool) -> dict[str, Any]:
    found = contents.document(row, show_args=show_args)
    # The note says why it is not decoded.
    if show_args and found["arguments_note"]:
        found["body_base64"] = base64.b64encode(row.body).decode()
    return found


def _plain(row: Row) -> dict[str, Any]:
    """A row's columns as JSON has them."""

    def said(value: Any) -> Any:
        if isinstance(value, datetime):
            return instant_text(value)
        return str(value) if isinstance(value, UUID) else value

    return {name: said(value) for name, value in row._asdict().items()}


def _check_limit(limit: object) -> None:
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
        raise InvalidTimer(f"limit = {limit!r}: it must be a whole number of at least 1.")
