"""What all that is done to many dead letters shares: which ones, page by page, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, TypedDict
from uuid import UUID

from celery_durable.calls import present_app
from celery_durable.core.moments import When, moment
from celery_durable.errors import InvalidTimer
from celery_durable.store import dead_letters as store
from celery_durable.store import schedules, timers
from celery_durable.store.database import Database
from celery_durable.store.dead_letters import Filter
from celery_durable.store.executor import Executor, Row

if TYPE_CHECKING:
    from celery import Celery

#: Dead letters that one look finds.
PAGE = 500

#: Dead letters that one transaction changes, or whose payloads are in memory at one time.
CHUNK = 100

#: Refusals that :class:`Tally` keeps the words of.
MOST_REFUSALS = 1000

Progress = Callable[[int], object]
"""Is told after each transaction how many are done so far."""


class Filters(TypedDict, total=False):
    """Which dead letters; those that all given ones let pass."""

    task: str | None
    """The task's name."""
    reason: str | None
    """Why it died: exhausted, undispatchable, worker lost …"""
    error_type: str | None
    """The qualified name of the last error's class, ``ValueError`` or ``proj.errors.Declined``."""
    error: str | None
    """Somewhere in the last error's text, in capitals or not."""
    key: str | None
    """Beginning of the idempotency key."""
    queue: str | None
    """The queue asked for; for a call without one, its routing key."""
    since: When | None
    """Died then or later: an aware datetime, or a timedelta or seconds from now (``timedelta(hours=-2)``)."""
    until: When | None
    """Died before then."""
    replayed: bool
    """Also those that were run again."""


@dataclass(kw_only=True)
class Tally:
    """What came of many dead letters."""

    done: int = 0
    """How many were replayed or discarded; in a dry run, how many would be."""
    elsewhere: int = 0
    """How many somebody else replayed, discarded or pruned meanwhile."""
    refused: int = 0
    """How many cannot be replayed: what is stored of them is no message."""
    refusals: dict[UUID, str] = field(default_factory=dict)
    """Why, of the first 1,000."""

    def refuse(self, timer_id: UUID, why: str) -> None:
        """Count one that cannot be replayed."""
        self.refused += 1
        if len(self.refusals) < MOST_REFUSALS:
            self.refusals[timer_id] = why


def database_of(app: Celery | None) -> Database:
    """The database of `app`, or of the current one."""
    return Database.of(app or present_app())


def id_of(executor: Executor, identity: UUID | str) -> UUID | None:
    """The id of the timer that an id or a Celery task id names."""
    found = timers.find(executor, identity)
    if found is not None:
        return found.id
    try:  # without its call no timer is found, but the dead letter is there
        return UUID(str(identity))
    except ValueError:
        return None


def filter_of(database: Database, filters: Filters) -> Filter:
    """Read filters.

    Raises:
        InvalidTimer: for one that says nothing; names it, its value and what it must be.
    """
    known = {each.name for each in fields(Filter)}
    for name, value in filters.items():
        if name not in known:
            raise InvalidTimer(f"There is no filter {name!r}. There are {', '.join(sorted(known))}.")
        if name == "replayed" and not isinstance(value, bool):
            raise InvalidTimer(f"replayed = {value!r}: it must be True or False.")
        if name not in ("replayed", "since", "until") and not isinstance(value, (str, type(None))):
            raise InvalidTimer(f"{name} = {value!r}: it must be text.")
    given = {name: value for name, value in filters.items() if name not in ("since", "until")}
    since, until = _instant(database, "since", filters.get("since")), _instant(database, "until", filters.get("until"))
    return Filter(**given, since=since, until=until)  # type: ignore[arg-type]  # checked above


def _instant(database: Database, name: str, when: When | None) -> datetime | None:
    if when is None:
        return None
    try:
        read = moment(when, naive=database.settings.naive_datetimes)
    except (ValueError, TypeError, OverflowError) as exc:
        raise InvalidTimer(f"{name}: {exc}") from exc
    if read.at is not None:
        return read.at.astimezone(timezone.utc)
    return database.run(schedules.now) + timedelta(seconds=read.after or 0.0)


def chunks(database: Database, wanted: Filter) -> Iterator[Sequence[Row]]:
    """Every dead letter that `wanted` lets pass, oldest first, some at a time and without payloads.

    What dies meanwhile is left out: a replay that fails again would be replayed for ever.
    """
    last = database.run(store.newest)
    cursor: str | None = None
    while last is not None:

        def look(executor: Executor, cursor: str | None = cursor, last: store.Position = last) -> store.Page:
            return store.page_of(executor, wanted, limit=PAGE, cursor=cursor, oldest_first=True, last=last)

        page = database.run(look)
        for start in range(0, len(page), CHUNK):
            yield page[start : start + CHUNK]
        cursor = page.cursor
        if cursor is None:
            return
