"""``durable status``: is everything on time, and who is at work?"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import click
from celery.bin.base import CeleryCommand
from rich.table import Table

from celery_durable.cli import timers
from celery_durable.cli.output import facts, listed, plain
from celery_durable.cli.session import DONE, Session, operates
from celery_durable.cli.times import absolute, duration, iso, relative
from celery_durable.core.states import IN_MOTION, State
from celery_durable.store import beats, history, listing, schedules
from celery_durable.store.executor import Executor

#: How many of the next timers and schedules are shown.
SHOWN = 5


@click.command(cls=CeleryCommand)
@operates
def status(session: Session) -> int:
    """Show whether all is on time. Counts, the oldest overdue timer, beats, lateness of the last day, what fires next."""
    database = session.database
    patience = max(15.0, 3 * database.settings.poll_interval)

    def operation(executor: Executor) -> dict[str, Any]:
        now = schedules.now(executor)
        waiting = listing.Filter(states=[State.WAITING], due_after=now)
        return {
            "now": now, "counts": beats.counts(executor), "beats": beats.every(executor),
            "lateness": history.lateness(executor),
            "timers": listing.page_of_timers(executor, waiting, limit=SHOWN).timers,
            "schedules": listing.next_schedules(executor, limit=SHOWN),
        }  # fmt: skip

    read = database.run(operation)
    now: datetime = read["now"]
    document = {
        "now": iso(now), "schema": database.schema, **_counts(read["counts"]),
        "lateness_last_day": {
            "number": read["lateness"].number,
            **{f"{name}_seconds": getattr(read["lateness"], name) for name in ("p50", "p95", "p99")},
        },
        "beats": [
            {"node": row.node, "pid": row.pid, "version": row.version, "alive": row.silent_for < patience,
             "started_at": iso(row.started_at), "seen_at": iso(row.seen_at), "silent_seconds": max(0.0, row.silent_for),
             "dispatched": row.dispatched}
            for row in read["beats"]
        ],
        "next_timers": [timers.document(found, now) for found in read["timers"]],
        "next_schedules": [
            {"name": each.name, "task": each.task, "next_at": iso(each.next_at)} for each in read["schedules"]
        ],
    }  # fmt: skip
    session.out.show(
        document,
        lambda: facts(_facts(document)),
        lambda: _beats(document),
        lambda: _next(read, now),
    )
    if not any(beat["alive"] for beat in document["beats"]):
        session.out.note("No beat is alive: nothing is dispatched. Start one: celery -A <your app> beat -S durable")
    return DONE


def _counts(counts: Mapping[str, Any]) -> dict[str, Any]:
    ended = counts["ended_last_day"]
    return {
        "timers": {
            "waiting": counts["waiting"], "waiting_is_estimate": counts["waiting_is_estimate"],
            **{str(state): counts["in_motion"].get(str(state), 0) for state in State if state in IN_MOTION},
        },
        "overdue": counts["due"],
        "oldest_overdue_seconds": None if counts["oldest_overdue"] is None else max(0.0, counts["oldest_overdue"]),
        "dead_letters": counts["dead"], "schedules": counts["schedules"], "faulty_schedules": counts["faulty"],
        "ended_last_day": {str(state): ended.get(str(state), 0) for state in State if state.ended},
    }  # fmt: skip


def _facts(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    counts, late = document["timers"], document["lateness_last_day"]
    about = "about " if counts["waiting_is_estimate"] else ""
    moving = ", ".join(f"{counts[str(state)]} {state}" for state in State if state in IN_MOTION)
    oldest = document["oldest_overdue_seconds"]
    overdue = f"{document['overdue']}" + ("" if oldest is None else f", the oldest for {duration(oldest)}")
    ended = ", ".join(f"{number} {state}" for state, number in document["ended_last_day"].items() if number)
    lateness = "-"
    if late["number"]:
        lateness = ", ".join(f"{name} {duration(late[f'{name}_seconds'])}" for name in ("p50", "p95", "p99"))
    return [
        ("waiting", f"{about}{counts['waiting']}"), ("overdue", overdue), ("in motion", moving),
        ("ended, last day", ended or "0"), ("lateness, last day", lateness),
        ("dead letters", str(document["dead_letters"])), (
            "schedules", f"{document['schedules']}" + (
                f", {document['faulty_schedules']} with a fault: see schedules list" if document["faulty_schedules"] else ""
            ),
        ),
    ]  # fmt: skip


def _beats(document: Mapping[str, Any]) -> Table | None:
    rows = [
        [plain(beat["node"]), str(beat["pid"]), "alive" if beat["alive"] else "silent",
         f"{duration(beat['silent_seconds'])} ago", str(beat["dispatched"])]
        for beat in document["beats"]
    ]  # fmt: skip
    return listed(["Beat", "Pid", "State", "Seen", "Dispatched"], rows, ids=False, fixed=(1, 2, 3)) if rows else None


def _next(read: Mapping[str, Any], now: datetime) -> Table | None:
    fires = [(found.due_at, f"timer {found.id}", found.task) for found in read["timers"]]
    fires += [(each.next_at, f"schedule {each.name}", each.task) for each in read["schedules"] if each.next_at]
    fires.sort(key=lambda fire: fire[0])
    rows = [
        [f"{absolute(at)}\n{relative(at, now)}", f"{plain(what)}\n{plain(task)}"] for at, what, task in fires[:SHOWN]
    ]
    return listed(["Next", "What"], rows, ids=False, fixed=(0,)) if rows else None
