"""``durable dead``: list, show, replay, discard, export."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import click
from celery.bin.base import CeleryCommand, CeleryOption
from rich.table import Table

from celery_durable import dead_letters
from celery_durable.cli import message
from celery_durable.cli.output import facts, listed, plain
from celery_durable.cli.session import DONE, FAILED, Session, operates
from celery_durable.cli.timers import attempt_document, attempt_table
from celery_durable.cli.times import WHEN, absolute, both, iso, relative, resolved
from celery_durable.dead_letters import Group, Tally
from celery_durable.errors import InvalidTimer, KeyConflict
from celery_durable.store import schedules
from celery_durable.store.executor import Row

_FILTERS = (
    click.option("--task", cls=CeleryOption, help="Only of this task."),
    click.option("--reason", cls=CeleryOption, help="Only those that died for this reason: exhausted, worker lost..."),
    click.option("--error-type", cls=CeleryOption, help="Only with this error, named as the list does: ValueError."),
    click.option("--error", cls=CeleryOption, help="Only with this text in the error, in capitals or not."),
    click.option("--key", cls=CeleryOption, help="Only keys that begin so."),
    click.option("--queue", cls=CeleryOption, help="Only for this queue."),
    click.option("--since", type=WHEN, cls=CeleryOption, help="Only those that died then or later: -2h, an instant."),
    click.option("--until", type=WHEN, cls=CeleryOption, help="Only those that died before then."),
)
_REPLAYED = click.option("--replayed", is_flag=True, cls=CeleryOption, help="Also those that were replayed.")
_ALL = click.option("--all", "every", is_flag=True, cls=CeleryOption, help="All that the filters let pass.")
_DRY = click.option("--dry-run", is_flag=True, cls=CeleryOption, help="Only say what would be done.")
_YES = click.option("-y", "--yes", is_flag=True, cls=CeleryOption, help="With --all: do not ask.")


def _filtered(command: Any) -> Any:
    """Give a command the options that choose dead letters."""
    for option in reversed(_FILTERS):
        command = option(command)
    return command


def _fixed(session: Session, filters: dict[str, Any]) -> tuple[datetime, dict[str, Any]]:
    """The database's time, and the filters with their times counted from it."""
    now = session.database.run(schedules.now)
    times = {name: resolved(filters[name], now) for name in ("since", "until")}
    return now, {**filters, **times}


@click.group()
def dead() -> None:
    """Dead letters: timers that have failed for good."""


@dead.command("list", cls=CeleryCommand)
@_filtered
@_REPLAYED
@click.option("--group", is_flag=True, cls=CeleryOption, help="Count them by task, error and reason instead.")
@click.option(
    "--limit", type=click.IntRange(1, 10_000), default=50, show_default=True, cls=CeleryOption, help="Most rows."
)
@click.option("--cursor", cls=CeleryOption, help="Go on where the page before ended.")
@operates
def list_(session: Session, /, *, group: bool, limit: int, cursor: str | None, **filters: Any) -> int:
    """List dead letters, newest first."""
    if group and cursor is not None:
        raise click.UsageError("--group has one page: leave --cursor out.")
    now, filters = _fixed(session, filters)
    try:
        if group:
            return _groups(session, now, limit, filters)
        page = dead_letters.find_all(limit=limit, before=cursor, app=session.app, **filters)
    except InvalidTimer as exc:
        raise click.UsageError(str(exc)) from exc
    session.out.show(
        {"now": iso(now), "dead_letters": [_document(row) for row in page], "cursor": page.cursor},
        lambda: listed(
            ["Timer / task / key", "Died", "Reason / error"], [_row(row, now) for row in page], fixed=(1,)
        ) if page else None,
    )  # fmt: skip
    if not page and page.cursor is None:
        session.out.note("No dead letters.")
    if page.cursor is not None:
        session.out.note(f"There may be more: --cursor {page.cursor}")
    return DONE


def _groups(session: Session, now: datetime, limit: int, filters: dict[str, Any]) -> int:
    found = dead_letters.groups(limit=limit, app=session.app, **filters)
    session.out.show(
        {
            "now": iso(now), "looked_at": found.looked_at, "complete": found.complete,
            "groups": [
                {"task": each.task, "error_type": each.error_type, "reason": each.reason, "number": each.number,
                 "oldest": iso(each.oldest), "newest": iso(each.newest), "example": str(each.example)}
                for each in found.groups
            ],
        },
        lambda: _group_table(found.groups) if found.groups else None,
    )  # fmt: skip
    if not found.groups:
        session.out.note("No dead letters.")
    if not found.complete:
        session.out.note(f"Counted over the newest {found.looked_at:,} of that time.")
    return DONE


def _group_table(groups: Sequence[Group]) -> Table:
    return listed(
        ["Number × task / newest", "Newest / oldest", "Reason / error"],
        [[f"{each.number} × {plain(each.task)}\n{each.example}", f"{absolute(each.newest)}\n{absolute(each.oldest)}",
          f"{plain(each.reason)}\n{plain(each.error_type)}"] for each in groups],
        fixed=(1,),
    )  # fmt: skip


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
    stored = None if row.body is None else message.document(row, show_args=show_args)
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
        lambda: None if stored is None else message.table(stored),
        lambda: facts([("", plain(trace))], title="Last traceback") if trace else None,
    )  # fmt: skip
    return DONE


@dead.command(cls=CeleryCommand)
@click.argument("ids", nargs=-1, metavar="[ID]...")
@_ALL
@_filtered
@click.option(
    "--at", type=WHEN, default="now", show_default=True, cls=CeleryOption, help="When: now, 2h, or an instant."
)
@_DRY
@_YES
@operates
def replay(
    session: Session, /, *, ids: Sequence[str], every: bool, at: datetime | timedelta, dry_run: bool, yes: bool,
    **filters: Any,
) -> int:  # fmt: skip
    """Run dead letters again, as new timers. Each once, with the same message and key."""
    if _all_asked_for(ids, every, filters):
        do = partial(dead_letters.replay_all, when=at, app=session.app)
        return _every(session, do, filters, "replayed", dry_run=dry_run, yes=yes)

    def act(identity: str) -> dict[str, Any]:
        timer = dead_letters.replay(identity, when=at, dry_run=dry_run, app=session.app)
        if dry_run:
            return {"answer": "would be replayed"}
        return {"answer": "replayed", "timer": str(timer.id), "due_at": iso(timer.due_at)}

    return _each(session, ids, act, dry_run)


@dead.command(cls=CeleryCommand)
@click.argument("ids", nargs=-1, metavar="[ID]...")
@_ALL
@_filtered
@_REPLAYED
@_DRY
@_YES
@operates
def discard(
    session: Session, /, *, ids: Sequence[str], every: bool, dry_run: bool, yes: bool, **filters: Any
) -> int:  # fmt: skip
    """Let dead letters go. Their outcome stays in the history until it is pruned."""
    if _all_asked_for(ids, every, filters):
        do = partial(dead_letters.discard_all, app=session.app)
        return _every(session, do, filters, "discarded", dry_run=dry_run, yes=yes)

    def act(identity: str) -> dict[str, Any]:
        if not dead_letters.discard(identity, dry_run=dry_run, app=session.app):
            raise InvalidTimer(f"{identity} is no dead letter.")
        return {"answer": "would be discarded" if dry_run else "discarded"}

    return _each(session, ids, act, dry_run)


@dead.command(cls=CeleryCommand)
@_filtered
@_REPLAYED
@click.option("--show-args", is_flag=True, cls=CeleryOption, help="With the arguments too.")
@operates
def export(session: Session, /, *, show_args: bool, **filters: Any) -> int:
    """Write dead letters as JSON lines, oldest first. With messages, attempts and tracebacks."""
    _, filters = _fixed(session, filters)
    try:
        letters = dead_letters.export(show_args=show_args, app=session.app, **filters)
    except InvalidTimer as exc:
        raise click.UsageError(str(exc)) from exc
    number = 0
    for number, letter in enumerate(letters, 1):  # noqa: B007  # counted for the note
        session.out.line(letter)
    session.out.note(f"{number} dead letters.")
    return DONE


def _all_asked_for(ids: Sequence[str], every: bool, filters: dict[str, Any]) -> bool:
    """Whether all that filters let pass are meant, and not those named."""
    if bool(ids) == every:
        raise click.UsageError("Name dead letters, or say --all, and not both.")
    if not every and any(value not in (None, False) for value in filters.values()):
        raise click.UsageError("Filters go with --all.")
    return every


def _every(
    session: Session, do: Callable[..., Tally], filters: dict[str, Any], done: str, *, dry_run: bool, yes: bool
) -> int:  # fmt: skip
    """Do something to all that the filters let pass, once somebody has agreed to their number."""
    now, filters = _fixed(session, filters)
    try:
        if not dry_run and not yes:
            if not sys.stdin.isatty():
                raise click.UsageError(
                    "--all asks first, and there is no terminal: look with --dry-run, then say --yes."
                )
            # Whatever dies while somebody thinks is not what they agree to.
            filters["until"] = filters["until"] or now
            number = do(dry_run=True, **filters).done
            if number and not click.confirm(f"{number} dead letters will be {done}. Go on?", err=True):
                session.out.note("Nothing was changed.")
                return FAILED
        tally = do(dry_run=dry_run, progress=None if dry_run else _progress(session, done), **filters)
    except InvalidTimer as exc:
        raise click.UsageError(str(exc)) from exc
    others = {"changed by others meanwhile": tally.elsewhere, "refused": tally.refused}
    counted = [(f"would be {done}" if dry_run else done, tally.done), *(pair for pair in others.items() if pair[1])]
    session.out.show(
        {"dry_run": dry_run, done: tally.done, "elsewhere": tally.elsewhere, "refused": tally.refused,
         "refusals": [{"id": str(timer_id), "error": why} for timer_id, why in tally.refusals.items()]},
        lambda: facts((name, str(number)) for name, number in counted),
    )  # fmt: skip
    for why in tally.refusals.values():
        session.out.error(why)
    if dry_run:
        session.out.note("Nothing was changed: --dry-run.")
    return FAILED if tally.refused else DONE


def _progress(session: Session, done: str) -> Callable[[int], None]:
    """Say now and then how far it is."""
    told = 0

    def progress(number: int) -> None:
        nonlocal told
        if number >= told + 1000:
            told = number
            session.out.note(f"{number} {done}.")

    return progress


def _each(session: Session, ids: Sequence[str], act: Callable[[str], dict[str, Any]], dry_run: bool) -> int:
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
        {"dry_run": dry_run, "dead_letters": results},
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
    return FAILED if any(each["error"] for each in results) else DONE


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
