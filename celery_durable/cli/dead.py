"""``durable dead``: list, show, replay, discard."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import click
from celery.bin.base import CeleryCommand, CeleryOption

from celery_durable import dead_letters
from celery_durable.cli import message
from celery_durable.cli.output import facts, listed, plain
from celery_durable.cli.session import DONE, FAILED, Session, operates
from celery_durable.cli.timers import attempt_document, attempt_table
from celery_durable.cli.times import WHEN, absolute, both, iso, relative
from celery_durable.errors import InvalidTimer, KeyConflict
from celery_durable.store import dead_letters as store
from celery_durable.store import schedules
from celery_durable.store.executor import Executor, Row


@click.group()
def dead() -> None:
    """Dead letters: timers that have failed for good."""


@dead.command("list", cls=CeleryCommand)
@click.option("--task", cls=CeleryOption, help="Only of this task.")
@click.option("--replayed", is_flag=True, cls=CeleryOption, help="Also those that were replayed.")
@click.option(
    "--limit", type=click.IntRange(1, 10_000), default=50, show_default=True, cls=CeleryOption, help="Most rows."
)
@click.option("--cursor", type=click.UUID, cls=CeleryOption, help="Go on where the page before ended.")
@operates
def list_(session: Session, *, task: str | None, replayed: bool, limit: int, cursor: UUID | None) -> int:
    """List dead letters, newest first."""

    def operation(executor: Executor) -> tuple[datetime, Sequence[Row]]:
        rows = store.find_all(executor, task=task, replayed=replayed, before=cursor, limit=limit + 1)
        return schedules.now(executor), rows

    now, rows = session.database.run(operation)
    rows, more = rows[:limit], len(rows) > limit
    following = str(rows[-1].id) if more else None
    session.out.show(
        {"now": iso(now), "dead_letters": [_document(row) for row in rows], "cursor": following},
        lambda: listed(
            ["Timer / task / key", "Died", "Reason / error"], [_row(row, now) for row in rows], fixed=(1,)
        ) if rows else None,
    )  # fmt: skip
    if not rows:
        session.out.note("No dead letters.")
    if following is not None:
        session.out.note(f"There is more: --cursor {following}")
    return DONE


@dead.command(cls=CeleryCommand)
@click.argument("identity", metavar="ID")
@click.option("--show-args", is_flag=True, cls=CeleryOption, help="Show the arguments too.")
@operates
def show(session: Session, *, identity: str, show_args: bool) -> int:
    """Show one dead letter. Its message, and its attempts with their errors."""
    database = session.database
    found = dead_letters.get(identity, app=session.app)
    if found is None:
        session.out.error(f"{identity!r} is no dead letter.")
        return FAILED
    row, attempts = found
    now = database.run(schedules.now)
    stored = message.document(row, show_args=show_args)
    trace = next((each.traceback for each in reversed(attempts) if each.traceback), None)
    pairs = [
        ("id", str(row.id)), ("task", plain(row.task)), ("task id", plain(row.task_id)), ("key", plain(row.key)),
        ("queue", plain(row.queue)), ("reason", plain(row.reason)), ("error", _error(row)),
        ("attempts", str(row.attempt)), ("created", both(row.created_at, now)), ("due", both(row.due_at, now)),
        ("started", both(row.started_at, now)), ("died", both(row.died_at, now)), ("worker", plain(row.worker)),
        ("replayed as", plain(row.replayed_as)), ("replayed", both(row.replayed_at, now)),
    ]  # fmt: skip
    session.out.show(
        {**_document(row), "task_id": row.task_id, "created_at": iso(row.created_at), "due_at": iso(row.due_at),
         "started_at": iso(row.started_at), "worker": row.worker, "now": iso(now), "message": stored,
         "attempts": [attempt_document(each) for each in attempts]},
        lambda: facts((name, value) for name, value in pairs if value != "-"),
        lambda: attempt_table(attempts) if attempts else None,
        lambda: message.table(stored),
        lambda: facts([("", plain(trace))], title="Last traceback") if trace else None,
    )  # fmt: skip
    return DONE


@dead.command(cls=CeleryCommand)
@click.argument("ids", nargs=-1, required=True, metavar="ID...")
@click.option(
    "--at", type=WHEN, default="now", show_default=True, cls=CeleryOption, help="When: now, 2h, or an instant."
)
@operates
def replay(session: Session, *, ids: Sequence[str], at: datetime | timedelta) -> int:
    """Run dead letters again, as new timers. Each once, with the same message and key."""

    def act(identity: str) -> dict[str, Any]:
        timer = dead_letters.replay(identity, when=at, app=session.app)
        return {"answer": "replayed", "timer": str(timer.id), "due_at": iso(timer.due_at)}

    return _each(session, ids, act, good="replayed")


@dead.command(cls=CeleryCommand)
@click.argument("ids", nargs=-1, required=True, metavar="ID...")
@operates
def discard(session: Session, *, ids: Sequence[str]) -> int:
    """Let dead letters go. Their outcome stays in the history until it is pruned."""

    def act(identity: str) -> dict[str, Any]:
        if not dead_letters.discard(identity, app=session.app):
            raise InvalidTimer(f"{identity} is no dead letter.")
        return {"answer": "discarded"}

    return _each(session, ids, act, good="discarded")


def _each(session: Session, ids: Sequence[str], act: Any, *, good: str) -> int:
    # Checked once, before the first of several is acted upon.
    _ = session.database
    results: list[dict[str, Any]] = []
    for identity in ids:
        result: dict[str, Any] = {"id": identity, "answer": "refused", "timer": None, "due_at": None, "error": None}
        try:
            result |= act(identity)
        except (InvalidTimer, KeyConflict) as exc:
            result["error"] = str(exc)
        results.append(result)
    session.out.show(
        {"dead_letters": results},
        lambda: listed(
            ["Dead letter", "Answer"],
            [[plain(each["id"]),
              f"{each['answer']} as\n{each['timer']}\ndue {each['due_at']}" if each["timer"] else each["answer"]]
             for each in results],
        ),
    )  # fmt: skip
    for each in results:
        if each["error"]:
            session.out.error(each["error"])
    return DONE if all(each["answer"] == good for each in results) else FAILED


def _document(row: Row) -> dict[str, Any]:
    return {
        "id": str(row.id), "task": row.task, "key": row.key, "queue": row.queue, "died_at": iso(row.died_at),
        "attempt": row.attempt, "reason": row.reason, "error_type": row.error_type, "error": row.error,
        "replayed_as": None if row.replayed_as is None else str(row.replayed_as), "replayed_at": iso(row.replayed_at),
    }  # fmt: skip


def _row(row: Row, now: datetime) -> list[str]:
    name = [str(row.id), plain(row.task)]
    if row.key and row.key != str(row.id):
        name.append(plain(f"key {row.key}"))
    error = _error(row).splitlines()[0]
    why = [plain(row.reason), error if len(error) <= 120 else f"{error[:119]}…"]
    if row.replayed_as is not None:
        why.append("replayed")
    died = f"{absolute(row.died_at)}\n{relative(row.died_at, now)}\nattempt {row.attempt}"
    return ["\n".join(name), died, "\n".join(why)]


def _error(row: Row) -> str:
    return plain(f"{row.error_type}: {row.error}" if row.error_type else row.error)
