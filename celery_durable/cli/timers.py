"""``durable timers``: list, show, cancel, reschedule, trigger."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta, timezone
from typing import Any
from uuid import UUID

import click
from celery.bin.base import CeleryCommand, CeleryOption
from rich.table import Table

from celery_durable import scheduling
from celery_durable.cli import message
from celery_durable.cli.output import facts, listed, plain
from celery_durable.cli.session import DONE, FAILED, USAGE, Session, operates
from celery_durable.cli.times import WHEN, absolute, both, duration, iso, relative, resolved
from celery_durable.core.states import LIVE, Answer, State
from celery_durable.errors import InvalidTimer
from celery_durable.store import history, listing, schedules
from celery_durable.store import timers as store
from celery_durable.store.executor import Executor, Row
from celery_durable.store.timers import Found

_BY_KEY = click.option("--key", "keys", multiple=True, cls=CeleryOption, help="Name a timer by its idempotency key.")


@click.group()
def timers() -> None:
    """Timers: stored calls with a due time."""


@timers.command("list", cls=CeleryCommand)
@click.option(
    "--state",
    "states",
    multiple=True,
    type=click.Choice([str(state) for state in State]),
    cls=CeleryOption,
    help="Only these states; may be repeated. Without it, all that have not ended.",
)
@click.option("--task", cls=CeleryOption, help="Only of this task.")
@click.option("--queue", cls=CeleryOption, help="Only for this queue.")
@click.option("--schedule", cls=CeleryOption, help="Only occurrences of this schedule.")
@click.option("--key", cls=CeleryOption, help="Only keys that begin so.")
@click.option("--due-after", type=WHEN, cls=CeleryOption, help="Only due at or after this time.")
@click.option("--due-before", type=WHEN, cls=CeleryOption, help="Only due before this time.")
@click.option("--overdue", is_flag=True, cls=CeleryOption, help="Only those that wait although they are due.")
@click.option(
    "--limit", type=click.IntRange(1, 10_000), default=50, show_default=True, cls=CeleryOption, help="Most rows."
)
@click.option("--cursor", cls=CeleryOption, help="Go on where the page before ended.")
@operates
def list_(
    session: Session, *, states: Sequence[str], task: str | None, queue: str | None, schedule: str | None,
    key: str | None, due_after: datetime | timedelta | None, due_before: datetime | timedelta | None, overdue: bool,
    limit: int, cursor: str | None,
) -> int:  # fmt: skip
    """List timers. Those in motion, then those waiting, by due time; ended ones newest first.

    Times are ISO-8601 with a zone, now, or from now: 10m, 2h, 3d, -1h.
    """
    if overdue and (states or due_before is not None):
        raise click.UsageError("--overdue means waiting and due: leave --state and --due-before out.")

    def operation(executor: Executor) -> tuple[datetime, listing.Page]:
        now = schedules.now(executor)
        wanted = listing.Filter(
            states=[State.WAITING] if overdue else [State(name) for name in states] or LIVE, task=task, queue=queue,
            schedule=schedule, key=key, due_after=resolved(due_after, now),
            due_before=now if overdue else resolved(due_before, now),
        )  # fmt: skip
        return now, listing.page_of_timers(executor, wanted, limit=limit, cursor=cursor)

    database = session.database
    try:
        now, page = database.run(operation)
    except ValueError as exc:
        raise click.UsageError(str(exc)) from exc
    session.out.show(
        {"now": iso(now), "timers": [document(found, now) for found in page.timers], "cursor": page.cursor},
        lambda: table(page.timers, now) if page.timers else None,
    )
    if not page.timers and page.cursor is None:
        ended = (
            "" if states or overdue else " among those that have not ended; ended ones: --state succeeded, and so on"
        )
        session.out.note(f"No timer matches{ended}.")
    elif page.cursor is not None and len(page.timers) == limit:
        session.out.note(f"There may be more: --cursor {page.cursor}")
    elif page.cursor is not None:
        session.out.note(
            f"{page.looked_at:,} timers were looked at, and there are more to look at: --cursor {page.cursor}"
        )
    return DONE


@timers.command(cls=CeleryCommand)
@click.argument("identity", metavar="ID", required=False)
@click.option("--key", cls=CeleryOption, help="Name the timer by its idempotency key.")
@click.option("--show-args", is_flag=True, cls=CeleryOption, help="Show the arguments too.")
@operates
def show(session: Session, *, identity: str | None, key: str | None, show_args: bool) -> int:
    """Show one timer. State, times, attempts with their errors, message headers."""
    if (identity is None) == (key is None):
        raise click.UsageError("Name the timer by its id or by --key, and not by both.")

    def operation(executor: Executor) -> tuple[Found, datetime, Sequence[Row], Row | None] | None:
        found = store.find(executor, identity) if identity is not None else store.find_key(executor, key or "")
        if found is None:
            return None
        attempts = history.attempts(executor, found.id)
        return found, schedules.now(executor), attempts, listing.message_of(executor, found.call_id)

    answer = session.database.run(operation)
    if answer is None:
        session.out.error(f"There is no timer {identity or key!r}: it never was, or has been pruned.")
        return FAILED
    found, now, attempts, row = answer
    stored = None if row is None else message.document(row, show_args=show_args)
    details = {
        "created_at": None if row is None else iso(row.created_at), "leased": found.leased,
        "nominal": None if row is None else iso(row.nominal), "tenant": None if row is None else row.tenant,
        "replay_of": None if row is None or row.replay_of is None else str(row.replay_of),
    }  # fmt: skip
    session.out.show(
        {**document(found, now), **details, "now": iso(now), "attempts": [attempt_document(each) for each in attempts],
         "message": stored},
        lambda: facts(_facts(found, now, row)),
        lambda: attempt_table(attempts) if attempts else None,
        lambda: None if stored is None else message.table(stored),
    )  # fmt: skip
    return DONE


@timers.command(cls=CeleryCommand)
@click.argument("ids", nargs=-1, metavar="[ID]...")
@_BY_KEY
@click.option("--reason", cls=CeleryOption, help="Kept in the history, beside your name.")
@operates
def cancel(session: Session, *, ids: Sequence[str], keys: Sequence[str], reason: str | None) -> int:
    """Cancel timers that nobody can have started. Exit code 1 if one could not be."""
    note = f"{session.operator}: {reason}" if reason else session.operator
    return _each(
        session, ids, keys, Answer.CANCELLED,
        lambda timer_id: scheduling.cancel(timer_id, reason=note, app=session.app),
    )  # fmt: skip


@timers.command(cls=CeleryCommand)
@click.argument("ids", nargs=-1, metavar="[ID]...")
@_BY_KEY
@click.option(
    "--to", type=WHEN, required=True, cls=CeleryOption, help="The new due time: 2h, 2030-01-31T09:00:00Z, now."
)
@operates
def reschedule(session: Session, *, ids: Sequence[str], keys: Sequence[str], to: datetime | timedelta) -> int:
    """Move timers to another due time. Exit code 1 if one could not be."""
    return _each(
        session, ids, keys, Answer.RESCHEDULED,
        lambda timer_id: scheduling.reschedule(timer_id, to, app=session.app),
    )  # fmt: skip


@timers.command(cls=CeleryCommand)
@click.argument("ids", nargs=-1, metavar="[ID]...")
@_BY_KEY
@operates
def trigger(session: Session, *, ids: Sequence[str], keys: Sequence[str]) -> int:
    """Make waiting timers due now. Exit code 1 if one no longer waits."""

    def now(timer_id: UUID) -> Answer:
        timer = scheduling.get_timer(timer_id, app=session.app)
        # One in motion is on its way already: to put it back would only send its message twice.
        if timer is not None and timer.state is not State.WAITING:
            return Answer.TOO_LATE
        return scheduling.reschedule(timer_id, timedelta(0), app=session.app)

    return _each(session, ids, keys, Answer.RESCHEDULED, now)


def _each(
    session: Session, ids: Sequence[str], keys: Sequence[str], good: Answer, act: Callable[[UUID], Answer]
) -> int:
    if not ids and not keys:
        raise click.UsageError("Name at least one timer, by its id or by --key.")
    database = session.database
    now = database.run(schedules.now)
    results: list[dict[str, Any]] = []
    rows: list[list[str]] = []
    code = DONE
    for name, find in [(each, store.find) for each in ids] + [(each, store.find_key) for each in keys]:
        found = database.run(lambda executor, find=find, name=name: find(executor, name))  # type: ignore[misc]  # mypy cannot infer a lambda with defaults
        result = {"name": name, "id": None, "answer": str(Answer.UNKNOWN), "state": None, "due_at": None, "error": None}
        due = "-"
        if found is not None:
            try:
                result |= {"id": str(found.id), "answer": str(act(found.id))}
            except InvalidTimer as exc:
                result |= {"id": str(found.id), "answer": "refused", "error": str(exc)}
                code = max(code, USAGE if len(ids) + len(keys) == 1 else FAILED)
            after = database.run(lambda executor, timer_id=found.id: store.find(executor, timer_id))  # type: ignore[misc]  # as above
            if after is not None:
                result |= {"state": str(after.state), "due_at": iso(after.due_at)}
                due = f"{absolute(after.due_at)}\n{relative(after.due_at, now)}"
        rows.append([plain(result["id"] or name), f"{result['answer']}\n{result['state'] or ''}".rstrip(), due])
        results.append(result)
        if result["answer"] != str(good):
            code = code or FAILED
    session.out.show(
        {"timers": results},
        lambda: listed(["Timer", "Answer / state", "Due"], rows, fixed=(1, 2)),
    )
    for each in results:
        if each["error"]:
            session.out.error(f"{each['name']}: {each['error']}")
    return code


def document(found: Found, now: datetime) -> dict[str, Any]:
    """One timer as JSON values."""
    late = found.due_at and found.dispatched_at and (found.dispatched_at - found.due_at).total_seconds()
    return {
        "id": str(found.id), "task": found.task, "task_id": found.task_id, "key": found.key, "queue": found.queue,
        "schedule": found.schedule, "state": str(found.state), "due_at": iso(found.due_at),
        "overdue_seconds": _overdue(found, now), "lateness_seconds": late or (0.0 if late == 0 else None),
        "attempt": found.attempt, "expires_at": iso(found.expires_at), "dispatched_at": iso(found.dispatched_at),
        "started_at": iso(found.started_at), "finished_at": iso(found.finished_at), "worker": found.worker,
        "reason": found.reason,
    }  # fmt: skip


def _overdue(found: Found, now: datetime) -> float | None:
    if found.due_at is None or found.state not in (State.WAITING, State.CLAIMED) or found.due_at > now:
        return None
    return (now - found.due_at).total_seconds()


def table(found: Sequence[Found], now: datetime) -> Table:
    """Timers, two or three lines each: an id alone takes 36 columns."""
    return listed(["Timer / task / key", "State / queue", "Due"], [_row(each, now) for each in found], fixed=(2,))


def _row(found: Found, now: datetime) -> list[str]:
    name = [str(found.id), plain(found.task)]
    if found.key and found.key != str(found.id):
        name.append(plain(f"key {found.key}"))
    state = [str(found.state), *([f"attempt {found.attempt}"] if found.attempt else [])]
    return [
        "\n".join(name), "\n".join([*state, *([plain(found.queue)] if found.queue else [])]),
        f"{absolute(found.due_at)}\n{relative(found.due_at, now)}",
    ]  # fmt: skip


def _facts(found: Found, now: datetime, row: Row | None) -> list[tuple[str, str]]:
    pairs = [
        ("id", str(found.id)), ("task", plain(found.task)), ("task id", plain(found.task_id)), ("key", plain(found.key)),
        ("state", str(found.state)), ("reason", plain(found.reason)), ("schedule", plain(found.schedule)),
        ("queue", plain(found.queue)), ("created", both(row and row.created_at, now)), ("due", both(found.due_at, now)),
        ("expires", both(found.expires_at, now)), ("dispatched", both(found.dispatched_at, now)),
        ("started", both(found.started_at, now)), ("finished", both(found.finished_at, now)),
        ("attempts", str(found.attempt)), ("worker", plain(found.worker)),
        ("replay of", plain(row and row.replay_of)),
    ]  # fmt: skip
    if found.due_at is not None and found.dispatched_at is not None:
        late = (found.dispatched_at - found.due_at).total_seconds()
        pairs.append(("lateness", duration(late)))
    return [(name, value) for name, value in pairs if value != "-"]


def attempt_document(row: Row) -> dict[str, Any]:
    """One ended attempt as JSON values."""
    return {
        "attempt": row.attempt, "fence": row.fence, "ending": row.ending, "started_at": iso(row.started_at),
        "ended_at": iso(row.ended_at), "next_due_at": iso(row.next_due_at), "worker": row.worker,
        "error_type": row.error_type, "error": row.error, "traceback": row.traceback,
    }  # fmt: skip


def attempt_table(attempts: Sequence[Row]) -> Table:
    """Ended attempts with their errors."""
    rows = []
    for row in attempts:
        ended = row.ended_at.astimezone(timezone.utc)
        error = f"{row.error_type}: {row.error}" if row.error_type else row.error
        rows.append([str(row.attempt), row.ending, absolute(ended), plain(error)])
    return listed(["#", "Attempt", "Ended", "Error"], rows, ids=False, fixed=(0, 1, 2))
