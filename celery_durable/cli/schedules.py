"""``durable schedules``: list, show, next."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import click
from celery import Celery
from celery.bin.base import CeleryCommand, CeleryOption

from celery_durable import schedules as api
from celery_durable.cli.message import REDACTED
from celery_durable.cli.output import facts, listed, plain
from celery_durable.cli.session import DONE, FAILED, Session, operates
from celery_durable.cli.times import absolute, both, iso, relative
from celery_durable.errors import InvalidSchedule
from celery_durable.recurrence import from_celery
from celery_durable.store import listing
from celery_durable.store import schedules as store
from celery_durable.store.executor import Executor, Row
from celery_durable.store.schedules import StoredSchedule


@click.group()
def schedules() -> None:
    """Schedules: named recurring definitions."""


@schedules.command("list", cls=CeleryCommand)
@click.option(
    "--limit", type=click.IntRange(1, 10_000), default=500, show_default=True, cls=CeleryOption, help="Most rows."
)
@click.option("--cursor", default="", cls=CeleryOption, help="Go on after this name.")
@operates
def list_(session: Session, *, limit: int, cursor: str) -> int:
    """List schedules by name."""

    def operation(executor: Executor) -> tuple[datetime, list[StoredSchedule]]:
        return store.now(executor), store.page_of(executor, after=cursor, page=limit + 1)

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
    """Show one schedule: its definition, its cursor, and which occurrences did not run."""

    def operation(executor: Executor) -> tuple[StoredSchedule | None, datetime, Sequence[Row]]:
        return store.get(executor, name), store.now(executor), listing.missed(executor, name, limit=10)

    found, now, missed = session.database.run(operation)
    if found is None:
        session.out.error(f"There is no schedule {name!r}.")
        return FAILED
    hidden: Any = REDACTED
    document = {
        **_document(found), "now": iso(now), "args": found.args if show_args else hidden,
        "kwargs": found.kwargs if show_args else hidden, "options": found.options, "policy": found.policy,
        "fingerprint": found.fingerprint, "cursor": iso(found.cursor),
        "missed": [{"nominal": iso(row.nominal), "noted_at": iso(row.noted_at), "reason": row.reason} for row in missed],
    }  # fmt: skip
    pairs = [
        ("name", plain(found.name)), ("task", plain(found.task)), ("when", _when(found)),
        ("anchor", absolute(found.anchor)), ("enabled", "yes" if found.enabled else "no"), ("owner", found.owner),
        ("next", both(found.next_at, now)), ("settled up to", both(found.cursor, now)), ("fired", str(found.fired)),
        ("last fired", both(found.last_fired_at, now)), ("fault", plain(found.fault)),
        ("args", plain(document["args"])), ("kwargs", plain(document["kwargs"])),
        ("options", plain(found.options or None)), ("policy", plain(found.policy or None)),
    ]  # fmt: skip
    session.out.show(
        document,
        lambda: facts((name, value) for name, value in pairs if value != "-"),
        lambda: listed(
            ["Did not run", "Reason"], [[absolute(row.nominal), plain(row.reason)] for row in missed], ids=False
        ) if missed else None,
    )  # fmt: skip
    return DONE


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
        lambda: listed(
            ["UTC", str(zone), "From now"],
            [[absolute(each), each.astimezone(zone).strftime("%a %Y-%m-%d %H:%M:%S %z"), relative(each, now)]
             for each in instants], ids=False,
        ) if instants else None,
    )  # fmt: skip
    if not instants:
        session.out.note("It never runs again." if found.enabled else "It is disabled, so it does not run.")
    return DONE


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
        "fault": schedule.fault,
    }  # fmt: skip


def _when(schedule: StoredSchedule) -> str:
    if schedule.kind == "interval":
        return f"every {plain(schedule.text)} s"
    return plain(f"{schedule.text} ({schedule.tz})" if schedule.tz else f"{schedule.text}")


def _row(schedule: StoredSchedule, now: datetime) -> list[str]:
    if schedule.fault:
        following = "fault: see show"
    elif not schedule.enabled:
        following = "disabled"
    else:
        following = f"{absolute(schedule.next_at)}\n{relative(schedule.next_at, now)}" if schedule.next_at else "never"
    return [f"{plain(schedule.name)}\n{plain(schedule.task)}", _when(schedule), following, str(schedule.fired)]
