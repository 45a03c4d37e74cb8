"""``durable schedules``: upsert, delete, pause, resume, trigger, backfill."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import click
from celery.bin.base import CeleryCommand, CeleryOption

from celery_durable import schedules as api
from celery_durable.cli.output import listed, plain
from celery_durable.cli.session import DONE, FAILED, USAGE, Session, operates
from celery_durable.cli.times import WHEN, absolute, iso, relative, resolved
from celery_durable.core.catchup import CATCHUPS, OVERLAPS
from celery_durable.errors import InvalidSchedule
from celery_durable.schedule import Schedule
from celery_durable.store import schedules as store

#: Schedules that one bulk command reads at a time.
PAGE = 500

_DRY = click.option("--dry-run", is_flag=True, cls=CeleryOption, help="Only say what would be done.")


if TYPE_CHECKING:
    from celery_durable.recurrence import When

    _ParamType = click.ParamType[Any]
else:
    # Generic only in newer releases of click.
    _ParamType = click.ParamType


class _Json(_ParamType):
    name = "json"

    def __init__(self, kind: type) -> None:
        self._kind = kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See :class:`click.ParamType`."""
        try:
            found = json.loads(value) if isinstance(value, str) else value
        except (ValueError, RecursionError) as exc:
            self.fail(f"{value!r} is no JSON: {exc}", param, ctx)
        if not isinstance(found, self._kind):
            self.fail(f"{value!r} must be a JSON {'array' if self._kind is list else 'object'}.", param, ctx)
        return found


def _chosen(command: Callable[..., Any]) -> Callable[..., Any]:
    """Names, or ``--all`` with filters."""
    for option in reversed((
        click.argument("names", nargs=-1, metavar="[NAME]..."),
        click.option("--all", "every", is_flag=True, cls=CeleryOption, help="All that the filters leave."),
        click.option("--task", cls=CeleryOption, help="With --all: only of this task."),
        click.option("--prefix", default="", cls=CeleryOption, help="With --all: only names that begin so."),
        click.option(
            "--owner", type=click.Choice(["api", "code"]), cls=CeleryOption,
            help="With --all: only those made at run time (api), or of beat_schedule (code).",
        ),
    )):  # fmt: skip
        command = option(command)
    return command


def _names(
    session: Session, names: Sequence[str], every: bool, task: str | None, prefix: str, owner: str | None,
    paused: bool | None = None,
) -> list[str]:  # fmt: skip
    if bool(names) == every:
        raise click.UsageError("Name schedules, or say --all, and not both.")
    if not every:
        if task or prefix or owner:
            raise click.UsageError("--task, --prefix and --owner go with --all.")
        return list(names)
    found: list[str] = []
    while True:
        page = api.list(
            after=found[-1] if found else "", limit=PAGE, prefix=prefix, task=task, owner=owner, paused=paused,
            app=session.app,
        )  # fmt: skip
        found += [each.name for each in page]
        if len(page) < PAGE:
            return found


def _each(session: Session, names: Sequence[str], act: Callable[[str], dict[str, Any]], dry_run: bool) -> int:
    """Do something to each schedule, and show what came of it."""
    database, results, code = session.database, [], DONE
    now = database.run(store.now)
    for name in names:
        try:
            results.append({"name": name, "error": None, **({} if dry_run else act(name))})
        except InvalidSchedule as exc:
            results.append({"name": name, "error": str(exc)})
            session.out.error(str(exc))
            code = FAILED
    good = [each for each in results if each["error"] is None]
    session.out.show(
        {"now": iso(now), "dry_run": dry_run, "schedules": results},
        lambda: listed(
            ["Schedule", "State", "Next"],
            [[plain(each["name"]), plain(each.get("state")), absolute(each.get("_next"))] for each in good], ids=False,
            fixed=(2,),
        ) if good else None,
    )  # fmt: skip
    if dry_run:
        session.out.note(f"Nothing was changed: --dry-run. It would be {len(good)} schedules.")
    elif not names:
        session.out.note("No schedule matches.")
    return code


def state_of(schedule: Schedule, now: datetime) -> str:
    """What a schedule does, in a word or two."""
    if not schedule.enabled:
        return "disabled"
    if schedule.paused_at is not None:
        until = f" until {absolute(schedule.paused_until)}" if schedule.paused_until is not None else ""
        return f"paused{until}"
    if schedule.fault:
        return "fault"
    return (
        "waiting" if schedule.next_at is not None and schedule.next_at > now else "due" if schedule.next_at else "ended"
    )


def _result(session: Session, schedule: Schedule) -> dict[str, Any]:
    now = session.database.run(store.now)
    return {
        "state": state_of(schedule, now), "next_at": iso(schedule.next_at), "_next": schedule.next_at,
        "paused_until": iso(schedule.paused_until), "paused_by": schedule.paused_by, "paused_note": schedule.paused_note,
    }  # fmt: skip


@click.command(cls=CeleryCommand)
@_chosen
@click.option("--until", type=WHEN, cls=CeleryOption, help="Goes on by itself then: 2h, 2030-01-31T09:00:00Z.")
@click.option("--note", cls=CeleryOption, help="Why; shown beside your name.")
@_DRY
@operates
def pause(
    session: Session, *, names: Sequence[str], every: bool, task: str | None, prefix: str, owner: str | None,
    until: datetime | timedelta | None, note: str | None, dry_run: bool,
) -> int:  # fmt: skip
    """Pause schedules. What comes due meanwhile does not run, and is not made up for."""
    return _each(
        session, _names(session, names, every, task, prefix, owner),
        lambda name: _result(
            session, api.pause(name, until=until, note=note, by=session.operator, app=session.app)
        ), dry_run,
    )  # fmt: skip


@click.command(cls=CeleryCommand)
@_chosen
@_DRY
@operates
def resume(
    session: Session, *, names: Sequence[str], every: bool, task: str | None, prefix: str, owner: str | None,
    dry_run: bool,
) -> int:  # fmt: skip
    """Resume paused schedules. The next occurrence after now is the next to run."""
    chosen = _names(session, names, every, task, prefix, owner, paused=True)
    return _each(session, chosen, lambda name: _result(session, api.resume(name, app=session.app)), dry_run)


@click.command(cls=CeleryCommand)
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@operates
def trigger(session: Session, *, names: Sequence[str]) -> int:
    """Run schedules' tasks once, now. Their own times stay as they are."""

    def act(name: str) -> dict[str, Any]:
        timer = api.trigger(name, app=session.app)
        return {"state": f"timer {timer.id}", "timer_id": str(timer.id), "_next": timer.due_at}

    return _each(session, names, act, dry_run=False)


@click.command(cls=CeleryCommand)
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@_DRY
@operates
def delete(session: Session, *, names: Sequence[str], dry_run: bool) -> int:
    """Delete schedules made at run time. Timers that are due already stay."""

    def act(name: str) -> dict[str, Any]:
        if not api.delete(name, app=session.app):
            raise InvalidSchedule(f"There is no schedule {name!r}.")
        return {"state": "deleted"}

    return _each(session, names, act, dry_run)


@click.command(cls=CeleryCommand)
@click.argument("name")
@click.option(
    "--from", "start", type=WHEN, required=True, cls=CeleryOption, help="First nominal time: -3d, or an instant."
)
@click.option("--to", "end", type=WHEN, default="now", show_default=True, cls=CeleryOption, help="Last nominal time.")
@click.option(
    "--overlap", type=click.Choice(["allow", "queue"]), cls=CeleryOption,
    help="All at once, or each when the one before has ended; as the schedule says if not given.",
)  # fmt: skip
@_DRY
@operates
def backfill(
    session: Session, *, name: str, start: datetime | timedelta, end: datetime | timedelta, overlap: str | None,
    dry_run: bool,
) -> int:  # fmt: skip
    """Run the occurrences of a span of the past that did not run."""
    now = session.database.run(store.now)
    begin, last = resolved(start, now), resolved(end, now)
    assert begin is not None and last is not None

    def progress(number: int) -> None:
        session.out.note(f"{number} stored.")

    try:
        found = api.backfill(name, begin, last, overlap=overlap, dry_run=dry_run, progress=progress, app=session.app)
    except InvalidSchedule as exc:
        session.out.error(str(exc))
        return FAILED
    session.out.show(
        {
            "now": iso(now), "name": name, "dry_run": dry_run, "overlap": found.overlap,
            "nominals": [iso(each) for each in found.nominals], "held": [iso(each) for each in found.held],
        },
        lambda: listed(
            ["Nominal", "From now", ""],
            [[absolute(each), relative(each, now), "would run" if dry_run else "runs"] for each in found.nominals]
            + [[absolute(each), relative(each, now), "has a timer already"] for each in found.held], ids=False,
        ) if found.nominals or found.held else None,
    )  # fmt: skip
    if dry_run:
        session.out.note(f"Nothing was changed: --dry-run. It would be {len(found.nominals)} occurrences.")
    elif not found.nominals:
        session.out.note("Nothing to run: every occurrence of that span has a timer, or there is none.")
    return DONE


@click.command(cls=CeleryCommand)
@click.argument("name")
@click.option("--task", required=True, cls=CeleryOption, help="Name of the task.")
@click.option("--cron", cls=CeleryOption, help="Cron text: 5 fields, or 6 with the seconds first.")
@click.option("--every", "interval", type=WHEN, cls=CeleryOption, help="An interval instead: 30s, 10m, 1d.")
@click.option("--tz", cls=CeleryOption, help="IANA zone of the cron text; the app's otherwise.")
@click.option("--args", "arguments", type=_Json(list), default="[]", cls=CeleryOption, help="JSON array.")
@click.option("--kwargs", type=_Json(dict), default="{}", cls=CeleryOption, help="JSON object.")
@click.option("--options", type=_Json(dict), default="{}", cls=CeleryOption, help="Of apply_async, as a JSON object.")
@click.option("--catchup", type=click.Choice(CATCHUPS), default="latest", show_default=True, cls=CeleryOption,
              help="Which of the missed occurrences run.")  # fmt: skip
@click.option("--overlap", type=click.Choice(OVERLAPS), default="allow", show_default=True, cls=CeleryOption,
              help="What happens while the run before goes on.")  # fmt: skip
@click.option(
    "--deadline", type=float, cls=CeleryOption, help="Seconds after which an occurrence does not run any more."
)
@click.option("--jitter", type=float, default=0.0, cls=CeleryOption, help="Seconds below which all runs are put off.")
@click.option("--start", type=WHEN, cls=CeleryOption, help="No occurrence before it.")
@click.option("--end", type=WHEN, cls=CeleryOption, help="No occurrence after it.")
@click.option("--max-runs", type=click.IntRange(1), cls=CeleryOption, help="Ends after that many runs.")
@click.option("--durable/--plain", "durable", default=None, help="For a task unknown here: is it a DurableTask?")
@click.option("--enabled/--disabled", "enabled", default=True, show_default=True, help="Whether it runs.")
@operates
def upsert(
    session: Session, /, *, name: str, cron: str | None, interval: datetime | timedelta | None, arguments: list[Any],
    start: datetime | timedelta | None, end: datetime | timedelta | None, **rest: Any,
) -> int:  # fmt: skip
    """Make a schedule, or change the one of that name."""
    if (cron is None) == (interval is None):
        raise click.UsageError("Say when: --cron or --every, and not both.")
    if interval is not None and not isinstance(interval, timedelta):
        raise click.UsageError("--every takes a length of time, such as 30s or 10m.")
    now = session.database.run(store.now)
    when: When = cron if cron is not None else interval or timedelta(0)
    try:
        made = api.upsert(
            name, when=when, args=arguments, start=resolved(start, now), end=resolved(end, now), app=session.app, **rest
        )
    except InvalidSchedule as exc:
        session.out.error(str(exc))
        return USAGE
    if made.task not in session.app.tasks:
        session.out.note(
            f"Task {made.task!r} is not registered in this app: check the name, unless only workers know it."
        )
    return _each(session, [made.name], lambda _: _result(session, made), dry_run=False)
