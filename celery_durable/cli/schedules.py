"""``durable schedules``: list, show, next, history; what changes them stands beside it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import click
from celery import Celery
from celery.bin.base import CeleryCommand, CeleryOption
from rich.table import Table

from celery_durable import schedules as api
from celery_durable.cli import schedule_changes
from celery_durable.cli.message import REDACTED
from celery_durable.cli.output import facts, listed, plain
from celery_durable.cli.schedule_changes import state_of
from celery_durable.cli.session import DONE, FAILED, Session, operates
from celery_durable.cli.times import WHEN, absolute, both, iso, relative, resolved
from celery_durable.errors import InvalidSchedule
from celery_durable.recurrence import from_celery
from celery_durable.schedule import Schedule
from celery_durable.store import schedules as store
from celery_durable.store.executor import Executor
from celery_durable.store.schedules import StoredSchedule


@click.group()
def schedules() -> None:
    """Schedules: named recurring definitions."""


for _command in (
    schedule_changes.backfill, schedule_changes.delete, schedule_changes.pause, schedule_changes.resume,
    schedule_changes.trigger, schedule_changes.upsert,
):  # fmt: skip
    schedules.add_command(_command)


@schedules.command("list", cls=CeleryCommand)
@click.option(
    "--limit", type=click.IntRange(1, 10_000), default=500, show_default=True, cls=CeleryOption, help="Most rows."
)
@click.option("--cursor", default="", cls=CeleryOption, help="Go on after this name.")
@click.option("--task", cls=CeleryOption, help="Only of this task.")
@click.option("--prefix", default="", cls=CeleryOption, help="Only names that begin so.")
@click.option(
    "--owner", type=click.Choice(["api", "code"]), cls=CeleryOption,
    help="Only those made at run time (api), or of beat_schedule (code).",
)  # fmt: skip
@click.option("--paused/--not-paused", "paused", default=None, help="Only those that are paused, or are not.")
@operates
def list_(session: Session, /, *, limit: int, cursor: str, **filters: Any) -> int:
    """List schedules by name."""

    def operation(executor: Executor) -> tuple[datetime, list[StoredSchedule]]:
        return store.now(executor), store.page_of(executor, after=cursor, page=limit + 1, **filters)

    now, rows = session.database.run(operation)
    rows, more = rows[:limit], len(rows) > limit
    following = rows[-1].name if more else None
    session.out.show(
        {"now": iso(now), "schedules": [_document(row) for row in rows], "cursor": following},
        lambda: listed(
            ["Schedule / task", "When", "Next", "Fired"], [_row(row, now) for row in rows], ids=False,
            fixed=(2, 3),
        ) if rows else None,
    )  # fmt: skip
    if not rows:
        session.out.note("No schedules.")
    if following is not None:
        session.out.note(f"There is more: --cursor {following!r}")
    return DONE


@schedules.command(cls=CeleryCommand)
@click.argument("name")
@click.option("--show-args", is_flag=True, cls=CeleryOption, help="Show the arguments too.")
@operates
def show(session: Session, *, name: str, show_args: bool) -> int:
    """Show one schedule. Its definition, its cursor, and which occurrences did not run."""

    found, now = session.database.run(lambda executor: (store.get(executor, name), store.now(executor)))
    if found is None:
        session.out.error(f"There is no schedule {name!r}.")
        return FAILED
    occurrences = api.history(name, 10, app=session.app)
    hidden: Any = REDACTED
    document = {
        **_document(found), "now": iso(now), "args": found.args if show_args else hidden,
        "kwargs": found.kwargs if show_args else hidden, "options": found.options, "policy": found.policy,
        "fingerprint": found.fingerprint, "cursor": iso(found.cursor),
        "history": [_occurrence(each) for each in occurrences],
    }  # fmt: skip
    pairs = [
        ("name", plain(found.name)), ("task", plain(found.task)), ("when", _when(found)),
        ("anchor", absolute(found.anchor)), ("enabled", "yes" if found.enabled else "no"), ("owner", found.owner),
        ("state", state_of(Schedule.of(found), now)), ("paused by", plain(found.paused_by)),
        ("paused since", both(found.paused_at, now)), ("note", plain(found.paused_note)),
        ("next", both(found.next_at, now)), ("queued", str(found.queued or "-")),
        ("settled up to", both(found.cursor, now)), ("fired", str(found.fired)),
        ("last fired", both(found.last_fired_at, now)),
        ("not run", ", ".join(f"{number} {reason}" for reason, number in found.not_run.items()) or "-"),
        ("fault", plain(found.fault)),
        ("args", plain(document["args"])), ("kwargs", plain(document["kwargs"])),
        ("options", plain(found.options or None)), ("policy", plain(found.policy or None)),
    ]  # fmt: skip
    session.out.show(
        document,
        lambda: facts((name, value) for name, value in pairs if value != "-"),
        lambda: _occurrences(occurrences, now) if occurrences else None,
    )  # fmt: skip
    return DONE


@schedules.command(cls=CeleryCommand)
@click.argument("name")
@click.option(
    "-n", "--number", type=click.IntRange(1, 10_000), default=50, show_default=True, cls=CeleryOption, help="How many."
)
@click.option("--before", type=WHEN, cls=CeleryOption, help="Only those before this time: where a page ended.")
@operates
def history(session: Session, *, name: str, number: int, before: datetime | timedelta | None) -> int:
    """Show the newest occurrences. Those that did not run say why."""
    found, now = session.database.run(lambda executor: (store.get(executor, name), store.now(executor)))
    occurrences = api.history(name, number, before=resolved(before, now), app=session.app)
    if found is None and not occurrences:
        session.out.error(f"There is no schedule {name!r}.")
        return FAILED
    session.out.show(
        {"now": iso(now), "name": name, "not_run": dict(found.not_run) if found is not None else None,
         "occurrences": [_occurrence(each) for each in occurrences]},
        lambda: _occurrences(occurrences, now) if occurrences else None,
    )  # fmt: skip
    if len(occurrences) == number:
        session.out.note(f"There may be more: --before {iso(occurrences[-1].nominal)}")
    return DONE


def _occurrence(occurrence: api.Occurrence) -> dict[str, Any]:
    return {
        "nominal": iso(occurrence.nominal), "reason": occurrence.reason, "state": occurrence.state,
        "timer_id": None if occurrence.timer_id is None else str(occurrence.timer_id),
        "due_at": iso(occurrence.due_at), "started_at": iso(occurrence.started_at),
        "finished_at": iso(occurrence.finished_at),
    }  # fmt: skip


def _occurrences(occurrences: Sequence[api.Occurrence], now: datetime) -> Table:
    return listed(
        ["Nominal", "Reason", "State"],
        [[absolute(each.nominal), plain(each.reason), plain(each.state or "did not run")] for each in occurrences],
        ids=False, fixed=(0,),
    )  # fmt: skip


@schedules.command("next", cls=CeleryCommand)
@click.argument("name")
@click.option(
    "-n", "--number", type=click.IntRange(1, 1000), default=10, show_default=True, cls=CeleryOption, help="How many."
)
@click.option("--tz", cls=CeleryOption, help="Zone of the second column; the schedule's own otherwise.")
@operates
def next_(session: Session, *, name: str, number: int, tz: str | None) -> int:
    """Show when a schedule runs next."""
    found, now = session.database.run(lambda executor: (store.get(executor, name), store.now(executor)))
    if found is None:
        session.out.error(f"There is no schedule {name!r}.")
        return FAILED
    zone = _zone(tz or found.tz or "UTC")
    try:
        instants = _next_times(session.app, found, now, number)
    except InvalidSchedule as exc:
        session.out.error(str(exc))
        return FAILED
    session.out.show(
        {"now": iso(now), "name": found.name, "enabled": found.enabled, "tz": str(zone),
         "next": [{"at": iso(each), "local": each.astimezone(zone).isoformat()} for each in instants]},
        lambda: _foretold(instants, zone, now) if instants else None,
    )  # fmt: skip
    if not instants:
        state = state_of(Schedule.of(found), now)
        session.out.note("It never runs again." if state == "ended" else f"It does not run: it is {state}.")
    return DONE


def _foretold(instants: Sequence[datetime], zone: ZoneInfo, now: datetime) -> Table:
    """Times in UTC, in the zone if that is another, and from now."""
    names = ["UTC", *([] if zone.key == "UTC" else [zone.key]), "From now"]
    rows = [
        [absolute(each), each.astimezone(zone).strftime("%a %Y-%m-%d %H:%M:%S %z"), relative(each, now)]
        for each in instants
    ]
    return listed(names, [row if len(names) == 3 else [row[0], row[2]] for row in rows], ids=False)


def _next_times(app: Celery, schedule: StoredSchedule, now: datetime, number: int) -> Sequence[datetime]:
    """When it runs; the rule of one that only code can hold is looked for in this app."""
    entry = (app.conf.beat_schedule or {}).get(schedule.name) if schedule.kind == store.CODE_KIND else None
    if entry is None:
        return api.next_times(schedule.name, number, app=app)
    if not schedule.enabled:
        return []
    rule = entry["schedule"] if isinstance(entry, dict) else entry.schedule
    return from_celery(rule).upcoming(max(now, schedule.cursor), number)


def _zone(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as exc:
        raise click.BadParameter(f"{name!r} is no IANA zone name, such as Europe/Berlin.", param_hint="--tz") from exc


def _document(schedule: StoredSchedule) -> dict[str, Any]:
    return {
        "name": schedule.name, "task": schedule.task, "kind": schedule.kind, "text": schedule.text, "tz": schedule.tz,
        "anchor": iso(schedule.anchor), "owner": schedule.owner, "enabled": schedule.enabled,
        "next_at": iso(schedule.next_at), "last_fired_at": iso(schedule.last_fired_at), "fired": schedule.fired,
        "not_run": dict(schedule.not_run), "queued": schedule.queued, "paused_at": iso(schedule.paused_at),
        "paused_until": iso(schedule.paused_until), "paused_by": schedule.paused_by,
        "paused_note": schedule.paused_note, "fault": schedule.fault,
    }  # fmt: skip


def _when(schedule: StoredSchedule) -> str:
    if schedule.kind == "interval":
        return f"every {plain(schedule.text)} s"
    return plain(f"{schedule.text} ({schedule.tz})" if schedule.tz else f"{schedule.text}")


def _row(schedule: StoredSchedule, now: datetime) -> list[str]:
    if schedule.fault:
        following = "fault: see show"
    elif not schedule.enabled or schedule.paused_at is not None:
        following = state_of(Schedule.of(schedule), now).replace(" until ", " until\n")
    else:
        following = f"{absolute(schedule.next_at)}\n{relative(schedule.next_at, now)}" if schedule.next_at else "never"
    return [f"{plain(schedule.name)}\n{plain(schedule.task)}", _when(schedule), following, str(schedule.fired)]
